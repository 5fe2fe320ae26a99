"""python -m outrider_gateway: settings, then serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outrider.server.extras import needs_extra

with needs_extra("gateway"):
    from outrider.server.process import run_process
    from outrider_gateway.settings import GatewaySettings


def main() -> None:
    """Runs the gateway until a signal ends it."""
    run_process("gateway", GatewaySettings, _load)


def _load() -> Callable[[GatewaySettings], Awaitable[None]]:
    with needs_extra("gateway"):
        from outrider_gateway.run import serve
    return serve


if __name__ == "__main__":
    main()

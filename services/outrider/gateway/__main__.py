"""python -m outrider.gateway: settings, then serve."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from outrider.server.extras import needs_extra

with needs_extra("gateway"):
    from outrider.gateway.settings import GatewaySettings
    from outrider.server.process import run_process


def main() -> None:
    """Runs the gateway until a signal ends it."""
    run_process("gateway", GatewaySettings, _load)


def _load() -> Callable[[GatewaySettings], Awaitable[None]]:
    with needs_extra("gateway"):
        from outrider.gateway.run import serve
    return serve


if __name__ == "__main__":
    main()

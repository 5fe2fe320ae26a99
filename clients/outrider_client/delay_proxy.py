"""A TCP proxy between two processes that makes the way between them long, thin, or impassable.

    python -m outrider_client.delay_proxy --to 127.0.0.1:50052 --delay-ms 20 --jitter-ms 2 --rate-down-mbit 20

Needs no privileges. With `--control PATH` it can be asked what has crossed it, and told to be otherwise
(`outrider_client.link.control`). `outrider_client.wan_link` is a real network, for those who may make one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path

from outrider_client.link.control import controllable
from outrider_client.link.flags import add_settings, settings_of
from outrider_client.link.line import LinkSettings
from outrider_client.link.proxy import DelayProxy


async def _run(target: str, settings: LinkSettings, listen: str, control: Path | None) -> None:
    proxy = DelayProxy(target, settings)
    async with contextlib.AsyncExitStack() as exits:
        if control is not None:
            await exits.enter_async_context(controllable(proxy, control))
        try:
            address = await proxy.start(listen)
        except OSError as error:
            raise SystemExit(f"error: --listen: cannot bind {listen}: {error.strerror}") from error
        exits.push_async_callback(proxy.close)
        print("listening", address, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    """Runs a proxy until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m outrider_client.delay_proxy", description="Makes TCP slow.")
    parser.add_argument("--listen", default="127.0.0.1:0", help="HOST:PORT to listen on; port 0 = any free one")
    parser.add_argument("--to", required=True, help="HOST:PORT to forward to")
    parser.add_argument("--control", type=Path, help="path of a Unix socket to be asked and told over")
    add_settings(parser, without=("loss",))
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_run(options.to, settings_of(options, parser), options.listen, options.control))


if __name__ == "__main__":
    main()

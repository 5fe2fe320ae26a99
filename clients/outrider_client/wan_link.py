"""A wide-area network between two network namespaces of this machine. Linux, and root, only.

    python -m outrider_client.wan_link --delay-ms 20 --jitter-ms 5 --loss 0.01 --rate-up-mbit 1 --names cloud,edge &
    ip netns exec cloud python -m outrider.verifier --listen 10.77.0.1:50051 ... &
    ip netns exec edge outrider generate --address 10.77.0.1:50051 ...

Real packets and real TCP, so what is measured over it is what a network of that kind would show. It runs until it is
interrupted, and takes both namespaces with it. `outrider_client.delay_proxy` needs no privileges.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path

from outrider_client.link.control import controllable
from outrider_client.link.flags import add_settings, settings_of
from outrider_client.link.line import LinkSettings
from outrider_client.link.namespaces import WanNotPossible, open_tun, two_namespaces, why_no_wan
from outrider_client.link.wan import WanLink
from outrider_client.stack import termination_as_exit


async def _carry(devices: tuple[int, int], settings: LinkSettings, seed: int | None, listen: Path) -> None:
    link = WanLink(*devices, settings, seed)
    async with controllable(link, listen):
        print("listening", listen, flush=True)
        await link.run()


def _run(names: tuple[str, str], settings: LinkSettings, seed: int | None, listen: Path) -> None:
    if problem := why_no_wan():
        raise WanNotPossible(problem)
    with two_namespaces(names) as (cloud, edge), contextlib.ExitStack() as devices:
        opened = []
        for namespace in (cloud, edge):
            opened.append(open_tun(namespace))
            devices.callback(os.close, opened[-1])
        asyncio.run(_carry((opened[0], opened[1]), settings, seed, listen))


def main() -> None:
    """Carries packets until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m outrider_client.wan_link", description="A network in user space.")
    parser.add_argument("--names", default="cloud,edge", help="of the namespaces: the one that is dialled, the other")
    parser.add_argument("--seed", type=int, help="of what is lost, and what comes later; default: another each time")
    parser.add_argument("--listen", type=Path, help="path of a Unix socket to be asked and told over")
    add_settings(parser)
    options = parser.parse_args()
    names = options.names.split(",")
    if len(names) != 2 or not all(names):
        parser.error(f"--names must be two names, like cloud,edge, got {options.names!r}")
    listen = options.listen or Path(f"/run/outrider-wan-{os.getpid()}.sock")
    try:
        with termination_as_exit():
            _run((names[0], names[1]), settings_of(options, parser), options.seed, listen)
    except WanNotPossible as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        pass  # that is how it ends


if __name__ == "__main__":
    main()

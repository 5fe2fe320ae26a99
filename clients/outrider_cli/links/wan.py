"""A wide-area network between two namespaces: packets, with delay, jitter, loss and a rate, and TCP's own answer to it.

It serves kernels without netem. Every packet passes through this process, some 30 000 a second at the most.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from outrider_cli.links.control import UP, LinkControl, LinkReport, controllable
from outrider_cli.links.direction import (
    BadSetting,
    LinkDirection,
    LinkSettings,
    add_settings,
    flags_of,
    settings_from,
    settings_of,
)
from outrider_cli.links.namespaces import (
    CLOUD_ADDRESS,
    EDGE_ADDRESS,
    Namespace,
    WanNotPossible,
    delete,
    open_tun,
    two_namespaces,
    why_no_wan,
)
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import termination_as_exit

MAX_QUEUE_S = 0.25
"""Longest wait for a turn, in seconds; packets that would wait longer are lost, as at a router."""
_MAX_PACKET_BYTES = 65536
_MAX_PACKETS_AT_ONCE = 64
_numbers = count()


class WanLink:
    """Carries packets between two TUN devices. Lives in one event loop; the devices are the caller's."""

    def __init__(self, cloud: int, edge: int, settings: LinkSettings, seed: int | None = None) -> None:
        """
        Args:
            cloud: File descriptor of the side that is dialled: up is towards it.
            edge: File descriptor of the other side.
            settings: See `LinkSettings`.
            seed: Keys losses and jitter; None means another one each time.
        """
        chance = random.Random(seed).random
        self._up, self._down = LinkDirection(chance, MAX_QUEUE_S), LinkDirection(chance, MAX_QUEUE_S)
        self._directions = ((edge, cloud, self._up), (cloud, edge, self._down))
        self._use(settings)

    async def run(self) -> None:
        """Carries packets until it is cancelled."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            for source, target, direction in self._directions:
                in_flight: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
                loop.add_reader(source, _take, source, direction, in_flight)
                tasks.create_task(_deliver(in_flight, target))

    async def change(self, changes: dict[str, Any]) -> None:
        """Changes settings: see `control.Link`. The state can only be UP."""
        if (state := changes.get("state", UP)) != UP:
            raise BadSetting(f"state must be {UP} for packets (loss can be 1), got {state!r}")
        self._use(settings_from(self._settings, {name: changes[name] for name in changes.keys() - {"state"}}))

    def report(self) -> LinkReport:
        """Returns the settings, and what has crossed the link."""
        up, down = self._up, self._down
        return LinkReport(self._settings, UP, up.num_bytes, down.num_bytes, up.num_lost + down.num_lost)

    def _use(self, settings: LinkSettings) -> None:
        self._settings = settings
        self._up.use(settings, settings.rate_up_mbit)
        self._down.use(settings, settings.rate_down_mbit)


def _take(source: int, direction: LinkDirection, in_flight: asyncio.Queue[tuple[float, bytes]]) -> None:
    """Reads the packets that have arrived, up to a bound: the other direction gets its turn too."""
    now = asyncio.get_running_loop().time()
    for _ in range(_MAX_PACKETS_AT_ONCE):
        try:
            packet = os.read(source, _MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        due = direction.enter(now, len(packet))
        if due is not None:
            in_flight.put_nowait((due, packet))


async def _deliver(in_flight: asyncio.Queue[tuple[float, bytes]], target: int) -> None:
    now = asyncio.get_running_loop().time
    while True:
        due, packet = await in_flight.get()
        # A packet that is due goes at once: a sleep of 0 would give the loop a turn for every packet.
        if (early := due - now()) > 0:
            await asyncio.sleep(early)
        # A device that is full, or down, loses packets: that is what networks do.
        with contextlib.suppress(OSError):
            os.write(target, packet)


@dataclass(frozen=True, slots=True)
class Wan:
    """Holds the two ends of a running network, and its control."""

    cloud: Namespace
    edge: Namespace
    """The side that dials: "up" is from here to the cloud."""
    control: LinkControl
    carrier: ManagedProcess
    """The process that carries its packets."""


@contextmanager
def running_wan(settings: LinkSettings, folder: Path) -> Iterator[Wan]:
    """Runs a network for the block, carried by another process, with its log in the folder.

    Processes are put into it with the `namespace` of `ManagedProcess`; they must have ended before the block does.

    Raises WanNotPossible, ProcessFailed.
    """
    if problem := why_no_wan():
        raise WanNotPossible(problem)
    stem = f"outrider-{os.getpid()}-{next(_numbers)}"
    names = f"{stem}-cloud", f"{stem}-edge"
    control = folder / f"{stem}.sock"
    flags = ["--names", ",".join(names), *flags_of(settings)]
    # It listens at the socket of its control, and announces that.
    carrier = ManagedProcess("wan", "outrider_cli.links.wan", flags, folder / "wan.log", listen=str(control))
    try:
        carrier.start()
        cloud, edge = Namespace(names[0], CLOUD_ADDRESS), Namespace(names[1], EDGE_ADDRESS)
        yield Wan(cloud, edge, LinkControl(control), carrier)
    finally:
        carrier.stop()
        # A carrier that had to be killed has not deleted its namespaces.
        for name in names:
            delete(name)


async def _carry(devices: tuple[int, int], settings: LinkSettings, seed: int | None, listen: Path) -> None:
    link = WanLink(*devices, settings, seed)
    async with controllable(link, listen):
        # Not before the socket is there: a reader of this line may ask at once.
        print("listening", listen, flush=True)
        await link.run()


def _run(names: tuple[str, str], settings: LinkSettings, seed: int | None, listen: Path) -> None:
    if problem := why_no_wan():
        raise WanNotPossible(problem)
    # The devices are closed, and so deleted, before their namespaces are.
    with two_namespaces(names) as (cloud, edge), contextlib.ExitStack() as devices:
        opened = []
        for namespace in (cloud, edge):
            opened.append(open_tun(namespace))
            devices.callback(os.close, opened[-1])
        asyncio.run(_carry((opened[0], opened[1]), settings, seed, listen))


def main() -> None:
    """Carries packets until it is interrupted."""
    parser = argparse.ArgumentParser(prog="python -m outrider_cli.links.wan", description="A network in user space.")
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

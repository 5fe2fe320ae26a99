"""The flood: a stream as fast as it goes, through either door, for the CPU time of an event.

At the pace of a model each event finds a process asleep, and most of what it takes is the waking. In a flood it is the
work alone.
"""

from __future__ import annotations

from pathlib import Path

import psutil

from outrider_bench.suites.gateway.doors import GRPC, HTTP, Door, GrpcDoor, HttpDoor
from outrider_bench.suites.gateway.experiments import DOORS, cpu_s
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.stack import ANY_PORT, Gateway
from outrider_client.client import Client


async def flood(folder: Path, num_events: int, num_turns: int) -> list[dict[str, float]]:
    """Return the microseconds of CPU time for each event by door, of each turn: of the gateway, and of this program
    with the same SDK. Raises ProcessFailed, GenerationFailed."""
    verifier = ManagedProcess(
        "flood verifier", "outrider_bench.workers.flood_verifier", (), folder / "flood.log", listen=ANY_PORT
    )
    verifier.start()
    flags = ("--upstream", verifier.address)
    gateway = Gateway("gateway", "outrider_gateway", flags, folder / "gateway.log", listen=ANY_PORT)
    try:
        gateway.start()
        gateway.wait_serving()
        async with Client(verifier.address) as client:
            doors: dict[str, Door] = {GRPC: GrpcDoor(client), HTTP: HttpDoor(gateway.address)}
            processes = {GRPC: psutil.Process(), HTTP: psutil.Process(gateway.pid)}
            turns = []
            for number in range(-1, num_turns):  # the first turn warms up
                turn = {}
                for door in DOORS[::-1] if number % 2 else DOORS:
                    before = cpu_s(processes[door])
                    sample = await doors[door].generate({"prompt": "a", "max_tokens": num_events})
                    turn[door] = 1e6 * (cpu_s(processes[door]) - before) / sample.num_tokens
                if number >= 0:
                    turns.append(turn)
            return turns
    finally:
        gateway.stop()
        verifier.stop()

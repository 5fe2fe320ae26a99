"""What is left when nobody generates any more: sessions, open files, threads, memory, tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import grpc
import psutil

from outrider.v1 import speculator_pb2, verifier_pb2
from outrider.v1.speculator_pb2_grpc import SpeculatorServiceStub
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_bench.suites.faults.plan import SPECULATOR
from outrider_bench.suites.faults.stage import Stage
from outrider_client.channel import open_aio

SETTLE_S = 10.0
"""For sessions of peers that were killed to be noticed, and for what closes in the background."""
POLL_S = 0.1
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """What a process holds."""

    process_id: int
    num_files: int
    num_threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """What is held while nobody generates."""

    processes: Mapping[str, Process]
    num_sessions: Mapping[str, int]
    """By service that has any."""
    num_client_tasks: int
    """Asyncio tasks of this process."""

    def to_json(self) -> dict[str, Any]:
        """As results.json has it."""
        return asdict(self)


async def holdings_of(stage: Stage) -> Holdings:
    """What is held once it has settled: sessions that have no caller any more are given some seconds to end."""
    for _ in range(int(SETTLE_S / POLL_S)):
        sessions = await _num_sessions(stage)
        if not any(sessions.values()):
            break
        await asyncio.sleep(POLL_S)
    return Holdings(
        {name: _process(process_id) for name, process_id in stage.process_ids.items()},
        sessions,
        len(asyncio.all_tasks()),
    )


def _process(process_id: int) -> Process:
    process = psutil.Process(process_id)
    with process.oneshot():
        return Process(process_id, process.num_fds(), process.num_threads(), process.memory_info().rss)


async def _num_sessions(stage: Stage) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, service in stage.services.items():
        async with open_aio(service.address, None) as channel:
            if name == SPECULATOR:
                info = await _speculator_info(channel)
                found[name] = info.num_sessions
            elif service in stage.verifiers:
                answer = VerifierServiceStub(channel).GetInfo(verifier_pb2.GetInfoRequest(), timeout=ANSWER_TIMEOUT_S)
                found[name] = (await answer).num_sessions
    return found


async def _speculator_info(channel: grpc.aio.Channel) -> speculator_pb2.SpeculatorServiceGetInfoResponse:
    request = speculator_pb2.SpeculatorServiceGetInfoRequest()
    return await SpeculatorServiceStub(channel).GetInfo(request, timeout=ANSWER_TIMEOUT_S)

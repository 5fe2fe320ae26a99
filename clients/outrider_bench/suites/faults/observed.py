"""Observations: what clients have seen, and what processes hold afterwards.

Clients see tokens by the second, when drafted tokens were accepted, how generations ended."""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc
import psutil

from outrider.v1 import speculator_pb2, verifier_pb2
from outrider.v1.speculator_pb2_grpc import SpeculatorServiceStub
from outrider.v1.verifier_pb2_grpc import VerifierServiceStub
from outrider_bench.suites.faults.experiments import SLOW, SPECULATOR, Fault
from outrider_bench.suites.faults.fault_stack import FaultStack
from outrider_cli.links.delay_proxy import TASK_NAME
from outrider_client.channel import open_aio


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds how a generation ended."""

    method: str
    error: str
    """The error that reached the caller; empty means that none did."""
    is_equal: bool
    """True if tokens and text are those of a run without faults."""
    first_difference: int | None
    """Index of the first token that is not; None means that those that came are all right."""
    num_tokens: int
    num_resumes: int
    longest_pause_s: float
    """Between two chunks."""


@dataclass(slots=True)
class Suffered:
    """A fault that has happened. Seconds on the clock of `Observed`."""

    fault: Fault
    began_s: float
    returned_s: float | None = None
    """Time at which the part was back: its process serves, its wire is whole. None means never."""

    def to_json(self, recovery_s: float | None) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        moments = {"began_s": self.began_s, "returned_s": self.returned_s, "recovery_s": recovery_s}
        return self.fault.to_json() | moments


@dataclass(slots=True)
class Observed:
    """Everything that was seen. `began` is a time of time.monotonic(); all else is seconds after it."""

    began: float
    outcomes: list[Outcome] = field(default_factory=list)
    suffered: list[Suffered] = field(default_factory=list)
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    drafted_s: list[float] = field(default_factory=list)
    """Times at which tokens of the draft model were accepted, in order."""

    def count(self, now: float, num_tokens: int, *, has_drafted: bool) -> None:
        """Counts a chunk that has come."""
        moment = now - self.began
        self.tokens_by_second[int(moment)] += num_tokens
        if has_drafted:
            self.drafted_s.append(moment)

    def add(self, outcome: Outcome) -> None:
        """Adds a generation that has ended."""
        self.outcomes.append(outcome)

    def recovery_s(self, suffered: Suffered) -> float | None:
        """Return the seconds from the speculator's return to the first accepted token of its draft model.

        None means that the fault hit another part or was only slow, that no such token came, or that the next fault of
        the speculator came first.
        """
        fault, returned = suffered.fault, suffered.returned_s
        if fault.part != SPECULATOR or fault.kind == SLOW or returned is None:
            return None
        # Sorted, since times are appended as they come.
        index = bisect.bisect_right(self.drafted_s, returned)
        if index == len(self.drafted_s):
            return None
        following = (
            other.began_s
            for other in self.suffered
            if other.fault.part == SPECULATOR and other.began_s >= returned and other is not suffered
        )
        recovered = self.drafted_s[index]
        return None if min(following, default=recovered) < recovered else recovered - returned

    def timeline(self) -> list[int]:
        """Return the tokens of each second."""
        return [self.tokens_by_second[second] for second in range(max(self.tokens_by_second, default=-1) + 1)]

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps; of the generations, only those with something to tell."""
        strange = [outcome for outcome in self.outcomes if outcome.error or not outcome.is_equal]
        return {
            "faults": [suffered.to_json(self.recovery_s(suffered)) for suffered in self.suffered],
            "tokens_by_second": self.timeline(),
            "num_generations": dict(Counter(outcome.method for outcome in self.outcomes)),
            "strange": [asdict(outcome) for outcome in strange],
        }


SETTLE_S = 10.0
"""For sessions of peers that were killed to be noticed, and for what closes in the background."""
POLL_S = 0.1
ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Process:
    """Holds what a process uses."""

    process_id: int
    num_files: int
    num_threads: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Holdings:
    """Holds what is used while no client generates."""

    processes: Mapping[str, Process]
    num_sessions: Mapping[str, int]
    """Sessions by service; one without any is left out."""
    num_client_tasks: int
    """Asyncio tasks of this process, those of the proxy's connections excluded."""

    def to_json(self) -> dict[str, Any]:
        """Return the object that results.json keeps."""
        return asdict(self)


async def holdings_of(stack: FaultStack) -> Holdings:
    """Return what is held once it has settled: sessions that have no caller any more are given some seconds to end."""
    for _ in range(int(SETTLE_S / POLL_S)):
        sessions = await _num_sessions(stack)
        if not any(sessions.values()):
            break
        await asyncio.sleep(POLL_S)
    return Holdings(
        {name: _process(process_id) for name, process_id in stack.process_ids.items()},
        sessions,
        num_client_tasks(),
    )


def num_client_tasks() -> int:
    """Count the asyncio tasks of this process that are not the fault proxy's.

    A connection through the proxy takes five tasks. The verifiers decide when they connect, so the proxy may have one
    connection more at the end than before the faults although no client has left anything.
    """
    return sum(task.get_name() != TASK_NAME for task in asyncio.all_tasks())


def _process(process_id: int) -> Process:
    process = psutil.Process(process_id)
    with process.oneshot():
        return Process(process_id, process.num_fds(), process.num_threads(), process.memory_info().rss)


async def _num_sessions(stack: FaultStack) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, service in stack.services.items():
        async with open_aio(service.address, None) as channel:
            if name == SPECULATOR:
                info = await _speculator_info(channel)
                found[name] = info.num_sessions
            elif service in stack.verifiers:
                answer = VerifierServiceStub(channel).GetInfo(verifier_pb2.GetInfoRequest(), timeout=ANSWER_TIMEOUT_S)
                found[name] = (await answer).num_sessions
    return found


async def _speculator_info(channel: grpc.aio.Channel) -> speculator_pb2.SpeculatorServiceGetInfoResponse:
    request = speculator_pb2.SpeculatorServiceGetInfoRequest()
    return await SpeculatorServiceStub(channel).GetInfo(request, timeout=ANSWER_TIMEOUT_S)

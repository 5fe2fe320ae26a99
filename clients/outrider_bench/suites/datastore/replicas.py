"""Two replicas on one Redis: how soon one of them answers from what the other has recorded."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from outrider_bench.datastore_streams import (
    ANSWER_TIMEOUT_S,
    LookupStream,
    NoAnswer,
    RecordStream,
    connected,
    lookup_request,
    tenant_scope,
)
from outrider_bench.result import Runs, Section, Target
from outrider_bench.suites.datastore.services import running_services
from outrider_bench.suites.datastore.sizes import BATCH_LEN, DatastoreRun

LOOKUP, WATCH, RING = "lookup", "watch", "ring"
TARGET = Target("<=", 100)
FIRST_TOKEN = 1 << 20
"""First token of the records: every token occurs once, so that an answer can only come from the one record."""
SUFFIX_LEN = 6
"""Longer than any n-gram: only the ring can match so much."""


async def measure_replicas(run: DatastoreRun) -> list[Section]:
    """Measure the time from the acknowledgement at one replica to the answer of the other."""
    runs, records = Runs(), _records()
    with running_services(run, "replicas", num_replicas=2) as services:
        one, other = (replica.address for replica in services.datastores)
        async with connected(one) as stub, connected(other) as other_stub:
            for repeat in range(run.config.repeats):
                run.log(f"two replicas, repeat {repeat + 1}")
                with RecordStream(stub) as sent, LookupStream(other_stub) as lookups:
                    # The first question makes the other replica follow the scope's ring.
                    await lookups.ask(lookup_request([[0]], tenant_scope()))
                    for name, times in (await _delays(run, other_stub, sent, lookups, records)).items():
                        runs.add_latencies(name, times, "p50", "max")
    names = [f"{name}: {statistic}" for name in (LOOKUP, WATCH, RING) for statistic in ("p50", "max")]
    section = Section(
        "Recorded at one replica, known at another", runs.measurements("ms", dict.fromkeys(names, TARGET))
    )
    section.notes = [
        f"From the acknowledgement of a record of {BATCH_LEN} tokens, {run.sizes.num_records} records each: until a "
        "lookup finds it (asked again and again), until a Watch brings it, and, for a session that has ended, until "
        "the ring has it. 0 = it was there before the acknowledgement.",
    ]
    return [section]


def _records() -> Iterator[list[int]]:
    """Records without a token in common."""
    return ([*range(start, start + BATCH_LEN)] for start in itertools.count(FIRST_TOKEN, BATCH_LEN))


async def _delays(
    run: DatastoreRun,
    other_stub: pb_grpc.DatastoreServiceAsyncStub,
    sent: RecordStream,
    lookups: LookupStream,
    records: Iterator[list[int]],
) -> dict[str, list[float]]:
    """Milliseconds, by way."""
    delays: dict[str, list[float]] = {LOOKUP: [], WATCH: [], RING: []}
    async with _Watcher(other_stub) as watcher:
        for number in range(run.sizes.num_records):
            tokens = next(records)
            acknowledged = await _record(sent, tokens, f"looked up {number} {tokens[0]}")
            await lookups.ask_until_found(lookup_request([tokens[:3]]))
            delays[LOOKUP].append(_ms_since(acknowledged))

            tokens = next(records)
            acknowledged = await _record(sent, tokens, f"watched {number} {tokens[0]}")
            seen = await watcher.time_of(tokens[-1])
            delays[WATCH].append(max(0.0, 1000 * (seen - acknowledged)))

            tokens = next(records)
            acknowledged = await _record(sent, tokens, f"ended {number} {tokens[0]}", end_session=True)
            ring = (types_pb2.SOURCE_RING,)
            await lookups.ask_until_found(lookup_request([tokens[:SUFFIX_LEN]], tiers=ring))
            delays[RING].append(_ms_since(acknowledged))
    return delays


async def _record(sent: RecordStream, tokens: list[int], session_id: str, *, end_session: bool = False) -> float:
    """Records a session; returns when it was acknowledged."""
    scope = tenant_scope(session_id)
    stored = await sent.record(pb.RecordRequest(scope=scope, accepted_token_ids=tokens, end_session=end_session))
    acknowledged = time.perf_counter()
    if stored < len(tokens) and not end_session:
        raise NoAnswer(f"{stored} of {len(tokens)} tokens of a record were stored")
    return acknowledged


def _ms_since(began: float) -> float:
    return 1000 * (time.perf_counter() - began)


class _Watcher:
    """Reads a Watch stream, and notes when tokens came."""

    def __init__(self, stub: pb_grpc.DatastoreServiceAsyncStub) -> None:
        self._call = stub.Watch(pb.WatchRequest(scope=tenant_scope()))
        self._seen: dict[int, float] = {}
        self._has_come = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    async def time_of(self, token_id: int) -> float:
        """Wait for a token, and return when it came. Raises NoAnswer if it does not."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while token_id not in self._seen:
                    # Nothing is awaited between the look and this, so no message can slip in unnoticed.
                    self._has_come.clear()
                    await self._has_come.wait()
        except TimeoutError:
            raise NoAnswer("a Watch stream did not bring a record") from None
        return self._seen[token_id]

    async def _run(self) -> None:
        async for response in self._call:
            now = time.perf_counter()
            self._seen.update(dict.fromkeys(response.shared.token_ids, now))
            self._has_come.set()

    async def __aenter__(self) -> _Watcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        self._call.cancel()
        await asyncio.wait((self._task,))

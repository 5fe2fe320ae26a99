"""Many sessions, opened, used and closed: what they leave behind."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import psutil

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider_bench.datastore_streams import (
    LookupStream,
    RecordStream,
    connected,
    lookup_request,
    session_scope,
)
from outrider_bench.result import Measurement, Section, Target, change_of
from outrider_bench.suites.datastore.data import Tokens, made_up_tokens
from outrider_bench.suites.datastore.services import running_services
from outrider_bench.suites.datastore.sizes import BATCH_LEN, CONTEXT_LEN, DatastoreRun
from outrider_cli.local.stack import Service

NUM_WORKERS = 8
SETTLE_S = 1.0
"""Redis frees in the background what was deleted."""
GROWTH_TARGET = Target("<=", 5)
MIB = 2**20


async def measure_sessions(run: DatastoreRun) -> list[Section]:
    """Memory before and after."""
    sizes = run.sizes
    tokens = made_up_tokens(1 << 16, run.config.seed)
    with running_services(run, "sessions") as services:
        [datastore] = services.datastores
        async with connected(datastore.address) as stub:
            run.log(f"{sizes.num_warm_up_sessions} sessions to warm up, then {sizes.num_sessions}")
            await _run_sessions(stub, tokens, iter(range(sizes.num_warm_up_sessions)))
            before = await _memory(stub, datastore)
            began = time.perf_counter()
            numbers = range(sizes.num_warm_up_sessions, sizes.num_warm_up_sessions + sizes.num_sessions)
            await _run_sessions(stub, tokens, iter(numbers))
            took_s = time.perf_counter() - began
            after = await _memory(stub, datastore)
    section = Section(f"{sizes.num_sessions} sessions, opened, used and closed")
    for name, old, new in zip(("Redis, used memory", "datastore, RSS"), before, after, strict=True):
        section.measurements += [
            Measurement(f"{name}, before", "MiB", (old / MIB,)),
            Measurement(f"{name}, after", "MiB", (new / MIB,)),
            Measurement(f"{name}, growth", "%", (change_of(old, new),), GROWTH_TARGET),
            Measurement(f"{name}, growth a session", "bytes", ((new - old) / sizes.num_sessions,)),
        ]
    section.measurements.append(Measurement("sessions a second", "1/s", (sizes.num_sessions / took_s,)))
    section.notes = [
        f"A session: a record of {BATCH_LEN} tokens, a lookup, its end; {NUM_WORKERS} at a time. Nothing else is in "
        f"Redis. Before the first measurement {sizes.num_warm_up_sessions} sessions warm both processes up: their "
        "buffers, and caches that hold so much and no more."
    ]
    return [section]


async def _run_sessions(stub: pb_grpc.DatastoreServiceAsyncStub, tokens: Tokens, numbers: Iterator[int]) -> None:
    """Run all sessions of these numbers. Workers take them in turn."""

    async def work() -> None:
        with LookupStream(stub) as lookups, RecordStream(stub) as records:
            for number in numbers:
                scope = session_scope(f"session {number}")
                start = number * 17 % (len(tokens) - BATCH_LEN)
                text = tokens[start : start + BATCH_LEN].tolist()
                await records.record(pb.RecordRequest(scope=scope, accepted_token_ids=text))
                await lookups.ask(lookup_request([text[-CONTEXT_LEN:]], scope))
                await records.record(pb.RecordRequest(scope=scope, base_len=len(text), end_session=True))

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_WORKERS):
            group.create_task(work())


async def _memory(stub: pb_grpc.DatastoreServiceAsyncStub, datastore: Service) -> tuple[int, int]:
    """Return the bytes that Redis uses, and that the datastore has in memory, after things have settled."""
    await asyncio.sleep(SETTLE_S)
    info = await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())
    return info.used_memory_bytes, psutil.Process(datastore.pid).memory_info().rss

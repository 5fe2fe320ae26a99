"""Outages: what is lost, and what still works, when the datastore or its Redis dies or hangs."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable
from functools import partial

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider_bench.datastore_streams import (
    TOKENIZER_HASH,
    LookupStream,
    RecordStream,
    connected,
    load_prior,
    lookup_request,
    num_stored_tokens,
    session_scope,
)
from outrider_bench.result import Measurement, Runs, Section, Target, lost_seconds
from outrider_bench.suites.datastore.data import contexts_of, documents_of, made_up_tokens
from outrider_bench.suites.datastore.services import DatastoreServices, running_services
from outrider_bench.suites.datastore.sizes import BATCH_LEN, CONTEXT_LEN, DatastoreRun
from outrider_cli.prior import requests as prior_requests

RECORDS_IN_FLIGHT = 8
PAUSE_S = 0.002
NUM_CONTEXTS = 256
# Far above the made-up vocabulary: an answer with such a token can only come from the record that holds it.
FIRST_TOKEN = 1 << 20

LOSS_TARGET, LOSS_S_TARGET = Target("<=", 0), Target("<=", 1)
RECOVERY_TARGET = Target("<=", 2000)
OUTAGE_TARGET = Target("<=", 5)


async def measure_outages(run: DatastoreRun) -> list[Section]:
    """SIGKILL of the datastore, and of a Redis that writes a file; then a Redis that is away."""
    with running_services(run, "outages", is_durable=True) as services:
        sections = [await _kill_datastore(run, services), await _restart_redis(run, services)]
        return [*sections, await _without_redis(run, services)]


async def _kill_datastore(run: DatastoreRun, services: DatastoreServices) -> Section:
    """Kills it while records are under way: some are acknowledged, the others are not."""
    [datastore] = services.datastores
    num_acknowledged = num_lost = num_unreadable = 0
    restarts: list[float] = []
    for number in range(run.sizes.num_kills):
        run.log(f"killing the datastore, {number + 1} of {run.sizes.num_kills}")
        scope = session_scope(f"killed {number}")
        first = FIRST_TOKEN + number * RECORDS_IN_FLIGHT * BATCH_LEN
        tokens = [*range(first, first + RECORDS_IN_FLIGHT * BATCH_LEN)]
        async with connected(datastore.address) as stub:
            with RecordStream(stub) as records:
                for start in range(0, len(tokens), BATCH_LEN):
                    record = tokens[start : start + BATCH_LEN]
                    await records.write(pb.RecordRequest(scope=scope, base_len=start, accepted_token_ids=record))
                # Another number each time: the kill meets the datastore at different places of its work.
                for _ in range(1 + number % RECORDS_IN_FLIGHT):
                    acknowledged = await records.acknowledgement()
                datastore.kill()
        began = time.perf_counter()
        datastore.restart()
        restarts.append(time.perf_counter() - began)
        async with connected(datastore.address) as stub:
            with LookupStream(stub) as lookups:
                # The three tokens before the last acknowledged one must lead to it.
                answer = await lookups.ask(lookup_request([tokens[acknowledged - 4 : acknowledged - 1]], scope))
            stored = await num_stored_tokens(stub, scope, len(tokens))
        num_acknowledged += acknowledged
        num_lost += max(0, acknowledged - stored)  # more may be stored than was acknowledged: that is no gain
        num_unreadable += tokens[acknowledged - 1] not in answer.results[0].token_ids
    section = Section("The datastore is killed (SIGKILL) with records under way")
    section.measurements = [
        Measurement("acknowledged tokens lost", "tokens", (num_lost,), LOSS_TARGET),
        Measurement("last acknowledged token not found", "lookups", (num_unreadable,), LOSS_TARGET),
        Measurement("acknowledged tokens", "tokens", (num_acknowledged,)),
        Measurement("start of the service until it serves", "s", tuple(restarts)),
    ]
    section.notes = [
        f"{run.sizes.num_kills} kills, each with {RECORDS_IN_FLIGHT} records of {BATCH_LEN} tokens sent and 1 to "
        f"{RECORDS_IN_FLIGHT} of them acknowledged. Redis runs on."
    ]
    return section


async def _restart_redis(run: DatastoreRun, services: DatastoreServices) -> Section:
    """Kills Redis while a session is recorded, and starts it again on its file."""
    runs = {"lost": Runs(), "tokens": Runs(), "recovery": Runs(), "start": Runs()}
    for repeat in range(run.config.repeats):
        run.log(f"killing a Redis with an append-only file, repeat {repeat + 1}")
        scope = session_scope(f"restarted {repeat}")
        async with connected(services.datastores[0].address) as stub:
            acknowledged = await _record_for(stub, scope, run.sizes.append_s)
            services.redis.kill()
            began = time.perf_counter()
            services.redis.start()
            runs["start"].add("start of Redis until it has read its file", time.perf_counter() - began)
            began = time.perf_counter()
            with LookupStream(stub) as lookups:
                beginning = [*range(FIRST_TOKEN, FIRST_TOKEN + 3)]
                await lookups.ask_until_found(lookup_request([beginning], scope))
            runs["recovery"].add("until the first answer from Redis", 1000 * (time.perf_counter() - began))
            stored = await num_stored_tokens(stub, scope, acknowledged[-1][1])
            runs["lost"].add("acknowledged records lost", lost_seconds(acknowledged, stored))
            runs["tokens"].add("acknowledged tokens", acknowledged[-1][1])
            runs["tokens"].add("acknowledged tokens lost", max(0, acknowledged[-1][1] - stored))
    section = Section("Redis (append-only file, flushed each second) is killed and restarted")
    section.measurements = [
        *runs["lost"].measurements("s", {"acknowledged records lost": LOSS_S_TARGET}),
        *runs["tokens"].measurements("tokens"),
        *runs["recovery"].measurements("ms", {"until the first answer from Redis": RECOVERY_TARGET}),
        *runs["start"].measurements("s"),
    ]
    section.notes = [
        "Lost: from the last acknowledgement that still holds to the last one. What Redis has written is safe from its "
        "own death, flushed or not; up to a second is lost only when the machine dies, which is not tried here.",
        "The time until the first answer begins when Redis itself has read its file and serves.",
    ]
    return section


async def _record_for(
    stub: pb_grpc.DatastoreServiceAsyncStub, scope: pb.Scope, seconds: float
) -> list[tuple[float, int]]:
    """Records a session for some time: when each record was acknowledged, and how many tokens were stored then."""
    acknowledged: list[tuple[float, int]] = []
    began = time.perf_counter()
    with RecordStream(stub) as records:
        for start in itertools.count(0, BATCH_LEN):
            tokens = [*range(FIRST_TOKEN + start, FIRST_TOKEN + start + BATCH_LEN)]
            stored = await records.record(pb.RecordRequest(scope=scope, base_len=start, accepted_token_ids=tokens))
            acknowledged.append((time.perf_counter(), stored))
            if acknowledged[-1][0] - began > seconds:
                return acknowledged
            await asyncio.sleep(PAUSE_S)
    raise AssertionError("count does not end")


async def _without_redis(run: DatastoreRun, services: DatastoreServices) -> Section:
    """Measure lookups while Redis is dead, and while it hangs."""
    redis = services.redis
    stream = made_up_tokens(run.sizes.prior_tokens + NUM_CONTEXTS * CONTEXT_LEN, run.config.seed)
    contexts = contexts_of(stream[run.sizes.prior_tokens :], NUM_CONTEXTS, CONTEXT_LEN)

    def send(number: signal.Signals) -> None:
        # Looked up at the last moment: a restarted Redis is another process.
        os.kill(redis.pid, number)

    ways: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {
        "killed": (redis.kill, redis.start),
        "hung": (partial(send, signal.SIGSTOP), partial(send, signal.SIGCONT)),
    }
    latency, recovery, found = Runs(), Runs(), Runs()
    async with connected(services.datastores[0].address) as stub:
        prior = documents_of(stream[: run.sizes.prior_tokens])
        await load_prior(stub, prior_requests(pb.Scope(tokenizer_hash=TOKENIZER_HASH), prior))
        with LookupStream(stub) as lookups:
            await lookups.ask(lookup_request(contexts[:1], session_scope()))
            await asyncio.sleep(run.sizes.settle_s)
            for repeat in range(run.config.repeats):
                for name, (fail, recover) in ways.items():
                    run.log(f"Redis is {name}, repeat {repeat + 1}")
                    fail()
                    times, hit_rate = await _lookups_for(lookups, contexts, run.sizes.outage_s)
                    recover()
                    began = time.perf_counter()
                    await lookups.ask_until_shared(lookup_request(contexts[:1]))
                    latency.add_latencies(f"Redis {name}, lookup", times, "p50", "max")
                    found.add(f"Redis {name}, contexts found", 100 * hit_rate)
                    recovery.add(
                        f"Redis {name}, until answers come from it again", 1000 * (time.perf_counter() - began)
                    )
    section = Section("Lookups while Redis is away (SIGKILL), or hangs (SIGSTOP)")
    statistics = [f"Redis {name}, lookup: {statistic}" for name in ways for statistic in ("p50", "max")]
    recoveries = [f"Redis {name}, until answers come from it again" for name in ways]
    section.measurements = [
        *latency.measurements("ms", dict.fromkeys(statistics, OUTAGE_TARGET)),
        *found.measurements("%"),
        *recovery.measurements("ms", dict.fromkeys(recoveries, RECOVERY_TARGET)),
    ]
    section.notes = [
        f"One stream, a question each {1000 * PAUSE_S:g} ms, from the signal on; {run.sizes.outage_s:g} s each time. "
        "The answers come from the prior that the replica holds. Recovery begins when Redis itself serves again."
    ]
    return section


async def _lookups_for(lookups: LookupStream, contexts: list[list[int]], seconds: float) -> tuple[list[float], float]:
    """Look up for some time, and return the milliseconds of each, and the share of those that found something."""
    times, num_hits = list[float](), 0
    requests = itertools.cycle([lookup_request([context]) for context in contexts])
    started = time.perf_counter()
    while time.perf_counter() - started < seconds:
        began = time.perf_counter()
        answer = await lookups.ask(next(requests))
        times.append(1000 * (time.perf_counter() - began))
        num_hits += answer.results[0].match_len > 0
        await asyncio.sleep(PAUSE_S)
    return times, num_hits / len(times)

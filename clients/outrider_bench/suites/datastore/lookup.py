"""Lookups over gRPC: latency of one, beside what gRPC and Redis alone cost, and throughput of many."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from outrider.v1 import datastore_pb2 as pb
from outrider_bench.datastore_streams import (
    CONTINUATION_LEN,
    TOKENIZER_HASH,
    LookupStream,
    NoAnswer,
    RecordStream,
    connected,
    load_prior,
    lookup_request,
    tenant_scope,
)
from outrider_bench.result import Measurement, Runs, Section, Target, distribution_of, statistic_of
from outrider_bench.suites.datastore.data import contexts_of, documents_of, made_up_tokens
from outrider_bench.suites.datastore.services import running_echo, running_services
from outrider_bench.suites.datastore.sizes import BATCH_LEN, CONTEXT_LEN, DatastoreRun
from outrider_bench.workers import echo
from outrider_bench.workers.client import Worker
from outrider_cli.prior import requests as prior_requests
from outrider_client.channel import open_aio

PAUSE_S = 0.01
NUM_WARM_UP = 20
NUM_TURNS = 5
"""Turns that lookups and echoes take in each repeat."""
SESSION = "lookups"
IN_FLIGHT = (1, 4)

LOOKUP, ECHO, REDIS = "lookup", "echo", "Redis"
BACK_TO_BACK, PAUSED = "back to back", "pauses of 10 ms"
LATENCY_TARGETS = {
    f"{LOOKUP}, {BACK_TO_BACK}: p50": Target("<=", 200),
    f"{LOOKUP}, {BACK_TO_BACK}: p99": Target("<=", 600),
}
THROUGHPUT_TARGET = Target(">=", 20_000)

Ask = Callable[[], Awaitable[object]]


async def measure_lookups(run: DatastoreRun, worker: Worker) -> list[Section]:
    """Latency and throughput of a datastore with a prior, a session and a shared tier."""
    sizes = run.sizes
    stream = made_up_tokens(sizes.prior_tokens + CONTEXT_LEN * sizes.num_lookups, run.config.seed)
    contexts = contexts_of(stream[sizes.prior_tokens :], sizes.num_lookups, CONTEXT_LEN)
    with running_services(run, "lookup") as services:
        async with connected(services.datastores[0].address) as stub:
            prior = documents_of(stream[: sizes.prior_tokens])
            await load_prior(stub, prior_requests(pb.Scope(tokenizer_hash=TOKENIZER_HASH), prior))
            scope = tenant_scope(SESSION)
            with RecordStream(stub) as records, LookupStream(stub) as lookups:
                await records.record(pb.RecordRequest(scope=scope, accepted_token_ids=contexts[0] + contexts[-1]))
                await lookups.ask_until_shared(lookup_request(contexts[:1], scope))
                await asyncio.sleep(sizes.settle_s)
                answers = [await lookups.ask(lookup_request([context], scope)) for context in contexts]
                request = lookup_request([contexts[0]])
                # The median in bytes: the echo answers as much, so the difference is not that of sizes.
                answer = sorted(answers, key=lambda answer: answer.ByteSize())[len(answers) // 2]
                async with _echoing(run, request.ByteSize(), answer.ByteSize()) as echo:
                    latency = await _latency(run, worker, services.redis.url, lookups, contexts, echo)
                throughput = await _throughput(run, lookups, contexts)
                store = (await stub.GetInfo(pb.DatastoreServiceGetInfoRequest())).store
    hits = sum(answer.results[0].match_len > 0 for answer in answers) / len(answers)
    latency.notes += [
        f"Made-up tokens, a prior of {sizes.prior_tokens} of them; one session with its tenant's shared tier; "
        f"{CONTEXT_LEN} tokens a context, {hits:.0%} of which are found; {CONTINUATION_LEN} tokens a continuation.",
        f"Echo: the same library and as many bytes (request {request.ByteSize()}, median answer {answer.ByteSize()}), "
        "and nothing behind it. Redis: one lookup by the datastore's own connection, without gRPC. Rest: lookup less "
        "echo.",
        f"{store}. "
        + (
            "Who asks runs on one core, who answers (Redis included) on another." if run.config.cores else "Not pinned."
        ),
    ]
    return [latency, throughput]


async def _latency(
    run: DatastoreRun,
    worker: Worker,
    redis_url: str,
    lookups: LookupStream,
    contexts: Sequence[Sequence[int]],
    echo: Ask,
) -> Section:
    """Lookups, echoes and Redis take turns in each repeat."""
    requests: Iterator[pb.LookupRequest] = itertools.cycle([lookup_request([context]) for context in contexts])
    are_local: list[bool] = []

    async def look_up() -> object:
        answer = await lookups.ask(next(requests))
        are_local.append(answer.is_local)
        return answer

    asks: dict[str, Ask] = {LOOKUP: look_up, ECHO: echo}
    ways = {BACK_TO_BACK: (run.sizes.num_lookups, 0.0), PAUSED: (run.sizes.num_paused_lookups, PAUSE_S)}
    runs, all_times = Runs(), dict[str, list[float]]()
    for repeat in range(run.config.repeats):
        run.log(f"lookups one at a time, repeat {repeat + 1}")
        times: dict[str, list[float]] = {f"{who}, {how}": [] for how in ways for who in asks}
        for turn in range(NUM_TURNS):
            for how, (count, pause_s) in ways.items():
                # Forth and back: neither always goes first.
                for who in list(asks)[:: -1 if turn % 2 else 1]:
                    times[f"{who}, {how}"] += await _times(asks[who], count // NUM_TURNS, pause_s)
        answer = await worker.call(
            "redis",
            redis_url=redis_url,
            tokenizer_hash=TOKENIZER_HASH,
            session_id=SESSION,
            contexts=contexts,
            max_continuation_len=CONTINUATION_LEN,
        )
        times[f"{REDIS}, {BACK_TO_BACK}"] = answer["lookup_us"]
        for name, values in times.items():
            runs.add_latencies(name, values, "p50", "p99")
            all_times.setdefault(name, []).extend(values)
        for how in ways:
            lookup, nothing = (statistic_of(times[f"{who}, {how}"], "p50") for who in asks)
            runs.add(f"rest, {how}: p50", lookup - nothing)
    section = Section("Lookup of one context", runs.measurements("us", LATENCY_TARGETS))
    share = 100 * sum(are_local) / len(are_local)
    section.measurements.append(Measurement("lookups answered without Redis, which was late", "%", (share,)))
    section.distributions = {name: distribution_of(values) for name, values in all_times.items()}
    return section


async def _times(ask: Ask, count: int, pause_s: float) -> list[float]:
    """Microseconds that each call took, after a few that do not count."""
    for _ in range(NUM_WARM_UP):
        await ask()
    # Garbage of the warm-up would otherwise be collected while a call is timed.
    gc.collect()
    times = []
    for _ in range(count):
        if pause_s:
            await asyncio.sleep(pause_s)
        began = time.perf_counter()
        await ask()
        times.append(1e6 * (time.perf_counter() - began))
    return times


@asynccontextmanager
async def _echoing(run: DatastoreRun, num_request_bytes: int, num_response_bytes: int) -> AsyncIterator[Ask]:
    """Ask a server that does nothing a question of the same size."""
    question = bytes(num_request_bytes)
    with running_echo(run, num_response_bytes) as address:
        async with open_aio(address, None) as channel:
            call: Any = channel.stream_stream(echo.METHOD)()

            async def ask() -> object:
                await call.write(question)
                answer = await call.read()
                if not isinstance(answer, bytes):
                    raise NoAnswer("the echo server ended")
                return answer

            yield ask
            call.cancel()


async def _throughput(run: DatastoreRun, lookups: LookupStream, contexts: Sequence[Sequence[int]]) -> Section:
    """Contexts a second, in batches, with one and with several requests under way."""
    batches = itertools.cycle([lookup_request(batch) for batch in _batches(contexts)])
    runs = Runs()
    for repeat in range(run.config.repeats):
        run.log(f"lookups in batches, repeat {repeat + 1}")
        for in_flight in IN_FLIGHT:
            runs.add(_throughput_name(in_flight), await _contexts_per_s(lookups, batches, in_flight, run.sizes.batch_s))
    targets = {_throughput_name(in_flight): THROUGHPUT_TARGET for in_flight in IN_FLIGHT}
    return Section(f"Lookups in batches of {BATCH_LEN}", runs.measurements("contexts/s", targets))


def _throughput_name(in_flight: int) -> str:
    return f"{in_flight} request{'s' * (in_flight > 1)} in flight"


def _batches(contexts: Sequence[Sequence[int]]) -> list[Sequence[Sequence[int]]]:
    """Batches of the same length, from a sequence that may be shorter than one."""
    filled = [*contexts, *contexts[: -len(contexts) % BATCH_LEN]]
    return [filled[start : start + BATCH_LEN] for start in range(0, len(filled), BATCH_LEN)]


async def _contexts_per_s(
    lookups: LookupStream, batches: Iterator[pb.LookupRequest], in_flight: int, seconds: float
) -> float:
    for _ in range(in_flight):
        await lookups.write(next(batches))
    # From here on a question goes out for each answer that comes in, so as many stay under way. Answers that come after
    # the time is over are fetched, but do not count.
    num_contexts = 0
    began = time.perf_counter()
    while (elapsed := time.perf_counter() - began) < seconds:
        num_contexts += len((await lookups.answer()).results)
        await lookups.write(next(batches))
    for _ in range(in_flight):
        await lookups.answer()
    return num_contexts / elapsed

"""The verifier counts what it tells its callers, at the same time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from outrider.core.statistics import COUNTS
from outrider.v1 import verifier_pb2
from outrider.wire.speculation import METHODS_FROM_PROTO
from outrider_client.client import Client
from outrider_client.errors import DeadlineExceeded, OutOfRange
from outrider_client.generation import Result
from tests.support.metric_values import above_0, values_of
from tests.support.services import RunningVerifier, running_speculator, running_verifier
from tests.support.waiting import until

PROMPT = "class TestParser(unittest.TestCase):\n    def test_"
PREFIX = "outrider_spec_decode_num_"


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_speculator() as speculator, running_verifier(speculator=speculator.address) as running:
        yield running


@pytest.fixture
async def client(verifier: RunningVerifier) -> AsyncIterator[Client]:
    async with Client(verifier.address) as connected:
        yield connected


async def generate(client: Client, method: str, *, max_tokens: int = 48) -> Result:
    return await client.complete(
        PROMPT, temperature=0.7, seed=11, max_tokens=max_tokens, ignore_eos=True, method=method
    )


async def test_a_scheduler_reads_the_load_under_the_names_of_vllm(client: Client, verifier: RunningVerifier) -> None:
    def load() -> dict[str, float]:
        values = values_of(verifier.servicer.metrics())
        return {
            name.removeprefix("vllm:"): number
            for name in values
            if name.startswith("vllm:")
            for number in values[name].values()
        }

    assert load() == {"num_requests_running": 0, "num_requests_waiting": 0, "kv_cache_usage_perc": 0}
    generation = client.generate(PROMPT, max_tokens=64, ignore_eos=True, method="off")
    async with generation:
        await anext(generation)
        running = load()
    assert (running["num_requests_running"], running["num_requests_waiting"]) == (1, 0)
    assert 0 < running["kv_cache_usage_perc"] < 1
    assert await verifier.is_idle()
    assert load()["num_requests_running"] == 0


async def test_counters_say_what_the_summaries_say(client: Client, verifier: RunningVerifier) -> None:
    methods = ("off", "speculative", "pearl", "best-first", "speculative")
    results = [await generate(client, method) for method in methods]
    assert await verifier.is_idle()
    values, summaries = values_of(verifier.servicer.metrics()), [result.summary for result in results]
    assert values["outrider_requests_total"] == {"OK,length": 5, "OK,stop": 0}
    assert above_0(values["outrider_sessions_total"]) == Counter(methods)
    rounds: Counter[str] = Counter()
    for method, summary in zip(methods, summaries, strict=True):
        rounds[method] += summary.num_rounds
    assert above_0(values["outrider_rounds_total"]) == rounds
    assert above_0(values["outrider_auto_rounds_total"]) == {}
    assert values[f"{PREFIX}drafts_total"][""] == sum(s.num_rounds - s.num_empty_rounds for s in summaries)
    assert values[f"{PREFIX}draft_tokens_total"][""] == sum(s.num_drafted_tokens for s in summaries) > 0
    num_accepted = sum(s.num_accepted_tokens for s in summaries)
    assert values[f"{PREFIX}accepted_tokens_total"][""] == num_accepted > 0
    assert values["outrider_hit_rounds_total"][""] == sum(s.num_hits for s in summaries)
    for name, info in COUNTS.items():
        if info.metric:
            assert values[info.metric] == {"": sum(getattr(s, name) for s in summaries)}, name
    at_position = list(values[f"{PREFIX}accepted_tokens_per_pos_total"].values())
    assert sum(at_position) == num_accepted
    assert at_position == sorted(at_position, reverse=True)
    assert len(at_position) == 32  # the longest chain here
    assert above_0(values["outrider_accepted_tokens_total"]) == {"draft": num_accepted}
    assert values["outrider_prompt_tokens_total"][""] == sum(result.num_prompt_tokens for result in results)
    assert values["outrider_generation_tokens_total"][""] == sum(result.num_output_tokens for result in results)
    rates = [s.num_accepted_tokens / s.num_drafted_tokens for s in summaries if s.num_drafted_tokens]
    assert values["outrider_request_acceptance_rate"] == {"count": 4, "sum": pytest.approx(sum(rates))}
    sent, received = (sum(getattr(s, f"num_bytes_{way}") for s in summaries) for way in ("sent", "received"))
    wire = values["outrider_wire_bytes_total"]
    # Each session's part of a message is preceded by its number and its length.
    assert 0 < sent < wire["speculator,sent"] < 1.2 * sent
    assert wire["speculator,received"] >= received > 0  # drafts may come when the text is complete
    assert values["outrider_degraded_sessions_total"][""] == 0


async def test_accepted_tokens_are_counted_at_each_position_that_they_reached(
    client: Client, verifier: RunningVerifier
) -> None:
    generation = client.generate(PROMPT, seed=11, temperature=0, max_tokens=64, ignore_eos=True, method="speculative")
    kept = [len(chunk.token_ids) - 1 async for chunk in generation if chunk.num_drafted]
    assert generation.result.num_output_tokens == 64
    at_position = values_of(verifier.servicer.metrics())[f"{PREFIX}accepted_tokens_per_pos_total"]
    expected = {str(position): sum(count > position for count in kept) for position in range(32)}
    assert at_position == expected
    assert max(kept) > 1


async def test_rounds_of_auto_are_counted_by_what_it_chose(client: Client, verifier: RunningVerifier) -> None:
    result = await generate(client, "auto", max_tokens=100)
    values = values_of(verifier.servicer.metrics())
    chosen: Counter[str] = Counter()
    for decision in result.summary.decisions:
        chosen[METHODS_FROM_PROTO[decision.method].name] += decision.num_rounds
    auto = above_0(values["outrider_auto_rounds_total"])
    assert auto == above_0(values["outrider_rounds_total"])
    assert sum(auto.values()) == result.summary.num_rounds
    # The round that reads the prompt is no decision.
    assert sum(auto.values()) - 1 == sum(chosen.values())
    assert all(auto[method] >= num_rounds for method, num_rounds in chosen.items())
    assert above_0(values["outrider_sessions_total"]) == {"auto": 1}


async def test_empty_rounds_have_a_reason_but_for_those_that_want_nothing(
    client: Client, verifier: RunningVerifier
) -> None:
    result = await generate(client, "pearl")
    plain = await generate(client, "off")
    values = values_of(verifier.servicer.metrics())
    reasons = values["outrider_fallback_rounds_total"]
    # The last round may have room only for the next token.
    num_empty = result.summary.num_empty_rounds
    assert num_empty - 1 <= sum(reasons.values()) <= num_empty
    assert plain.summary.num_empty_rounds == 48
    assert reasons["draft_down"] == reasons["no_match"] == reasons["load"] == 0


async def test_a_speculator_that_is_away_from_the_beginning_is_a_reason_and_no_loss(client: Client) -> None:
    async with running_verifier(speculator="127.0.0.1:1") as verifier, Client(verifier.address) as alone:
        result = await generate(alone, "pearl")
        values = values_of(verifier.servicer.metrics())
    assert result.summary.degraded
    [missing] = result.summary.missing_peers
    assert (missing.peer, missing.absence) == (verifier_pb2.PEER_SPECULATOR, verifier_pb2.ABSENCE_UNREACHABLE)
    num_rounds = result.summary.num_rounds
    [words] = result.missing_peers
    assert words.startswith(
        f"the speculator could not be reached for {missing.num_rounds} of {num_rounds} rounds (UNAVAILABLE: "
    )
    assert "127.0.0.1:1" in words
    assert 0 < missing.num_rounds <= num_rounds
    assert values["outrider_peer_up"] == {"speculator": 0}
    assert values["outrider_speculator_losses_total"][""] == result.summary.num_speculator_losses == 0
    assert values["outrider_degraded_sessions_total"][""] == 1
    assert values["outrider_fallback_rounds_total"]["draft_down"] > 0
    assert values[f"{PREFIX}drafts_total"][""] == 0


async def test_tokens_and_rounds_are_counted_while_a_generation_runs(client: Client, verifier: RunningVerifier) -> None:
    # Tests share the pool: blocks of earlier engines come back when the garbage collector has found them.
    num_bytes_before = values_of(verifier.servicer.metrics())["outrider_kv_cache_bytes"][""]
    generation = client.generate(PROMPT, max_tokens=1500, ignore_eos=True, method="off")
    num_tokens = 0
    async for chunk in generation:
        num_tokens += len(chunk.token_ids)
        if num_tokens >= 5:
            break
    values = values_of(verifier.servicer.metrics())
    assert values["outrider_generation_tokens_total"][""] >= 5
    assert values["outrider_rounds_total"]["off"] >= 5
    assert values["outrider_kv_cache_tokens"][""] > 5
    assert values["outrider_kv_cache_bytes"][""] > 0
    assert (values["outrider_requests_running"][""], values["outrider_requests_waiting"][""]) == (1, 0)
    assert sum(values["outrider_requests_total"].values()) == 0
    generation.cancel()
    assert await verifier.is_idle()
    values = values_of(verifier.servicer.metrics())
    assert above_0(values["outrider_requests_total"]) == {"CANCELLED,": 1}
    assert (values["outrider_requests_running"][""], values["outrider_requests_waiting"][""]) == (0, 0)
    assert values["outrider_request_duration_seconds"]["count"] == 0

    # A session is forgotten a moment before its blocks are free, and the engine runs in another thread.
    def is_free() -> bool:
        values = values_of(verifier.servicer.metrics())
        return not values["outrider_kv_cache_tokens"][""] and values["outrider_kv_cache_bytes"][""] <= num_bytes_before

    await until(is_free)


async def test_a_generation_waits_until_its_prompt_is_processed(client: Client, verifier: RunningVerifier) -> None:
    forward, may_run = verifier.engine._runner.forward, asyncio.Event()
    loop = asyncio.get_running_loop()

    def held(*arguments: Any, **options: Any) -> object:
        asyncio.run_coroutine_threadsafe(may_run.wait(), loop).result()
        return forward(*arguments, **options)

    verifier.engine._runner.forward = held  # type: ignore[method-assign, assignment]
    try:
        task = asyncio.create_task(generate(client, "off"))
        async with asyncio.timeout(10):
            while not verifier.servicer.num_sessions:  # noqa: ASYNC110 - the server has no event for it
                await asyncio.sleep(0.005)
        values = values_of(verifier.servicer.metrics())
        assert (values["outrider_requests_running"][""], values["outrider_requests_waiting"][""]) == (0, 1)
        assert values["outrider_prompt_tokens_total"][""] == 0
        may_run.set()
        await task
    finally:
        del verifier.engine._runner.forward
    values = values_of(verifier.servicer.metrics())
    assert (values["outrider_requests_running"][""], values["outrider_requests_waiting"][""]) == (0, 0)


async def test_refusals_and_deadlines_are_counted_by_their_code(client: Client, verifier: RunningVerifier) -> None:
    with pytest.raises(OutOfRange):
        await client.complete(PROMPT, max_tokens=10**6)
    with pytest.raises(DeadlineExceeded):
        await client.complete(PROMPT, max_tokens=1500, ignore_eos=True, method="off", timeout_s=0.2)
    assert await verifier.is_idle()
    ended = values_of(verifier.servicer.metrics())["outrider_requests_total"]
    assert above_0(ended) == {"OUT_OF_RANGE,": 1, "DEADLINE_EXCEEDED,": 1}


async def test_times_add_up(client: Client, verifier: RunningVerifier) -> None:
    result = await generate(client, "speculative")
    assert await verifier.is_idle()
    values = values_of(verifier.servicer.metrics())
    duration, first = (
        values[f"outrider_{name}"] for name in ("request_duration_seconds", "time_to_first_token_seconds")
    )
    tokens, chunks = (values[f"outrider_inter_{name}_latency_seconds"] for name in ("token", "chunk"))
    assert (duration["count"], first["count"]) == (1, 1)
    assert chunks["count"] == result.summary.num_rounds - 1
    assert tokens["count"] < 48  # those of the first chunk have none before them
    assert tokens["count"] >= chunks["count"]
    assert tokens["sum"] == pytest.approx(chunks["sum"])
    assert first["sum"] + chunks["sum"] <= duration["sum"]
    spent = values["outrider_round_seconds_total"]
    assert spent["prefill"] > 0
    assert spent["forward"] <= values["outrider_verify_duration_seconds"]["sum"]
    assert values["outrider_verify_duration_seconds"]["count"] == result.summary.num_rounds
    assert values["outrider_verify_rows_total"][""] >= result.summary.num_drafted_tokens + result.summary.num_rounds
    assert sum(spent.values()) <= duration["sum"]
    assert values["outrider_draft_wait_seconds"]["count"] > 0
    assert values["outrider_draft_latency_seconds"]["count"] > 0


async def test_between_the_forwards_of_plain_rounds_is_a_gap(client: Client, verifier: RunningVerifier) -> None:
    result = await generate(client, "off")
    assert await verifier.is_idle()
    values = values_of(verifier.servicer.metrics())
    gaps = values["outrider_verify_gap_seconds"]
    assert gaps["count"] == result.summary.num_rounds - 1
    assert 0 < gaps["sum"] < values["outrider_request_duration_seconds"]["sum"]


async def test_a_resumed_generation_is_counted_as_one(client: Client, verifier: RunningVerifier) -> None:
    begun = await generate(client, "off", max_tokens=8)
    again = await client.complete(
        PROMPT,
        temperature=0.7,
        seed=11,
        max_tokens=16,
        ignore_eos=True,
        method="off",
        resume_token_ids=begun.token_ids,
    )
    assert again.num_output_tokens == 16
    values = values_of(verifier.servicer.metrics())
    assert values["outrider_resumed_sessions_total"][""] == 1
    assert values["outrider_generation_tokens_total"][""] == 16

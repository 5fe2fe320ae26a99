"""A generation between its engine and its peers: all get the same tokens, and nobody works for it after its end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.auto.history import TemperatureClass
from outrider.core.auto.strategies import strategies_of
from outrider.core.methods import AUTO, OFF, PEARL, RETRIEVAL
from outrider.core.params import SamplingParams, Source
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import Method, SpeculationParams, Steering
from outrider.core.statistics import Statistics
from outrider.v1 import types_pb2
from outrider.verifier.generation import HIGH_WATER, Generation
from outrider.verifier.listener import PeerRequests
from tests.support.scripted_datastore import scripted_datastore
from tests.support.scripted_speculator import ScriptedSpeculator, dialling, serving
from tests.support.services import RunningVerifier, running_verifier
from tests.support.waiting import until

PROMPT = (5, 6, 7, 8)
RESUMED = (9, 10)


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


def spec(verifier: RunningVerifier, method: Method, max_tokens: int) -> SessionSpec:
    params = SpeculationParams(method, 8, 32)
    sampling = SamplingParams(temperature=0.0)
    return SessionSpec("s", PROMPT, sampling, params, verifier.model.vocab_size, max_tokens, resume_token_ids=RESUMED)


def text_of(verdicts: list[Verdict]) -> list[int]:
    return [*PROMPT, *RESUMED, *(token_id for verdict in verdicts for token_id in verdict.token_ids)]


async def test_the_drafter_is_let_go_at_the_last_verdict_however_slowly_the_client_reads(
    verifier: RunningVerifier,
) -> None:
    speculator, max_tokens = ScriptedSpeculator(), HIGH_WATER + 32
    async with serving(speculator) as address, dialling(address) as peer:
        with closing(Generation(spec(verifier, PEARL, max_tokens), verifier.engine, peer, None)) as generation:
            await until(lambda: speculator.commits)  # it pauses for its reader before the end
            events = generation.events()
            verdicts = [await anext(events) for _ in range(HIGH_WATER)]
            await until(lambda: speculator.num_streams == 0)  # the rest was not read
            verdicts += [event async for event in events]
    text = text_of([verdict for verdict in verdicts if isinstance(verdict, Verdict)])
    told = list(speculator.opened[0].committed_token_ids)
    for commit in speculator.commits:
        assert commit.base_len == len(told)
        told += commit.token_ids
    assert told == text[: len(told)]
    assert len(text) == len(PROMPT) + max_tokens
    assert len(told) < len(text), "of the last commit it learns nothing"


async def test_the_datastore_gets_every_token_also_those_that_are_sent_when_the_generation_has_ended(
    verifier: RunningVerifier,
) -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_records.clear()
        with closing(Generation(spec(verifier, RETRIEVAL, 12), verifier.engine, None, peer)) as generation:
            verdicts = [event async for event in generation.events() if isinstance(event, Verdict)]
        datastore.holds_records.set()
        await until(lambda: "s" in datastore.ended)
    assert datastore.tokens["s"] == text_of(verdicts)


async def run(generation: Generation) -> list[Verdict]:
    with closing(generation):
        return [event async for event in generation.events() if isinstance(event, Verdict)]


async def test_where_drafts_are_known_not_to_pay_auto_does_not_call_the_speculator(verifier: RunningVerifier) -> None:
    speculator, auto = ScriptedSpeculator(), spec(verifier, AUTO, 30)
    history = verifier.engine.timings.history
    for strategy in strategies_of(auto.speculation):
        if strategy.method.has_draft_model:
            record = history.record(strategy, TemperatureClass.GREEDY)
            for _ in range(50):
                # A second a token: slower than the target alone on any machine, however busy.
                history.add_round(record, TemperatureClass.GREEDY, 1, 1e3, True)
            history.record_failure(record)
    async with serving(speculator) as address, dialling(address) as peer:
        verdicts = await run(Generation(auto, verifier.engine, peer, None))
    assert len(text_of(verdicts)) == len(PROMPT) + 30
    assert speculator.opened == []


async def test_auto_opens_a_speculator_that_it_does_not_know_with_a_limit(verifier: RunningVerifier) -> None:
    speculator = ScriptedSpeculator()
    async with serving(speculator) as address, dialling(address) as peer:
        await run(Generation(spec(verifier, AUTO, 60), verifier.engine, peer, None))
        await run(Generation(spec(verifier, PEARL, 60), verifier.engine, peer, None))
    assert [opened.max_forward_us > 0 for opened in speculator.opened] == [True, False]


def is_paused(speculator: ScriptedSpeculator) -> bool:
    return any(steering.speculation.method == types_pb2.METHOD_OFF for steering in speculator.steerings)


async def test_auto_leaves_a_speculator_asleep_that_is_far_too_slow(verifier: RunningVerifier) -> None:
    speculator = ScriptedSpeculator()
    speculator.forward_us = 1_000_000
    async with serving(speculator) as address, dialling(address) as peer:
        generation = Generation(spec(verifier, AUTO, 400), verifier.engine, peer, None)
        with closing(generation):
            async for _ in generation.events():
                if is_paused(speculator):
                    break
            # Other steerings tell of times alone, before it or after.
            await until(lambda: is_paused(speculator))


async def test_a_stream_that_is_opened_in_the_middle_of_a_text_has_all_of_it(verifier: RunningVerifier) -> None:
    engine = cast(Any, SimpleNamespace(open=lambda *_, **__: None, close=lambda _: None, post=lambda *_: None))
    speculator, auto = ScriptedSpeculator(), spec(verifier, AUTO, 60)
    pearl = SpeculationParams(PEARL, 8, 32)
    async with serving(speculator) as address, dialling(address) as peer:
        with closing(Generation(auto, engine, peer, None)) as generation:
            generation.on_begun(Steering(SpeculationParams(OFF)), 0)
            generation.on_verdict(verdict_of(11), Statistics(), PeerRequests(steering=Steering(None, 2000, 500)))
            generation.on_verdict(verdict_of(12), Statistics(), PeerRequests(steering=Steering(pearl)))
            await until(lambda: speculator.steerings)
    opened, steering = speculator.opened[0], speculator.steerings[0]
    assert list(opened.committed_token_ids) == [*PROMPT, *RESUMED, 11, 12]
    assert opened.max_forward_us == 0, "the verifier has chosen to wake it"
    assert steering.speculation.method == types_pb2.METHOD_PEARL
    assert (steering.forward_us, steering.round_trip_us) == (2000, 500), "what it has missed before"


async def test_a_generation_that_was_closed_opens_no_stream(verifier: RunningVerifier) -> None:
    engine = cast(Any, SimpleNamespace(open=lambda *_, **__: None, close=lambda _: None, post=lambda *_: None))
    speculator = ScriptedSpeculator()
    async with serving(speculator) as address, dialling(address) as peer:
        generation = Generation(spec(verifier, AUTO, 60), engine, peer, None)
        generation.close()
        generation.on_begun(Steering(), 0)
    assert not speculator.opened


def verdict_of(token_id: int) -> Verdict:
    return Verdict(0, 0, (), 6, (token_id,), (Source.TARGET,), None, None, None, None)

"""A generation between its engine and its peers: all hear the same tokens, and nobody works for it when it is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.session import SessionSpec, Verdict
from outrider.verifier.generation import HIGH_WATER, Generation
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
        with closing(Generation(spec(verifier, Method.PEARL, max_tokens), verifier.engine, peer, None)) as generation:
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
        with closing(Generation(spec(verifier, Method.RETRIEVAL, 12), verifier.engine, None, peer)) as generation:
            verdicts = [event async for event in generation.events() if isinstance(event, Verdict)]
        datastore.holds_records.set()
        await until(lambda: "s" in datastore.ended)
    assert datastore.tokens["s"] == text_of(verdicts)

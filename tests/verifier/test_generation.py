"""A generation between its engine and its peers: all hear the same tokens, and nobody works for it when it is over."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import closing

import pytest

from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.session import SessionSpec, Verdict
from outrider.verifier.generation import Generation
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


def spec(verifier: RunningVerifier, method: Method) -> SessionSpec:
    params = SpeculationParams(method, 8, 32)
    sampling = SamplingParams(temperature=0.0)
    return SessionSpec("s", PROMPT, sampling, params, verifier.model.vocab_size, 12, resume_token_ids=RESUMED)


async def test_the_drafter_is_let_go_at_the_last_verdict_however_slowly_the_client_reads(
    verifier: RunningVerifier,
) -> None:
    speculator = ScriptedSpeculator()
    async with serving(speculator) as address, dialling(address) as peer:
        with closing(Generation(spec(verifier, Method.PEARL), verifier.engine, peer, None)) as generation:
            await until(lambda: speculator.opened)
            await until(lambda: speculator.num_streams == 0)  # nobody has read anything
            verdicts = [event async for event in generation.events() if isinstance(event, Verdict)]
    text = [*PROMPT, *RESUMED, *(token_id for verdict in verdicts for token_id in verdict.token_ids)]
    told = list(speculator.opened[0].committed_token_ids)
    for commit in speculator.commits:
        assert commit.base_len == len(told)
        told += commit.token_ids
    assert told == text[: len(told)]
    assert len(text) == len(PROMPT) + 12
    assert len(told) < len(text), "of the last commit it learns nothing"


async def test_the_datastore_gets_every_token_also_those_that_are_sent_when_the_generation_has_ended(
    verifier: RunningVerifier,
) -> None:
    async with scripted_datastore() as (datastore, peer):
        datastore.holds_records.clear()
        with closing(Generation(spec(verifier, Method.RETRIEVAL), verifier.engine, None, peer)) as generation:
            verdicts = [event async for event in generation.events() if isinstance(event, Verdict)]
        datastore.holds_records.set()
        await until(lambda: "s" in datastore.ended)
    text = [*PROMPT, *RESUMED, *(token_id for verdict in verdicts for token_id in verdict.token_ids)]
    assert datastore.tokens["s"] == text

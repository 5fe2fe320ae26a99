"""The model's own file sets what a request omits of its sampling, for every caller and every drafter."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from outrider.v1.types_pb2 import SamplingParams
from outrider_client.client import Client
from outrider_client.errors import InvalidArgument
from outrider_client.generation import Result
from tests.support.services import (
    RunningVerifier,
    draft_model,
    other_target_model,
    running_edge,
    running_speculator,
    running_verifier,
    target_model,
)

DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "max_tokens": 40}
PROMPT = "def parse(text):\n    "


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    model = replace(target_model(), default_sampling=DEFAULTS)
    async with (
        running_speculator() as speculator,
        running_verifier(model=model, speculator=speculator.address) as found,
    ):
        yield found


@pytest.fixture
async def plain() -> AsyncIterator[RunningVerifier]:
    """A verifier of the same model without default sampling."""
    async with running_verifier(model=other_target_model()) as found:
        yield found


async def text_of(address: str, **options: object) -> Result:
    async with Client(address) as client:
        return await client.complete(PROMPT, seed=7, ignore_eos=True, **options)  # type: ignore[arg-type]


async def test_a_request_that_says_nothing_has_the_models_sampling(
    verifier: RunningVerifier, plain: RunningVerifier
) -> None:
    spelled_out = await text_of(plain.address, **DEFAULTS)
    assert len(spelled_out.token_ids) == 40
    # Another text; otherwise the comparison would be vacuous.
    assert (await text_of(plain.address, max_tokens=40)).token_ids != spelled_out.token_ids
    for method in ("off", "speculative", "best-first", "auto"):
        assert (await text_of(verifier.address, method=method)).token_ids == spelled_out.token_ids
    # A text cannot be continued under other defaults unless the client names the old ones, so clients do.
    begun = await text_of(verifier.address, max_tokens=10)
    assert begun.token_ids == spelled_out.token_ids[:10]


@pytest.mark.slow
async def test_an_edge_and_its_drafter_have_the_models_sampling(
    verifier: RunningVerifier, plain: RunningVerifier
) -> None:
    spelled_out = await text_of(plain.address, **DEFAULTS)
    async with running_edge(verifier.address, model=draft_model()) as edge:
        text = await text_of(edge.address, method="speculative")
        async with Client(edge.address) as client:
            assert (await client.info()).model.default_sampling == SamplingParams(**DEFAULTS)
    assert text.token_ids == spelled_out.token_ids
    # A drafter with other penalties and temperatures would seldom be right.
    assert text.acceptance_length > 1.5


async def test_a_requests_own_value_wins(verifier: RunningVerifier, plain: RunningVerifier) -> None:
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 60}
    assert (await text_of(verifier.address, **given)).token_ids == (await text_of(plain.address, **given)).token_ids
    assert len((await text_of(verifier.address, min_tokens=50)).token_ids) == 50
    with pytest.raises(InvalidArgument, match=r"sampling\.top_p must be in \(0, 1\], got 0"):
        await text_of(verifier.address, top_p=0.0)


async def test_the_models_length_is_cut_to_the_room_that_there_is() -> None:
    model = replace(target_model(), default_sampling={"max_tokens": 100_000, "temperature": 0.0})
    async with running_verifier(model=model) as verifier, Client(verifier.address) as client:
        room = model.max_context_len - 2000
        assert len((await client.complete([9] * 2000, ignore_eos=True)).token_ids) == room
        assert (await client.info()).model.default_sampling == SamplingParams(max_tokens=100_000, temperature=0)


async def test_a_model_without_defaults_has_none(plain: RunningVerifier) -> None:
    async with Client(plain.address) as client:
        assert (await client.info()).model.default_sampling == SamplingParams()

"""Structures in a running verifier: one that cannot be followed any further ends only its own call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.core.structure import StructureBroken
from outrider.models.structure import GrammarMatcher
from outrider_client import Client
from outrider_client.errors import InvalidArgument
from tests.support.services import RunningVerifier, running_verifier

PROMPT = "def add(a, b):\n"


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


@pytest.fixture(params=[7, 8, 9])
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes grammars become too complex on the way, which no honest one does: when a token is drawn, or when one is
    committed."""
    num_consumed: dict[GrammarMatcher, int] = {}
    consume = GrammarMatcher.consume

    def breaking(matcher: GrammarMatcher, token_id: int) -> bool:
        num_consumed[matcher] = num_consumed.get(matcher, 0) + 1
        if num_consumed[matcher] > request.param:
            raise StructureBroken("too many items")
        return consume(matcher, token_id)

    monkeypatch.setattr(GrammarMatcher, "consume", breaking)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("method", ["off", "retrieval"])
async def test_a_structure_that_becomes_too_complex_ends_its_call_and_no_other(
    verifier: RunningVerifier, method: str
) -> None:
    async with Client(verifier.address) as client:
        other = asyncio.create_task(
            client.complete(PROMPT, max_tokens=60, ignore_eos=True, temperature=0, resume=False)
        )
        with pytest.raises(InvalidArgument, match="structured_outputs cannot be followed any further: too many items"):
            await client.complete(
                PROMPT, structured_outputs={"regex": "[a-z]{40}"}, max_tokens=60, method=method, resume=False
            )
        assert (await other).num_output_tokens == 60
    assert await verifier.is_idle()


async def test_special_tokens_count_as_text_only_where_the_text_has_them(verifier: RunningVerifier) -> None:
    structure = {"choice": ["yes"], "special_tokens_as_text": True}
    async with Client(verifier.address) as client:
        rule = r"structured_outputs\.special_tokens_as_text must be unset or false unless skip_special_tokens is false"
        for skips in (None, True):
            with pytest.raises(InvalidArgument, match=rule):
                await client.complete(PROMPT, structured_outputs=structure, skip_special_tokens=skips)
        result = await client.complete(PROMPT, structured_outputs=structure, skip_special_tokens=False)
        assert result.text == "yes"


async def test_a_structure_of_one_call_says_nothing_of_the_next(verifier: RunningVerifier) -> None:
    async with Client(verifier.address) as client:
        for choices in (["alpha", "beta"], ["gamma"], ["alpha", "beta"]):
            result = await client.complete(PROMPT, structured_outputs={"choice": choices}, max_tokens=20)
            assert result.text in choices

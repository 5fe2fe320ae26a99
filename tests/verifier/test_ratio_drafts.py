"""Drafts from outside under the ratio rule: rows that cannot be true do no harm, and true ones count."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from tests.support.services import RunningVerifier, running_verifier
from tests.support.verifier_requests import handshake

NUM_TOKENS = 48


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier() as running:
        yield running


def request(**sampling: Any) -> verifier_pb2.GenerateRequest:
    return verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text="class TestParser(unittest.TestCase):\n    def test_"),
        sampling=types_pb2.SamplingParams(seed=11, max_tokens=NUM_TOKENS, ignore_eos=True, **sampling),
        speculation=types_pb2.SpeculationParams(
            method=types_pb2.METHOD_SPECULATIVE, acceptance_rule=types_pb2.ACCEPTANCE_RULE_RATIO
        ),
    )


Drafter = Callable[[int, list[int]], types_pb2.Draft]


async def collaborate(
    verifier: RunningVerifier, draft: Drafter, **sampling: Any
) -> tuple[list[int], verifier_pb2.Finished]:
    """Generates with drafts that are made from (prompt length, output so far), one after each event."""
    async with grpc.aio.insecure_channel(verifier.address) as channel:
        call = verifier_pb2_grpc.VerifierServiceStub(channel).Collaborate()  # type: ignore[no-untyped-call]
        opening = verifier_pb2.CollaborateOpen(handshake=handshake(verifier), request=request(**sampling))
        await call.write(verifier_pb2.CollaborateRequest(open=opening))
        output: list[int] = []
        num_prompt_tokens = 0
        async for response in call:
            if response.WhichOneof("event") == "finished":
                await call.done_writing()
                return output, response.finished
            num_prompt_tokens = num_prompt_tokens or response.started.num_prompt_tokens
            output += response.chunk.token_ids
            await call.write(verifier_pb2.CollaborateRequest(draft=draft(num_prompt_tokens, output)))
        raise AssertionError("the stream ended without Finished")


def chain(
    num_prompt_tokens: int, output: list[int], tokens: list[int], rows: list[types_pb2.SparseRow]
) -> types_pb2.Draft:
    return types_pb2.Draft(
        base_len=num_prompt_tokens + len(output),
        first_node_id=1 + 16 * len(output),
        parent_offsets=[0] + [1] * (len(tokens) - 1),
        token_ids=tokens,
        source=types_pb2.SOURCE_DRAFT,
        q_rows=rows,
    )


async def test_rows_that_cannot_be_true_do_no_harm(verifier: RunningVerifier) -> None:
    rng = random.Random(3)

    def garbage(num_prompt_tokens: int, output: list[int]) -> types_pb2.Draft:
        tokens = [rng.randrange(verifier.model.vocab_size) for _ in range(rng.randrange(1, 6))]
        rows = []
        for token_id in tokens[: rng.randrange(7)]:
            ids = [rng.choice([token_id, -5, 0, 7, 10**6, rng.randrange(2048)]) for _ in range(rng.randrange(4))]
            weights = [rng.choice([0, 1, 77, 2**32 - 1]) for _ in range(rng.randrange(4))]
            rows.append(types_pb2.SparseRow(token_ids=ids, weights=weights))
        return chain(num_prompt_tokens, output, tokens, rows)

    output, finished = await collaborate(verifier, garbage, temperature=0.7, top_k=5)
    assert len(output) == NUM_TOKENS
    assert finished.reason == verifier_pb2.FINISH_REASON_LENGTH
    assert finished.summary.num_drafted_tokens > 0
    assert await verifier.is_idle()


async def test_a_row_says_how_readily_its_token_is_kept(verifier: RunningVerifier) -> None:
    """A drawn token that its row calls rare is kept if the target gives it more probability; a picked token is kept
    only as often as the target would draw it."""
    shares = {}
    for is_drawn in (True, False):

        def guess(num_prompt_tokens: int, output: list[int], is_drawn: bool = is_drawn) -> types_pb2.Draft:
            token_id = len(output) * 37 % 300
            row = (
                types_pb2.SparseRow(token_ids=[token_id, 2047], weights=[1, 10**8])
                if is_drawn
                else types_pb2.SparseRow()
            )
            return chain(num_prompt_tokens, output, [token_id], [row])

        _, finished = await collaborate(verifier, guess, temperature=2.0)
        shares[is_drawn] = finished.summary.num_accepted_tokens / finished.summary.num_drafted_tokens
    assert shares[False] < 0.2
    assert shares[True] > 0.6

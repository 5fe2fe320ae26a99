"""Texts of an engine that launches the next batch before it knows the draws of the last one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from outrider.models.draws import DrawnTokens
from outrider.models.sampling import Sampler
from outrider.verifier.scheduler import Scheduler
from outrider_client.client import Client
from tests.support.crowded_pool import PROMPTS, crowded_model
from tests.support.services import running_verifier

WORK: list[dict[str, Any]] = [
    {"max_tokens": 1},
    {"max_tokens": 40, "temperature": 0.0},
    {"max_tokens": 90, "stop_token_ids": [13, 199]},
    {"max_tokens": 70, "stop": ["return", ")"], "temperature": 0.0},
    {"max_tokens": 50, "top_p": 0.8},
    {"max_tokens": 30, "repetition_penalty": 1.3},
    {"max_tokens": 60, "logprobs": 2},
    {"max_tokens": 20, "logprobs": 0, "logprobs_mode": "processed_logprobs"},
    {"max_tokens": 60, "method": "retrieval", "temperature": 0.0},
    {"max_tokens": 120},
    {"max_tokens": 25, "structured_outputs": {"regex": "[a-c]{8,20}"}},
    # Plain rounds are best for a text that nobody could guess, however long a forward takes.
    {"max_tokens": 150, "method": "auto", "temperature": 3.0},
]
"""Requests that end in all ways, and some whose next round is unknown before the verdict."""


@pytest.fixture
def num_ahead(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Number of sessions of each batch that was launched while the device was busy with another one."""
    counts: list[int] = []
    following = Scheduler.next

    def counted(self: Scheduler, now: float, after: Any = None) -> Any:
        batch = following(self, now, after)
        if after is not None:
            counts.append(0 if batch is None else len(batch.work))
        return batch

    monkeypatch.setattr(Scheduler, "next", counted)
    return counts


REPORTED = [{"max_tokens": 40 + number, "logprobs": number % 4} for number in range(6)]
REPORTED += [{"max_tokens": 60}]
RAW_LOGITS = {"max_tokens": 50, "logprobs": 1, "logprobs_mode": "raw_logits"}
Said = tuple[list[int], str, object]
"""Token ids, text and log-probabilities."""


async def texts(client: Client, work: list[dict[str, Any]]) -> list[Said]:
    async def complete(number: int, asked: dict[str, Any]) -> Said:
        options = {"method": "off", "seed": number, "temperature": 0.8} | asked
        done = await client.complete(PROMPTS[number % len(PROMPTS)], **options)
        return list(done.token_ids), done.text, done.logprobs

    return list(await asyncio.gather(*(complete(number, asked) for number, asked in enumerate(work))))


@pytest.mark.parametrize(
    "work",
    [WORK, [WORK[2]] * 6, [WORK[3]] * 6, [WORK[9]] * 9, [WORK[11]], [WORK[11]] * 5, [*REPORTED, RAW_LOGITS]],
    ids=["all kinds", "stop tokens", "stop strings", "a crowded pool", "auto", "auto in company", "log-probabilities"],
)
async def test_texts_are_those_of_an_engine_that_waits(
    monkeypatch: pytest.MonkeyPatch, num_ahead: list[int], work: list[dict[str, Any]]
) -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        expected = await texts(client, work)
        assert not any(num_ahead)
        monkeypatch.setattr(verifier.engine, "overlaps", True)
        assert await texts(client, work) == expected
        # How often `auto` prefers plain rounds depends on the load of the machine.
        assert sum(map(bool, num_ahead)) > 10 or work[0].get("method") == "auto"


async def test_rows_that_the_host_draws_for_change_no_text(
    monkeypatch: pytest.MonkeyPatch, num_ahead: list[int]
) -> None:
    begin, num_left = Sampler.begin, [0]

    def leaving_some(self: Sampler, *arguments: Any) -> DrawnTokens:
        token_ids = begin(self, *arguments).wait()
        left = [row for row, token_id in enumerate(token_ids) if token_id % 5 == 0]
        num_left[0] += len(left)
        on_device = [-1 if row in left else token_id for row, token_id in enumerate(token_ids)]
        return DrawnTokens(torch.tensor(on_device), lambda rows: [token_ids[row] for row in rows])

    work = [WORK[number] for number in (1, 2, 4, 6, 9)]
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        expected = await texts(client, work)
        monkeypatch.setattr(verifier.engine, "overlaps", True)
        monkeypatch.setattr(Sampler, "begin", leaving_some)
        assert await texts(client, work) == expected
        assert num_left[0] > 10
        assert sum(map(bool, num_ahead)) > 10


async def test_who_comes_and_who_leaves_in_the_middle_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, num_ahead: list[int]
) -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        (expected,) = await texts(client, WORK[9:10])
        monkeypatch.setattr(verifier.engine, "overlaps", True)
        going = asyncio.create_task(texts(client, WORK[9:10]))
        for number in range(4):
            leaving = client.generate(PROMPTS[1 + number], max_tokens=200, ignore_eos=True, method="off")
            for _ in range(3):
                await anext(leaving)
            await leaving.aclose()
        assert await going == [expected]
        # A session that has left may still be there when the next one comes.
        assert max(num_ahead) >= 2

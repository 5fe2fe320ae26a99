"""Texts of rounds that a target was asked for behind drafts that the host did not know yet: those of plain decoding."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest

from outrider.core.session import Verdict
from outrider.models.pending_draft import NUM_BEST, PendingDraft
from outrider.models.runner import Runner
from outrider.speculator.loop_choice import LoopChoice
from outrider.verifier.engine import Engine
from outrider.verifier.rounds_behind_drafts import RoundsBehindDrafts, RowsBehind
from outrider.verifier.session import VerifySession
from outrider_client.client import Client
from tests.support.pending_drafts import LoopingRunner
from tests.support.services import RunningVerifier, draft_model, running_verifier

PROMPTS = [
    "class TestQueue(unittest.TestCase):\n    def test_",
    "def add(a, b):\n    return",
    "import os\nimport sys\n\n\ndef main() -> None:\n",
]
# With four tokens, one loop is the whole draft.
IN_TURNS: dict[str, Any] = {
    "method": "best-first",
    "rows": "tree",
    "best_first": {"serial": True},
    "num_speculative_tokens": 4,
}
METHODS: dict[str, dict[str, Any]] = {
    "best-first": IN_TURNS,
    "speculative": {"method": "speculative", "rows": "chain", "num_speculative_tokens": 4},
}
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"temperature": 1.0, "top_p": 0.8},
]
ENDS: list[dict[str, Any]] = [
    {"max_tokens": 9},
    {"stop": ["self", "return"]},
    {"stop_token_ids": [13, 199, 420]},
    {"include_stop_str_in_output": True, "stop": [")"]},
]
Said = list[tuple[list[int], str]]


@dataclass
class Seen:
    """Counts of what has happened."""

    num_claimed: int = 0
    num_along: int = 0
    """Rounds of a session behind a draft that have accepted tokens of its chain alone."""
    num_beside: int = 0
    """Those that have accepted a token beside it."""


def widest(_self: object, rows: dict[VerifySession, RowsBehind], _most: int) -> dict[VerifySession, RowsBehind]:
    return {session: each._replace(width=NUM_BEST - 1) for session, each in rows.items()}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    counts, claim, apply = Seen(), PendingDraft.claim, VerifySession.apply

    def counted_claim(draft: PendingDraft) -> bool:
        is_claimed = claim(draft)
        counts.num_claimed += is_claimed
        return is_claimed

    def counted_apply(session: VerifySession, *arguments: Any, **options: Any) -> Verdict:
        rows = session.rows
        verdict = apply(session, *arguments, **options)
        accepted = [] if rows is None else [rows[row] for row in verdict.accepted_rows]
        is_along = accepted == list(range(1, 1 + len(accepted)))
        counts.num_along += bool(accepted) and is_along
        counts.num_beside += not is_along
        return verdict

    monkeypatch.setattr(PendingDraft, "claim", counted_claim)
    monkeypatch.setattr(VerifySession, "apply", counted_apply)
    return counts


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopingRunner]:
    """A draft model's runner that the target's engine tells what it has looked at."""
    looping = LoopingRunner(draft_model().runner)
    follow, plan, end = Engine.follow, Engine.plan, PendingDraft.end

    def telling_follow(engine: Engine, draft: PendingDraft) -> None:
        looping.show(draft)
        follow(engine, draft)

    def telling_plan(engine: Engine, now: float) -> Any:
        draft = engine._pending_draft
        planned = plan(engine, now)
        if draft is not None:
            looping.look_at(draft)
        return planned

    def telling_end(draft: PendingDraft, found: Any) -> bool:
        is_claimed = end(draft, found)
        looping.end(draft)
        return is_claimed

    monkeypatch.setattr(Engine, "follow", telling_follow)
    monkeypatch.setattr(Engine, "plan", telling_plan)
    monkeypatch.setattr(PendingDraft, "end", telling_end)
    return looping


@pytest.fixture
async def verifier(runner: LoopingRunner, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RunningVerifier]:
    """One whose models share a device that works on by itself."""
    draft = replace(draft_model(), runner=cast(Runner, runner))
    async with running_verifier(draft=draft) as running:
        serving = running.servicer._serving
        assert serving is not None
        limits = replace(serving.limits, shares_gpu=True)
        monkeypatch.setattr(running.servicer, "_serving", replace(serving, limits=limits))
        monkeypatch.setattr(running.engine, "works_on", True)
        yield running


async def texts(verifier: RunningVerifier, num_sessions: int, **options: Any) -> Said:
    async with Client(verifier.address) as client:

        async def complete(number: int) -> tuple[list[int], str]:
            asked = {"seed": number, "max_tokens": 40, "ignore_eos": True, **options}
            done = await client.complete(PROMPTS[number], **asked)
            assert not done.summary.num_speculator_losses
            return list(done.token_ids), done.text

        return list(await asyncio.gather(*map(complete, range(num_sessions))))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("draws", DRAWS, ids=["greedy", "sampled", "top_p"])
async def test_texts_of_rounds_behind_drafts_are_those_of_plain_rounds(
    monkeypatch: pytest.MonkeyPatch, verifier: RunningVerifier, seen: Seen, method: str, draws: dict[str, Any]
) -> None:
    # How many pay is a question of times.
    monkeypatch.setattr(RoundsBehindDrafts, "_widened", widest)
    plain = await texts(verifier, 3, method="off", **draws)
    assert not seen.num_claimed
    for num_sessions in (1, 3):
        num_before = seen.num_claimed
        assert await texts(verifier, num_sessions, **METHODS[method], **draws) == plain[:num_sessions]
        assert seen.num_claimed > num_before
    assert seen.num_along > 0
    assert seen.num_beside > 0


@pytest.mark.parametrize("temperature", [0.0, 0.7])
async def test_texts_are_the_same_where_some_drafts_go_on_and_are_not_claimed(
    verifier: RunningVerifier, temperature: float
) -> None:
    plain = await texts(verifier, 3, method="off", temperature=temperature)
    longer = {**IN_TURNS, "num_speculative_tokens": 12}
    assert await texts(verifier, 3, temperature=temperature, **longer) == plain


@pytest.mark.parametrize("method", METHODS)
async def test_chains_that_end_where_the_host_has_to_draw_change_no_text(
    monkeypatch: pytest.MonkeyPatch, verifier: RunningVerifier, runner: LoopingRunner, seen: Seen, method: str
) -> None:
    # Chains that end early seem to go on.
    monkeypatch.setattr(LoopChoice, "mostly_ends", lambda *_: True)
    monkeypatch.setattr(RoundsBehindDrafts, "_widened", widest)
    plain = await texts(verifier, 2, method="off", temperature=0.7)
    runner.is_left = lambda number: number % 5 == 0
    assert await texts(verifier, 2, temperature=0.7, **METHODS[method]) == plain
    assert runner.num_left > 10
    assert seen.num_claimed > 5


@pytest.mark.parametrize("end", ENDS, ids=lambda end: next(iter(end)))
async def test_texts_end_where_those_of_plain_rounds_do(
    verifier: RunningVerifier, seen: Seen, end: dict[str, Any]
) -> None:
    plain = await texts(verifier, 3, method="off", temperature=0.7, **end)
    assert await texts(verifier, 3, temperature=0.7, **IN_TURNS, **end) == plain
    assert seen.num_claimed > 0


async def test_who_leaves_in_the_middle_of_a_round_behind_a_draft_changes_no_text(
    verifier: RunningVerifier, seen: Seen
) -> None:
    (plain,) = await texts(verifier, 1, method="off", max_tokens=150, temperature=0.7)
    going = asyncio.create_task(texts(verifier, 1, max_tokens=150, temperature=0.7, **IN_TURNS))
    async with Client(verifier.address) as client:
        for number in range(4):
            leaving = client.generate(PROMPTS[1], seed=number, max_tokens=200, ignore_eos=True, **IN_TURNS)
            for _ in range(3):
                await anext(leaving)
            await leaving.aclose()
    assert await going == [plain]
    assert seen.num_claimed > 10
    assert await verifier.is_idle()

"""Which sessions share the next forward, and how long some of them are held back for others."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.costs import HOLD_SHARE
from outrider.core.methods import OFF, PEARL, SPECULATIVE
from outrider.core.params import Source
from outrider.core.speculation import Method
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft
from outrider.verifier.engine import Engine
from outrider.verifier.session import VerifySession
from tests.support.stepped_engine import OPENED_AT, add_session

HOLD_S = HOLD_SHARE * 0.01


def planned(engine: Engine, now: float) -> tuple[list[VerifySession], float | None]:
    """Sessions of the next batch; if there is none, how long to wait for it."""
    batch = engine.scheduler.next(now)
    return [] if batch is None else list(batch.work), engine.scheduler.wait_s


def test_each_piece_of_a_prompt_is_held_back_for_a_quarter_of_a_forward_and_no_longer(engine: Engine) -> None:
    prefilling = add_session(engine, OFF, 300, 0)
    waiting = add_session(engine, SPECULATIVE, 3, 2)
    for ready_at in (OPENED_AT, OPENED_AT + 0.05, OPENED_AT + 0.1):
        assert waiting.round.deadline > ready_at + HOLD_S
        assert planned(engine, ready_at) == ([], pytest.approx(HOLD_S))
        assert planned(engine, ready_at + HOLD_S / 2) == ([], pytest.approx(HOLD_S / 2))
        assert planned(engine, ready_at + 1.01 * HOLD_S) == ([prefilling], None)
        # As after a forward of fifty rows.
        segment = prefilling.round.segment(50, 0)
        prefilling.cache.reserve(prefilling.cache.length + len(segment.token_ids))
        prefilling.cache.append(range(prefilling.cache.length, prefilling.cache.length + len(segment.token_ids)))


def test_a_piece_of_a_prompt_is_not_held_back_beyond_the_deadline_of_those_that_wait(engine: Engine) -> None:
    waiting = add_session(engine, SPECULATIVE, 3, 2)
    prefilling = add_session(engine, OFF, 300, 0)
    assert planned(engine, waiting.round.deadline - HOLD_S / 2) == ([], pytest.approx(HOLD_S / 2))
    assert planned(engine, waiting.round.deadline) == ([waiting, prefilling], None)


def draft_to(session: VerifySession, num_tokens: int) -> None:
    """A chain after all committed tokens, of whose tokens the draft model is sure."""
    tokens = list(range(100, 100 + num_tokens))
    draft = Draft(len(session.generation.committed), 1, [0] + [1] * (num_tokens - 1), tokens, [], Source.DRAFT)
    session.add_draft(draft, OPENED_AT)


def add_drafted(
    engine: Engine, method: Method = SPECULATIVE, num_prompt_tokens: int = 3, *, shares_gpu: bool = True
) -> VerifySession:
    """A session whose draft model has read its prompt, and has not drafted after it yet."""
    session = add_session(engine, method, num_prompt_tokens, 2, shares_gpu=shares_gpu)
    session.attach()
    session.add_draft(Draft(2, 1, [0], [2], [], Source.DRAFT), OPENED_AT)
    return session


def test_sessions_that_share_a_gpu_with_the_draft_model_are_verified_when_all_drafts_are_there(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    late = OPENED_AT + 10 * HOLD_S
    assert planned(engine, late) == ([], pytest.approx(second.round.deadline - late))
    draft_to(second, 8)
    assert planned(engine, late) == ([first, second], None)


def test_a_draft_that_does_not_come_holds_the_others_until_its_deadline(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    assert planned(engine, second.round.deadline) == ([first, second], None)


def test_nobody_waits_for_a_drafter_that_is_lost(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    assert planned(engine, OPENED_AT)[0] == []
    second.detach(Peer.SPECULATOR, Absence.LOST)
    assert planned(engine, OPENED_AT) == ([first, second], None)


def another_gpu(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine, shares_gpu=False), add_drafted(engine, shares_gpu=False)]


def a_plain_one(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_session(engine, OFF, 3, 2, shares_gpu=True)]


def one_that_is_drafted_ahead(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_drafted(engine, PEARL)]


def one_that_reads_its_prompt(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_drafted(engine, num_prompt_tokens=300)]


def a_draft_model_that_reads(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_session(engine, SPECULATIVE, 3, 2, shares_gpu=True)]


@pytest.mark.parametrize(
    "sharing",
    [
        another_gpu,
        a_plain_one,
        one_that_is_drafted_ahead,
        one_that_reads_its_prompt,
        a_draft_model_that_reads,
    ],
)
def test_sessions_are_held_back_for_drafts_only_where_all_take_turns(
    engine: Engine, sharing: Callable[[Engine], list[VerifySession]]
) -> None:
    drafted, waiting, *others = sharing(engine)
    for session in (drafted, *(each for each in others if each.drafter.is_drafting and not each.round.is_prefilling)):
        draft_to(session, 8)
    assert planned(engine, OPENED_AT) == ([], pytest.approx(HOLD_S))
    assert planned(engine, OPENED_AT + 1.01 * HOLD_S) == ([drafted, *others], None)
    assert not waiting.round.nodes

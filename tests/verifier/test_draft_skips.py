"""Rounds without drafts: chosen where they bring more in their time, and none of the text depends on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider.core.params import BestFirstParams, Method, SamplingParams, Source
from outrider.core.session import FinishReason
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft
from outrider.models.prefill import MIN_PREFILL_ROWS
from outrider.verifier.draft_skips import MAX_IN_A_ROW, DraftSkips, ExpectedTokens, SkippingSession
from outrider.verifier.engine import Engine
from outrider.verifier.session import VerifySession
from tests.support.stepped_engine import GREEDY, OPENED_AT, Asynchronous, add_session, stepped_engine

ROUND_MS, DRAFT_MS = 5.0, 10.0
"""A round that waits for a draft takes three times as long."""


class Expecting:
    """A session that expects so many tokens with a draft and without."""

    def __init__(self, with_draft: float, at_once: float, *, is_greedy: bool = True) -> None:
        self._expected = ExpectedTokens(with_draft, at_once, is_greedy)
        self.num_skipped = 0

    def expected_tokens(self) -> ExpectedTokens:
        return self._expected

    def skip_draft(self) -> None:
        self.num_skipped += 1


class Waiting(Expecting):
    """A session that needs a draft in any case."""

    def expected_tokens(self) -> Any:
        return None


def skips(*sessions: Expecting, draft_skips: DraftSkips | None = None, draft_ms: float | None = DRAFT_MS) -> bool:
    before = [session.num_skipped for session in sessions]
    of_engine: Sequence[SkippingSession] = sessions
    (draft_skips or DraftSkips()).choose(of_engine, ROUND_MS, draft_ms)
    has_skipped = [session.num_skipped > count for session, count in zip(sessions, before, strict=True)]
    assert len(set(has_skipped)) == 1, "all of them or none"
    return has_skipped[0]


def test_a_draft_is_skipped_where_what_is_there_brings_more_in_its_time() -> None:
    assert skips(Expecting(6.0, 2.1))
    assert not skips(Expecting(6.0, 1.9))


def test_sessions_that_share_a_forward_skip_their_drafts_together() -> None:
    assert skips(Expecting(6.0, 1.0), Expecting(6.0, 3.2))
    assert not skips(Expecting(6.0, 1.0), Expecting(6.0, 2.8))


def test_nobody_skips_a_draft_beside_a_session_that_needs_one_or_before_its_time_is_known() -> None:
    assert not skips(Expecting(6.0, 6.0), Waiting(6.0, 6.0))
    assert not skips(Expecting(6.0, 6.0), draft_ms=None)


def test_what_is_expected_is_corrected_by_what_rounds_have_brought() -> None:
    draft_skips, session = DraftSkips(), Expecting(6.0, 3.0)
    assert skips(session, draft_skips=draft_skips)
    for _ in range(60):
        draft_skips.learn(session.expected_tokens(), 1, has_skipped=True)
    assert not skips(session, draft_skips=draft_skips)
    # Of sampled texts nothing else is known than before.
    assert skips(Expecting(6.0, 3.0, is_greedy=False), draft_skips=draft_skips)
    for _ in range(60):
        draft_skips.learn(session.expected_tokens(), 1, has_skipped=False)
    assert skips(session, draft_skips=draft_skips)


def test_after_some_rounds_in_a_row_without_a_draft_one_waits_for_it() -> None:
    draft_skips, session = DraftSkips(), Expecting(2.0, 2.0)
    chosen = [skips(session, draft_skips=draft_skips) for _ in range(2 * MAX_IN_A_ROW + 2)]
    assert chosen == [True] * MAX_IN_A_ROW + [False] + [True] * MAX_IN_A_ROW + [False]


@pytest.fixture
def engine() -> Engine:
    return stepped_engine()


def in_turns(engine: Engine, sampling: SamplingParams = GREEDY, **fields: Any) -> VerifySession:
    """A session in turns with the draft model, one of whose chains has been verified."""
    fields = {"best_first": BestFirstParams(serial=True), "sources": (Source.POOL,), "retrieval": True, **fields}
    method = fields.pop("method", Method.BEST_FIRST)
    session = add_session(engine, method, 3, 2, sampling, shares_gpu=True, **fields)
    session.attach()
    draft_to(session, [100, 101, 102])
    verify(session, [100, 101, 7, 8])
    return session


def draft_to(session: VerifySession, token_ids: Sequence[int]) -> None:
    offsets = [0] + [1] * (len(token_ids) - 1)
    session.add_draft(Draft(len(session.session.committed), 1, offsets, token_ids, [], Source.DRAFT), OPENED_AT)


def verify(session: VerifySession, draws: Sequence[int], max_num_nodes: int = 31) -> None:
    assert session.is_ready(OPENED_AT + 1e3)
    segment = session.segment(0, max_num_nodes)
    session.cache.reserve(session.cache.length + len(segment.token_ids))
    session.cache.append(range(session.cache.length, session.cache.length + len(segment.token_ids)))
    session.apply(draws[: segment.num_logits], 5.0, OPENED_AT, OPENED_AT)


def test_a_session_expects_of_a_draft_what_drafts_have_brought_it(engine: Engine) -> None:
    session = in_turns(engine)
    assert session.takes_turns
    # Two of three tokens were kept, and nothing is known of what comes behind the third.
    assert session.expected_tokens() == ExpectedTokens(3.0, 1.0, is_greedy=True)


def test_what_is_there_counts_as_far_as_a_round_can_verify_it_and_stands_beside_a_draft(engine: Engine) -> None:
    session = in_turns(engine)
    draft_to(session, [100, 101, 102, 103, 104])
    assert session.expected_tokens() == ExpectedTokens(6.0, 6.0, is_greedy=True)
    session._timings.max_num_nodes.add(1)
    assert session.expected_tokens() == ExpectedTokens(3.0, 2.0, is_greedy=True)


def test_a_session_that_retrieves_nothing_or_has_another_method_waits_for_its_draft(engine: Engine) -> None:
    assert in_turns(engine, retrieval=False).expected_tokens() is None
    assert in_turns(engine, method=Method.SPECULATIVE).expected_tokens() is None


def test_a_session_expects_no_more_tokens_of_a_draft_than_it_may_emit(engine: Engine) -> None:
    session = in_turns(engine)
    session.session.spec = replace(session.session.spec, max_tokens=session.session.num_output_tokens + 2)
    assert session.expected_tokens() == ExpectedTokens(2, 1.0, is_greedy=True)


def test_samples_of_the_ratio_rule_are_judged_when_they_were_drawn_whatever_is_there(engine: Engine) -> None:
    session = in_turns(engine)
    session.session.decides_by_ratio = True
    assert session.expected_tokens() is None


def test_a_session_without_its_draft_begins_at_once_and_still_takes_turns(engine: Engine) -> None:
    session = in_turns(engine)
    assert not session.is_ready(OPENED_AT)
    assert not session.peer_requests().skips_draft
    session.skip_draft()
    assert session.peer_requests().skips_draft
    assert session.is_ready(OPENED_AT)
    assert session.takes_turns
    assert not session.is_drafting
    verify(session, [9])
    # The next round is another one.
    assert session.is_drafting
    assert not session.peer_requests().skips_draft
    assert not session.is_ready(OPENED_AT)


def test_a_round_without_a_draft_says_nothing_of_what_drafts_bring(engine: Engine) -> None:
    session = in_turns(engine)
    before = session.expected_tokens()
    session.skip_draft()
    draft_to(session, [300])  # it was on its way
    verify(session, [9])
    assert session.expected_tokens() == before


def test_a_session_whose_drafter_would_have_much_to_read_waits_for_its_draft(engine: Engine) -> None:
    session = in_turns(engine)
    session.peer_requests()
    session.skip_draft()
    assert session.peer_requests().skips_draft
    num_untold = 0
    while session.expected_tokens() is not None:
        verify(session, [9])
        session.skip_draft()
        assert session.peer_requests().skips_draft
        num_untold += 1
    # With the nine of another round they would not go into one forward.
    assert num_untold == MIN_PREFILL_ROWS - 8
    session.skips_draft = False
    session.peer_requests()
    assert session.expected_tokens() is not None


def test_a_round_without_a_draft_waits_for_no_datastore(engine: Engine) -> None:
    session = in_turns(engine)
    assert session.deadline > OPENED_AT
    session.skip_draft()
    assert session.deadline == OPENED_AT


def test_the_time_of_every_draft_is_measured_in_turns(engine: Engine) -> None:
    session = in_turns(engine)
    draft_to(session, [100, 101, 102])
    session._timings.speculator_ms.value = None
    verify(session, [100, 101], max_num_nodes=1)
    assert session.session.tree.root.children
    draft_to(session, [50])
    assert session._timings.speculator_ms.value is not None


def test_the_engine_learns_from_what_a_round_was_expected_to_bring(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[Any] = []
    monkeypatch.setattr(engine._draft_skips, "choose", lambda *_: None)
    monkeypatch.setattr(engine._draft_skips, "learn", lambda *given, has_skipped: learnt.append((*given, has_skipped)))
    Asynchronous(monkeypatch, engine)
    session = in_turns(engine)
    expected = session.expected_tokens()
    draft_to(session, [7, 8])
    assert session.is_ready(math.inf)
    engine.step([session])
    assert learnt == [(expected, 2, False)]
    session.expected_tokens()
    session.skip_draft()
    assert session.is_ready(math.inf)
    engine.step([session])
    assert [entry[1:] for entry in learnt] == [(2, False), (1, True)]
    # Nothing was expected of a round that goes on without its drafter.
    session.expected_tokens()
    session.detach(Peer.SPECULATOR, Absence.LOST)
    assert session.is_ready(math.inf)
    engine.step([session])
    assert len(learnt) == 2


def test_the_engine_asks_those_that_take_turns_and_have_all_been_verified(engine: Engine) -> None:
    asked: list[int] = []
    first, second = in_turns(engine), in_turns(engine)
    plain: Any = engine
    plain._draft_skips = type("Skips", (), {"choose": lambda self, sessions, *_: asked.append(len(sessions))})()
    engine._skip_drafts([first])
    assert asked == []
    engine._skip_drafts([first, second])
    assert asked == [2]
    # One that reads its prompt waits for no draft, and one that has ended for nothing.
    add_session(engine, Method.OFF, 300, 2)
    second.session.finish_reason = FinishReason.STOP
    engine._skip_drafts([first])
    assert asked == [2, 1]
    # One that others would slow down, or be slowed down by.
    plain_one = add_session(engine, Method.OFF, 3, 2)
    engine._skip_drafts([first, plain_one])
    assert asked == [2, 1]

"""Rounds that verify nothing tell their reasons apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from outrider.core.methods import AUTO, OFF, PEARL, RETRIEVAL
from outrider.core.params import Source
from outrider.core.speculation import Method
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft
from outrider.verifier.engine import Engine
from outrider.verifier.round import EmptyRoundReason
from outrider.verifier.session import VerifySession
from tests.support.stepped_engine import OPENED_AT, add_session

LATE = OPENED_AT + 10
"""Later than any wait."""
NO_TOKENS: list[int] = []


def nothing(session: VerifySession) -> None: ...


def read(session: VerifySession) -> None:
    """Makes a draft without tokens come: the drafter has read the text."""
    session.add_draft(Draft(3, 1, NO_TOKENS, NO_TOKENS, [], Source.DRAFT), OPENED_AT)


def read_a_while_ago(session: VerifySession) -> None:
    """Makes a round pass after the drafter has read the text."""
    read(session)
    session.round = session.round.next(session.round.strategy, OPENED_AT, is_typical=True)


def wait(session: VerifySession) -> None:
    read_a_while_ago(session)
    session.round.patience_ms = 20.0
    assert not session.round.is_ready(OPENED_AT)


def lose(session: VerifySession) -> None:
    session.detach(Peer.SPECULATOR, Absence.LOST)


def draft(session: VerifySession) -> None:
    session.add_draft(Draft(3, 1, [0], [7], [], Source.DRAFT), OPENED_AT)


@pytest.mark.parametrize(
    ("method", "event", "reason"),
    [
        (PEARL, wait, EmptyRoundReason.DRAFT_TIMEOUT),
        (PEARL, read_a_while_ago, EmptyRoundReason.NOT_AWAITED),
        (PEARL, read, EmptyRoundReason.NO_DRAFT),
        (PEARL, nothing, EmptyRoundReason.DRAFT_PENDING),
        (PEARL, lose, EmptyRoundReason.DRAFT_DOWN),
        (RETRIEVAL, nothing, EmptyRoundReason.NO_MATCH),
        # The strategy that auto falls back to without a drafter has the same reason.
        (AUTO, lose, EmptyRoundReason.DRAFT_DOWN),
        (OFF, nothing, None),
    ],
)
def test_a_round_without_a_draft_has_a_reason(
    engine: Engine, method: Method, event: Callable[[VerifySession], None], reason: EmptyRoundReason | None
) -> None:
    session = add_session(engine, method, 3, 2)
    event(session)
    assert session.round.is_ready(LATE)
    session.round.segment(0, 8)
    assert session.round.why_empty is reason


def test_without_a_drafter_nothing_is_missing(engine: Engine) -> None:
    session = add_session(engine, PEARL, 3, 2, has_drafter=False)
    session.round.segment(0, 8)
    assert session.round.why_empty is None


@pytest.mark.parametrize(("max_num_nodes", "reason"), [(0, EmptyRoundReason.LOAD), (1, None)])
def test_a_draft_that_finds_no_row_is_crowded_out(
    engine: Engine, max_num_nodes: int, reason: EmptyRoundReason | None
) -> None:
    session = add_session(engine, PEARL, 3, 2)
    draft(session)
    assert session.round.is_ready(LATE)
    session.round.segment(0, max_num_nodes)
    assert session.round.why_empty is reason

"""SAGUARO after a miss: what the target verifies instead of a draft, and whether it waits for one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.methods import SAGUARO
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.retrieval.prior import PriorTable
from outrider.core.session import SessionSpec
from outrider.core.speculation import Fallback, SpeculationParams
from outrider.core.tree import Draft
from outrider.rounds.timings import Activity, EngineTimings
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession

PROMPT = (1, 2, 3)
GAMMA = 4


def session_of(
    fallback: Fallback, rows: Rows = Rows.CHAIN, num_sessions: int = 1, *, retrieval: bool = True
) -> VerifySession:
    saguaro = SaguaroParams(fallback=fallback)
    params = SpeculationParams(SAGUARO, GAMMA, 8, retrieval=retrieval, rows=rows, own=(saguaro,))
    spec = SessionSpec("s", PROMPT, SamplingParams(temperature=0.0), params, 1000, 100)
    timings = EngineTimings(ForwardTimes({1: 10.0, 64: 10.1}))
    timings.set_sessions([Activity.DRAFTING] * num_sessions)
    timings.speculator_ms.add(2.0)
    tiers = SimpleNamespace(prior=PriorTable.build([[*PROMPT, *range(10, 30)]]), shared=None)
    cache, listener = SimpleNamespace(length=len(PROMPT) - 1), cast(Any, None)
    return VerifySession(spec, listener, cast(Any, cache), timings, RoundCounts(), cast(Any, tiers), 0.0)


def sources_after_a_miss(session: VerifySession) -> list[Source]:
    assert session.round.is_ready(1.0), "nobody waits so long"
    return [node.source for node in session.round.nodes]


@pytest.mark.parametrize("rows", Rows)
def test_plain_verifies_nothing_not_even_what_is_known(rows: Rows) -> None:
    assert sources_after_a_miss(session_of(Fallback.PLAIN, rows)) == []


def test_retrieval_verifies_what_is_known() -> None:
    assert set(sources_after_a_miss(session_of(Fallback.RETRIEVAL))) == {Source.PRIOR}


def test_random_verifies_a_whole_chain_of_random_tokens_the_same_each_time() -> None:
    session, other = session_of(Fallback.RANDOM, retrieval=False), session_of(Fallback.RANDOM, retrieval=False)
    assert sources_after_a_miss(session) == [Source.RANDOM] * GAMMA
    assert sources_after_a_miss(other) == [Source.RANDOM] * GAMMA
    tokens = [node.token_id for node in session.round.nodes]
    assert tokens == [node.token_id for node in other.round.nodes]
    assert len(set(tokens)) == GAMMA


@pytest.mark.parametrize("fallback", Fallback)
def test_a_draft_needs_no_fallback(fallback: Fallback) -> None:
    session = session_of(fallback)
    session.add_draft(Draft(len(PROMPT), 1, [0, 1], [50, 51], [-0.1, -0.1], Source.DRAFT), 0.001)
    assert session.round.is_ready(0.001)
    assert [node.token_id for node in session.round.nodes[:2]] == [50, 51]


@pytest.mark.parametrize(
    ("fallback", "num_sessions", "waits"),
    [
        (Fallback.DRAFT, 1, True),
        (Fallback.DRAFT, 16, True),
        (Fallback.AUTO, 1, True),
        (Fallback.AUTO, 16, False),
        (Fallback.PLAIN, 1, False),
        (Fallback.RANDOM, 1, False),
    ],
)
def test_a_draft_is_waited_for_as_the_fallback_and_the_batch_say(
    fallback: Fallback, num_sessions: int, waits: bool
) -> None:
    session = session_of(fallback, num_sessions=num_sessions, retrieval=False)
    assert (session.round.deadline > 0.0) == waits

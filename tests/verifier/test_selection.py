"""What a round verifies of a retrieved chain, and when it waits for the draft model's."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.costs import ForwardTimes
from outrider.core.methods import DOUBLE, PEARL, RETRIEVAL
from outrider.core.methods.double import DoubleParams
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import Draft
from outrider.rounds.selection import select_nodes
from outrider.rounds.timings import QUIET_STEPS, Activity, EngineTimings
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession
from tests.support.trees import add_path

DEAR_ROWS = ForwardTimes({1: 1.0, 32: 8.75})
"""A row costs a quarter of a plain forward."""
REPEATED = (1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4)


def spec_of(method: Method, prompt: tuple[int, ...] = (1, 2, 3), **fields: Any) -> SessionSpec:
    params = SpeculationParams(method, 8, **fields)
    return SessionSpec("s", prompt, SamplingParams(temperature=0.0), params, vocab_size=1000, max_tokens=1000)


def timings_without_overhead() -> EngineTimings:
    timings = EngineTimings(DEAR_ROWS)
    for activity in (*[Activity.RETRIEVING] * QUIET_STEPS, Activity.DRAFTING):
        timings.set_sessions([activity])
        timings.add_overhead(0.0)
    return timings


@pytest.mark.parametrize(("probability", "length"), [(0.99, 8), (0.5, 1), (0.05, 0)])
def test_a_retrieved_chain_is_verified_as_far_as_it_pays(probability: float, length: int) -> None:
    session = Session(spec_of(RETRIEVAL))
    add_path(session.tree, 3, range(10, 18), math.log(probability), Source.RING)
    timings = timings_without_overhead()
    assert len(select_nodes(session, session.next_chain(), Rows.CHAIN, timings)) == length


def test_without_calibration_a_retrieved_chain_is_verified_whole() -> None:
    session = Session(spec_of(RETRIEVAL, calibration=False))
    add_path(session.tree, 3, range(10, 18), math.log(0.05), Source.RING)
    assert len(select_nodes(session, session.next_chain(), Rows.CHAIN, EngineTimings(DEAR_ROWS))) == 8


def test_the_draft_model_s_chain_is_verified_as_it_is() -> None:
    session = Session(spec_of(PEARL))
    add_path(session.tree, 3, range(10, 18), math.log(0.5), Source.DRAFT)
    assert len(select_nodes(session, session.next_chain(), Rows.CHAIN, EngineTimings(DEAR_ROWS))) == 8


@pytest.mark.parametrize(("probability", "length"), [(0.99, 8), (0.3, 4)])
def test_what_was_retrieved_behind_the_draft_model_s_chain_is_verified_as_far_as_it_pays(
    probability: float, length: int
) -> None:
    session = Session(spec_of(DOUBLE))
    add_path(session.tree, 3, range(10, 14), math.log(0.9), Source.DRAFT)
    add_path(session.tree, 3, range(10, 18), math.log(probability), Source.PRIOR)
    timings = timings_without_overhead()
    assert len(select_nodes(session, session.next_chain(), Rows.CHAIN, timings)) == length


def verify_session(spec: SessionSpec) -> VerifySession:
    cache = SimpleNamespace(length=len(spec.prompt_token_ids) - 1)
    timings, listener = EngineTimings(ForwardTimes({1: 10.0})), cast(Any, None)
    return VerifySession(spec, listener, cast(Any, cache), timings, RoundCounts(), None, 0.0)


def test_where_draft_and_target_take_turns_the_target_waits_for_the_draft_whatever_is_known() -> None:
    session = verify_session(spec_of(DOUBLE, REPEATED, own=(DoubleParams(serial=True),)))
    assert not session.round.is_ready(0.001)
    assert [node.source for node in session.round.nodes] == [Source.DYNAMIC] * len(session.round.nodes)
    assert session.round.nodes
    session.add_draft(Draft(len(REPEATED), 1, [0], [5], [-0.1], Source.DRAFT), 0.002)
    assert session.round.is_ready(0.002)
    assert [node.source for node in session.round.nodes[:2]] == [Source.DRAFT, Source.DYNAMIC], (
        "and what is known behind it"
    )


def test_a_drafter_that_does_not_come_is_not_waited_for_for_ever() -> None:
    session = verify_session(spec_of(DOUBLE, REPEATED, own=(DoubleParams(serial=True),)))
    assert session.round.is_ready(1.0)


def test_without_taking_turns_a_good_retrieved_chain_is_verified_at_once() -> None:
    session = verify_session(spec_of(RETRIEVAL, REPEATED))
    assert session.round.is_ready(0.0)
    assert session.round.nodes

"""Who chooses a session's strategy: its request, its own controller, or the group that shares its forwards."""

from __future__ import annotations

import pytest

from outrider.core.auto.strategies import PLAIN, strategies_of
from outrider.core.costs import ForwardTimes
from outrider.core.methods import METHODS, OFF, PEARL
from outrider.core.params import SamplingParams
from outrider.core.session import SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.rounds.strategy_choice import StrategyChoice
from outrider.rounds.timings import Activity, EngineTimings

AUTO = SpeculationParams(METHODS["auto"], retrieval=True)
FIRST = strategies_of(AUTO)[0]


@pytest.fixture
def timings() -> EngineTimings:
    return EngineTimings(ForwardTimes({1: 10.0, 16: 20.0}))


def choice(timings: EngineTimings, speculation: SpeculationParams = AUTO) -> StrategyChoice:
    spec = SessionSpec("s", (1, 2, 3), SamplingParams(temperature=0.0), speculation, 100, 50)
    made = StrategyChoice(spec, timings)
    made.set_attached(True)  # as a session does
    return made


def run(
    timings: EngineTimings, choices: list[StrategyChoice], num_steps: int, step_ms: float, now: float = 0.0
) -> list[int]:
    """Runs steps that take this long while any session drafts, and that bring each session as little as a plain step.
    Returns the number of distinct strategies after each step."""
    counts = []
    for _ in range(num_steps):
        timings.set_sessions([Activity.of(each.strategy) for each in choices])
        is_drafting = any(each.strategy.method.has_draft_model for each in choices)
        taken_ms = step_ms if is_drafting else timings.plain_ms
        now += taken_ms / 1e3
        for each in choices:
            each.observe(1, taken_ms, is_pending=False)
            each.choose()
        timings.end_step([each.take_share() for each in choices], now, is_typical=True)
        counts.append(len({each.strategy for each in choices}))
    return counts


def test_a_method_that_is_named_is_not_chosen_again(timings: EngineTimings) -> None:
    pearl = choice(timings, SpeculationParams(PEARL))
    pearl.choose()
    pearl.observe(1, 1e6, is_pending=False)
    pearl.choose()
    assert (pearl.strategy.method, pearl.is_auto, pearl.is_probing, pearl.decisions()) == (
        PEARL,
        False,
        False,
        [],
    )


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_alone_or_in_company_what_does_not_pay_is_left(timings: EngineTimings, num_sessions: int) -> None:
    choices = [choice(timings) for _ in range(num_sessions)]
    assert choices[0].strategy == FIRST
    run(timings, choices, 40, step_ms=100.0)
    assert {each.strategy.method.has_draft_model for each in choices} == {False}
    used = choices[0].decisions()
    assert used[0].strategy == FIRST
    assert sum(each.num_rounds for each in used) == sum(each.num_tokens for each in used) == 40


def test_all_that_share_forwards_follow_the_same_strategy(timings: EngineTimings) -> None:
    choices = [choice(timings) for _ in range(16)]
    assert set(run(timings, choices, 100, step_ms=30.0)) == {1}
    assert len({each.strategy for each in choices[0].decisions()}) > 1


def test_a_session_that_is_left_alone_chooses_by_itself_again(timings: EngineTimings) -> None:
    choices = [choice(timings) for _ in range(16)]
    run(timings, choices, 40, step_ms=100.0)
    assert choices[0].strategy != FIRST
    timings.set_sessions([Activity.NONE])
    choices[0].choose()
    # Nothing is known yet of sessions that run alone.
    assert choices[0].strategy == FIRST


def test_a_round_that_the_group_has_chosen_teaches_a_session_nothing_that_is_alone_since(
    timings: EngineTimings,
) -> None:
    two = [choice(timings), choice(timings)]
    run(timings, two, 3, step_ms=10.0)
    timings.set_sessions([Activity.NONE])
    assert two[0].is_probing  # asked between a step and its verdicts
    two[0].observe(1, 10.0, is_pending=False)
    assert timings.history.num_rounds == 0
    two[0].choose()
    two[0].observe(1, 10.0, is_pending=False)
    assert timings.history.num_rounds == 1


def test_a_named_method_goes_on_plain_if_it_is_off(timings: EngineTimings) -> None:
    off, pearl = (choice(timings, SpeculationParams(method)) for method in (OFF, PEARL))
    assert (off.goes_on_plain, pearl.goes_on_plain) == (True, False)


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_it_goes_on_plain_as_long_as_nothing_better_was_found(timings: EngineTimings, num_sessions: int) -> None:
    choices = [choice(timings) for _ in range(num_sessions)]
    foretold: list[tuple[bool, bool]] = []
    for step in range(300):
        was_plain = choices[0].strategy.is_plain
        goes_on = choices[0].goes_on_plain
        run(timings, choices, 1, step_ms=100.0, now=step)
        foretold.append((goes_on, was_plain and choices[0].strategy.is_plain))
    assert {True, False} == {goes_on for goes_on, _ in foretold}
    # A group decides before the step; a session's own controller may decide otherwise during the step.
    wrong = [pair for pair in foretold if pair[0] != pair[1]]
    assert wrong == [] if num_sessions > 1 else set(wrong) <= {(True, False)}


def test_who_is_left_alone_may_not_go_on_plain_as_the_group_did(timings: EngineTimings) -> None:
    choices = [choice(timings) for _ in range(16)]
    run(timings, choices, 40, step_ms=100.0)
    assert choices[0].goes_on_plain
    timings.set_sessions([Activity.NONE])
    assert not choices[0].goes_on_plain


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_without_a_drafter_nothing_that_needs_one_is_chosen(timings: EngineTimings, num_sessions: int) -> None:
    choices = [choice(timings) for _ in range(num_sessions)]
    run(timings, choices, 1, step_ms=10.0)
    choices[0].set_attached(False)
    assert not choices[0].strategy.method.has_draft_model
    choices[0].set_attached(True)
    assert choices[0].strategy.method.has_draft_model


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_a_drafter_that_is_too_slow_is_not_tried_at_once(timings: EngineTimings, num_sessions: int) -> None:
    timings.set_sessions([Activity.NONE] * num_sessions)
    slow = choice(timings)
    slow.choose()
    slow.hold_drafts()
    assert slow.strategy == PLAIN


def test_the_overhead_of_plain_rounds_is_learnt_where_no_draft_model_is_at_work(timings: EngineTimings) -> None:
    for activity, overhead_ms in ((Activity.NONE, 2.0), (Activity.DRAFTING, 20.0), (Activity.NONE, 2.0)):
        for _ in range(100):
            timings.set_sessions([activity] * 16)
            # Just after drafting has ended, the draft model still finishes its current work.
            timings.add_overhead(overhead_ms)
    assert timings.overhead_ms(Activity.NONE) == pytest.approx(2.0)
    assert timings.overhead_ms(Activity.DRAFTING) == pytest.approx(20.0)
    assert timings.plain_ms == pytest.approx(22.0)
    # A load that was never seen takes the value of the nearest one.
    timings.set_sessions([Activity.NONE] * 4)
    assert timings.overhead_ms(Activity.NONE) == pytest.approx(2.0)

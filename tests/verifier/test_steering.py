"""What a generation's drafter is told while it drafts: news only."""

from __future__ import annotations

import pytest

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.costs import ForwardTimes
from outrider.core.params import BestFirstParams, Method, SpeculationParams, Steering
from outrider.verifier.steering import DrafterSteering
from outrider.verifier.timings import EngineTimings

IN_TURNS, AHEAD = Strategy(Method.SPECULATIVE), Strategy(Method.PEARL)


def timings() -> EngineTimings:
    return EngineTimings(ForwardTimes({1: 5.0}))


def steering(strategy: Strategy = IN_TURNS, known: EngineTimings | None = None) -> DrafterSteering:
    return DrafterSteering(SpeculationParams(strategy.method, 8, 8), strategy, known or timings())


def test_while_nothing_is_new_nothing_is_said() -> None:
    assert steering().next(IN_TURNS, 8) is None


@pytest.mark.parametrize(("max_num_nodes", "said"), [(7, 7), (1, 1), (0, 1), (8, None), (99, None)])
def test_a_drafter_that_is_waited_for_is_told_how_many_nodes_a_round_can_verify(
    max_num_nodes: int, said: int | None
) -> None:
    told = steering().next(IN_TURNS, max_num_nodes)
    assert told == (None if said is None else Steering(max_num_nodes=said))


def test_it_is_told_again_when_that_changes_and_when_there_is_room_for_all_again() -> None:
    drafter = steering()
    numbers = [drafter.next(IN_TURNS, count) for count in (5, 5, 3, 20, 30)]
    assert [told and told.max_num_nodes for told in numbers] == [5, None, 3, 8, None]


def test_a_drafter_that_works_meanwhile_is_told_no_number() -> None:
    assert steering(AHEAD).next(AHEAD, 3) is None
    own = SpeculationParams(Method.BEST_FIRST, 8, 8, best_first=BestFirstParams(serial=True))
    best_first = Strategy(Method.BEST_FIRST)
    assert DrafterSteering(own, best_first, timings()).next(best_first, 3) == Steering(max_num_nodes=3)


def test_another_strategy_is_told_once_and_its_times_with_it() -> None:
    known = timings()
    drafter = steering(IN_TURNS, known)
    known.speculator_ms.add(9.0)
    known.draft_forward_ms.add(6.0)
    told = drafter.next(AHEAD, 99)
    assert told is not None
    assert told.speculation is not None
    assert (told.speculation.method, told.forward_us, told.round_trip_us) == (Method.PEARL, 5000, 3000)
    assert drafter.next(AHEAD, 99) is None


def test_who_has_begun_with_a_pause_is_woken_by_its_own_strategy() -> None:
    drafter = steering()
    drafter.begins_paused()
    assert drafter.next(PLAIN, 99) is None
    told = drafter.next(IN_TURNS, 99)
    assert told is not None
    assert told.speculation is not None

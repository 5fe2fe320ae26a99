"""What a generation's drafter is told while it drafts: only changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.costs import ForwardTimes
from outrider.core.methods import BEST_FIRST, PEARL, SPECULATIVE
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import SamplingParams
from outrider.core.session import Session, SessionSpec
from outrider.core.speculation import SpeculationParams, Steering
from outrider.rounds.drafter_link import DrafterLink
from outrider.rounds.timings import EngineTimings

FORWARD_TIME = Steering(forward_us=5000)
IN_TURNS, AHEAD = Strategy(SPECULATIVE), Strategy(PEARL)


def timings(max_num_nodes: int = 64) -> EngineTimings:
    known = EngineTimings(ForwardTimes({1: 5.0}))
    known.max_num_nodes.value = max_num_nodes
    return known


def link_of(
    strategy: Strategy = IN_TURNS,
    known: EngineTimings | None = None,
    params: SpeculationParams | None = None,
    *,
    is_probing: bool = False,
) -> DrafterLink:
    params = params or SpeculationParams(strategy.method, 8, 8)
    generation = Session(SessionSpec("s", (1, 2, 3), SamplingParams(temperature=0.0), params, 1000, 100))
    return DrafterLink(generation, strategy, known or timings(), has_drafter=True, is_probing=is_probing)


def told_of(link: DrafterLink, strategy: Strategy) -> Steering | None:
    link.follow(strategy)
    return link.next_steering()


def test_while_nothing_is_new_nothing_is_said() -> None:
    link = link_of()
    assert link.next_steering() == FORWARD_TIME
    assert link.next_steering() is None
    unknown = EngineTimings(ForwardTimes({1: 5.0}))
    assert link_of(known=unknown).next_steering() == FORWARD_TIME


@pytest.mark.parametrize(("max_num_nodes", "said"), [(7, 7), (1, 1), (0, 1), (8, None), (64, None)])
def test_a_drafter_that_is_waited_for_is_told_how_many_nodes_a_round_can_verify(
    max_num_nodes: int, said: int | None
) -> None:
    told = link_of(known=timings(max_num_nodes)).next_steering()
    assert told == (FORWARD_TIME if said is None else replace(FORWARD_TIME, max_num_nodes=said))


def test_it_is_told_again_when_that_changes_much_and_when_there_is_room_for_all_again() -> None:
    known = timings()
    link = link_of(known=known)
    link.next_steering()
    told = []
    for count in (6, 6, 7, 5, 4, 3, 3, 7.9, 20, 30):
        known.max_num_nodes.value = count
        said = link.next_steering()
        told.append(said and said.max_num_nodes)
    assert told == [6, None, None, None, 4, None, None, 7, 8, None]


def test_a_drafter_that_works_meanwhile_is_told_no_number() -> None:
    assert link_of(AHEAD, timings(3)).next_steering() == FORWARD_TIME
    own = SpeculationParams(BEST_FIRST, 8, 8, own=(BestFirstParams(serial=True),))
    best_first = Strategy(BEST_FIRST)
    assert link_of(best_first, timings(3), own).next_steering() == replace(FORWARD_TIME, max_num_nodes=3)


def test_another_strategy_is_told_once_and_its_times_with_it() -> None:
    known = timings()
    link = link_of(IN_TURNS, known)
    known.speculator_ms.add(9.0)
    known.draft_forward_ms.add(6.0)
    told = told_of(link, AHEAD)
    assert told is not None
    assert told.speculation is not None
    assert (told.speculation.method, told.forward_us, told.round_trip_us) == (PEARL, 5000, 3000)
    assert told_of(link, AHEAD) is None


def test_a_drafter_that_has_begun_with_a_pause_is_woken_by_its_own_strategy() -> None:
    link = link_of(is_probing=True)
    assert link.attach(forward_us=10**6)
    assert told_of(link, PLAIN) is None
    told = told_of(link, IN_TURNS)
    assert told is not None
    assert told.speculation is not None

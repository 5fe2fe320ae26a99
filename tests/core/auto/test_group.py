"""Sessions that share forwards draft only where that pays for all of them together."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.auto.group import Group, Share, load_class_of
from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.methods import METHODS
from outrider.core.params import Rows

BEST_FIRST = Strategy(METHODS["best-first"], Rows.TREE)
PEARL = Strategy(METHODS["pearl"])
RETRIEVAL = Strategy(METHODS["retrieval"], retrieval=True)
STRATEGIES = (BEST_FIRST, PEARL, RETRIEVAL, PLAIN)
PLAIN_MS = 25.0


@dataclass
class World:
    """Steps of some sessions that follow their group; what each strategy brings and costs is given."""

    num_sessions: int
    means: dict[Strategy, float]
    """Tokens of a session in a step."""
    times_ms: dict[Strategy, float]
    """Time of a step in which all sessions use the strategy."""
    group: Group = field(default_factory=Group)
    used: Counter[Strategy] = field(default_factory=Counter)
    chance: random.Random = field(default_factory=lambda: random.Random(1))
    time_ms: float = 0.0
    num_tokens: int = 0
    told_plain_ms: float = PLAIN_MS
    """Time of a plain step that the group is told."""

    def run(self, num_steps: int, usable: tuple[Strategy, ...] = STRATEGIES) -> float:
        """Runs steps; returns their throughput relative to plain steps."""
        self.time_ms, self.num_tokens = 0.0, 0
        for _ in range(num_steps):
            self.group.set_load(self.num_sessions, self.told_plain_ms)
            strategy = self.group.leader(STRATEGIES).strategy
            self.used[strategy] += 1
            step_ms = self.times_ms[strategy] * self.chance.uniform(0.95, 1.05)
            shares = [Share(STRATEGIES, usable, self._tokens(strategy), False) for _ in range(self.num_sessions)]
            self.group.end_step(shares, step_ms, is_typical=True)
            self.time_ms += step_ms
            self.num_tokens += sum(share.num_tokens for share in shares)
        return self.num_tokens / self.num_sessions / self.time_ms * PLAIN_MS

    def _tokens(self, strategy: Strategy) -> int:
        least = int(self.means[strategy])
        return least + (self.chance.random() < self.means[strategy] - least)


def world(num_sessions: int, **rates: float) -> World:
    """Returns a world in which strategies have these rates, relative to plain steps."""
    rate_of = {strategy: rates.get(strategy.method.name.replace("-", "_"), 1.0) for strategy in STRATEGIES}
    means = {BEST_FIRST: 3.2, PEARL: 2.6, RETRIEVAL: 1.4, PLAIN: 1.0}
    return World(num_sessions, means, {each: means[each] * PLAIN_MS / rate_of[each] for each in STRATEGIES})


def test_where_drafting_does_not_pay_for_all_nobody_drafts() -> None:
    crowd = world(16, best_first=0.88, pearl=0.9, retrieval=0.97)
    crowd.run(400)
    assert crowd.run(2000) > 0.98
    assert crowd.used[PLAIN] > 2000


@pytest.mark.parametrize("best", ["best_first", "retrieval"])
def test_the_strategy_that_brings_most_for_all_is_used(best: str) -> None:
    few = world(4, **{"best_first": 0.9, "pearl": 0.9, "retrieval": 0.9, best: 1.3})
    few.run(600)
    assert few.run(2000) > 1.3 * 0.97


def test_what_pays_under_one_load_says_nothing_of_another() -> None:
    few, crowd = world(4, best_first=1.4), world(16, best_first=0.8, pearl=0.8, retrieval=0.8)
    crowd.group = few.group
    few.run(300)
    crowd.run(400)
    assert few.run(200) > 1.3
    assert crowd.run(200) > 0.97


def test_what_does_not_pay_for_few_is_not_tried_at_once_for_many() -> None:
    few, crowd = (world(number, best_first=0.8, pearl=0.8, retrieval=0.9) for number in (8, 16))
    crowd.group = few.group
    few.run(200)
    assert crowd.run(300) > 0.98
    assert crowd.used[PLAIN] == 300


@pytest.mark.parametrize("passes_by", [False, True])
@pytest.mark.parametrize(("rate", "is_begun_with"), [(1.1, False), (1.25, False), (1.6, True)])
def test_what_pays_a_little_for_few_is_not_begun_with_for_four_times_as_many(
    rate: float, is_begun_with: bool, passes_by: bool
) -> None:
    few = world(8, best_first=rate, pearl=0.8, retrieval=0.8)
    crowd = world(32, best_first=rate / 1.5, pearl=0.6, retrieval=0.7)
    crowd.group = few.group
    few.run(200)
    assert few.used.most_common(1)[0][0] == BEST_FIRST
    if passes_by:
        # Sessions arrive one by one, so nothing is learnt at the loads in between.
        some = world(16)
        some.group = few.group
        some.group.set_load(16, PLAIN_MS)
        some.group.leader(STRATEGIES)
    crowd.run(1)
    assert (crowd.used[BEST_FIRST] == 1) == is_begun_with
    if not is_begun_with:
        assert crowd.run(300) > 0.98


def test_what_pays_a_little_is_judged_by_plain_steps_as_they_are_not_as_they_are_told() -> None:
    # If steps are faster than was told, plain ones bring more, too.
    few, crowd = world(8, retrieval=1.12), world(16, retrieval=0.95, best_first=0.8, pearl=0.8)
    crowd.group = few.group
    few.told_plain_ms = crowd.told_plain_ms = 1.15 * PLAIN_MS
    few.run(600)
    assert few.used.most_common(1)[0][0] == RETRIEVAL
    crowd.run(300)
    assert crowd.used[RETRIEVAL] == 0


def test_a_load_that_was_passed_through_does_not_hide_what_is_known_of_others() -> None:
    few, some, crowd = world(8, best_first=1.25), world(16, best_first=3.0), world(32, best_first=0.7)
    some.group = crowd.group = few.group
    few.run(200)
    some.run(5)
    crowd.run(1)
    assert crowd.used[BEST_FIRST] == 0


def test_what_does_not_pay_for_many_may_pay_for_few() -> None:
    few, crowd = world(4, best_first=1.4), world(16, best_first=0.8, pearl=0.8, retrieval=0.9)
    few.group = crowd.group
    crowd.run(200)
    assert few.run(100) > 1.4 * 0.97


def test_what_did_not_pay_for_few_is_tried_for_many_in_the_end() -> None:
    few, crowd = world(8, best_first=0.8, pearl=0.8, retrieval=0.8), world(16, best_first=1.4)
    crowd.group = few.group
    few.run(200)
    crowd.run(3000)
    assert crowd.run(500) > 1.3


def test_a_load_that_changes_by_one_is_the_same_load() -> None:
    assert {load_class_of(number) for number in (15, 16, 17)} == {load_class_of(16)}
    assert [load_class_of(number) for number in (1, 2, 4, 8, 16, 32)] == [0, 1, 2, 3, 4, 5]


def test_a_session_without_a_drafter_takes_what_it_can_use() -> None:
    few = world(4, best_first=1.5)
    few.run(100)
    leader = few.group.leader(STRATEGIES)
    assert leader.strategy == BEST_FIRST
    assert leader.strategy_for((RETRIEVAL, PLAIN)) == RETRIEVAL
    assert leader.strategy_for((PLAIN,)) == PLAIN


def test_without_any_drafter_nothing_that_needs_one_is_chosen() -> None:
    few = world(4, best_first=1.5)
    few.run(100)
    few.run(1, usable=(RETRIEVAL, PLAIN))
    before = few.used[BEST_FIRST]
    few.run(300, usable=(RETRIEVAL, PLAIN))
    assert few.used[BEST_FIRST] == before


@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.sampled_from([STRATEGIES, (RETRIEVAL, PLAIN)]))),
            st.floats(0, 1e4),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_whatever_steps_bring_a_session_gets_a_strategy_that_it_can_use(
    steps: list[tuple[list[tuple[int, bool, tuple[Strategy, ...]]], float, bool]],
) -> None:
    group = Group()
    for members, step_ms, is_typical in steps:
        group.set_load(len(members), PLAIN_MS)
        shares = [Share(STRATEGIES, usable, number, pending) for number, pending, usable in members]
        group.end_step(shares, step_ms, is_typical=is_typical)
        for share in shares:
            assert group.leader(STRATEGIES).strategy_for(share.usable) in share.usable

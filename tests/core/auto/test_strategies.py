"""A way as one session sees it: its own rounds beside the experience of all."""

from __future__ import annotations

import pytest

from outrider.core.auto.history import Strategy, StrategyHistory, TemperatureClass
from outrider.core.auto.strategies import SessionStrategy
from tests.core.auto.simulated_costs import BEST_FIRST, PEARL, PLAIN_MS, RETRIEVAL

GREEDY = TemperatureClass.GREEDY


class Session:
    """Options of one session, and the rounds that it and others have seen."""

    def __init__(self) -> None:
        self.experience = StrategyHistory(PLAIN_MS)
        self.options = {way: SessionStrategy(way, self.experience, GREEDY) for way in (BEST_FIRST, PEARL, RETRIEVAL)}
        self.num_rounds = 0

    def others_see(self, way: Strategy, num_rounds: int, *tokens: int) -> None:
        """Rounds of other sessions, of cost 1, with these tokens in turn."""
        for number in range(num_rounds):
            self.experience.count(self.options[way].record, GREEDY, tokens[number % len(tokens)], 1.0, True)

    def sees(self, way: Strategy, num_rounds: int, *tokens: int) -> None:
        """Rounds of this session."""
        for number in range(num_rounds):
            num_tokens = tokens[number % len(tokens)]
            self.others_see(way, 1, num_tokens)
            self.num_rounds += 1
            self.options[way].learn(num_tokens, 1.0, self.num_rounds)

    def rate(self, way: Strategy) -> float:
        return self.options[way].estimate(list(self.options.values()), self.num_rounds).rate


def test_without_rounds_of_its_own_a_session_believes_all_others() -> None:
    session = Session()
    session.others_see(PEARL, 200, 3)
    assert session.rate(PEARL) == pytest.approx(3.0)


def test_its_own_rounds_count_the_more_the_more_there_are() -> None:
    session = Session()
    session.others_see(PEARL, 500, 1, 7)
    rates = []
    for _ in range(4):
        session.sees(PEARL, 25, 1, 3)
        rates.append(session.rate(PEARL))
    assert 4 > rates[0] > rates[1] > rates[2] > rates[3] > 2
    assert rates[-1] < 2.5


def test_its_own_rounds_are_not_counted_twice() -> None:
    """In the first session of a process, the experience of all is its own: an estimate is as certain as they are."""
    session = Session()
    session.sees(PEARL, 16, 1, 2, 6, 3)
    estimate = session.options[PEARL].estimate(list(session.options.values()), session.num_rounds)
    assert estimate.rate == pytest.approx(3.0, rel=0.02)
    assert estimate.error == pytest.approx(session.options[PEARL].record.evidence.error, rel=0.1)


def test_a_text_that_is_hard_for_one_draft_is_taken_to_be_hard_for_others_but_not_for_retrieval() -> None:
    session = Session()
    for way in (PEARL, BEST_FIRST, RETRIEVAL):
        session.others_see(way, 300, 1, 7)
    session.sees(PEARL, 40, 1, 3)
    assert session.rate(BEST_FIRST) < 3.4
    assert session.rate(RETRIEVAL) == pytest.approx(4.0, rel=0.01)


def test_what_a_session_saw_long_ago_fades() -> None:
    session = Session()
    session.others_see(PEARL, 500, 1, 7)
    session.sees(PEARL, 100, 1, 3)
    before = session.rate(PEARL)
    session.num_rounds += 1000
    assert session.rate(PEARL) > before + 0.5


def test_a_way_that_was_fled_from_is_held_longer_each_time() -> None:
    option = Session().options[PEARL]
    holds = []
    for _ in range(3):
        option.abandon(100)
        holds.append(option.held_until - 100)
    assert holds == [holds[0], 2 * holds[0], 4 * holds[0]]
    option.renew()
    assert option.held_until == 0


def test_rounds_behind_plain_ones_add_up_and_a_single_hiccup_counts_little() -> None:
    option = Session().options[PEARL]
    option.count(1, 200.0, behind=19.0)
    assert option.deficit == 3.0
    option.count(4, 12.0, behind=-2.8)
    assert option.deficit == pytest.approx(0.2)
    option.count(4, 12.0, behind=-2.8)
    assert option.deficit == 0.0
    assert option.behind == pytest.approx(13.4)

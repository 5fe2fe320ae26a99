"""A strategy as one session sees it: the session's own rounds, and the history of all sessions."""

from __future__ import annotations

import pytest

from outrider.core.auto.history import StrategyHistory, TemperatureClass
from outrider.core.auto.session_strategy import SessionStrategy
from outrider.core.auto.strategies import Strategy
from tests.core.auto.simulated_costs import BEST_FIRST, PEARL, PLAIN_MS, RETRIEVAL

GREEDY = TemperatureClass.GREEDY


class Session:
    """Options of one session, and the rounds that it and others have seen."""

    def __init__(self) -> None:
        self.history = StrategyHistory(PLAIN_MS)
        self.strategies = {
            strategy: SessionStrategy(strategy, self.history, GREEDY) for strategy in (BEST_FIRST, PEARL, RETRIEVAL)
        }
        self.num_rounds = 0

    def others_see(self, strategy: Strategy, num_rounds: int, *tokens: int) -> None:
        """Rounds of other sessions, of cost 1, with these numbers of tokens in turn."""
        for number in range(num_rounds):
            self.history.add_round(self.strategies[strategy].record, GREEDY, tokens[number % len(tokens)], 1.0, True)

    def sees(self, strategy: Strategy, num_rounds: int, *tokens: int) -> None:
        """Rounds of this session."""
        for number in range(num_rounds):
            num_tokens = tokens[number % len(tokens)]
            self.others_see(strategy, 1, num_tokens)
            self.num_rounds += 1
            self.strategies[strategy].learn_round(num_tokens, 1.0, self.num_rounds)

    def rate(self, strategy: Strategy) -> float:
        return self.strategies[strategy].estimate(list(self.strategies.values()), self.num_rounds).rate


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
    """All rounds of a process's first session are its own, so an estimate is exactly as certain as they are."""
    session = Session()
    session.sees(PEARL, 16, 1, 2, 6, 3)
    estimate = session.strategies[PEARL].estimate(list(session.strategies.values()), session.num_rounds)
    assert estimate.rate == pytest.approx(3.0, rel=0.02)
    assert estimate.error == pytest.approx(session.strategies[PEARL].record.rate.error, rel=0.1)


def test_a_text_hard_for_one_draft_is_hard_for_all_but_retrieval() -> None:
    session = Session()
    for strategy in (PEARL, BEST_FIRST, RETRIEVAL):
        session.others_see(strategy, 300, 1, 7)
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


def test_an_abandoned_strategy_is_held_longer_each_time() -> None:
    strategy = Session().strategies[PEARL]
    holds = []
    for _ in range(3):
        strategy.abandon(100)
        holds.append(strategy.held_until - 100)
    assert holds == [holds[0], 2 * holds[0], 4 * holds[0]]
    strategy.reset()
    assert strategy.held_until == 0


def test_what_a_strategy_brought_before_it_was_abandoned_counts_little_in_that_text() -> None:
    session = Session()
    session.others_see(BEST_FIRST, 200, 3)
    session.sees(BEST_FIRST, 30, 3)
    session.sees(BEST_FIRST, 8, 1)
    before = session.rate(BEST_FIRST)
    session.strategies[BEST_FIRST].abandon(session.num_rounds)
    assert before > 2.5
    assert session.rate(BEST_FIRST) < before - 0.15
    first = session.rate(BEST_FIRST)
    session.strategies[BEST_FIRST].abandon(session.num_rounds)
    assert session.rate(BEST_FIRST) < first, "the others' texts count less each time"


def test_a_deficit_adds_up_and_a_single_hiccup_counts_little() -> None:
    strategy = Session().strategies[PEARL]
    strategy.count_round(1, 200.0, tokens_behind=19.0)
    assert strategy.deficit == 3.0
    strategy.count_round(4, 12.0, tokens_behind=-2.8)
    assert strategy.deficit == pytest.approx(0.2)
    strategy.count_round(4, 12.0, tokens_behind=-2.8)
    assert strategy.deficit == 0.0
    assert strategy.tokens_behind == pytest.approx(13.4)

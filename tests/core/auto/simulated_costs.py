"""Worlds for a controller: time and tokens of a round of each strategy, by text. Times are in milliseconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.core.auto.controller import Controller
from outrider.core.auto.history import StrategyHistory
from outrider.core.auto.strategies import PLAIN, Decision, Strategy
from outrider.core.methods import METHODS
from outrider.core.params import Rows

RETRIEVAL = Strategy(METHODS["retrieval"], retrieval=True)
PEARL = Strategy(METHODS["pearl"], retrieval=True)
BEST_FIRST = Strategy(METHODS["best-first"], Rows.TREE)
DOUBLE = Strategy(METHODS["double"], retrieval=True)
STRATEGIES = (BEST_FIRST, PEARL, DOUBLE, RETRIEVAL, PLAIN)
"""In the order of a server's preference."""

PLAIN_MS = 10.0
NUM_TOKENS = 128
"""Length of a generation."""


@dataclass(frozen=True)
class Cost:
    """Costs and gains of a strategy's rounds."""

    acceptance: float
    """Probability of each further token, given the tokens before it."""
    rounds_ms: float
    max_chain_len: int = 8
    restart: int = 1
    """Rounds after a switch to it that bring one token each, because the drafter starts over."""


@dataclass(frozen=True)
class World:
    """What rounds cost and bring. A world is constant; a run may switch between worlds."""

    costs: dict[Strategy, Cost]
    by_category: Sequence[dict[Strategy, float]] = ({},)
    """Factors of the acceptance, by category; sessions belong to the categories in turn."""
    jitter: float = 0.05
    """Relative standard deviation of a round's time."""
    hiccup: float = 0.0
    """Probability that the host makes a round take five times as long."""
    text_deviation: float = 0.05
    """Standard deviation of the sessions' acceptance: texts differ."""
    reading_rounds: float = 0.0
    """Plain rounds for which the draft model reads a prompt."""
    slowdown: float = 1.0
    """Factor of a plain round's time while the draft model works; 1 means that they share nothing."""


@dataclass
class Trace:
    """The rounds of all sessions, in the order of the process."""

    sessions: list[int] = field(default_factory=list)
    strategies: list[Strategy] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    times_ms: list[float] = field(default_factory=list)
    decisions: dict[int, list[Decision]] = field(default_factory=dict)

    def tokens_per_ms(self, first: int = 0, last: int | None = None) -> float:
        """Rate of a range of rounds."""
        return sum(self.tokens[first:last]) / sum(self.times_ms[first:last])

    @property
    def num_rounds(self) -> int:
        return len(self.strategies)

    def runs(self) -> list[list[tuple[Strategy, int, int, float]]]:
        """For each session, its runs of rounds of one strategy: (strategy, rounds, their tokens, their time)."""
        runs: dict[int, list[tuple[Strategy, int, int, float]]] = {}
        rounds = zip(self.sessions, self.strategies, self.tokens, self.times_ms, strict=True)
        for session, strategy, num_tokens, time_ms in rounds:
            known = runs.setdefault(session, [])
            last = known.pop() if known and known[-1][0] == strategy else (strategy, 0, 0, 0.0)
            known.append((strategy, last[1] + 1, last[2] + num_tokens, last[3] + time_ms))
        return list(runs.values())

    @property
    def num_switches(self) -> int:
        return sum(len(runs) - 1 for runs in self.runs())

    def excursions(self, rates: Mapping[Strategy, float]) -> list[tuple[float, int, float]]:
        """Short runs (at most 64 rounds) between two runs of another strategy: their time in milliseconds, their
        tokens, and the rate of that other strategy."""
        found = []
        for runs in self.runs():
            for before, (_, num_rounds, num_tokens, time_ms), after in zip(runs, runs[1:], runs[2:], strict=False):
                if before[0] == after[0] and num_rounds <= 64:
                    found.append((time_ms, num_tokens, rates[before[0]]))
        return found


class Steady:
    """A controller that always uses the same strategy."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def strategy(self) -> Strategy:
        return self._strategy

    def observe(self, num_tokens: int, round_ms: float) -> None:
        pass

    def decisions(self) -> list[Decision]:
        return []


class _Session:
    """A generation in a world: its text, and its progress."""

    def __init__(self, number: int, controller: Controller | Steady, seed: int) -> None:
        self.number, self.controller = number, controller
        self.num_left = NUM_TOKENS
        self._random = np.random.default_rng((seed, number))
        self._text = float(self._random.standard_normal())
        self._strategy: Strategy | None = None
        self._since_switch = 0
        self._reads_for = math.inf
        """Milliseconds that the draft model still has to read. Infinity means that it has not begun."""

    def round(self, world: World) -> tuple[Strategy, int, float]:
        strategy = self.controller.strategy()
        self._since_switch = self._since_switch + 1 if strategy == self._strategy else 0
        self._strategy = strategy
        if strategy.method.has_draft_model and self._reads(world):
            return self._pending_round(strategy, world)
        cost = world.costs[strategy]
        factor = world.by_category[self.number % len(world.by_category)].get(strategy, 1.0)
        acceptance = min(0.97, max(0.0, cost.acceptance * factor * (1 + world.text_deviation * self._text)))
        chances = self._random.random(cost.max_chain_len)
        noise, hiccup = self._random.standard_normal(), self._random.random()
        num_accepted = int(np.argmax(np.append(chances >= acceptance, True)))
        if self._since_switch < cost.restart:
            num_accepted = 0
        num_tokens = min(1 + num_accepted, self.num_left)
        time_ms = cost.rounds_ms * max(0.5, 1 + world.jitter * noise) * (5 if hiccup < world.hiccup else 1)
        self.num_left -= num_tokens
        self.controller.observe(num_tokens, time_ms)
        return strategy, num_tokens, time_ms

    def _reads(self, world: World) -> bool:
        if math.isinf(self._reads_for):
            self._reads_for = world.reading_rounds * PLAIN_MS
        return self._reads_for > 0

    def _pending_round(self, strategy: Strategy, world: World) -> tuple[Strategy, int, float]:
        self._since_switch = -1
        time_ms = PLAIN_MS * world.slowdown * max(0.5, 1 + world.jitter * self._random.standard_normal())
        self._reads_for -= time_ms
        self.num_left -= 1
        assert isinstance(self.controller, Controller)
        self.controller.observe(1, time_ms, is_pending=True)
        return strategy, 1, time_ms


def run(
    world: Callable[[int], World],
    begin: Callable[[int], Controller | Steady],
    num_sessions: int,
    num_parallel: int = 1,
    seed: int = 0,
    num_tokens: int = NUM_TOKENS,
) -> Trace:
    """Runs generations, so many in parallel, one round of each in turn.

    Args:
        world: By the number of tokens that the process has committed.
        begin: The controller of a session, by its number.
        num_sessions: In total.
        num_parallel: At a time.
        seed: Decides the texts and the noise.
        num_tokens: Of each.
    """
    trace, waiting, running, num_committed = Trace(), list(range(num_sessions)), [], 0
    while waiting or running:
        while waiting and len(running) < num_parallel:
            number = waiting.pop(0)
            session = _Session(number, begin(number), seed)
            session.num_left = num_tokens
            running.append(session)
        for session in list(running):
            strategy, count, time_ms = session.round(world(num_committed))
            num_committed += count
            trace.sessions.append(session.number)
            trace.strategies.append(strategy)
            trace.tokens.append(count)
            trace.times_ms.append(time_ms)
            if session.num_left <= 0:
                running.remove(session)
                trace.decisions[session.number] = session.controller.decisions()
    return trace


def run_fixed(world: Callable[[int], World], strategy: Strategy, num_sessions: int, **sizes: int) -> Trace:
    """The same generations, always with the same strategy."""
    return run(world, lambda _: Steady(strategy), num_sessions, **sizes)


def run_auto(
    world: Callable[[int], World],
    num_sessions: int,
    strategies: Sequence[Strategy] = STRATEGIES,
    temperature: float = 0.0,
    history: StrategyHistory | None = None,
    num_prompt_tokens: int = 0,
    **sizes: int,
) -> Trace:
    """The same generations, with the controllers of a new process, or of one with this history."""
    history = history or StrategyHistory(PLAIN_MS)
    return run(
        world,
        lambda number: Controller(history, temperature, strategies, number, num_prompt_tokens),
        num_sessions,
        **sizes,
    )


PLAIN_COST = Cost(0, PLAIN_MS)
GOOD = World(
    {
        PLAIN: PLAIN_COST,
        RETRIEVAL: Cost(0.15, 1.03 * PLAIN_MS, restart=0),
        PEARL: Cost(0.68, 1.15 * PLAIN_MS),
        BEST_FIRST: Cost(0.78, 1.2 * PLAIN_MS),
        DOUBLE: Cost(0.7, 1.2 * PLAIN_MS),
    }
)
UNTRAINED = World(
    {
        PLAIN: PLAIN_COST,
        RETRIEVAL: Cost(0.02, 1.05 * PLAIN_MS, restart=0),
        PEARL: Cost(0.0, 1.12 * PLAIN_MS),
        BEST_FIRST: Cost(0.01, 1.25 * PLAIN_MS),
        DOUBLE: Cost(0.01, 1.2 * PLAIN_MS),
    }
)


def slowed(factor: float, retrieval: float) -> World:
    """A draft so slow that a round with it takes `factor` plain rounds."""
    drafted = Cost(0.35, factor * PLAIN_MS)
    retrieved = Cost(retrieval, 1.03 * PLAIN_MS, restart=0)
    return World({PLAIN: PLAIN_COST, RETRIEVAL: retrieved, PEARL: drafted, BEST_FIRST: drafted, DOUBLE: drafted})


WORLDS = {
    "best-first is clearly best": GOOD,
    "untrained draft": UNTRAINED,
    "only retrieval pays": slowed(3, retrieval=0.3),
    "nothing pays": slowed(3, retrieval=0.0),
    "categories differ": World(
        GOOD.costs | {BEST_FIRST: Cost(0.72, 1.2 * PLAIN_MS)},
        by_category=({BEST_FIRST: 0.95, PEARL: 1.06}, {BEST_FIRST: 1.05, PEARL: 0.97}),
    ),
    "noise": World(GOOD.costs, jitter=0.15, hiccup=0.02),
    "noise and an untrained draft": World(UNTRAINED.costs, jitter=0.15, hiccup=0.02),
}

"""Sessions that share forwards choose their strategy together.

A session that drafts slows down all others of its forward, and a single session gains little by not drafting. If each
chose by its own measurements, all would go on drafting long after it has stopped to pay for any of them. So one
controller chooses for all, by the tokens of all sessions per time of a step, which is the machine's throughput. A
strategy that pays with one session need not pay with many: each load has a controller of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from outrider.core.auto.controller import Controller
from outrider.core.auto.history import StrategyHistory
from outrider.core.auto.strategies import PLAIN, Strategy

UNTYPICAL_STEPS = 2
"""Steps after a change of strategy that are not representative: one has run before sessions could follow, and in the
next the drafters begin."""
HIDDEN_COST = 0.05
"""Share of the gain by drafts that is lost in steps that are not measured: steps that read prompts, which take longer
with drafts in them, and the first steps of each session (measured with 16 sessions: 3 to 6 %)."""
TEMPERATURE = 0.7
"""Stands for the temperatures of all sessions, which are measured together."""


@cache
def load_class_of(num_sessions: int) -> int:
    """Returns the class of a load. Within a class, strategies cost and bring about as much.

    The classes are 1, 2, 3 to 5, 6 to 11, 12 to 22 sessions, and so on. The usual limits of servers (4, 8, 16) lie in
    the middle, so the load stays the same when one session ends before the next one begins.
    """
    return round(math.log2(max(1, num_sessions)))


class Share(NamedTuple):
    """Describes the part that one session had in a step."""

    strategies: tuple[Strategy, ...]
    """Strategies that it may use, by its request."""
    usable: tuple[Strategy, ...]
    """Those that it can use now."""
    num_tokens: int
    """Tokens that it has committed. 0 means that it was not ready for the step."""
    is_pending: bool
    """True if its draft model has sent nothing yet since the strategy needs it."""


class Group:
    """Chooses for all sessions that share forwards: one strategy for all that may use the same strategies."""

    def __init__(self) -> None:
        self._leaders: dict[tuple[int, tuple[Strategy, ...]], Leader] = {}
        self._load_class = 0
        self._plain_ms = 1.0
        self.draft_ms = 0.0
        """Time of a draft forward of one row. 0 means not known."""

    def set_load(self, num_sessions: int, plain_ms: float) -> None:
        """Sets how many sessions share a forward, and the time of a step in which none of them drafts."""
        load_class = load_class_of(num_sessions)
        self._plain_ms = plain_ms
        for (of_class, _), leader in self._leaders.items():
            if of_class == load_class:
                leader.begin(plain_ms, self.draft_ms, is_new_load=load_class != self._load_class)
        self._load_class = load_class

    def leader(self, strategies: tuple[Strategy, ...]) -> Leader:
        """Returns the leader that chooses among these strategies under the present load."""
        key = self._load_class, strategies
        leader = self._leaders.get(key)
        if leader is None:
            leader = Leader(strategies, self._plain_ms, self.draft_ms, self._below(strategies))
            self._leaders[key] = leader
        return leader

    def _below(self, strategies: tuple[Strategy, ...]) -> list[tuple[int, Leader]]:
        """Returns the leaders of lower loads, the nearest first, and by how many classes each of them is lower."""
        lower = [
            (self._load_class - of_class, leader)
            for (of_class, others), leader in self._leaders.items()
            if others == strategies and of_class < self._load_class
        ]
        return sorted(lower, key=lambda pair: pair[0])

    def end_step(self, shares: Sequence[Share], step_ms: float, *, is_typical: bool) -> None:
        """Learns from a step.

        Args:
            shares: Those of all sessions that are past their prompts, also of those that were not ready.
            step_ms: Time from the end of the step before it to its own.
            is_typical: False if it is not representative: it has read a prompt.
        """
        members: dict[tuple[Strategy, ...], list[Share]] = {}
        for share in shares:
            members.setdefault(share.strategies, []).append(share)
        for strategies, of_group in members.items():
            self.leader(strategies).observe(of_group, step_ms, is_typical=is_typical)


class Leader:
    """Chooses one strategy for some sessions under one load."""

    def __init__(
        self,
        strategies: tuple[Strategy, ...],
        plain_ms: float,
        draft_ms: float,
        below: Sequence[tuple[int, Leader]] = (),
    ) -> None:
        """
        Args:
            strategies: Those to choose from.
            plain_ms: Time of a step in which no session drafts.
            draft_ms: Time of a draft forward of one row. 0 means not known.
            below: Leaders with the same strategies under lower loads, the nearest first, each with the number of
                classes between.
        """
        # Of its own: its rounds are steps of all sessions.
        self._history = StrategyHistory(plain_ms)
        self._history.draft_ms = draft_ms
        self._history.inherit([(num_classes, leader._history) for num_classes, leader in below])
        self._controller = Controller(self._history, TEMPERATURE, strategies)
        self._usable: set[Strategy] = set(strategies)
        self._num_steps = 0
        """Steps since the strategy or the load has changed."""

    def begin(self, plain_ms: float, draft_ms: float, *, is_new_load: bool) -> None:
        """Sets the time of a step in which no session drafts, and that of a draft forward. Called before each step."""
        self._history.plain_ms, self._history.draft_ms = plain_ms, draft_ms
        if is_new_load:
            self._num_steps = 0

    @property
    def strategy(self) -> Strategy:
        """The strategy for all."""
        return self._controller.strategy()

    def strategy_for(self, usable: Sequence[Strategy]) -> Strategy:
        """Returns the strategy for a session that can use only these: the common one, or the nearest substitute."""
        if self.strategy in usable:
            return self.strategy
        return next((each for each in usable if not each.method.has_draft_model), PLAIN)

    @property
    def is_probing(self) -> bool:
        """True while draft models are awake that are not known to pay (`Controller.is_probing`)."""
        return self._controller.is_probing

    def hold_drafts(self) -> None:
        """Does what `Controller.hold_drafts` does: the draft model is too slow to be tried without a budget for it."""
        self._controller.hold_drafts()

    def observe(self, members: Sequence[Share], step_ms: float, *, is_typical: bool) -> None:
        """Learns from a step of these sessions."""
        usable = {strategy for each in dict.fromkeys(share.usable for share in members) for strategy in each}
        if usable != self._usable:
            self._usable = usable
            self._controller.set_available(usable)
        before = self.strategy
        self._num_steps += 1
        if not is_typical:
            return
        num_tokens = sum(share.num_tokens for share in members) / len(members)
        self._controller.observe(
            num_tokens if before.is_plain else (1 - HIDDEN_COST) * num_tokens,
            step_ms,
            is_pending=2 * sum(share.is_pending for share in members) > len(members),
            is_typical=self._num_steps > UNTYPICAL_STEPS,
        )
        if self.strategy != before:
            self._num_steps = 0

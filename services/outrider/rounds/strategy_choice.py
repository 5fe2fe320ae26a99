"""The strategy of a session's rounds, and what chooses it: its request, its own controller, or its group."""

from __future__ import annotations

from outrider.core.auto.controller import Controller
from outrider.core.auto.group import Leader, Share
from outrider.core.auto.strategies import Decision, Strategy, strategies_of
from outrider.core.session import SessionSpec
from outrider.rounds.timings import EngineTimings


class StrategyChoice:
    """Holds the strategy of a session. Only `auto` has several. Between rounds, the controller of a session that runs
    alone chooses among them; if sessions share forwards, their group does (`outrider.core.auto.group`)."""

    def __init__(self, spec: SessionSpec, timings: EngineTimings) -> None:
        """
        Args:
            spec: The request.
            timings: What all sessions have measured.
        """
        self._spec, self._timings = spec, timings
        self._strategies = strategies_of(spec.speculation, shares_gpu=spec.shares_gpu)
        self.strategy = self._strategies[0]
        """The strategy of the next round."""
        self.has_changed = False
        """True if the latest choice differs from the one before."""
        self.is_auto = spec.speculation.method.is_auto
        """True if there are several strategies."""
        self._usable = self._strategies
        self._number = timings.number_session() if self.is_auto else 0
        self._chooser: Controller | Leader | None = None
        """Chooser of the strategy: its own controller, or the leader of its group. None: the request."""
        self._used: dict[Strategy, Decision] = {}
        self._num_tokens, self._is_pending = 0, False
        """The session's part in the current step."""

    def set_attached(self, is_attached: bool) -> None:
        """Sets whether there is a drafter, and chooses anew: a strategy that has become usable can be chosen at
        once."""
        self._usable = tuple(each for each in self._strategies if is_attached or not each.method.has_draft_model)
        if isinstance(self._chooser, Controller):
            self._chooser.set_available(self._usable)
        self.choose()

    def choose(self) -> None:
        """Chooses the strategy of the next round."""
        if self.is_auto:
            before, self.strategy = self.strategy, self._chosen()
            self.has_changed = self.strategy != before

    def _chosen(self) -> Strategy:
        if self._timings.num_sessions > 1:
            self._chooser = self._timings.group.leader(self._strategies)
            return self._chooser.strategy_for(self._usable)
        if not isinstance(self._chooser, Controller):
            # A new controller: what an earlier one knew of the drafter is outdated since others have decided.
            self._chooser = self._new_controller()
        return self._chooser.strategy()

    def _new_controller(self) -> Controller:
        temperature, length = self._spec.sampling.temperature, len(self._spec.prompt_token_ids)
        controller = Controller(self._timings.history, temperature, self._strategies, self._number, length)
        controller.set_available(self._usable)
        return controller

    def hold_drafts(self) -> None:
        """Records that the drafter is too slow to be tried without a budget for it, and chooses anew."""
        if self._chooser is not None:
            self._chooser.hold_drafts()
        self.choose()

    @property
    def is_first(self) -> bool:
        """True if the strategy is the one that a drafter is opened with."""
        return self.strategy == self._strategies[0]

    @property
    def goes_on_plain(self) -> bool:
        """True if this round is plain, and so is the next one, unless a controller of its own learns better from
        this one."""
        if not (self.is_auto and self.strategy.is_plain):
            return self.strategy.is_plain
        if self._timings.num_sessions > 1:
            # The choice that `choose` will make: the group learns from the current step only later.
            return self._timings.group.leader(self._strategies).strategy_for(self._usable).is_plain
        return isinstance(self._chooser, Controller)

    @property
    def is_probing(self) -> bool:
        """True while a drafter is on trial: it runs, may slow all forwards down, and its value is unknown."""
        return self._chooser is not None and self._chooser.is_probing

    def observe(self, num_tokens: int, round_ms: float, *, is_pending: bool) -> None:
        """Learns from a round.

        Args:
            num_tokens: Tokens that the round has committed.
            round_ms: Time from the previous commit to its own.
            is_pending: True if the drafter has not answered since the strategy has needed it.
        """
        if not self.is_auto:
            return
        used = self._used.get(self.strategy)
        if used is None:
            used = self._used[self.strategy] = Decision(self.strategy)
        used.add_round(num_tokens, round_ms)
        self._num_tokens, self._is_pending = num_tokens, is_pending
        # If others have just come or left, this controller did not choose the strategy of the round.
        if self._timings.num_sessions <= 1 and isinstance(self._chooser, Controller):
            self._chooser.observe(num_tokens, round_ms, is_pending=is_pending)

    def take_share(self) -> Share:
        """Returns the session's part in the current step, once."""
        share = Share(self._strategies, self._usable, self._num_tokens, self._is_pending)
        self._num_tokens = 0
        return share

    def decisions(self) -> list[Decision]:
        """Returns the rounds of each strategy, in the order of its first use."""
        return list(self._used.values())

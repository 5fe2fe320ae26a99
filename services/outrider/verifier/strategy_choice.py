"""The strategy of a session's rounds, and who chooses it: its request, its own controller, or its group."""

from __future__ import annotations

from outrider.core.auto.controller import Controller
from outrider.core.auto.group import Leader, Share
from outrider.core.auto.strategies import Decision, Strategy, strategies_of
from outrider.core.session import SessionSpec
from outrider.verifier.timings import EngineTimings


class StrategyChoice:
    """Holds the strategy of a session. Only `auto` has several: alone, a session's controller chooses among them
    between rounds; where sessions share forwards, their group does (`outrider.core.auto.group`)."""

    def __init__(self, spec: SessionSpec, timings: EngineTimings) -> None:
        """
        Args:
            spec: The request.
            timings: What all sessions have measured.
        """
        self._spec, self._timings = spec, timings
        self._strategies = strategies_of(spec.speculation, shares_gpu=spec.shares_gpu)
        self.strategy = self._strategies[0]
        """That of the next round."""
        self.has_changed = False
        """True if the latest choice was another than the one before."""
        self.is_auto = spec.speculation.method.is_auto
        """True if there are several."""
        self._usable = self._strategies
        self._number = timings.number_session() if self.is_auto else 0
        self._chooser: Controller | Leader | None = None
        """The one that has chosen it: its own controller, or the leader of its group. None: the request has."""
        self._used: dict[Strategy, Decision] = {}
        self._num_tokens, self._is_pending = 0, False
        """The part in the step of now."""

    def set_attached(self, is_attached: bool) -> None:
        """Takes in whether there is a drafter, and chooses anew: a strategy that can be used now is chosen at once."""
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
            # A new one: what an earlier one knew of the drafter is over since others have decided.
            self._chooser = self._new_controller()
        return self._chooser.strategy()

    def _new_controller(self) -> Controller:
        temperature, length = self._spec.sampling.temperature, len(self._spec.prompt_token_ids)
        controller = Controller(self._timings.history, temperature, self._strategies, self._number, length)
        controller.set_available(self._usable)
        return controller

    def hold_drafts(self) -> None:
        """Takes in that the drafter is too slow to be tried without a budget for it, and chooses anew."""
        if self._chooser is not None:
            self._chooser.hold_drafts()
        self.choose()

    @property
    def is_first(self) -> bool:
        """True for the strategy that a drafter is opened with."""
        return self.strategy == self._strategies[0]

    @property
    def goes_on_plain(self) -> bool:
        """True if this round is plain, and so is the next one, unless a controller of its own learns better from
        this one."""
        if not (self.is_auto and self.strategy.is_plain):
            return self.strategy.is_plain
        if self._timings.num_sessions > 1:
            # What `choose` will find: the group has learnt from the steps so far, and learns from this one later.
            return self._timings.group.leader(self._strategies).strategy_for(self._usable).is_plain
        return isinstance(self._chooser, Controller)

    @property
    def is_probing(self) -> bool:
        """True while a drafter is awake of which it is not known if it pays, and which may slow all forwards down."""
        return self._chooser is not None and self._chooser.is_probing

    def observe(self, num_tokens: int, round_ms: float, *, is_pending: bool) -> None:
        """Learns from a round.

        Args:
            num_tokens: Tokens that it has committed.
            round_ms: Time from the commit before it to its own.
            is_pending: True if the drafter has said nothing yet since the strategy needs it.
        """
        if not self.is_auto:
            return
        used = self._used.get(self.strategy)
        if used is None:
            used = self._used[self.strategy] = Decision(self.strategy)
        used.add_round(num_tokens, round_ms)
        self._num_tokens, self._is_pending = num_tokens, is_pending
        # Where others have just come or left, somebody else has chosen the strategy of this round.
        if self._timings.num_sessions <= 1 and isinstance(self._chooser, Controller):
            self._chooser.observe(num_tokens, round_ms, is_pending=is_pending)

    def take_share(self) -> Share:
        """Returns its part in the step of now, once."""
        share = Share(self._strategies, self._usable, self._num_tokens, self._is_pending)
        self._num_tokens = 0
        return share

    def decisions(self) -> list[Decision]:
        """Returns the rounds of each strategy, in the order of its first use."""
        return list(self._used.values())

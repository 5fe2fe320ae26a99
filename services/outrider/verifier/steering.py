"""The knowledge of a generation's drafter of how to go on, and what it should be told next."""

from __future__ import annotations

from outrider.core.auto.strategies import PLAIN, Strategy, params_of
from outrider.core.speculation import SpeculationParams, Steering, Waiting
from outrider.verifier.timings import EngineTimings

NEAR_PART = 4
"""Part of a number of nodes by which it may be off before the drafter is told another one."""


class DrafterSteering:
    """Tells one session's drafter what has changed since it was last told. Owned by the engine's thread."""

    def __init__(self, params: SpeculationParams, strategy: Strategy, timings: EngineTimings) -> None:
        """
        Args:
            params: Those of the request.
            strategy: The one that the drafter begins with.
            timings: What all sessions have measured.
        """
        self._params, self._timings = params, timings
        self._strategy = strategy
        """The strategy that the drafter knows of."""
        self._sent = Steering()

    def begins_paused(self) -> None:
        """Takes in that the drafter has begun with a pause."""
        self._strategy = PLAIN

    def next(self, strategy: Strategy) -> Steering | None:
        """Returns what the drafter should know and does not, for rounds of a strategy; None means that there is
        nothing."""
        timings, sent = self._timings, self._sent
        forward_us, round_trip_us = sent.forward_us, sent.round_trip_us
        # Milliseconds to microseconds. At least 1, as 0 means that nothing has changed.
        if strategy.method.has_draft_model:
            forward_us = max(1, int(timings.forward_ms.get(0.0) * 1e3))
        if timings.speculator_ms.value is not None:
            round_trip_us = max(1, int((timings.speculator_ms.value - timings.draft_forward_ms.get(0.0)) * 1e3))
        max_num_nodes = self._max_num_nodes(strategy)
        is_known = _is_near(sent.forward_us, forward_us) and _is_near(sent.round_trip_us, round_trip_us)
        if is_known and max_num_nodes == sent.max_num_nodes and self._strategy == strategy:
            return None
        speculation = None if self._strategy == strategy else params_of(strategy, self._params)
        self._sent, self._strategy = Steering(speculation, forward_us, round_trip_us, max_num_nodes), strategy
        return self._sent

    def _max_num_nodes(self, strategy: Strategy) -> int:
        """Returns the most nodes of a round, as the drafter should know it. 0 means that it need not."""
        sent, most = self._sent.max_num_nodes, self._params.num_speculative_tokens
        measured = int(self._timings.max_num_nodes.get(most))
        # A drafter that is not waited for has nothing better to do, and one that would not draft more needs no number.
        if strategy.method.waits(self._params) is not Waiting.IN_TURNS or (not sent and measured >= most):
            return sent
        measured = max(1, min(most, measured))
        # Sessions come and go: it would be told in each round. It is always told when there is room for all again.
        is_near = abs(measured - sent) <= sent // NEAR_PART and measured < most
        return sent if sent and is_near else measured


def _is_near(known_us: int, measured_us: int) -> bool:
    """Returns True if a drafter that knows the one time would do the same with the other."""
    return abs(known_us - measured_us) <= max(500, known_us // 3)

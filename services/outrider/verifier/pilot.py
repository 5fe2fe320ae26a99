"""Which way a generation goes on, and what its speculator is told of that."""

from __future__ import annotations

from outrider.core.controller import Controller
from outrider.core.experience import Experience
from outrider.core.option import Decision
from outrider.core.params import Method
from outrider.core.speculation import SpeculationParams
from outrider.core.steering import Steering
from outrider.core.ways import params_of, ways_of
from outrider.verifier.pace import Pace


class Pilot:
    """Of one generation. `Method.AUTO` changes its way between rounds; all other methods have one."""

    def __init__(self, params: SpeculationParams, temperature: float, experience: Experience, number: int) -> None:
        """`number` is that of the session: sessions try other ways at different places of their texts."""
        self._params = params
        self._ways = ways_of(params)
        self._controller: Controller | None = None
        if params.method is Method.AUTO:
            self._controller = Controller(experience, temperature, self._ways, number)
        self.way = self._ways[0]
        self._told_way = self.way
        self._told = Steering()

    def set_attached(self, is_attached: bool) -> None:
        """Whether a drafter is there."""
        if self._controller is not None:
            self._controller.set_available([way for way in self._ways if is_attached or not way.method.has_draft_model])
            self.way = self._controller.way()

    def observe(self, num_tokens: int, round_ms: float, *, is_typical: bool) -> None:
        """A round is over; the next one goes the way that `way` says. A round with a prompt in it is not typical."""
        if self._controller is not None:
            if is_typical:
                self._controller.observe(num_tokens, round_ms)
            self.way = self._controller.way()

    @property
    def decisions(self) -> list[Decision]:
        """What `Method.AUTO` has used; nothing for any other method."""
        return self._controller.decisions() if self._controller is not None else []

    def steering(self, pace: Pace) -> Steering | None:
        """What the speculator should know, if it is news."""
        latency_ms, told = pace.speculator_ms.value, self._told
        forward_us, round_trip_us = told.forward_us, told.round_trip_us
        if latency_ms is not None:
            forward_us = int(pace.forward_ms.get(0.0) * 1e3)
            round_trip_us = max(1, int((latency_ms - pace.draft_forward_ms.get(0.0)) * 1e3))
        is_known = _is_near(told.forward_us, forward_us) and _is_near(told.round_trip_us, round_trip_us)
        if is_known and self._told_way == self.way:
            return None
        speculation = None if self._told_way == self.way else params_of(self.way, self._params)
        self._told, self._told_way = Steering(speculation, forward_us, round_trip_us), self.way
        return self._told


def _is_near(known_us: int, measured_us: int) -> bool:
    """Whether a drafter that knows the one would do the same with the other."""
    return abs(known_us - measured_us) <= max(500, known_us // 3)

"""How long a peer may say nothing before it counts as lost, by how long it usually takes to answer."""

from __future__ import annotations

from outrider.core.statistics import RunningMean
from outrider.rpc.backoff import doubled

MIN_SILENCE_S = 1.0
USUAL_TIMES = 20
FIRST_ANSWER_S = 5.0
"""For the first answer: it has a connection to make and a prompt to read."""
MAX_FIRST_ANSWER_S = 60.0
MIN_UNANSWERED = 3
"""One commit may leave nothing to draft that is not drafted already; so many in a row do not."""


class Silence:
    """What one stream has been told and has not answered. Times are those of one clock, in seconds."""

    def __init__(self, usual_s: RunningMean, num_tries: int) -> None:
        """`usual_s` learns how long answers take; it is shared by all streams of a peer. `num_tries`: streams before
        this one that have never been answered; each doubles the time for the first answer."""
        self._usual_s = usual_s
        self._first_answer_s = doubled(FIRST_ANSWER_S, MAX_FIRST_ANSWER_S, num_tries)
        self._is_warm = False
        self._since: float | None = None
        self._num_unanswered = 0

    def open(self, now: float) -> float:
        """The stream is being opened; returns when it should be open at the latest."""
        return now + self._first_answer_s

    def tell(self, now: float) -> None:
        """It was told something that wants an answer."""
        if self._since is None:
            self._since = now
        self._num_unanswered += 1

    def hear(self, now: float) -> None:
        """It has answered."""
        if self._is_warm and self._since is not None:
            self._usual_s.add(now - self._since)
        self._is_warm = True
        self.forgive()

    def forgive(self) -> None:
        """It owes no answer."""
        self._since, self._num_unanswered = None, 0

    @property
    def limit_s(self) -> float:
        """How long it may say nothing."""
        if not self._is_warm:
            return self._first_answer_s
        return max(MIN_SILENCE_S, USUAL_TIMES * self._usual_s.get(0.0))

    @property
    def deadline(self) -> float | None:
        """When it counts as lost; None = it owes too little for that."""
        if self._since is None or self._num_unanswered < MIN_UNANSWERED:
            return None
        return self._since + self.limit_s

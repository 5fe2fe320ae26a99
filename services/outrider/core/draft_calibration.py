"""How often the target says what a draft model ranks first, second, ...: its own probabilities are a poor estimate.

A draft model is surer or less sure than it should be, and under shared noise the question is another one anyway: not
how probable a token is, but whether both models draw the same. So what the draft model claims is corrected by what was
seen: by rank among the candidates, depth below the committed tokens, and the claimed probability itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Key = tuple[bool, int, int, int]
"""What claims are counted under: whether nothing is drawn (temperature 0), rank, class of the depth, class of the
probability."""

MAX_RANK = 4
FIRST_WEIGHT = 6.0
"""Claims that the first correction, none, is worth."""
FADE = 1 - 1 / 400
"""What is left of the weight of old claims after each new one."""
MOST = 0.99
"""No claim counts as more."""
LEAST_LOGPROB = -100.0
"""No claim weighs less: at a low temperature a claim may be so improbable that its probability is 0 as a number."""


class DraftCalibration:
    """Corrects claims. Shared by the sessions of a process, and by few enough of them to be of one draft model; used by
    one thread."""

    def __init__(self) -> None:
        self._sums: dict[Key, list[float]] = {}

    def key(self, is_greedy: bool, rank: int, depth: int, logprob: float) -> Key:
        """What a claim is counted under. `depth` 1 is a child of the root."""
        depth_class = 0 if depth <= 1 else 1 if depth <= 3 else 2
        return is_greedy, min(rank, MAX_RANK), depth_class, min(6, int(-2.0 * logprob))

    def corrected(self, key: Key, logprob: float) -> float:
        """Log-probability that the target says it, of a claim of this log-probability."""
        sums = self._sums.get(key)
        if sums is None:
            return min(logprob, math.log(MOST))
        claimed, agreed = sums
        first = FIRST_WEIGHT * math.exp(max(logprob, LEAST_LOGPROB))
        return min(logprob + math.log((agreed + first) / (claimed + first)), math.log(MOST))

    def add(self, claims: Sequence[tuple[Key, float]], agreed: int) -> None:
        """The target has spoken where these candidates (key, claimed log-probability) stood, best first: it said number
        `agreed`, or something else (-1)."""
        for index, (key, logprob) in enumerate(claims):
            sums = self._sums.setdefault(key, [0.0, 0.0])
            sums[0] = sums[0] * FADE + math.exp(logprob)
            sums[1] = sums[1] * FADE + (index == agreed)

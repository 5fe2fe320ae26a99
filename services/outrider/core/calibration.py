"""How often the target agrees with a retrieved token: a count says how often it followed, which is something else."""

from __future__ import annotations

from outrider.core.params import Source

LEAST = 0.02
"""No guess counts as less, nor as 1 minus less: measured rates are of few cases at first."""

Key = tuple[Source, int, int]
"""What guesses are counted under: tier, length of the match, class of the share."""

FIRST_WEIGHT = 4
"""Cases that the rate before the first case is worth."""
MAX_COUNTED_LEN = 8
"""Longer matches are counted as this long."""


class Calibration:
    """How often the target agrees with a retrieved token: by tier, length of the match and share of the token.

    Shared by the sessions of a process; used by one thread. Begins with what was measured on source code.
    """

    def __init__(self, weight: float = 0.03) -> None:
        self._weight = weight
        self._rates: dict[Key, float] = {}
        self._num_seen: dict[Key, int] = {}

    def key(self, source: Source, match_len: int, share: float) -> Key:
        """What a guess is counted under."""
        return source, min(match_len, MAX_COUNTED_LEN), 2 if share > 0.9 else 1 if share > 0.5 else 0

    def rate(self, key: Key) -> float:
        """Probability that the target agrees."""
        rate = self._rates.get(key)
        return _first_rate(key) if rate is None else rate

    def add(self, key: Key, agreed: bool) -> None:
        """The target has spoken."""
        rate = self.rate(key)
        num_seen = self._num_seen[key] = self._num_seen.get(key, 0) + 1
        # What was measured elsewhere counts as FIRST_WEIGHT cases; later, what happens now counts more than long ago.
        rate += max(self._weight, 1 / (num_seen + FIRST_WEIGHT)) * (agreed - rate)
        self._rates[key] = min(1 - LEAST, max(LEAST, rate))


def _first_rate(key: Key) -> float:
    _, match_len, share = key
    by_length = (0.3, 0.3, 0.55, 0.7, 0.8, 0.85, 0.88, 0.9, 0.92)[match_len]
    return by_length * (0.4, 0.75, 1.0)[share]

"""What rounds have shown: tokens for cost, exponentially forgotten, and how far that can be trusted."""

from __future__ import annotations

import math

UNKNOWN_VARIANCE = 1.0
"""Of a round's tokens, before rounds have shown it: a way whose rounds all bring one token may yet bring two."""
UNKNOWN_ROUNDS = 2.0
"""Rounds that it is worth."""


class Evidence:
    """Sums over rounds of tokens and of cost, in plain rounds: a round's cost is its time over a plain round's.

    The rate is a ratio of sums, not a mean of ratios: it is total tokens over total time that counts, and a mean of
    ratios favours ways whose rounds are sometimes very short.
    """

    __slots__ = ("_cc", "_tc", "_tt", "cost", "tokens", "weight")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nothing is known."""
        self.weight = self.tokens = self.cost = self._tt = self._tc = self._cc = 0.0

    def copy(self, other: Evidence) -> None:
        """Takes another's sums for its own."""
        self.weight, self.tokens, self.cost = other.weight, other.tokens, other.cost
        self._tt, self._tc, self._cc = other._tt, other._tc, other._cc

    def add(self, num_tokens: float, cost: float) -> None:
        """Takes a round in."""
        self.weight += 1.0
        self.tokens += num_tokens
        self.cost += cost
        self._tt += num_tokens * num_tokens
        self._tc += num_tokens * cost
        self._cc += cost * cost

    def fade(self, factor: float) -> None:
        """All that is known counts less. The rate stays."""
        self.weight *= factor
        self.tokens *= factor
        self.cost *= factor
        self._tt *= factor
        self._tc *= factor
        self._cc *= factor

    @property
    def rate(self) -> float:
        """Tokens for the time of a plain round; 1 = no better than plain rounds. Not without evidence."""
        return self.tokens / self.cost

    @property
    def round_cost(self) -> float:
        """Mean cost of a round. Not without evidence."""
        return self.cost / self.weight

    @property
    def squares(self) -> float:
        """Sum of the squares of what rounds brought more or less than their cost should have, in tokens squared."""
        rate = self.tokens / self.cost
        return max(0.0, self._tt - 2 * rate * self._tc + rate * rate * self._cc)

    @property
    def variance(self) -> float:
        """Of a round's tokens around those that its cost should have brought, in tokens squared."""
        return (self.squares + UNKNOWN_ROUNDS * UNKNOWN_VARIANCE) / (self.weight + UNKNOWN_ROUNDS)

    @property
    def error(self) -> float:
        """Standard error of the rate (of a ratio of means, by the delta method). Infinite without evidence."""
        if self.weight <= 0 or self.cost <= 0:
            return math.inf
        return math.sqrt(self.variance / self.weight) / self.round_cost

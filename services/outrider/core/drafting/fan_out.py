"""How many outcomes are drafted for after each position of a chain (SAGUARO, Theorem 12).

An outcome (k, t) of a verification is: the first k tokens of the chain are accepted, and t is the next token. F_k is
how many t are drafted for after position k = 0..K of a chain of K tokens. All k accepted and the next one refused has
probability a ** k * (1 - a), all K accepted a ** K, with a the acceptance rate; and the next token is missed by F
guesses with a probability that falls like F ** -r. Then the chance of a hit is greatest, for a given sum of the F_k, if

    F_k = F_0 * a ** (k / (1 + r))  for k < K,        F_K = F_0 * a ** (K / (1 + r)) * (1 - a) ** (-1 / (1 + r)).
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import FanOut, SaguaroParams

FIRST_RATE = 0.7
"""Acceptance rate of a session of which nothing is known yet."""
FIRST_WEIGHT = 8.0
"""Tokens that this is worth."""
FADE = 1 - 1 / 64
"""What is left of the weight of old tokens after each new one."""
MIN_RATE = 0.05
MAX_RATE = 0.98
"""Beyond these the theorem gives everything to one end of the chain, on the word of a few rounds."""


class AcceptanceRate:
    """How often a token of a chain is accepted when those before it were (a_p of the theorem). Old rounds fade."""

    def __init__(self) -> None:
        self._num_judged = FIRST_WEIGHT
        self._num_accepted = FIRST_RATE * FIRST_WEIGHT

    @property
    def value(self) -> float:
        """In [MIN_RATE, MAX_RATE]."""
        return min(MAX_RATE, max(MIN_RATE, self._num_accepted / self._num_judged))

    def add(self, num_accepted: int, *, is_refused: bool) -> None:
        """A verdict: so many leading tokens were accepted, and then one was refused, or the chain ended."""
        for outcome in (*(1.0,) * num_accepted, *(0.0,) * is_refused):
            self._num_judged = FADE * self._num_judged + 1.0
            self._num_accepted = FADE * self._num_accepted + outcome


def fan_outs(params: SaguaroParams, chain_len: int, acceptance_rate: float) -> list[int]:
    """F_k for k = 0..chain_len. Their sum is the budget, unless they are given."""
    match params.fan_out:
        case FanOut.GEOMETRIC:
            return apportioned(params.budget, geometric_shares(chain_len, acceptance_rate, params.exponent))
        case FanOut.UNIFORM:
            return apportioned(params.budget, [1.0] * (chain_len + 1))
        case FanOut.GIVEN:
            last = len(params.fan_outs) - 1
            return [params.fan_outs[min(k, last)] for k in range(chain_len + 1)]


def geometric_shares(chain_len: int, acceptance_rate: float, exponent: float) -> list[float]:
    """F_k / F_0 of Theorem 12, for k = 0..chain_len.

    Raises:
        ValueError: The acceptance rate is not in (0, 1): then one end of the chain gets all.
    """
    if not 0 < acceptance_rate < 1:
        raise ValueError(f"acceptance_rate must be in (0, 1), got {acceptance_rate}")
    ratio = acceptance_rate ** (1 / (1 + exponent))
    shares = [ratio**k for k in range(chain_len + 1)]
    shares[-1] *= (1 - acceptance_rate) ** (-1 / (1 + exponent))
    return shares


def apportioned(budget: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` whose sum is `budget`: rounded down, and what is missing goes to the
    largest remainders, to the earlier of equals."""
    total = sum(shares)
    quotas = [budget * share / total for share in shares]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda k: counts[k] - quotas[k])
    for k in by_remainder[: budget - sum(counts)]:
        counts[k] += 1
    return counts

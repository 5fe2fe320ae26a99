"""Predictions of speculative decoding from the pair of models alone, to be held beside measurements. Pure."""

from __future__ import annotations


def expected_tokens(acceptance_rate: float, chain_len: int) -> float:
    """Return the tokens that a round is expected to commit: (1 - a^(g + 1)) / (1 - a).

    That is the target's own token and as many drafted ones as are accepted before the first refusal, if each is
    accepted with the same probability, whatever became of the others (the tutorial on speculative decoding, "Sequential
    Acceptance"; Leviathan et al. 2023, equation 1).

    Args:
        acceptance_rate: Probability a of accepting a drafted token that is reached, in [0, 1].
        chain_len: Drafted tokens g of a round, at least 0.

    Returns:
        A number in [1, chain_len + 1].

    Raises:
        ValueError: An argument is out of its range.
    """
    if not 0 <= acceptance_rate <= 1:
        raise ValueError(f"acceptance_rate must be in [0, 1], got {acceptance_rate}")
    if chain_len < 0:
        raise ValueError(f"chain_len must be at least 0, got {chain_len}")
    # As a sum: the closed form divides by zero where everything is accepted.
    return sum(acceptance_rate**count for count in range(chain_len + 1))


def walltime_improvement(acceptance_rate: float, chain_len: int, draft_share: float) -> float:
    """Return how many times as fast as plain decoding a draft-then-verify round is expected to be.

    That is `expected_tokens`, divided by the time of a round in forwards of the target, g * c + 1 (Leviathan et al.
    2023, Theorem 3.8).

    Args:
        acceptance_rate: Probability a of accepting a drafted token that is reached, in [0, 1].
        chain_len: Drafted tokens g of a round, at least 0.
        draft_share: Time c of a draft forward by that of a target forward, at least 0.

    Raises:
        ValueError: An argument is out of its range.
    """
    if draft_share < 0:
        raise ValueError(f"draft_share must be at least 0, got {draft_share}")
    return expected_tokens(acceptance_rate, chain_len) / (chain_len * draft_share + 1)

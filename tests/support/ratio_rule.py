"""The ratio rule on plain lists over the whole vocabulary: the reference for `outrider.models.chains`.

Leviathan, Kalman, Matias 2023, algorithm 1, with the uniforms and the noise of `outrider.core.noise`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.core.acceptance import Drafted, claimed_row, first_refused
from outrider.core.noise import gumbel_of
from outrider.core.tree import TokenId


def residual(probabilities: Sequence[float], refused: Drafted) -> list[float]:
    """Returns the weights of the next token in place of a refused one: max(0, p - q), not normalised.

    The refused token itself gets no weight. If rounding leaves nothing, the weights are p.
    """
    remaining = list(probabilities)
    row = claimed_row(refused)
    for token_id, weight in zip(row.token_ids, row.weights, strict=True):
        if 0 <= token_id < len(remaining):
            remaining[token_id] = max(0.0, remaining[token_id] - weight / row.total)
    remaining[refused.token_id] = 0.0
    return remaining if any(remaining) else list(probabilities)


def draw(weights: Sequence[float], seed: int, output_index: int) -> TokenId:
    """Returns a token drawn by its weight with the Gumbel noise of the output index, as the sampler does."""
    token_ids = [token_id for token_id, weight in enumerate(weights) if weight > 0]
    noise = gumbel_of(seed, output_index, token_ids)
    scored = [(math.log(weights[t]) + g, -t) for t, g in zip(token_ids, noise, strict=True)]
    return -max(scored)[1]


def judge(
    probabilities: Sequence[Sequence[float]], chain: Sequence[Drafted], seed: int, first_output_index: int
) -> list[TokenId]:
    """Returns the tokens that a round emits: the kept ones, and one next token.

    Args:
        probabilities: p [1 + chain, vocab]; row i is for the token at first_output_index + i.
        chain: Tokens within the vocabulary.
        seed: Of the generation.
        first_output_index: Tokens that the generation put out before the chain.

    Returns:
        At most 1 + len(chain) tokens. Only the last may differ from the chain's.
    """
    at_chain = [row[drafted.token_id] for row, drafted in zip(probabilities, chain, strict=False)]
    count = first_refused(at_chain, chain, seed, first_output_index)
    weights = probabilities[count] if count == len(chain) else residual(probabilities[count], chain[count])
    next_token = draw(weights, seed, first_output_index + count)
    return [*(drafted.token_id for drafted in chain[:count]), next_token]

"""Chains of several sessions judged together by the ratio rule, where every answer of a device is waited for.

`outrider.models.ratio.judge` asks the device several times for each session. Here all sessions ask together, and three
times: for the probabilities of their tokens, if anything is left where one was refused, and for their next tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.acceptance import Drafted, claimed_row, first_refused
from outrider.core.params import SamplingParams
from outrider.models.sampling import Sampler, tempered_and_filtered

LEAST_LOGPROB = -745.0
"""Probabilities with a smaller logarithm are 0 in float64."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Describes a chain of drafted tokens, and the rows of logits that judge it."""

    drafted: Sequence[Drafted]
    """Drafted tokens, at least one, all within the vocabulary."""
    first_row: int
    """Index of the first token's row. The others follow, and one for the token behind the chain."""
    sampling: SamplingParams
    """Parameters of the generation; temperature above 0."""
    first_output_index: int
    """Number of tokens that the generation put out before the chain."""


@torch.inference_mode()
def judge_together(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> list[list[int] | None]:
    """Judges chains as `outrider.models.ratio.judge` does, up to rounding.

    Args:
        sampler: Draws the next tokens.
        logits: float32 [rows, vocab], of the target.
        chains: One for each session, at least one.

    Returns:
        For each chain its tokens that are kept, and one next token. None where rounding leaves no token to replace a
        refused one: such a chain is to be judged alone.
    """
    rows = [chain.first_row + index for chain in chains for index in range(len(chain.drafted))]
    scores = tempered_and_filtered(
        logits[_indices(rows, logits)], [chain.sampling for chain in chains for _ in chain.drafted]
    )
    normalisers = scores.logsumexp(-1).double()
    token_ids = [[drafted.token_id] for chain in chains for drafted in chain.drafted]
    at_chains = scores.gather(-1, _indices(token_ids, logits))[:, 0]
    probabilities = iter((at_chains - normalisers).exp().tolist())
    num_kept = [
        first_refused(
            [next(probabilities) for _ in chain.drafted], chain.drafted, chain.sampling.seed, chain.first_output_index
        )
        for chain in chains
    ]

    places, refused, place = list[int](), list[Drafted](), 0
    for chain, kept in zip(chains, num_kept, strict=True):
        if kept < len(chain.drafted):
            places.append(place + kept)
            refused.append(chain.drafted[kept])
        place += len(chain.drafted)
    residuals = scores.new_empty(0, scores.shape[-1])
    left = list[bool]()
    if refused:
        indices = _indices(places, scores)
        own = normalisers[indices]
        residuals = _residuals(scores[indices], own, refused)
        left = (residuals.amax(-1) - own > LEAST_LOGPROB).tolist()
    return _with_next_tokens(sampler, logits, chains, num_kept, residuals, left)


def _residuals(scores: Tensor, normalisers: Tensor, refused: Sequence[Drafted]) -> Tensor:
    """Returns what the next tokens in place of refused ones are drawn from: log max(0, p - q), plus a constant.

    Args:
        scores: float32 [refused, vocab], written.
        normalisers: float64 [refused]: their logsumexp.
        refused: One for each row.

    Returns:
        `scores`, with minus infinity for what has no weight, as the refused tokens have none.
    """
    vocab_size = scores.shape[-1]
    claims = []
    for drafted in refused:
        row = claimed_row(drafted)
        # Rows come from outside, and may name tokens that the target does not have.
        claims.append(
            {t: w / row.total for t, w in zip(row.token_ids, row.weights, strict=True) if 0 <= t < vocab_size}
        )
        # More than any p: nothing is left of it.
        claims[-1][drafted.token_id] = 2.0
    length = max(map(len, claims))
    # Filled up with the refused token, all of whose entries say the same.
    padded = [
        [*claim.items(), *[(drafted.token_id, 2.0)] * (length - len(claim))]
        for claim, drafted in zip(claims, refused, strict=True)
    ]
    token_ids = _indices([[token_id for token_id, _ in row] for row in padded], scores)
    claimed = torch.tensor([[q for _, q in row] for row in padded], dtype=torch.double).to(scores.device)
    own = normalisers[:, None]
    rest = (scores.gather(-1, token_ids).double() - own).exp() - claimed
    # The logarithm of 0 is minus infinity.
    return scores.scatter_(-1, token_ids, (rest.clamp_min_(0).log() + own).float())


def _with_next_tokens(
    sampler: Sampler,
    logits: Tensor,
    chains: Sequence[Chain],
    num_kept: Sequence[int],
    residuals: Tensor,
    left: Sequence[bool],
) -> list[list[int] | None]:
    """Draws a token behind what is kept of each chain: from its residual, one row for each chain with a refused token,
    or where nothing was refused from the target itself."""
    is_whole = [kept == len(chain.drafted) for chain, kept in zip(chains, num_kept, strict=True)]
    ends = [chain.first_row + len(chain.drafted) for chain, whole in zip(chains, is_whole, strict=True) if whole]
    rows = torch.cat([logits[_indices(ends, logits)], residuals])
    order = sorted(range(len(chains)), key=lambda number: not is_whole[number])
    # What is left of p has had its temperature and its filters.
    params = [
        chains[number].sampling if is_whole[number] else SamplingParams(seed=chains[number].sampling.seed)
        for number in order
    ]
    tokens = sampler.draw(rows, params, [chains[number].first_output_index + num_kept[number] for number in order])
    found: dict[int, list[int] | None] = {}
    for number, token_id, is_left in zip(order, tokens, [True] * len(ends) + list(left), strict=True):
        kept = [drafted.token_id for drafted in chains[number].drafted[: num_kept[number]]]
        found[number] = [*kept, token_id] if is_left else None
    return [found[number] for number in range(len(chains))]


def _indices(numbers: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long).to(like.device, non_blocking=True)

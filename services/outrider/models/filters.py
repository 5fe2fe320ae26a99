"""Temperatures and filters: which tokens of a row may be drawn, and how probable they are.

The order of the filters is temperature, top_k, top_p (on what top_k left, renormalised), min_p (relative to the most
probable token). Each keeps a set of the most probable tokens, so together they keep the smallest of these sets. The
most probable token always stays. Among equally probable tokens the lower id comes first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.largest import largest

LEAST_TEMPERATURE, GREATEST_TEMPERATURE = 1e-30, 1e38
"""Temperatures beyond these are clamped to them. Long before, the best token has all the probability, or all tokens
have the same; soon after, float32 is infinite or NaN."""
NUM_PRESORTED = 256
"""Best tokens of a row that are sorted first. The whole vocabulary is sorted only if top_p needs more of them."""


def tempered_and_filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Computes the scores that `Sampler.draw` adds noise to, minus infinity for tokens that are not allowed: a new
    [rows, vocab].

    Tokens are drawn from their softmax.
    """
    scores = tempered(logits, params)
    allowed = allowed_of(scores, params)
    return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)


def tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Divides the logits of each row by its temperature: a new [rows, vocab]."""
    # A tensor, not a number: torch may multiply by a number's reciprocal, and a draw would then depend on whether all
    # rows share a temperature.
    column = np.array(temperatures(params), dtype=np.float32)
    return logits / torch.from_numpy(column).to(logits.device)


def temperatures(params: Sequence[SamplingParams]) -> list[list[float]]:
    """Returns the divisor of each row's logits, as a column."""
    return [[1.0 if p.is_greedy else min(max(p.temperature, LEAST_TEMPERATURE), GREATEST_TEMPERATURE)] for p in params]


def allowed_of(tempered: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Marks the tokens that each row may draw: bool [rows, vocab], or None if no row has a filter."""
    rows_of: dict[tuple[int, float, float], list[int]] = {}
    for row, p in enumerate(params):
        if not p.is_greedy and p.has_filters:
            rows_of.setdefault((p.top_k, p.top_p, p.min_p), []).append(row)
    if not rows_of:
        return None
    if len(rows_of) == 1 and len(params) == len(next(iter(rows_of.values()))):
        return _filter(tempered, *next(iter(rows_of)))
    allowed = torch.ones_like(tempered, dtype=torch.bool)
    for filters, rows in rows_of.items():
        allowed[rows] = _filter(tempered[rows], *filters)
    return allowed


def _filter(tempered: Tensor, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Marks the tokens that the filters keep: bool [rows, vocab], for tempered logits of the same shape."""
    vocab_size = tempered.shape[-1]
    best = tempered.amax(-1, keepdim=True)
    # Differences of logits are differences of log-probabilities, so a filter relative to the best needs no softmax.
    floor = best + math.log(min_p) if min_p > 0 else None
    if not 0 < top_k < vocab_size and top_p == 1:
        assert floor is not None or top_k >= vocab_size
        return tempered >= floor if floor is not None else torch.ones_like(tempered, dtype=torch.bool)
    num_sorted = min(vocab_size, top_k or NUM_PRESORTED)
    kept = _count_kept(tempered, best, num_sorted, top_k, top_p)
    if kept is None:
        kept = _count_kept(tempered, best, vocab_size, top_k, top_p)
        assert kept is not None
    counts, lowest = kept
    # By value, not by the indices of `topk`, whose order among equals is undefined. If there are too many equals, the
    # highest ids go.
    allowed = tempered >= lowest
    surplus = allowed.sum(-1, keepdim=True) - counts
    if bool((surplus > 0).any()):
        allowed &= ~_last_of_equals(tempered == lowest, surplus)
    return allowed if floor is None else allowed & (tempered >= floor)


def _count_kept(
    tempered: Tensor, best: Tensor, num_sorted: int, top_k: int, top_p: float
) -> tuple[Tensor, Tensor] | None:
    """Counts the tokens that top_k and top_p keep, and finds the last one's value: int64, float32 [rows, 1] each.

    None if that takes more than `num_sorted` tokens.
    """
    values, _ = largest(tempered, num_sorted)
    if top_p == 1:
        return torch.full_like(best, num_sorted, dtype=torch.long), values[:, -1:]
    # float64: the sum of a large vocabulary in float32 is off by more than a rare token's share.
    shares = (values - best).double().exp()
    reached = shares.cumsum(-1)
    # top_p is a share of the tokens that top_k has left or, without top_k, of the whole vocabulary.
    total = reached[:, -1:] if top_k else (tempered - best).double().exp().sum(-1, keepdim=True)
    needed = top_p * total
    if num_sorted < (top_k or tempered.shape[-1]) and bool((reached[:, -1:] < needed).any()):
        return None
    # A token stays if those before it do not reach top_p yet, so the first always stays. In a row of NaN none would.
    counts = ((reached - shares) < needed).sum(-1, keepdim=True).clamp_min_(1)
    return counts, values.gather(-1, counts - 1)


def _last_of_equals(equal: Tensor, surplus: Tensor) -> Tensor:
    """Marks the last `surplus` [rows, 1] true entries of each row of `equal` [rows, vocab]: the highest ids."""
    from_the_end = equal.flip(-1).cumsum(-1).flip(-1)
    return equal & (from_the_end <= surplus)

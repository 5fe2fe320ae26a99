"""Drawing tokens under the match rule: the best token of `logits / temperature + noise`, among those allowed.

The order of the filters is temperature, top_k, top_p (on what top_k left, renormalised), min_p (relative to the
most probable token). Each keeps a set of the most probable tokens, so together they keep the smallest of the sets.
The most probable token always stays. Among equally probable tokens the lower id comes first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.drafting.policy import Candidate
from outrider.core.noise import FMIX32, LOWBIAS32, gumbel_rows, row_key
from outrider.core.params import SamplingParams

NUM_NORMALISED = 8
"""Best perturbed scores over which the log-probabilities of drafted candidates are normalised."""
# A draft model may be surer of the target's draw than its own probabilities say, because both share the noise and,
# mostly, the order of the best tokens. Its log-probabilities are multiplied by these. Fitted by log-loss on 960
# positions of held-out code, demo pair: best at 3 for temperature 0 (mean probability .95, agreement .95; without:
# .79), 1.5 to 2 for 0.7 and 1 (.82 and .70; agreement .81 and .71; without: .71 and .54). They decide where chains end,
# never what is accepted.
GREEDY_SHARPNESS = 3.0
SAMPLED_SHARPNESS = 1.7
LEAST_TEMPERATURE = 1e-30
"""A lower temperature counts as this: the best token has all the probability long before, and float32 is infinite or
not a number soon after."""
NUM_PRESORTED = 256
"""Best tokens of a row that are sorted first. Only if top_p needs more of them is the whole vocabulary sorted."""


class Sampler:
    """Draws for every row of a packed forward. A draw is a pure function; the only state is noise that is kept."""

    def __init__(self) -> None:
        self._noise: NoiseRows | None = None
        self._noise_key: tuple[int, torch.device] | None = None

    @torch.inference_mode()
    def draw(self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> list[int]:
        """Draws the target's token for every row.

        Args:
            logits: float32 [rows, vocab].
            params: One for each row.
            output_indices: For each row, how many tokens the generation put out before the one drawn here.

        Returns:
            A token id for each row.
        """
        scores = logits if all(p.is_greedy for p in params) else self._perturbed(logits, params, output_indices)
        # `argmax` promises the first of equals, which is the lowest id.
        token_ids: list[int] = scores.argmax(-1).tolist()
        return token_ids

    @torch.inference_mode()
    def candidates(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], k: int
    ) -> list[list[Candidate]]:
        """Guesses from a draft model's logits which tokens the target will most probably draw.

        Returns:
            For each row at most k candidates, best first. The log-probability is that of the
            target drawing the same: the log-softmax over the best 8 of the perturbed scores (at temperature 0, of the
            logits) times `SAMPLED_SHARPNESS` (`GREEDY_SHARPNESS`). A row has fewer if fewer tokens are allowed.
        """
        is_greedy = [p.is_greedy for p in params]
        scores = logits if all(is_greedy) else self._perturbed(logits, params, output_indices)
        # At least as many as `_ranked` normalises over, even where fewer are wanted.
        values, ids = scores.topk(min(max(k, NUM_NORMALISED), logits.shape[-1]))
        return [
            _ranked(row_ids, row_values, GREEDY_SHARPNESS if greedy else SAMPLED_SHARPNESS)[:k]
            for row_ids, row_values, greedy in zip(ids.tolist(), values.tolist(), is_greedy, strict=True)
        ]

    @torch.inference_mode()
    def draw_weighted(self, weights: Tensor, seed: int, output_index: int) -> int:
        """Draws a token by its weight, float [vocab] and not all 0, with the noise of one output index."""
        noise = self._noise_rows(weights).row(seed, output_index)
        # A weight of 0 comes to minus infinity, and the noise is finite: such a token is never drawn.
        return int((weights.log() + noise).argmax())

    def _perturbed(self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> Tensor:
        """Returns logits / temperature + noise, minus infinity where not allowed; greedy rows as they are."""
        noise = self._noise_rows(logits)
        scores = _tempered(logits, params)
        # Before the noise is added: filters look at probabilities, not at one draw.
        allowed = _allowed(scores, params)
        if len(params) == 1:
            scores += noise.row(params[0].seed, output_indices[0])
        elif not any(p.is_greedy for p in params):
            scores += torch.stack([noise.row(p.seed, i) for p, i in zip(params, output_indices, strict=True)])
        else:
            # Iterating over a tensor yields views of it, so `+=` writes into `scores`.
            for row, p, i in zip(scores, params, output_indices, strict=True):
                if not p.is_greedy:
                    row += noise.row(p.seed, i)
        return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)

    def _noise_rows(self, logits: Tensor) -> NoiseRows:
        key = (logits.shape[-1], logits.device)
        if self._noise is None or self._noise_key != key:
            self._noise, self._noise_key = NoiseRows(*key), key
        return self._noise


def tempered_and_filtered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Computes what `Sampler.draw` adds the noise to, with minus infinity where not allowed: a new [rows, vocab].

    Their softmax is what tokens are drawn from.
    """
    scores = _tempered(logits, params)
    allowed = _allowed(scores, params)
    return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)


def _tempered(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    # A tensor, not a number: torch may multiply by a number's reciprocal, and then a draw would depend
    # on whether all rows share a temperature.
    temperatures = [[1.0 if p.is_greedy else max(p.temperature, LEAST_TEMPERATURE)] for p in params]
    return logits / torch.tensor(temperatures, device=logits.device)


def _ranked(token_ids: Sequence[int], scores: Sequence[float], sharpness: float) -> list[Candidate]:
    """Ranks candidates, best first. A filtered token has minus infinity, and is left out. `scores` must fall."""
    # Python numbers: for eight of them, a tensor operator costs more than the arithmetic. The best score is taken off
    # because `exp` must not overflow.
    sharp = [sharpness * (score - scores[0]) for score in scores]
    total = math.log(sum(math.exp(score) for score in sharp[:NUM_NORMALISED]))
    pairs = [Candidate(t, score - total) for t, score in zip(token_ids, sharp, strict=True) if score != -math.inf]
    # `topk` promises no order between equals.
    pairs.sort(key=lambda pair: (-pair[1], pair[0]))
    return pairs


def _allowed(tempered: Tensor, params: Sequence[SamplingParams]) -> Tensor | None:
    """Marks the tokens that each row may draw: bool [rows, vocab], or None where no row has a filter."""
    rows_of: dict[tuple[int, float, float], list[int]] = {}
    for row, p in enumerate(params):
        if not p.is_greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0):
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
    """Marks the tokens that the filters keep: bool [rows, vocab], of tempered logits of the same shape."""
    vocab_size = tempered.shape[-1]
    best = tempered.amax(-1, keepdim=True)
    # Logits differ by what their log-probabilities differ by, so a filter relative to the best needs no softmax.
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
    # By value, not by the indices of `topk`, which are in no certain order among equals; too many of them go by id.
    allowed = tempered >= lowest
    surplus = allowed.sum(-1, keepdim=True) - counts
    if bool((surplus > 0).any()):
        allowed &= ~_last_of_equals(tempered == lowest, surplus)
    return allowed if floor is None else allowed & (tempered >= floor)


def _count_kept(
    tempered: Tensor, best: Tensor, num_sorted: int, top_k: int, top_p: float
) -> tuple[Tensor, Tensor] | None:
    """Counts the tokens that top_k and top_p keep, and finds the last one's value: int64, float32 [rows, 1] each.

    None if more than `num_sorted` tokens must be known to tell.
    """
    values = tempered.topk(num_sorted).values
    if top_p == 1:
        return torch.full_like(best, num_sorted, dtype=torch.long), values[:, -1:]
    # float64: the sum of a large vocabulary in float32 is off by more than a rare token's share.
    shares = (values - best).double().exp()
    reached = shares.cumsum(-1)
    # top_p is a share of what top_k has left or, without that, of the whole vocabulary.
    total = reached[:, -1:] if top_k else (tempered - best).double().exp().sum(-1, keepdim=True)
    needed = top_p * total
    if num_sorted < (top_k or tempered.shape[-1]) and bool((reached[:, -1:] < needed).any()):
        return None
    # A token stays if those before it do not reach top_p yet; so the first always does.
    counts = ((reached - shares) < needed).sum(-1, keepdim=True)
    return counts, values.gather(-1, counts - 1)


def _last_of_equals(equal: Tensor, surplus: Tensor) -> Tensor:
    """Marks the last `surplus` [rows, 1] true entries of each row of `equal` [rows, vocab]: the highest ids."""
    from_the_end = equal.flip(-1).cumsum(-1).flip(-1)
    return equal & (from_the_end <= surplus)


BLOCK_ENTRIES = 32_768
"""Token entries of a block: 16 output indices of a vocabulary of 2048 tokens, one of a large vocabulary."""
MAX_BLOCK_ROWS = 16


class NoiseRows:
    """Computes the noise of whole rows, for one vocabulary size and device, and keeps it.

    Output indices are drawn in order, and again after a rejected draft. So a block of consecutive indices is
    computed in one go (a row of 2048 costs 26 us alone and 10 us in a block of 16) and the blocks
    used last are kept.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, capacity_bytes: int = 64 * 2**20) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._block_rows = max(1, min(MAX_BLOCK_ROWS, BLOCK_ENTRIES // vocab_size))
        self._capacity = max(2, capacity_bytes // (4 * self._block_rows * vocab_size))
        self._blocks: OrderedDict[tuple[int, int], tuple[Tensor, ...]] = OrderedDict()
        self._token_ids = np.arange(vocab_size)

    def row(self, seed: int, output_index: int) -> Tensor:
        """Returns the Gumbel noise of every token at one output index: float32 [vocab]. Shared: do not write to it."""
        number, offset = divmod(output_index, self._block_rows)
        block = self._blocks.get((seed, number))
        if block is None:
            block = self._blocks[seed, number] = self._compute(seed, number)
            if len(self._blocks) > self._capacity:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end((seed, number))
        return block[offset]

    def _compute(self, seed: int, number: int) -> tuple[Tensor, ...]:
        indices = range(number * self._block_rows, (number + 1) * self._block_rows)
        if self._device.type == "cpu":
            # numpy has the unsigned 32-bit words that torch lacks, and less overhead a call.
            rows = torch.from_numpy(gumbel_rows(seed, indices, self._token_ids))
        else:
            rows = torch.stack([gumbel_tensor(seed, index, self._vocab_size, self._device) for index in indices])
        return rows.unbind(0)


def hash_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """Computes one row of `outrider.core.noise.hash_rows` for the ids 0 .. vocab_size-1: int64 [vocab], below 2**32."""
    first, second = row_key(seed, output_index)
    words = _finalise(torch.arange(vocab_size, device=device) ^ first, LOWBIAS32)
    return _finalise(words ^ second, FMIX32)


def gumbel_tensor(seed: int, output_index: int, vocab_size: int, device: torch.device) -> Tensor:
    """`outrider.core.noise.gumbel` of the ids 0 .. vocab_size-1, in torch: float32 [vocab]."""
    # In float64 like its twin: in float32 the largest hashes would become infinite noise.
    uniform = (hash_tensor(seed, output_index, vocab_size, device).double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log(uniform))).float()


def _finalise(words: Tensor, constants: tuple[int, int, int, int, int]) -> Tensor:
    """Applies one round of the hash to int64 words below 2**32."""
    first, factor, second, factor_2, third = constants
    # Torch has no unsigned words: products wrap at 64 bits, which leaves their low 32 bits right.
    words = ((words ^ (words >> first)) * factor) & 0xFFFFFFFF
    words = ((words ^ (words >> second)) * factor_2) & 0xFFFFFFFF
    return words ^ (words >> third)

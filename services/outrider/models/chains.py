"""The ratio rule with tensors: chains of several sessions judged together, on a CPU or on a device.

`outrider.core.acceptance` has the rule. The steps, each for all chains at once:

1. The probability of every drafted token says which is the first that is refused.
2. The next token comes from the row behind what is kept: from p itself if nothing was refused, else from what is left
   of p without q, max(0, p - q). It is drawn by the sampler, with the noise of its output index, which is independent
   of the uniform that refused the token (`outrider.core.noise`).

Where rounding alone has refused a token, nothing may be left of p. Then p itself is drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.acceptance import Drafted, claimed_row, first_refused
from outrider.core.params import SamplingParams
from outrider.models.sampling import Sampler, has_kernels, tempered_and_filtered

Doubles = npt.NDArray[np.float64]

LEAST_LOGPROB = -64.0
"""Less than the logarithm of what is left of some token's probability, if one was refused by more than rounding: a
uniform has 53 bits, and what is left is shared by less than 2**32 tokens."""
SURELY_LEFT = 1e-4
"""Rounding changes the share that is left of p by less. Where it is more, no token with some of it is looked for."""
MAX_ENTRIES = 2**20
"""Most logits of chains that are judged at once on a CPU, whose caches hold what is made of so many."""


@dataclass(frozen=True, slots=True)
class Chain:
    """Describes a chain of drafted tokens, and the rows of logits that judge it."""

    drafted: Sequence[Drafted]
    """Drafted tokens, all within the vocabulary. Without any, the next token is drawn."""
    first_row: int
    """Index of the first token's row. The others follow, and one for the token behind the chain."""
    sampling: SamplingParams
    """Parameters of the generation; temperature above 0."""
    first_output_index: int
    """Number of tokens that the generation put out before the chain."""


def judge(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> list[list[int]]:
    """Judges chains under the ratio rule: returns for each its tokens that are kept, and one next token.

    The law is the target's only if every token's q is what it was drawn from, and what its drafter draws with is
    independent of the seed's acceptance uniforms and Gumbel noise. A q that cannot be true, because it lacks the token,
    counts as none.

    Args:
        sampler: Draws the next tokens; without a chain, or after all of it, exactly as `Sampler.draw` does.
        logits: float32 [rows, vocab], of the target.
        chains: One for each session.

    Returns:
        For each chain at most 1 + len(drafted) tokens. Only the last may differ from the chain's.
    """
    return begin_judging(sampler, logits, chains)()


def begin_judging(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int]]]:
    """Tells a device to judge chains, without waiting for it; returns what waits, and has the result of `judge`."""
    if not chains or not has_kernels(logits):
        return lambda: _judged(sampler, logits, chains)
    # Here, because only an installation for CUDA has Triton.
    from outrider.models.cuda.device_chains import launch

    read = launch(logits, chains)

    def wait() -> list[list[int]]:
        found = read()
        left = [chain for chain, tokens in zip(chains, found, strict=True) if tokens is None]
        rest = iter(_judged(sampler, logits, left))
        return [next(rest) if tokens is None else tokens for tokens in found]

    return wait


@torch.inference_mode()
def _judged(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> list[list[int]]:
    return [tokens for group in _groups(logits, chains) for tokens in _judged_at_once(sampler, logits, group)]


def _groups(logits: Tensor, chains: Sequence[Chain]) -> Iterator[Sequence[Chain]]:
    """Divides chains into groups that are judged at once: a device judges all at once."""
    most = MAX_ENTRIES // logits.shape[-1] if logits.device.type == "cpu" else sum(1 + len(c.drafted) for c in chains)
    first = num_rows = 0
    for number, chain in enumerate(chains):
        num_rows += len(chain.drafted)
        if number > first and num_rows > most:
            yield chains[first:number]
            first, num_rows = number, len(chain.drafted)
    if first < len(chains):
        yield chains[first:]


def _judged_at_once(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> list[list[int]]:
    rows = [chain.first_row + index for chain in chains for index in range(len(chain.drafted))]
    num_kept = [0] * len(chains)
    residuals: Tensor | None = None
    if rows:
        scores = tempered_and_filtered(_rows(logits, rows), [chain.sampling for chain in chains for _ in chain.drafted])
        logprobs = scores.log_softmax(-1)
        token_ids = _indices([[drafted.token_id] for chain in chains for drafted in chain.drafted], logits)
        num_kept = _num_kept(logprobs.gather(-1, token_ids).flatten().tolist(), chains)
        ends = accumulate(len(chain.drafted) for chain in chains)
        places, refused = list[int](), list[Drafted]()
        for chain, kept, end in zip(chains, num_kept, ends, strict=True):
            if kept < len(chain.drafted):
                places.append(end - len(chain.drafted) + kept)
                refused.append(chain.drafted[kept])
        if refused:
            residuals = _residuals(_rows(logprobs, places), refused)
    next_tokens = _next_tokens(sampler, logits, chains, num_kept, residuals)
    return [
        [*(drafted.token_id for drafted in chain.drafted[:kept]), token_id]
        for chain, kept, token_id in zip(chains, num_kept, next_tokens, strict=True)
    ]


def _num_kept(logprobs: Sequence[float], chains: Sequence[Chain]) -> list[int]:
    """Returns how many tokens of each chain are kept, by log p of all tokens of all chains."""
    own = map(math.exp, logprobs)
    return [
        first_refused(
            list(islice(own, len(chain.drafted))), chain.drafted, chain.sampling.seed, chain.first_output_index
        )
        for chain in chains
    ]


def claims(drafted: Drafted, vocab_size: int) -> tuple[npt.NDArray[np.int64], Doubles]:
    """Returns what is subtracted from p where a token was refused: token ids, each once, and q of each. For the refused
    token, which is among them, it is more than any p."""
    row = claimed_row(drafted)
    token_ids = np.array(row.token_ids, dtype=np.int64)
    shares = np.array(row.weights, dtype=np.float64)
    shares /= row.total
    shares[token_ids == drafted.token_id] = 2.0
    # An id below 0 is a large one here.
    unsigned = token_ids.view(np.uint64)
    if unsigned.max() >= vocab_size:
        # Rows come from outside, and may name tokens that the target does not have.
        token_ids, shares = token_ids[unsigned < vocab_size], shares[unsigned < vocab_size]
    return token_ids, shares


def _residuals(logprobs: Tensor, refused: Sequence[Drafted]) -> Tensor:
    """Computes what the next tokens in place of refused ones are drawn from: the logarithm of max(0, p - q).

    As in Leviathan et al. 2023 (also DOUBLE, section 2.1). It differs from that of p for the few tokens that q has.

    Args:
        logprobs: float32 [refused, vocab], contiguous, may be written.
        refused: One for each row.

    Returns:
        float32 [refused, vocab], with minus infinity for what has no weight, as the refused tokens have none.
    """
    vocab_size, flat = logprobs.shape[-1], logprobs.view(-1)
    claimed = [claims(drafted, vocab_size) for drafted in refused]
    counts = [len(token_ids) for token_ids, _ in claimed]
    firsts = [0, *accumulate(counts[:-1])]
    of_rows = [row * vocab_size + token_ids for row, (token_ids, _) in enumerate(claimed)]
    places = torch.from_numpy(np.concatenate(of_rows)).to(logprobs.device)
    whole = flat.index_select(0, places)
    probabilities = np.exp(whole.cpu().numpy(), dtype=np.float64)
    rest = np.maximum(probabilities - np.concatenate([shares for _, shares in claimed]), 0.0)
    with np.errstate(divide="ignore"):
        # The logarithm of 0 is minus infinity.
        logarithms = np.log(rest).astype(np.float32)
    flat.scatter_(0, places, torch.from_numpy(logarithms).to(logprobs.device))
    left = 1.0 - np.add.reduceat(probabilities - rest, firsts)
    if left.min() < SURELY_LEFT:
        for row in np.flatnonzero(left < SURELY_LEFT).tolist():
            if float(logprobs[row].amax()) < LEAST_LOGPROB:
                some = slice(firsts[row], firsts[row] + counts[row])
                flat.scatter_(0, places[some], whole[some])
    return logprobs


def _next_tokens(
    sampler: Sampler, logits: Tensor, chains: Sequence[Chain], num_kept: Sequence[int], residuals: Tensor | None
) -> list[int]:
    """Draws a token behind what is kept of each chain: from its residual, one row for each chain with a refused token,
    or where nothing was refused from the target itself."""
    whole = [number for number, chain in enumerate(chains) if num_kept[number] == len(chain.drafted)]
    cut = [number for number, chain in enumerate(chains) if num_kept[number] < len(chain.drafted)]
    rows = [] if residuals is None else [residuals]
    if whole:
        rows.insert(0, _rows(logits, [chains[number].first_row + num_kept[number] for number in whole]))
    params = [chains[number].sampling for number in whole] + [
        _unchanged(chains[number].sampling.seed) for number in cut
    ]
    order = whole + cut
    scores = rows[0] if len(rows) == 1 else torch.cat(rows)
    tokens = sampler.draw(scores, params, [chains[number].first_output_index + num_kept[number] for number in order])
    found = dict(zip(order, tokens, strict=True))
    return [found[number] for number in range(len(chains))]


@lru_cache(maxsize=1024)
def _unchanged(seed: int) -> SamplingParams:
    """Returns what draws from scores as they are: what is left of p has had its temperature and its filters."""
    return SamplingParams(seed=seed)


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns rows of a tensor, which are copied only where they do not follow each other."""
    first, last = rows[0], rows[-1]
    follow_each_other = rows == list(range(first, last + 1))
    return tensor[first : last + 1] if follow_each_other else tensor[_indices(rows, tensor)]


def _indices(numbers: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    # Through numpy: a tensor of a list takes five times as long.
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(like.device, non_blocking=True)

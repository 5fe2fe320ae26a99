"""Draws drafts from a draft model's logits, and judges rounds by a target's, under both rules.

`outrider.core.acceptance` has the ratio rule. Chains of several sessions are judged together. The steps, each for all
chains at once:

1. The probabilities of the drafted tokens tell which token is the first that is refused.
2. The next token comes from the row after what is kept: from p itself if nothing was refused, else from what is left of
   p without q, max(0, p - q). The sampler draws it, with the noise of its output index. That noise is independent of
   the uniform that refused the token (`outrider.core.noise`).

If rounding alone has refused a token, nothing may be left of p. The next token is then drawn from p itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.core.acceptance import MAX_ROW_LEN, Drafted, first_refused, sampled_candidates, sparse_row
from outrider.core.adjustments import Adjustment
from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.structure import Matcher, StructureBroken, StructuredText
from outrider.core.tree import Node
from outrider.models.adjustments import adjusted
from outrider.models.chains import LEAST_LOGPROB, Chain, claims
from outrider.models.draws import DrawnTokens, RowDraws
from outrider.models.filters import tempered_and_filtered
from outrider.models.sampling import Sampler
from outrider.models.structure import draw_allowed, mask_row

SURELY_LEFT = 1e-4
"""Rounding changes the share that is left of p by less. Where more is left, no token that has some of it is looked
for."""
MAX_ENTRIES = 2**20
"""Most logits of chains that are judged at once: the intermediate results of so many fit into a CPU's caches."""
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """Describes how one row of a draft model's logits is drawn from."""

    sampling: SamplingParams
    """Temperature above 0 and filters; the seed is in the word."""
    word: int
    """Uniform in [0, 2**64), and used for nothing else (`outrider.core.acceptance`)."""
    vocab_size: int
    """Token ids of a draft are below it: a model's logits may be padded."""
    bias: float = 1.0
    """Factor of the most probable tokens (SAGUARO sampling, C)."""
    num_biased: int = 0
    """Number of tokens that the factor applies to, the most probable ones (F)."""


@torch.inference_mode()
def draft_candidates(logits: Tensor, draws: Sequence[DraftDraw], k: int) -> list[list[Candidate]]:
    """Draws a token for every row of a draft model's logits, and picks some more.

    Args:
        logits: float32 [rows, vocab].
        draws: One for each row.
        k: Most candidates of a row.

    Returns:
        For each row first the token that was drawn, with the row that it was drawn from: the softmax of the tempered,
        filtered logits over their best 64. At most k - 1 other tokens follow, the most probable first.
    """
    if any(draw.vocab_size < logits.shape[-1] for draw in draws):
        # A copy, because rows are views: the logits stay as they are.
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            # Before the filters: if the best tokens of a row are padding, the filters might keep nothing else.
            row[draw.vocab_size :] = -torch.inf
    scores = tempered_and_filtered(logits, [draw.sampling for draw in draws])
    # The token is drawn from the very row that is sent as q, so the cut costs acceptance, not exactness.
    best = scores.topk(min(MAX_ROW_LEN, scores.shape[-1]))
    logprobs = best.values.double().log_softmax(-1)
    found = []
    for draw, token_ids, row_logprobs, probabilities in zip(
        draws, best.indices.tolist(), logprobs.tolist(), logprobs.exp().tolist(), strict=True
    ):
        # Tokens that are not allowed have minus infinity, and so come last.
        num_allowed = next((index for index, p in enumerate(row_logprobs) if p == -torch.inf), len(token_ids))
        del token_ids[num_allowed:], row_logprobs[num_allowed:], probabilities[num_allowed:]
        # The bias lowers q of the best tokens, so that max(0, p - q) holds more of them. The token after a refusal is
        # drawn from that, and the drafter has prepared for those tokens (SAGUARO sampling).
        row = sparse_row(token_ids, probabilities, draw.bias, draw.num_biased)
        found.append(sampled_candidates(row, token_ids, row_logprobs, draw.word, k))
    return found


def candidates(
    sampler: Sampler,
    logits: Tensor,
    params: Sequence[SamplingParams],
    output_indices: Sequence[int],
    draws: Sequence[DraftDraw | None],
    k: int,
    is_raw: Sequence[bool] = (),
    ranked_rows: RowDraws | None = None,
) -> list[list[Candidate]]:
    """Finds what may follow each row: by `draft_candidates` if `draws` has an entry for it, by `Sampler.candidates` if
    that is None. `is_raw` is as in the latter. `ranked_rows` describes the rows that have None, if their forward was
    told of them.

    The lists have one entry for each row of the logits.
    """
    on_device = None if ranked_rows is None else ranked_rows.on_device
    drawn = [(row, draw) for row, draw in enumerate(draws) if draw is not None]
    ranked = [row for row, draw in enumerate(draws) if draw is None]
    if not drawn:
        return sampler.candidates(logits, params, output_indices, k, is_raw, on_device) if ranked else []
    found = dict(
        zip(
            (row for row, _ in drawn),
            draft_candidates(logits[[row for row, _ in drawn]], [draw for _, draw in drawn], k),
            strict=True,
        )
    )
    if ranked:
        of_ranked = [params[row] for row in ranked], [output_indices[row] for row in ranked]
        raw_ranked = [is_raw[row] for row in ranked] if is_raw else ()
        found.update(zip(ranked, sampler.candidates(logits[ranked], *of_ranked, k, raw_ranked, on_device), strict=True))
    return [found[row] for row in range(len(draws))]


class Round(NamedTuple):
    """Describes what one session wants of a target's logits."""

    sampling: SamplingParams
    output_indices: Sequence[int]
    """For each row, how many tokens the generation put out before the one that is drawn there."""
    chain: Sequence[Drafted] | None = None
    """Tokens that the ratio rule judges, one for each row but the first. None means the match rule."""
    adjustments: Sequence[Adjustment | None] = ()
    """Changes of each row's logits before a token is drawn. Empty means that there are none."""
    nodes: Sequence[Node] = ()
    """Drafted tokens of the rows but the first. Needed with `structured` only."""
    structured: StructuredText | None = None
    """Holds the draws to a structure. None means that there is none."""

    @property
    def redraws_all(self) -> bool:
        """True if draws without the structure do not count: filters look at the whole distribution, and come after the
        structure."""
        if self.structured is None or self.chain is not None:
            return False
        return self.sampling.has_filters and not self.sampling.is_greedy

    @property
    def is_drawn(self) -> bool:
        """True if every row is drawn from as it is. What its draw depends on is then known before the forward."""
        return self.chain is None and not self.redraws_all


def draws_of(rounds: Sequence[Round]) -> RowDraws:
    """Describes the draws that are known before their forward has run, so that the forward brings them to the device.

    Draws that depend on the forward's results are left out: the next token after a chain under the ratio rule, because
    the judgement decides its place and weights, and a structure's draws, because only rows that are reached are drawn.
    These bring what they need in copies of their own. So do the adjustments of logits.
    """
    drawn = [each for each in rounds if each.is_drawn]
    return RowDraws(
        [each.sampling for each in drawn for _ in each.output_indices],
        [index for each in drawn for index in each.output_indices],
    )


class PendingRounds(NamedTuple):
    """Describes what rounds emit. A device may still be computing it."""

    wait: Callable[[], list[list[int]]]
    """Waits for the device; returns what `emitted` does. To be called once."""
    drawn: DrawnTokens | None = None
    """Draws of all rows of the logits, if rounds emit nothing else. The next rounds can then follow on the device
    before the host knows these draws. None means that the host decides what is emitted."""


def emitted(
    sampler: Sampler, logits: Tensor, rounds: Sequence[Round], draws: RowDraws | None = None
) -> list[list[int]]:
    """Draws one token for each row of each round; under the ratio rule, the tokens that the round emits.

    Args:
        sampler: Draws.
        logits: float32 [rows of all rounds, vocab], in their order.
        rounds: One for each session; their rules may differ.
        draws: Result of `draws_of` for them, if that is known already.
    """
    return begin_rounds(sampler, logits, rounds, draws).wait()


def begin_rounds(
    sampler: Sampler, logits: Tensor, rounds: Sequence[Round], draws: RowDraws | None = None
) -> PendingRounds:
    """Tells a device to draw for rounds, see `emitted`, without waiting for it."""
    draws = draws or draws_of(rounds)
    if not any(each.adjustments for each in rounds):
        return _begin(sampler, logits, rounds, draws)
    of_rows = [each.adjustments or [None] * len(each.output_indices) for each in rounds]

    def wait() -> list[list[int]]:
        # After `adjusted` the logits are as they were, and the host may draw rows again: all of it is done inside.
        with adjusted(logits, [adjustment for of_round in of_rows for adjustment in of_round]):
            return _begin(sampler, logits, rounds, draws).wait()

    return PendingRounds(wait)


def _begin(sampler: Sampler, logits: Tensor, rounds: Sequence[Round], draws: RowDraws) -> PendingRounds:
    ends = list(accumulate(len(each.output_indices) for each in rounds))
    spans = [(end - len(each.output_indices), end) for each, end in zip(rounds, ends, strict=True)]
    of_draws = [number for number, each in enumerate(rounds) if each.is_drawn]
    chains = {
        number: Chain(each.chain, span[0], each.sampling, each.output_indices[0])
        for number, (each, span) in enumerate(zip(rounds, spans, strict=True))
        if each.chain is not None and each.structured is None
    }
    # A device is told of all before it is waited for.
    judged = begin_judging(sampler, logits, list(chains.values())) if chains else None
    drawn = None
    if of_draws:
        # Copied only if there is another kind of round among them.
        is_all = len(of_draws) == len(rounds)
        rows = logits if is_all else torch.cat([logits[slice(*spans[number])] for number in of_draws])
        drawn = sampler.begin(rows, draws.params, draws.output_indices, draws.on_device)

    def wait() -> list[list[int]]:
        found: dict[int, list[int]] = {}
        if drawn is not None:
            tokens = iter(drawn.wait())
            for number in of_draws:
                found[number] = list(islice(tokens, len(rounds[number].output_indices)))
        if judged is not None:
            found.update(zip(chains, judged(), strict=True))
        for number, (each, span) in enumerate(zip(rounds, spans, strict=True)):
            if each.structured is not None:
                own_rows = logits[slice(*span)]
                tokens_as_drawn = _likeliest(sampler, own_rows) if each.redraws_all else found.get(number, [])
                found[number] = _structured(sampler, own_rows, each, each.structured, tokens_as_drawn)
        return [found[number] for number in range(len(rounds))]

    is_as_drawn = len(of_draws) == len(rounds) and all(each.structured is None for each in rounds)
    return PendingRounds(wait, drawn if is_as_drawn else None)


def _likeliest(sampler: Sampler, logits: Tensor) -> list[int]:
    """Returns the best token of each row, in place of draws that would not count: rows that are reached are drawn
    again, and for the others a guess is enough."""
    return sampler.draw(logits, [_GREEDY] * len(logits), range(len(logits)))


def _structured(
    sampler: Sampler, logits: Tensor, round_: Round, structured: StructuredText, draws: Sequence[int]
) -> list[int]:
    """Returns the draws of a round that obey its structure. Returns none if the text cannot go on: `structured` then
    holds the reason as its `error` or its `failure`."""
    sampling, indices = round_.sampling, round_.output_indices

    def redraw(row: int, matcher: Matcher) -> int:
        return draw_allowed(sampler, logits[row : row + 1], matcher, sampling, indices[row])

    try:
        if round_.chain is None:
            return structured.settled(round_.nodes, draws, redraw, redraws_all=round_.redraws_all)
        rows, path = logits.clone(), list[int]()
        for row in range(len(rows)):
            if row:
                path.append(round_.chain[row - 1].token_id)
            matcher = structured.behind(path)
            if matcher is None:
                break  # the token before it was judged and refused
            is_over = matcher.is_over
            if not is_over:
                mask_row(rows, row, matcher)
            matcher.rollback(len(path))
            if is_over:
                break  # what is drawn after the end is cut off
        rows = rows[: row + 1]
        (tokens,) = judge(sampler, rows, [Chain(round_.chain[: len(rows) - 1], 0, sampling, indices[0])])
        return tokens
    except StructureBroken as error:
        structured.error = str(error)
    except Exception as error:
        structured.failure = error  # not raised: other rounds are in the same step
    return []


def judge(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> list[list[int]]:
    """Judges chains under the ratio rule: returns for each chain the tokens that are kept, and one next token.

    The output follows the target's distribution only if every token was drawn from its q, and if the drafter's random
    numbers are independent of the seed's acceptance uniforms and Gumbel noise. A q that lacks its token cannot be true,
    and counts as none.

    Args:
        sampler: Draws the next tokens. Without a chain, or after a whole one, it draws exactly as `Sampler.draw` does.
        logits: float32 [rows, vocab], of the target.
        chains: One for each session.

    Returns:
        For each chain at most 1 + len(drafted) tokens. Only the last may differ from the chain's.
    """
    return begin_judging(sampler, logits, chains)()


def begin_judging(sampler: Sampler, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int]]]:
    """Tells a device to judge chains, without waiting for it. Returns a function that waits and returns what `judge`
    does."""
    read = sampler.judge(logits, chains) if chains else list

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
    """Divides chains into groups that are judged at once."""
    most = MAX_ENTRIES // logits.shape[-1]
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


def _residuals(logprobs: Tensor, refused: Sequence[Drafted]) -> Tensor:
    """Computes the logarithm of max(0, p - q), from which the tokens in place of refused ones are drawn.

    As in Leviathan et al. 2023 (also DOUBLE, section 2.1). It differs from log p only for the few tokens that q has.

    Args:
        logprobs: float32 [refused, vocab], contiguous, may be written.
        refused: One for each row.

    Returns:
        float32 [refused, vocab], with minus infinity for tokens without weight, such as the refused ones.
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
    """Draws a token after the kept part of each chain: from its residual, one row for each chain with a refused token,
    or from the target itself if nothing was refused."""
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
    """Returns parameters that leave scores as they are: temperature and filters were applied before the residual was
    taken."""
    return SamplingParams(seed=seed)


def _rows(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Returns rows of a tensor. They are copied only if they are not consecutive."""
    first, last = rows[0], rows[-1]
    follow_each_other = rows == list(range(first, last + 1))
    return tensor[first : last + 1] if follow_each_other else tensor[_indices(rows, tensor)]


def _indices(numbers: Sequence[int] | Sequence[Sequence[int]], like: Tensor) -> Tensor:
    # Through numpy: a tensor of a list takes five times as long.
    return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(like.device, non_blocking=True)

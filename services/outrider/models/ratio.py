"""Drafts and rounds under both rules: what is drawn from a draft model's logits, and what a target's decide.

`outrider.core.acceptance` has the ratio rule, and `outrider.models.chains` judges by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from outrider.core.acceptance import (
    MAX_ROW_LEN,
    Drafted,
    sampled_candidates,
    sparse_row,
)
from outrider.core.adjustments import Adjustment
from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.structure import Matcher, StructureBroken, StructuredText
from outrider.core.tree import Node
from outrider.models.adjustments import adjusted
from outrider.models.chains import Chain, begin_judging, judge
from outrider.models.cuda.rows import RowDraws
from outrider.models.sampling import DrawnTokens, Sampler, tempered_and_filtered
from outrider.models.structure import draw_allowed, mask_row

_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class DraftDraw:
    """Describes how one row of a draft model's logits is drawn from."""

    sampling: SamplingParams
    """Temperature above 0 and filters; the seed is in the word."""
    word: int
    """Uniform in [0, 2**64), and of no other use (`outrider.core.acceptance`)."""
    vocab_size: int
    """Token ids of a draft are below it: a model's logits may be padded."""
    bias: float = 1.0
    """Factor of the most probable tokens (SAGUARO sampling, C)."""
    num_biased: int = 0
    """Number of tokens that the factor applies to, the most probable ones (F)."""


@torch.inference_mode()
def draft_candidates(logits: Tensor, draws: Sequence[DraftDraw], k: int) -> list[list[Candidate]]:
    """Draws a token, and picks some more, for every row of a draft model's logits.

    Args:
        logits: float32 [rows, vocab].
        draws: One for each row.
        k: Most candidates of a row.

    Returns:
        For each row first the token that was drawn, with the row it was drawn from: the softmax of the tempered,
        filtered logits over their best 64. Then at most k - 1 other tokens, the most probable first.
    """
    if any(draw.vocab_size < logits.shape[-1] for draw in draws):
        # A copy, because rows are views: the logits stay as they are.
        logits = logits.clone()
        for row, draw in zip(logits, draws, strict=True):
            # Before the filters: of a row whose best tokens are padding they might keep nothing else.
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
        # The bias lowers q of the best tokens, so that max(0, p - q), which the token after a refusal is drawn from,
        # holds more of them: the drafter has prepared for those (SAGUARO sampling).
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
    """Finds what may follow each row: `draft_candidates` where it is drawn from, `Sampler.candidates` where `draws` has
    None. `is_raw` is as there. `ranked_rows` are the rows that have None, if their forward was told of them.

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
    """For each row, how many tokens the generation put out before the one drawn there."""
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
        """True if no draw without the structure counts: filters look at the whole distribution, and come behind it."""
        if self.structured is None or self.chain is not None:
            return False
        return self.sampling.has_filters and not self.sampling.is_greedy

    @property
    def is_drawn(self) -> bool:
        """True if every row is drawn from as it is, so that what its draw depends on is known before the forward."""
        return self.chain is None and not self.redraws_all


def draws_of(rounds: Sequence[Round]) -> RowDraws:
    """Describes the draws of rounds that are known before their forward has run, for it to bring that to the device.

    Not among them are draws that follow from what the forward finds: the next token behind a chain under the ratio
    rule, whose place and weights its judgement decides, and a structure's draws, of which only the rows that are
    reached are made. These bring what they need in copies of their own. So do the adjustments of logits.
    """
    drawn = [each for each in rounds if each.is_drawn]
    return RowDraws(
        [each.sampling for each in drawn for _ in each.output_indices],
        [index for each in drawn for index in each.output_indices],
    )


class PendingRounds(NamedTuple):
    """Describes what rounds emit while a device may still be at it."""

    wait: Callable[[], list[list[int]]]
    """Waits for the device; returns what `emitted` does. To be called once."""
    drawn: DrawnTokens | None = None
    """Draws of all rows of the logits, where rounds emit nothing else. Then the next rounds can follow on the device
    before these are known to the host. None means that the host decides what is emitted."""


def emitted(
    sampler: Sampler, logits: Tensor, rounds: Sequence[Round], draws: RowDraws | None = None
) -> list[list[int]]:
    """Draws one token for each row of each round; under the ratio rule, the tokens that the round emits.

    Args:
        sampler: Draws.
        logits: float32 [rows of all rounds, vocab], in their order.
        rounds: One for each session; both rules may be among them.
        draws: What `draws_of` says of them, if that is known already.
    """
    return begin_rounds(sampler, logits, rounds, draws).wait()


def begin_rounds(
    sampler: Sampler, logits: Tensor, rounds: Sequence[Round], draws: RowDraws | None = None
) -> PendingRounds:
    """Tells a device to draw for rounds, see `emitted`, and does not wait for it."""
    draws = draws or draws_of(rounds)
    if not any(each.adjustments for each in rounds):
        return _begin(sampler, logits, rounds, draws)
    of_rows = [each.adjustments or [None] * len(each.output_indices) for each in rounds]

    def wait() -> list[list[int]]:
        # Logits are as they were behind that, and rows may be drawn again by the host: all of it is done there.
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
        # Copied only where another kind of round is among them.
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
    """Returns the best token of each row, in place of draws of which none counts: rows that are reached are drawn
    again, and of the others a guess will do."""
    return sampler.draw(logits, [_GREEDY] * len(logits), range(len(logits)))


def _structured(
    sampler: Sampler, logits: Tensor, round_: Round, structured: StructuredText, draws: Sequence[int]
) -> list[int]:
    """Returns the draws of a round that obey its structure. If the text cannot go on: none, and `structured` says
    why, as its `error` or its `failure`."""
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
                break  # the token before is judged, and refused
            is_over = matcher.is_over
            if not is_over:
                mask_row(rows, row, matcher)
            matcher.rollback(len(path))
            if is_over:
                break  # what is drawn behind the end is cut off
        rows = rows[: row + 1]
        (tokens,) = judge(sampler, rows, [Chain(round_.chain[: len(rows) - 1], 0, sampling, indices[0])])
        return tokens
    except StructureBroken as error:
        structured.error = str(error)
    except Exception as error:
        structured.failure = error  # not raised: other rounds are in the same step
    return []

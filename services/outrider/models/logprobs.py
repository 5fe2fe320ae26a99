"""Log-probabilities of tokens, from the logits that they were drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from outrider.core.reports import LogprobsMode, ReportParams, TokenLogprobs
from outrider.core.session import Verdict
from outrider.models.adjustments import adjusted
from outrider.models.ratio import Round
from outrider.models.sampling import leading_values, tempered_and_filtered


@torch.inference_mode()
def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int, mode: LogprobsMode) -> list[TokenLogprobs]:
    """Returns the log-probability of a token in each row, and those of the most probable ones.

    Args:
        logits: float32 [rows, vocab]; for the processed modes, those that tokens are drawn from.
        token_ids: One for each row.
        num_top: Most probable tokens of each row to tell.
        mode: Log-probabilities or logits.
    """
    if not token_ids:
        return []
    values = logits.log_softmax(-1) if mode.is_normalised else logits
    own = values.gather(-1, torch.tensor([[token_id] for token_id in token_ids], device=values.device))
    ranks = (values > own).sum(-1) + 1
    top: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    if num_top:
        top_values, top_ids = leading_values(values, min(num_top, values.shape[-1]))
        top = [
            # Equals come by their ids, which `topk` does not promise.
            tuple(sorted(zip(ids, of_row, strict=True), key=lambda pair: (-pair[1], pair[0])))
            for ids, of_row in zip(top_ids.tolist(), top_values.tolist(), strict=True)
        ]
    return [
        TokenLogprobs(value, rank, of_row)
        for (value,), rank, of_row in zip(own.tolist(), ranks.tolist(), top, strict=True)
    ]


def round_logprobs(logits: Tensor, round_: Round, verdict: Verdict, report: ReportParams) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of the tokens that a round commits, if they are asked for.

    Args:
        logits: float32 [rows of the round, vocab], as the model has them.
        round_: The round, as it was before the verdict.
        verdict: Its decision.
        report: What is asked for.
    """
    if report.logprobs is None or not verdict.token_ids:
        return ()
    # A token was drawn from the row of the one before it: the root's, then those of the accepted ones.
    rows = [0, *verdict.accepted_rows][: len(verdict.token_ids)]
    drawn_from = logits[rows]
    if report.logprobs_mode.is_processed:
        adjustments = round_.adjustments or [None] * len(logits)
        with adjusted(drawn_from, [adjustments[row] for row in rows]):
            drawn_from = tempered_and_filtered(drawn_from, [round_.sampling] * len(rows))
    return tuple(token_logprobs(drawn_from, verdict.token_ids, report.logprobs, report.logprobs_mode))


def without_prompts(logits: Tensor, counts: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor]]:
    """Takes the rows out that only tell how probable a prompt is: the first ones of each session.

    Args:
        logits: float32 [rows of all sessions, vocab].
        counts: For each session its rows, and how many of them are taken out.

    Returns:
        The other rows, and those of each session that were taken out.
    """
    begins = [0, *accumulate(num_rows for num_rows, _ in counts)]
    spans = [(begin, begin + taken, begin + rows) for begin, (rows, taken) in zip(begins, counts, strict=False)]
    others = torch.cat([logits[begin:end] for _, begin, end in spans])
    return others, [logits[begin:end] for begin, end, _ in spans]

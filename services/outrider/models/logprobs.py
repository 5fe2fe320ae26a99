"""Log-probabilities of tokens, from the logits that they were drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from outrider.core.reports import LogprobsMode, ReportParams, TokenLogprobs
from outrider.core.session import Verdict
from outrider.models.acceptance import Round
from outrider.models.adjustments import adjusted
from outrider.models.draws import DrawnTokens, HostCopy
from outrider.models.filters import tempered_and_filtered
from outrider.models.largest import largest


def token_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int, mode: LogprobsMode) -> list[TokenLogprobs]:
    """Returns the log-probability of one token in each row, and those of the most probable tokens.

    Args:
        logits: float32 [rows, vocab]; for the processed modes, the logits that tokens are drawn from.
        token_ids: One for each row.
        num_top: Number of most probable tokens to return for each row.
        mode: Log-probabilities or logits.
    """
    if not token_ids:
        return []
    return _begin(logits, torch.tensor(token_ids, device=logits.device), num_top, mode)()


@torch.inference_mode()
def _begin(logits: Tensor, token_ids: Tensor, num_top: int, mode: LogprobsMode) -> Callable[[], list[TokenLogprobs]]:
    """Tells a device to find what `token_logprobs` returns, for token ids as whole numbers [rows]. Returns a function
    that waits for it."""
    find = _find_on_host if logits.device.type == "cpu" else _find
    copies = [HostCopy(each) for each in find(logits, token_ids[:, None].long(), num_top, mode)]

    def wait() -> list[TokenLogprobs]:
        own, ranks, *leading = (copy.wait().tolist() for copy in copies)
        # Equals are ordered by their ids, which `topk` does not promise.
        top = [
            tuple(sorted(zip(ids, of_row, strict=True), key=lambda pair: (-pair[1], pair[0])))
            for of_row, ids in zip(*leading, strict=True)
        ]
        return [TokenLogprobs(*each) for each in zip(own, ranks, top or [()] * len(own), strict=True)]

    return wait


def _find(logits: Tensor, token_ids: Tensor, num_top: int, mode: LogprobsMode) -> list[Tensor]:
    """Finds the numbers and ranks of tokens, each [rows], and the most probable tokens as `largest` does."""
    values = logits.log_softmax(-1) if mode.is_normalised else logits
    own = values.gather(-1, token_ids)
    found = [own.squeeze(-1), (values > own).sum(-1) + 1]
    return found + list(largest(values, min(num_top, values.shape[-1]))) if num_top else found


def _find_on_host(logits: Tensor, token_ids: Tensor, num_top: int, mode: LogprobsMode) -> list[Tensor]:
    """Does what `_find` does. A row at a time stays in a core's cache, where all of them at once would be written to
    memory and read again; and one thread waits for no other."""
    own, ranks = logits.gather(-1, token_ids), np.empty(len(logits), np.int64)
    peaks, totals = np.zeros((2, len(logits), 1), np.float32)
    for number, (row, value) in enumerate(zip(logits.numpy(), own.numpy(), strict=True)):
        ranks[number] = 1 + np.count_nonzero(row > value)
        if mode.is_normalised:
            peaks[number] = row.max()
            totals[number] = np.log(np.exp(row - peaks[number]).sum())

    def shown(values: Tensor) -> Tensor:
        return values - torch.from_numpy(peaks) - torch.from_numpy(totals)

    found = [shown(own).squeeze(-1), torch.from_numpy(ranks)]
    if num_top:
        values, ids = largest(logits, min(num_top, logits.shape[-1]))
        found += [shown(values), ids]
    return found


def begin_drawn_logprobs(
    logits: Tensor, drawn: DrawnTokens, reports: Sequence[ReportParams]
) -> Callable[[], list[TokenLogprobs | None]]:
    """Tells a device to find the log-probabilities of tokens that it draws itself, without waiting for it.

    Args:
        logits: float32 [rows, vocab], as the model has them.
        drawn: One token for each row.
        reports: What each row is asked to report.

    Returns:
        A function that waits for them and returns those of each row's token. Call it after `drawn.wait`. None for rows
        that ask for nothing, for rows that ask for processed ones, and for rows that the host had to draw:
        `round_logprobs` finds those.
    """
    asking: dict[tuple[int, LogprobsMode], list[int]] = {}
    for row, report in enumerate(reports):
        if report.logprobs is not None and not report.logprobs_mode.is_processed:
            asking.setdefault((report.logprobs, report.logprobs_mode), []).append(row)
    # For all rows: the numbers of the rows that ask would have to be copied to the device first.
    token_ids = drawn.on_device.clamp_min(0)
    waits = [(rows, _begin(logits, token_ids, num_top, mode)) for (num_top, mode), rows in asking.items()]

    def wait() -> list[TokenLogprobs | None]:
        found: list[TokenLogprobs | None] = [None] * len(reports)
        for rows, wait_for_rows in waits:
            of_rows = wait_for_rows()
            for row in set(rows).difference(drawn.unsettled):
                found[row] = of_rows[row]
        return found

    return wait


def round_logprobs(logits: Tensor, round_: Round, verdict: Verdict, report: ReportParams) -> tuple[TokenLogprobs, ...]:
    """Returns the log-probabilities of the tokens that a round commits, if they are asked for.

    Args:
        logits: float32 [rows of the round, vocab], as the model has them.
        round_: The round as it was before the verdict.
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
    """Separates the rows that only tell how probable a prompt is. They are the first rows of each session.

    Args:
        logits: float32 [rows of all sessions, vocab].
        counts: For each session the number of its rows, and how many of them are taken out.

    Returns:
        The other rows, and the rows of each session that were taken out.
    """
    begins = [0, *accumulate(num_rows for num_rows, _ in counts)]
    spans = [(begin, begin + taken, begin + rows) for begin, (rows, taken) in zip(begins, counts, strict=False)]
    others = torch.cat([logits[begin:end] for _, begin, end in spans])
    return others, [logits[begin:end] for begin, end, _ in spans]

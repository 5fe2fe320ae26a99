"""Log-probabilities of tokens, of rows of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.reports import LogprobsMode, TokenLogprobs
from outrider.models.sampling import leading_values


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

"""Draws by kernels for rows of a packed forward: one copy to the device, two launches, one copy back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.cuda.draws import MAX_NUM_BEST, ROW_WORDS, UNSETTLED, best_tokens

Best = tuple[list[int], list[float]]
"""The best token ids of a row, and their scores."""

ROW = np.dtype(
    [("top_p", "f8"), ("key", "u4", 2), ("temperature", "f4"), ("top_k", "i4"), ("log_min_p", "f4"), ("unused", "i4")]
)
"""A row as kernels read it."""


class DeviceDraws:
    """Finds the best perturbed scores of rows, and keeps the host's buffer from one call to the next."""

    def __init__(self) -> None:
        self._host = torch.empty(0, ROW_WORDS, dtype=torch.int32)

    def best(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        divisors: Sequence[Sequence[float]],
        keys: Sequence[tuple[int, int]],
        k: int,
    ) -> list[Best | None]:
        """Finds the k best of `logits / divisor + noise` of every row, as its filters allow.

        Args:
            logits: float32 [rows, vocab].
            params: One for each row. Greedy rows have neither noise nor filters.
            divisors: A column: what each row's logits are divided by.
            keys: For each row its `outrider.core.noise.row_key`.
            k: At most `MAX_NUM_BEST`.

        Returns:
            For each row k token ids and their scores, the best first, equals by the lower id; scores of minus infinity
            stand for tokens that are not there. None if kernels do not settle it.
        """
        num_rows, vocab_size = logits.shape
        if num_rows > len(self._host):
            # What is copied from it is waited for below, so one buffer is enough.
            size = max(64, 2 * num_rows)
            self._host = torch.empty(size, ROW_WORDS, dtype=torch.int32, pin_memory=logits.is_cuda)
        host = self._host[:num_rows]
        write_rows(host.numpy().view(ROW)[:, 0], params, divisors, keys, vocab_size)
        found = best_tokens(logits, host.to(logits.device, non_blocking=True), 1 if k == 1 else MAX_NUM_BEST).cpu()
        token_ids, scores = found[0, :, :k].tolist(), found[1, :, :k].view(torch.float32).tolist()
        return [
            None if of_row[0] == UNSETTLED else (of_row, own) for of_row, own in zip(token_ids, scores, strict=True)
        ]


def write_rows(
    rows: npt.NDArray[Any],
    params: Sequence[SamplingParams],
    divisors: Sequence[Sequence[float]],
    keys: Sequence[tuple[int, int]],
    vocab_size: int,
) -> None:
    """Writes for kernels how rows are drawn from: `ROW` [rows]. The other arguments are as in `DeviceDraws.best`."""
    rows["key"] = keys
    of_rows = zip(params, divisors, strict=True)
    rows["temperature"] = [0.0 if p.is_greedy else divisor for p, (divisor,) in of_rows]
    rows["top_p"] = [1.0 if p.is_greedy else p.top_p for p in params]
    rows["top_k"] = [vocab_size if p.is_greedy else min(p.top_k or vocab_size, vocab_size) for p in params]
    rows["log_min_p"] = [-math.inf if p.is_greedy or not p.min_p else math.log(p.min_p) for p in params]

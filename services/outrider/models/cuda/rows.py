"""Rows of logits as kernels draw from them: what they read of each, and what they say of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.contenders import Best

ROW = np.dtype(
    [("top_p", "f8"), ("key", "u4", 2), ("temperature", "f4"), ("top_k", "i4"), ("log_min_p", "f4"), ("unused", "i4")]
)
"""A row as kernels read it: how it is drawn from. `key` is that of its noise; a temperature of 0 is greedy; a top_k of
the vocabulary size or more is none, and so is a log_min_p of minus infinity."""
ROW_WORDS = ROW.itemsize // 4
"""int32 words of a row."""
UNSETTLED = -1
"""Stands in place of a row's first token id where the host has to draw."""
MAX_NUM_BEST = 8
"""Most tokens of a row that are looked for, and the only number of them beside one."""


def best_of_rows(found: Tensor, k: int) -> list[Best | None]:
    """Reads what `outrider.models.cuda.draws.best_tokens` has found: the k best of each row, None if it is unsettled.

    Args:
        found: int32 [2, rows, at least k], on the host.
        k: Tokens of a row.
    """
    token_ids, scores = found[0, :, :k].tolist(), found[1, :, :k].view(torch.float32).tolist()
    return [None if of_row[0] == UNSETTLED else (of_row, own) for of_row, own in zip(token_ids, scores, strict=True)]


def write_rows(
    rows: npt.NDArray[Any],
    params: Sequence[SamplingParams],
    divisors: Sequence[Sequence[float]],
    keys: Sequence[tuple[int, int]],
    vocab_size: int,
) -> None:
    """Writes for kernels how rows are drawn from.

    Args:
        rows: `ROW` [rows], written.
        params: One for each row. Greedy rows have neither noise nor filters.
        divisors: A column: what each row's logits are divided by.
        keys: For each row its `outrider.core.noise.row_key`.
        vocab_size: Width of the logits.
    """
    rows["key"] = keys
    of_rows = zip(params, divisors, strict=True)
    rows["temperature"] = [0.0 if p.is_greedy else divisor for p, (divisor,) in of_rows]
    rows["top_p"] = [1.0 if p.is_greedy else p.top_p for p in params]
    rows["top_k"] = [vocab_size if p.is_greedy else min(p.top_k or vocab_size, vocab_size) for p in params]
    rows["log_min_p"] = [-math.inf if p.is_greedy or not p.min_p else math.log(p.min_p) for p in params]

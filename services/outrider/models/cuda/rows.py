"""Rows of logits as kernels draw from them: what they read for each row, and what they return.

How the rows of a forward are drawn from is known before it runs, and goes to the device in its one copy (`RowDraws`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.noise import row_key, row_keys
from outrider.core.params import SamplingParams
from outrider.models.draws import Best
from outrider.models.filters import temperatures

ROW = np.dtype(
    [("top_p", "f8"), ("key", "u4", 2), ("temperature", "f4"), ("top_k", "i4"), ("log_min_p", "f4"), ("unused", "i4")]
)
"""A row as kernels read it: how it is drawn from. `key` is the key of its noise. A temperature of 0 is greedy. A top_k
of the vocabulary size or more is no filter, and neither is a log_min_p of minus infinity."""
ROW_WORDS = ROW.itemsize // 4
"""int32 words of a row."""
TESTED = np.dtype([("bound", "f8"), ("token_id", "i4"), ("row", "i4"), ("first_claim", "i4"), ("num_claims", "i4")])
"""A row of a chain as kernels read it: the greatest p with which its token is refused; the token, below 0 for none; the
row of the logits; and the claims that are subtracted from p then."""
TESTED_WORDS = TESTED.itemsize // 4
"""int32 words of a `TESTED`."""
CHAIN_WORDS = 2
"""int32 words of a chain as kernels read it: its first row, and how many tokens it has."""
MANY_ROWS = 16
"""From this many rows on, their keys are computed together: fewer are quicker one by one."""
UNSETTLED = -1
"""Stands in place of a row's first token id if the host has to draw."""
MAX_NUM_BEST = 8
"""Most tokens that are looked for in a row, and the only number besides one."""


def best_of_rows(found: Tensor, k: int) -> list[Best | None]:
    """Reads the results of `outrider.models.cuda.draws.best_tokens`: the k best tokens of each row, None if it is
    unsettled.

    Args:
        found: int32 [2, rows, at least k], on the host.
        k: Tokens of a row.
    """
    return best_of_steps(found[None, :, :, :k])[0]


def best_of_steps(found: Tensor) -> list[list[Best | None]]:
    """Reads the results for the rows of several steps: the best tokens of each step and row, None if that is unsettled.

    Args:
        found: int32 [steps, 2, rows, tokens], on the host.
    """
    token_ids, scores = found[:, 0].tolist(), found[:, 1].view(torch.float32).tolist()
    return [
        [None if best[0] == UNSETTLED else (best, its_scores) for best, its_scores in zip(*of_step, strict=True)]
        for of_step in zip(token_ids, scores, strict=True)
    ]


def write_rows(
    rows: npt.NDArray[Any], params: Sequence[SamplingParams], output_indices: Sequence[int], vocab_size: int
) -> None:
    """Writes for kernels how rows are drawn from.

    Args:
        rows: `ROW` [rows], or [steps, rows] for consecutive tokens; written.
        params: One for each row. Greedy rows have neither noise nor filters.
        output_indices: For each row, how many tokens the generation put out before the one that is drawn there in the
            first step.
        vocab_size: Width of the logits.
    """
    # Mostly a session has several rows with the same parameter object, which is looked up once.
    kinds = {id(p): p for p in params}
    fields = {
        each: (1.0, 0.0, vocab_size, -math.inf)
        if p.is_greedy
        else (p.top_p, divisor, min(p.top_k or vocab_size, vocab_size), math.log(p.min_p) if p.min_p else -math.inf)
        for (each, p), (divisor,) in zip(kinds.items(), temperatures(list(kinds.values())), strict=True)
    }
    columns = np.array([fields[id(p)] for p in params]).T
    rows["top_p"], rows["temperature"], rows["top_k"], rows["log_min_p"] = columns
    num_steps = rows.size // max(1, len(params))
    if all(p.is_greedy for p in params):
        rows["key"] = 0  # they are drawn from without noise
    elif rows.size < MANY_ROWS:
        keys = [
            row_key(p.seed, index + step)
            for step in range(num_steps)
            for p, index in zip(params, output_indices, strict=True)
        ]
        rows["key"] = np.array(keys).reshape(*rows.shape, 2)
    else:
        indices = [index + step for step in range(num_steps) for index in output_indices]
        rows["key"] = row_keys([p.seed for p in params] * num_steps, indices).reshape(*rows.shape, 2)

"""Adjusts rows of logits (`outrider.core.adjustments`), all rows of a forward at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from outrider.core.adjustments import Adjustment


@contextmanager
def adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Iterator[None]:
    """Adjusts logits in place while the body runs, and restores them afterwards: few of them change, and a copy of all
    would cost more than the sampler.

    Args:
        logits: float32 [rows, vocab], contiguous.
        adjustments: One for each row; None where the row stays as it is.
    """
    rows = [(row, each) for row, each in enumerate(adjustments) if each is not None and not each.is_empty]
    if not rows:
        yield
        return
    with torch.inference_mode():
        flat, places = logits.view(-1), _Places(rows, logits)
        saved = [(each, flat[each]) for each in (places.biased, places.seen, places.forbidden)]
        flat.index_add_(0, places.biased, places.bias)
        seen = flat[places.seen]
        # Element by element, so that a row has the same bits wherever it stands.
        seen = torch.where(seen > 0, seen / places.penalties, seen * places.penalties) - places.subtrahends
        flat[places.seen] = seen
        flat[places.forbidden] = -torch.inf
    try:
        yield
    finally:
        with torch.inference_mode():
            for place, values in saved:
                flat[place] = values


class _Places:
    """Places in the flat logits that are adjusted, and by how much: tensors that one copy brings to the device."""

    def __init__(self, rows: Sequence[tuple[int, Adjustment]], logits: Tensor) -> None:
        width, changes = logits.shape[-1], [each for _, each in rows]
        starts = [row * width for row, _ in rows]
        repeated = [np.full(len(each.seen_token_ids), each.repetition_penalty, dtype=np.float32) for each in changes]
        # Wide numbers first, so that they are aligned.
        arrays = [
            np.concatenate([start + each.bias_token_ids for start, each in zip(starts, changes, strict=True)]),
            np.concatenate([start + each.seen_token_ids for start, each in zip(starts, changes, strict=True)]),
            np.concatenate([start + each.forbidden_token_ids for start, each in zip(starts, changes, strict=True)]),
            np.concatenate([each.bias for each in changes]),
            np.concatenate(repeated),
            np.concatenate([each.subtrahends for each in changes]),
        ]
        words = [array.view(np.int32) for array in arrays]
        copied = torch.from_numpy(np.concatenate(words)).to(logits.device, non_blocking=True)
        parts = copied.split_with_sizes([len(each) for each in words])
        self.biased, self.seen, self.forbidden = (part.view(torch.int64) for part in parts[:3])
        self.bias, self.penalties, self.subtrahends = (part.view(torch.float32) for part in parts[3:])

"""Adjusts rows of logits (`outrider.core.adjustments`), all rows of a forward at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.adjustments import Adjustment


@contextmanager
def adjusted(logits: Tensor, adjustments: Sequence[Adjustment | None]) -> Iterator[None]:
    """Adjusts logits in place while the body runs, and gives them back as they were: few of them change, and a copy of
    all would cost more than the sampler.

    Args:
        logits: float32 [rows, vocab], contiguous.
        adjustments: One for each row; None where the row stays as it is.
    """
    rows = [(row, each) for row, each in enumerate(adjustments) if each is not None]
    if not rows:
        yield
        return
    with torch.inference_mode():
        flat, places = logits.view(-1), _Places(rows, logits)
        saved = [(each, flat[each]) for each in (places.biased, places.seen, places.forbidden)]
        flat.index_add_(0, places.biased, places.bias)
        seen = flat[places.seen]
        # Element by element, and so the same bits for a row wherever it stands.
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
    """Places of the adjustments of rows in the flat logits, and by how much: tensors on their device."""

    def __init__(self, rows: Sequence[tuple[int, Adjustment]], logits: Tensor) -> None:
        self._rows, self._width, self._device = rows, logits.shape[-1], logits.device
        self.biased = self._flat([each.bias_token_ids for _, each in rows])
        self.bias = self._tensor([each.bias for _, each in rows])
        self.seen = self._flat([each.seen_token_ids for _, each in rows])
        self.penalties = self._tensor(
            [np.full(len(each.seen_token_ids), each.repetition_penalty, dtype=np.float32) for _, each in rows]
        )
        self.subtrahends = self._tensor([each.subtrahends for _, each in rows])
        self.forbidden = self._flat([each.forbidden_token_ids for _, each in rows])

    def _flat(self, token_ids: Sequence[npt.NDArray[np.int64]]) -> Tensor:
        places = [row * self._width + ids for (row, _), ids in zip(self._rows, token_ids, strict=True)]
        return self._tensor(places)

    def _tensor(self, arrays: Sequence[npt.NDArray[np.generic]]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays)).to(self._device)

"""Draws by kernels for rows of a packed forward: one copy to the device, two launches, one copy back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.contenders import Best
from outrider.models.cuda.draws import best_tokens
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_rows, write_rows


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
        return best_of_rows(found, k)

"""Draws by kernels for rows of a packed forward: two launches, and one copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.cpu.contenders import Best
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_rows, write_rows


class DeviceDraws:
    """Finds the best perturbed scores of rows."""

    def __init__(self, best_tokens: Callable[[Tensor, Tensor, int], Tensor]) -> None:
        """Draws by a function; see `outrider.models.cuda.draws`."""
        self._best_tokens = best_tokens

    def best(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        rows: Tensor | None = None,
    ) -> list[Best | None]:
        """Finds the k best of `logits / temperature + noise` of every row, as its filters allow.

        Args:
            logits: float32 [rows, vocab].
            params: One for each row. Greedy rows have neither noise nor filters.
            output_indices: For each row, how many tokens the generation put out before the one drawn here.
            k: At most `MAX_NUM_BEST`.
            rows: What `RowDraws.on_device` is for these rows. None copies it now: where what is drawn from followed
                from the forward itself.

        Returns:
            For each row k token ids and their scores, the best first, equals by the lower id; scores of minus infinity
            stand for tokens that are not there. None if kernels do not settle it.
        """
        return best_of_rows(self.begin(logits, params, output_indices, k, rows).cpu(), k)

    def begin(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Tells the device to find the k best, see `best`, and does not wait for it; returns what `best_of_rows`
        reads."""
        if rows is None:
            rows = self._copied(params, output_indices, logits)
        return self._best_tokens(logits, rows, 1 if k == 1 else MAX_NUM_BEST)

    @staticmethod
    def _copied(params: Sequence[SamplingParams], output_indices: Sequence[int], logits: Tensor) -> Tensor:
        num_rows, vocab_size = logits.shape
        # Torch keeps pinned memory for whoever wants some next, but not before it was copied.
        host = torch.empty(num_rows, ROW_WORDS, dtype=torch.int32, pin_memory=logits.is_cuda)
        write_rows(host.numpy().view(ROW)[:, 0], params, output_indices, vocab_size)
        return host.to(logits.device, non_blocking=True)

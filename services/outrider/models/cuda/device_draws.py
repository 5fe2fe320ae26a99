"""Draws by kernels of a GPU: two launches for the rows of a packed forward, and one copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.core.params import SamplingParams
from outrider.models.chains import Chain
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_rows, write_rows
from outrider.models.draws import Best, DrawnTokens
from outrider.models.torch.draws import TorchDraws

JudgeChains = Callable[[Tensor, Sequence[Chain]], Callable[[], list[list[int] | None]]]
"""See `outrider.models.cuda.device_chains.launch`."""


class CudaDraws(TorchDraws):
    """Finds the best perturbed scores, see `Draws`. Rows that kernels do not settle are left to torch."""

    def __init__(self, best_tokens: Callable[[Tensor, Tensor, int], Tensor], judge_chains: JudgeChains) -> None:
        """
        Args:
            best_tokens: See `outrider.models.cuda.draws`.
            judge_chains: Launches what judges chains.
        """
        super().__init__()
        self._best_tokens, self._judge_chains = best_tokens, judge_chains

    def begin(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        rows: Tensor | None = None,
    ) -> DrawnTokens:
        """See `Draws`."""
        if all(p.is_greedy for p in params):
            return super().begin(logits, params, output_indices)
        found = self._launched(logits, params, output_indices, 1, rows)
        return DrawnTokens(found[0, :, 0], partial(self._redrawn, logits, params, output_indices))

    def best(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        rows: Tensor | None = None,
    ) -> list[Best]:
        """See `Draws`."""
        if k > MAX_NUM_BEST:
            return super().best(logits, params, output_indices, k)
        found = best_of_rows(self._launched(logits, params, output_indices, k, rows).cpu(), k)
        left = [row for row, of_row in enumerate(found) if of_row is None]
        rest = iter(super().best(*_chosen(left, logits, params, output_indices), k) if left else ())
        return [next(rest) if of_row is None else of_row for of_row in found]

    def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
        """See `Draws`."""
        return self._judge_chains(logits, chains)

    def _launched(
        self,
        logits: Tensor,
        params: Sequence[SamplingParams],
        output_indices: Sequence[int],
        k: int,
        rows: Tensor | None,
    ) -> Tensor:
        """Tells the device to find the k best; returns what `best_of_rows` reads."""
        if rows is None:
            # What is drawn from followed from the forward itself: it is copied now.
            rows = _copied(params, output_indices, logits)
        return self._best_tokens(logits, rows, 1 if k == 1 else MAX_NUM_BEST)

    @torch.inference_mode()
    def _redrawn(
        self, logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int], rows: Sequence[int]
    ) -> list[int]:
        """Draws for some rows without kernels."""
        token_ids: list[int] = self.scores(*_chosen(rows, logits, params, output_indices)).argmax(-1).tolist()
        return token_ids


def _chosen(
    rows: Sequence[int], logits: Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]
) -> tuple[Tensor, list[SamplingParams], list[int]]:
    return logits[rows], [params[row] for row in rows], [output_indices[row] for row in rows]


def _copied(params: Sequence[SamplingParams], output_indices: Sequence[int], logits: Tensor) -> Tensor:
    num_rows, vocab_size = logits.shape
    # Torch keeps pinned memory for whoever wants some next, but not before it was copied.
    host = torch.empty(num_rows, ROW_WORDS, dtype=torch.int32, pin_memory=logits.is_cuda)
    write_rows(host.numpy().view(ROW)[:, 0], params, output_indices, vocab_size)
    return host.to(logits.device, non_blocking=True)

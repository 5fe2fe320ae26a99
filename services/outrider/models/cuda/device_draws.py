"""Draws by kernels of a GPU: two launches for the rows of a packed forward, and one copy back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.models.chains import Chain
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW, ROW_WORDS, best_of_rows, write_rows
from outrider.models.draws import Best, DrawnTokens, RowDraws
from outrider.models.torch.draws import TorchDraws

JudgeChains = Callable[[Tensor, Sequence[Chain]], Callable[[], list[list[int] | None]]]
"""Signature of `outrider.models.cuda.device_chains.launch`."""


class CudaDraws(TorchDraws):
    """Finds the best perturbed scores, see `Draws`. Rows that kernels do not settle are left to torch."""

    def __init__(self, best_tokens: Callable[[Tensor, Tensor, int], Tensor], judge_chains: JudgeChains) -> None:
        """
        Args:
            best_tokens: See `outrider.models.cuda.draws`.
            judge_chains: Launches the kernels that judge chains.
        """
        super().__init__()
        self._best_tokens, self._judge_chains = best_tokens, judge_chains

    def begin(self, logits: Tensor, draws: RowDraws) -> DrawnTokens:
        """See `Draws`."""
        if draws.is_greedy:
            return super().begin(logits, draws)
        return DrawnTokens(self._launched(logits, draws, 1)[0, :, 0], partial(self._redrawn, logits, draws))

    def best(self, logits: Tensor, draws: RowDraws, k: int) -> list[Best]:
        """See `Draws`."""
        if k > MAX_NUM_BEST:
            return super().best(logits, draws, k)
        found = best_of_rows(self._launched(logits, draws, k).cpu(), k)
        left = [row for row, of_row in enumerate(found) if of_row is None]
        rest = iter(super().best(logits[left], draws.at(left), k) if left else ())
        return [next(rest) if of_row is None else of_row for of_row in found]

    def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
        """See `Draws`."""
        return self._judge_chains(logits, chains)

    def _launched(self, logits: Tensor, draws: RowDraws, k: int) -> Tensor:
        """Tells the device to find the k best tokens; returns what `best_of_rows` reads."""
        # If the draws depended on the forward itself, their rows are copied only now.
        rows = _copied(logits, draws) if draws.on_device is None else draws.on_device
        return self._best_tokens(logits, rows, 1 if k == 1 else MAX_NUM_BEST)

    @torch.inference_mode()
    def _redrawn(self, logits: Tensor, draws: RowDraws, rows: Sequence[int]) -> list[int]:
        """Draws for some rows without kernels."""
        token_ids: list[int] = self.scores(logits[rows], draws.at(rows)).argmax(-1).tolist()
        return token_ids


def _copied(logits: Tensor, draws: RowDraws) -> Tensor:
    num_rows, vocab_size = logits.shape
    # Torch reuses pinned memory for later requests, but not before it was copied.
    host = torch.empty(num_rows, ROW_WORDS, dtype=torch.int32, pin_memory=logits.is_cuda)
    write_rows(host.numpy().view(ROW)[:, 0], draws.params, draws.output_indices, vocab_size)
    return host.to(logits.device, non_blocking=True)

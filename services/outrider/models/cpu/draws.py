"""Draws on a CPU. With a large vocabulary, noise is computed only for tokens that can win."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.noise import gumbel, row_key
from outrider.core.params import SamplingParams
from outrider.models.cpu.contenders import Contenders
from outrider.models.draws import Best, DrawnTokens, RowDraws
from outrider.models.filters import allowed_of, temperatures, tempered
from outrider.models.largest import LARGE_VOCAB_SIZE, argmax, leading
from outrider.models.torch.draws import TorchDraws

MANY_TOKENS = 8192
"""If filters leave more tokens than this, noise is again computed only for those that can win."""


class CpuDraws(TorchDraws):
    """Finds the best perturbed scores, see `Draws`. For small vocabularies, a block of noise serves several output
    indices."""

    def __init__(self) -> None:
        super().__init__()
        self._contenders: Contenders | None = None

    def begin(self, logits: Tensor, draws: RowDraws) -> DrawnTokens:
        """See `Draws`."""
        if _is_lazy(logits, draws):
            token_ids = [token_ids[0] for token_ids, _ in self._lazy_best(logits, draws, 1)]
        else:
            token_ids = argmax(self.scores(logits, draws))
        return DrawnTokens(torch.tensor(token_ids, dtype=torch.long))

    def best(self, logits: Tensor, draws: RowDraws, k: int) -> list[Best]:
        """See `Draws`."""
        if _is_lazy(logits, draws):
            return self._lazy_best(logits, draws, k)
        return super().best(logits, draws, k)

    def _lazy_best(self, logits: Tensor, draws: RowDraws, k: int) -> list[Best]:
        """Finds at most k best tokens of every row, and their scores, with noise for few tokens. The results are those
        of `scores`; equal scores go by the lower id."""
        if self._contenders is None or self._contenders.vocab_size != logits.shape[-1]:
            self._contenders = Contenders(logits.shape[-1])
        plain = [row for row, p in enumerate(draws.params) if not p.is_greedy and not p.has_filters]
        found: dict[int, Best] = {}
        if plain:
            rows = logits if len(plain) == len(logits) else logits[plain]
            best = _of_contenders(self._contenders, rows.numpy(), draws.at(plain), k)
            found = {row: of_row for row, of_row in zip(plain, best, strict=True) if of_row is not None}
        return [
            found[row] if row in found else _best(self._contenders, logits[row : row + 1], p, index, k)
            for row, (p, index) in enumerate(zip(draws.params, draws.output_indices, strict=True))
        ]


def _is_lazy(logits: Tensor, draws: RowDraws) -> bool:
    return logits.shape[-1] >= LARGE_VOCAB_SIZE and not draws.is_greedy


def _of_contenders(
    contenders: Contenders, logits: npt.NDArray[np.float32], draws: RowDraws, k: int
) -> list[Best | None]:
    """Finds the k best tokens of rows as if they had no filters."""
    keys = [row_key(p.seed, index) for p, index in zip(draws.params, draws.output_indices, strict=True)]
    column = np.array(temperatures(draws.params), dtype=np.float32)
    return contenders.best(logits, column, np.array(keys, dtype=np.uint32), k)


def _best(contenders: Contenders, logits: Tensor, params: SamplingParams, output_index: int, k: int) -> Best:
    """Finds the best tokens of one row [1, vocab] and their scores, with noise for the tokens that its filters
    leave."""
    if params.is_greedy:
        if k == 1:
            return argmax(logits), []
        values, ids = logits[0].topk(k)
        return ids.tolist(), values.tolist()
    scaled = tempered(logits, [params]).numpy()[0]
    # With top_k nothing depends on the rest of the vocabulary.
    token_ids = leading(scaled, params.top_k or len(scaled))
    if not params.has_filters:
        # Mostly a row with few tokens left, such as a residual or one under a structure.
        possible = np.flatnonzero(scaled != -np.inf)
        token_ids = possible if len(possible) >= k else token_ids
    allowed = allowed_of(torch.from_numpy(scaled[token_ids])[None], [params])
    # Filters may leave nothing of a row of NaN. It still gets a token.
    if allowed is not None and bool(allowed.any()):
        token_ids = token_ids[allowed.numpy()[0]]
        if len(token_ids) > MANY_TOKENS:
            masked = np.full((1, len(scaled)), -np.inf, dtype=np.float32)
            masked[0, token_ids] = logits.numpy()[0, token_ids]
            (best,) = _of_contenders(contenders, masked, RowDraws([params], [output_index]), k)
            if best is not None:
                return best
    scores = scaled[token_ids] + gumbel(params.seed, output_index, token_ids)
    few = leading(scores, k)
    # Stable, so that the lower of equals stays first.
    order = few[np.argsort(-scores[few], kind="stable")[:k]]
    return token_ids[order].tolist(), scores[order].tolist()

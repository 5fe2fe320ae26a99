"""Draws by torch's operators, on any device: noise and filters of whole rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.models.chains import Chain
from outrider.models.draws import Best, DrawnTokens, RowDraws
from outrider.models.filters import allowed_of, tempered
from outrider.models.torch.noise import NoiseRows


class TorchDraws:
    """Finds the best perturbed scores, see `Draws`. Its only state is cached noise."""

    def __init__(self) -> None:
        self._noise: NoiseRows | None = None
        self._noise_key: tuple[int, torch.device] | None = None

    def begin(self, logits: Tensor, draws: RowDraws) -> DrawnTokens:
        """See `Draws`."""
        # `argmax` promises the first of equals, `topk` does not.
        return DrawnTokens(self.scores(logits, draws).argmax(-1))

    def best(self, logits: Tensor, draws: RowDraws, k: int) -> list[Best]:
        """See `Draws`. The order of equals is undefined."""
        values, token_ids = self.scores(logits, draws).topk(k)
        return list(zip(token_ids.tolist(), values.tolist(), strict=True))

    def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
        """See `Draws`. All is left to the host."""
        return lambda: [None] * len(chains)

    def scores(self, logits: Tensor, draws: RowDraws) -> Tensor:
        """Returns logits / temperature + noise, minus infinity for tokens that are not allowed. Greedy rows stay as
        they are."""
        if draws.is_greedy:
            return logits
        params, output_indices = draws.params, draws.output_indices
        noise = self._noise_rows(logits)
        scores = tempered(logits, params)
        # Before the noise is added: filters look at probabilities, not at one draw.
        allowed = allowed_of(scores, params)
        if len(params) == 1:
            scores += noise.row(params[0].seed, output_indices[0])
        elif not any(p.is_greedy for p in params):
            scores += torch.stack([noise.row(p.seed, i) for p, i in zip(params, output_indices, strict=True)])
        else:
            # Iterating over a tensor yields views of it, so `+=` writes into `scores`.
            for row, p, i in zip(scores, params, output_indices, strict=True):
                if not p.is_greedy:
                    row += noise.row(p.seed, i)
        return scores if allowed is None else scores.masked_fill_(~allowed, -math.inf)

    def _noise_rows(self, logits: Tensor) -> NoiseRows:
        key = (logits.shape[-1], logits.device)
        if self._noise is None or self._noise_key != key:
            self._noise, self._noise_key = NoiseRows(*key), key
        return self._noise

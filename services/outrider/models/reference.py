"""The library's own logits of two short texts, taken before a runner takes the model over. The runner's logits have to
be the same, but for rounding.

Features of a model that no list of ours names show here: before and after its head, at late positions, and where a text
runs in pieces or next to another one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider.models.checkpoint import UnsupportedModel
from outrider.models.runner import Runner, Segment, context_of

NUM_TOKENS = 24
"""Tokens of a text."""
LARGEST_GAP = {torch.float32: 2**-7, torch.bfloat16: 2**-3, torch.float16: 2**-5}
"""Largest distance between two rows of logits, as a part of their length. In bfloat16 each rounding is off by 2**-9,
and some hundreds of them follow each other; the limit for float32 is far above rounding."""


class Reference:
    """Holds logits of two texts. The last rows of one are at the end of the context."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Runs the library's model. It must be in its final type, on its device, and as the library made it."""
        config = model.config.get_text_config()
        length = context_of(config).length
        num_tokens = min(NUM_TOKENS, length)
        half = num_tokens // 2
        self._token_ids = [(17 * i + 3) % config.vocab_size for i in range(num_tokens)]
        last = range(length - (num_tokens - half), length)
        self._positions = [[*range(num_tokens)], [*range(half), *last]]
        self._logits = [_logits(model, self._token_ids, positions) for positions in self._positions]

    def check(self, runner: Runner) -> None:
        """Runs the texts in pieces, both in one forward. Raises UnsupportedModel if their logits differ from the
        library's."""
        # Only known families run by kernels that read every position, and their late positions are like others.
        texts = self._positions if runner.takes_gaps else self._positions[:1]
        caches = [runner.new_cache() for _ in texts]
        half = len(self._token_ids) // 2
        for piece in (slice(half), slice(half, None)):
            ids = self._token_ids[piece]
            segments = [
                Segment(cache, ids, len(ids), positions[piece]) for cache, positions in zip(caches, texts, strict=True)
            ]
            found = runner.forward(segments).view(len(segments), len(ids), -1).cpu()
            for rows, expected, positions in zip(found, self._logits, texts, strict=False):
                has_logits = rows[0] > -torch.inf  # of a head that has some tokens alone
                gap = _gap(rows[:, has_logits], expected[piece][:, has_logits])
                if not gap <= LARGEST_GAP.get(runner.dtype, LARGEST_GAP[torch.float32]):
                    where = f"its logits from position {positions[piece][0]} on"
                    raise UnsupportedModel(f"{where} are not those of the library's own forward, by {gap:.1%} of them")
        for cache in caches:
            cache.clear()


@torch.inference_mode()
def _logits(model: PreTrainedModel, token_ids: list[int], position_ids: list[int]) -> Tensor:
    device = model.device
    ids, positions = (torch.tensor([each], device=device) for each in (token_ids, position_ids))
    # Without a mask, the library would take a jump in positions for the beginning of another text.
    mask = torch.ones_like(ids)
    logits: Tensor = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0]
    return logits.float().cpu()


def _gap(found: Tensor, expected: Tensor) -> float:
    """Returns the median over rows of the distance between them, as a part of the length of what is expected. A
    constant added to all logits of a row changes nothing, so it is left out."""
    found, expected = (rows - rows.mean(-1, keepdim=True) for rows in (found, expected))
    # The median: a single row may be routed to other experts if two of them are nearly as good.
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).median())

"""Small rows of logits for tests of the ratio rule, under all filters, and the law that they imply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models.acceptance import DraftDraw, draft_candidates
from outrider.models.chains import Chain
from outrider.models.filters import tempered_and_filtered

FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


def logits_of(seed: int, rows: int = 1, vocab_size: int = 12) -> Tensor:
    """Makes rows of logits: float32 [rows, vocab_size]."""
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5


def distribution(logits: Tensor, **filters: Any) -> npt.NDArray[np.float64]:
    """Computes the distribution that the target draws from (`test_sampling` compares it with the definition)."""
    exact: npt.NDArray[np.float64] = (
        tempered_and_filtered(logits[None], [SamplingParams(**filters)])[0].double().softmax(-1).numpy()
    )
    return exact


def words(count: int, seed: int = 0) -> list[int]:
    """Draws words for drafts: uniform in [0, 2**64)."""
    drawn: list[int] = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64).tolist()
    return drawn


def assert_drawn_from(expected: npt.NDArray[np.float64], tokens: list[int]) -> None:
    """Asserts by chi-square that tokens come from a distribution. Tokens that are expected less than five times are
    pooled."""
    law = len(tokens) * expected
    counts = np.bincount(tokens, minlength=len(law))
    assert not counts[law == 0].any()
    is_rare = law < 5
    wanted, found = law[~is_rare], counts[~is_rare]
    if law[is_rare].sum() > 0:
        wanted, found = (np.append(each, of_all[is_rare].sum()) for each, of_all in ((wanted, law), (found, counts)))
    if len(wanted) > 1:
        assert stats.chisquare(found, wanted).pvalue > 1e-4


def random_chain(random: np.random.Generator, logits: Tensor, sampling: SamplingParams) -> list[Candidate]:
    """Drafts tokens from rows like the target's; some are picked, and some drawn from strange rows."""
    chain, vocab_size = [], logits.shape[-1]
    for row in logits:
        noisy = (row + torch.from_numpy(random.normal(0, 0.7, vocab_size)).float())[None]
        draw = DraftDraw(sampling, int(random.integers(0, 2**64, dtype=np.uint64)), vocab_size)
        drawn = draft_candidates(noisy, [draw], 1)[0][0]
        kind = random.integers(8)
        if kind == 0:
            drawn = Candidate(drawn.token_id, -1.0)
        elif kind == 1:
            drawn = Candidate(drawn.token_id, -1.0, SparseRow([drawn.token_id, vocab_size + 5], [3, 1]))
        elif kind == 2:
            drawn = Candidate(drawn.token_id, -1.0, SparseRow([(drawn.token_id + 1) % vocab_size], [1]))
        chain.append(drawn)
    return chain


def random_round(
    seed: int, filters: Sequence[dict[str, Any]], *, vocab_size: int, is_coarse: bool = False
) -> tuple[Tensor, list[Chain]]:
    """Makes one chain for each of the filters, and their logits. After the logits of each chain comes one row that
    belongs to no chain. Coarse logits are multiples of a half."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 5, len(filters)).tolist()
    logits, first_row = 2 * logits_of(seed, sum(lengths) + 2 * len(lengths), vocab_size), 0
    if is_coarse:
        logits = (2 * logits).round() / 2
    found = []
    for number, length in enumerate(lengths):
        sampling = SamplingParams(seed=97 * seed + number, **filters[number])
        rows = logits[first_row : first_row + length]
        found.append(Chain(random_chain(random, rows, sampling), first_row, sampling, 3 * number))
        first_row += length + 2
    return logits, found


def num_whole(chains: Sequence[Chain], judged: Sequence[Sequence[int]]) -> int:
    """Counts the chains without a refused token."""
    return sum(len(tokens) > len(chain.drafted) for chain, tokens in zip(chains, judged, strict=True))

"""Kernels judge chains as torch's version of the rule does, for all filters, claims and logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models.acceptance import judge
from outrider.models.chains import Chain
from outrider.models.sampling import Sampler
from tests.support.ratio_cases import FILTERS, logits_of, num_whole, random_round

pytest.importorskip("triton")
from outrider.models.cuda import chains, device_chains, draws
from outrider.models.cuda.device_chains import launch

# Kernels also compute rows that are not finite; their results are not stored.
pytestmark = [
    pytest.mark.interpret,
    pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning"),
]

EXTREMES: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_p": 1e-9},
    {"top_p": 0.5, "top_k": 150, "temperature": 4.0},
    {"min_p": 1.0},
    {"top_k": 3, "min_p": 0.9},
    {"temperature": 1e-30},
    {"temperature": 3.5e38, "top_k": 40, "top_p": 0.9},
]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits a small vocabulary into several stretches of several blocks."""
    monkeypatch.setattr(draws, "OFFERING", {"BLOCK": 256, "NUM_BLOCKS": 1, "num_warps": 4})
    monkeypatch.setattr(draws, "SETTLING", {"BLOCK": 256, "WIDTH": 128, "NUM_STAGES": 3, "num_warps": 4})
    monkeypatch.setattr(chains, "WEIGHING", {"BLOCK": 256, "CLAIMS": 16, "NUM_STAGES": 3, "num_warps": 4})
    monkeypatch.setattr(chains, "LEAVING", {"BLOCK": 128, "NUM_BLOCKS": 2, "CLAIMS": 16, "num_warps": 4})


@pytest.mark.parametrize("is_coarse", [False, True], ids=["all-different", "many-equal"])
@pytest.mark.parametrize("filters", [FILTERS, EXTREMES], ids=["usual", "extreme"])
def test_kernels_keep_and_draw_what_torch_does(filters: list[dict[str, Any]], is_coarse: bool) -> None:
    logits, of_round = random_round(15, filters, vocab_size=300, is_coarse=is_coarse)
    expected = judge(Sampler(), logits, of_round)
    assert 0 < num_whole(of_round, expected) < len(of_round), "something is refused of some, but not of all"
    assert launch(logits, of_round)() == expected


def test_a_large_vocabulary_is_judged_as_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter's time depends on the number of steps, not of tokens.
    monkeypatch.setattr(draws, "OFFERING", {"BLOCK": 8192, "NUM_BLOCKS": 2, "num_warps": 4})
    monkeypatch.setattr(draws, "SETTLING", {"BLOCK": 32_768, "WIDTH": 32_768, "NUM_STAGES": 3, "num_warps": 4})
    monkeypatch.setattr(chains, "WEIGHING", {"BLOCK": 65_536, "CLAIMS": 64, "NUM_STAGES": 3, "num_warps": 4})
    monkeypatch.setattr(chains, "LEAVING", {"BLOCK": 32_768, "NUM_BLOCKS": 2, "CLAIMS": 64, "num_warps": 4})
    logits = logits_of(1, 2, 151_936)
    logits[:, 140_000:140_003] += 9
    sampling = SamplingParams(seed=4, top_p=0.95)
    drafted = Candidate(140_000, -1.0, SparseRow([140_000, 140_001, 7], [9, 1, 1]))
    of_round = [Chain([drafted], 0, sampling, index) for index in range(2)]
    assert launch(logits, of_round)() == judge(Sampler(), logits, of_round)


@pytest.fixture
def keeps_what_filters_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes chains keep each token with any probability."""
    monkeypatch.setattr(device_chains, "refusal_bound", lambda *_: 1e-30)


@pytest.mark.usefixtures("keeps_what_filters_keep")
def test_sums_that_float32_cannot_tell_from_what_top_p_needs_are_told_apart() -> None:
    logits, count = logits_of(7, 6, 300), 100
    shares, order = (logits - logits.amax(-1, keepdim=True)).double().exp().sort(-1, descending=True)
    before = (shares[:, :count].sum(-1) / shares.sum(-1)).tolist()
    # The tokens before this one just reach top_p, or just miss it.
    of_round = [
        Chain([Candidate(int(order[row, count]), -1.0)], row, SamplingParams(seed=1, top_p=before[row] + more), 0)
        for row in range(5)
        for more in (-1e-9, 1e-9)
    ]
    assert [None if tokens is None else len(tokens) for tokens in launch(logits, of_round)()] == 5 * [1, 2]


@pytest.mark.usefixtures("keeps_what_filters_keep")
@pytest.mark.parametrize("filters", [{"top_p": 0.25}, {"top_k": 64}, {"top_k": 128, "top_p": 0.5}], ids=str)
def test_of_equals_at_the_end_of_a_filter_the_lower_ids_are_kept(filters: dict[str, Any]) -> None:
    # The first 64 of 256 tokens with the same share have exactly a quarter.
    logits = torch.zeros(2, 300)
    logits[:, 256:] = -math.inf
    chains_of_one = [Chain([Candidate(token_id, -1.0)], 0, SamplingParams(**filters), 0) for token_id in (63, 64)]
    assert [None if tokens is None else len(tokens) for tokens in launch(logits, chains_of_one)()] == [2, 1]


def test_where_rounding_leaves_nothing_p_itself_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_chains, "refusal_bound", lambda *_: 1.0)
    logits = torch.full((4, 300), -1e4)
    logits[:, 3] = 0.0
    # These rows leave a remainder, however small.
    logits[2:, 5] = -40.0
    claims = SparseRow([3, 5], [4095, 1])
    drafts = [Candidate(3, -1.0), Candidate(3, -1.0, claims)]
    of_round = [Chain([each], row, SamplingParams(seed=1), 0) for row in (0, 2) for each in drafts]
    # In the last chain, q exceeds p for both tokens.
    assert launch(logits, of_round)() == [[3], [3], [5], [3]]


def test_rows_that_are_no_finite_numbers_are_left_to_torch_and_others_are_not() -> None:
    logits = logits_of(2, 10, 300)
    logits[0, 200] = math.nan
    logits[2, 200] = math.inf
    logits[4] = -math.inf
    logits[7, 200] = math.nan
    best = [Candidate(int(row.nan_to_num(-9.0).argmax()), -1.0) for row in logits]
    of_round = [Chain([best[row]], row, SamplingParams(seed=row, top_k=1), 0) for row in (0, 2, 4, 6, 8)]
    found = launch(logits, of_round)()
    assert found[:4] == [None] * 4
    assert found[4:] == judge(Sampler(), logits, of_round[4:])

"""Draws by kernels have the bits of the sampler that sorts, for all filters and at the limits of float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.core.noise import gumbel
from outrider.core.params import SamplingParams
from outrider.models.draws import RowDraws
from outrider.models.sampling import Sampler
from outrider.models.torch.draws import TorchDraws

pytest.importorskip("triton")
from outrider.models.cuda import draws
from outrider.models.cuda.device_chains import launch
from outrider.models.cuda.device_draws import CudaDraws
from outrider.models.cuda.rows import UNSETTLED

# Kernels also compute rows that are not finite; their results are not stored.
pytestmark = [pytest.mark.interpret, pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")]

COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 1},
    {"top_p": 0.8},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.85, "min_p": 0.08},
    {"temperature": 4.0, "top_k": 150, "top_p": 0.5},
]
EXTREMES: list[dict[str, Any]] = [
    {"temperature": temperature, **filters}
    for temperature in (5e-324, 1e-30, 1e-9, 3.5e38)
    for filters in ({}, {"top_p": 5e-324}, {"top_k": 40, "top_p": 0.9}, {"min_p": 5e-324}, {"top_k": 1})
]


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits a small vocabulary into several stretches of several blocks."""
    for name in ("OFFERING", "OFFERING_SEVERAL"):
        monkeypatch.setattr(draws, name, {"BLOCK": 128, "NUM_BLOCKS": 2, "num_warps": 4})
    monkeypatch.setattr(draws, "SETTLING", {"BLOCK": 256, "WIDTH": 128, "NUM_STAGES": 3, "num_warps": 4})


class KernelSampler:
    """Draws as a sampler does on CUDA. Counts the rows that the kernels leave to torch."""

    def __init__(self) -> None:
        self.num_unsettled = 0
        self._sampler = Sampler(CudaDraws(self._counted, launch))

    def draw(self, *arguments: Any) -> list[int]:
        return self._sampler.draw(*arguments)

    def candidates(self, *arguments: Any) -> Any:
        return self._sampler.candidates(*arguments)

    def _counted(self, *arguments: Any) -> Tensor:
        found = draws.best_tokens(*arguments)
        self.num_unsettled += int((found[0, :, 0] == UNSETTLED).sum())
        return found


@pytest.fixture
def sampler() -> KernelSampler:
    return KernelSampler()


def random_rows(num_rows: int, vocab_size: int = 300, *, seed: int = 1, is_coarse: bool = False) -> Tensor:
    rows = 3 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))
    return (2 * rows).round() / 2 if is_coarse else rows


def many(filters: list[dict[str, Any]], times: int) -> tuple[list[SamplingParams], list[int]]:
    params = [SamplingParams(seed=7919 * i, **filters[i % len(filters)]) for i in range(times * len(filters))]
    return params, [i % 50 for i in range(len(params))]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("is_coarse", [False, True], ids=["all-different", "many-equal"])
def test_draws_are_the_samplers_own(sampler: KernelSampler, is_coarse: bool) -> None:
    params, indices = many(COMBINATIONS, 4)
    logits = random_rows(len(params), is_coarse=is_coarse)
    assert sampler.draw(logits, params, indices) == Sampler().draw(logits, params, indices)
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("is_coarse", [False, True], ids=["all-different", "many-equal"])
def test_candidates_are_the_samplers_own(sampler: KernelSampler, is_coarse: bool) -> None:
    params, indices = many(COMBINATIONS, 1)
    logits = random_rows(len(params), is_coarse=is_coarse)
    found = sampler.candidates(logits, params, indices, 8)
    for row, p, index, of_row in zip(logits, params, indices, found, strict=True):
        # `topk` promises neither an order among equals, nor which of those at the end it takes.
        scores = row if p.is_greedy else TorchDraws().scores(row[None], RowDraws([p], [index]))[0]
        best = np.argsort(-scores.numpy(), kind="stable")[:8]
        assert [each.token_id for each in of_row] == [int(t) for t in best if scores[t] > -math.inf]
        if not (p.is_greedy and is_coarse):
            assert of_row == Sampler().candidates(row[None], [p], [index], 8)[0]
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
def test_every_valid_temperature_draws_as_the_sampler_does(sampler: KernelSampler) -> None:
    params, indices = many(EXTREMES, 1)
    logits = 10 * random_rows(len(params))
    assert sampler.draw(logits, params, indices) == Sampler().draw(logits, params, indices)
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
def test_equal_logits_and_tokens_that_are_forbidden_are_drawn_as_the_sampler_does(sampler: KernelSampler) -> None:
    params, indices = many(COMBINATIONS, 3)
    logits = random_rows(len(params))
    third = len(COMBINATIONS)
    logits[:third] = 1.0
    logits[third : 2 * third, 10:] = -math.inf
    logits[2 * third :] = -math.inf
    logits[2 * third :, 77] = -5.0
    assert sampler.draw(logits, params, indices) == Sampler().draw(logits, params, indices)
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
def test_rows_that_are_no_finite_numbers_are_left_to_torch_and_others_are_not(sampler: KernelSampler) -> None:
    logits = random_rows(5)
    logits[0] = math.nan
    logits[1, 200] = math.nan
    logits[2, 200] = math.inf
    logits[3] = -math.inf
    params = [SamplingParams(seed=seed, top_p=0.9) for seed in range(5)]
    assert sampler.draw(logits, params, range(5)) == Sampler().draw(logits, params, range(5))
    assert sampler.num_unsettled == 4


@pytest.mark.usefixtures("small_blocks")
def test_noise_that_is_lost_in_rounding_leaves_a_row_to_torch(
    sampler: KernelSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draws, "OFFERING", {"BLOCK": 256, "NUM_BLOCKS": 2, "num_warps": 4})
    params = [SamplingParams(seed=3, temperature=1e-30), SamplingParams(seed=3)]
    assert sampler.draw(torch.ones(2, 300), params, [0, 0]) == Sampler().draw(torch.ones(2, 300), params, [0, 0])
    assert sampler.num_unsettled == 1


@pytest.mark.parametrize("filters", [{"temperature": 0.7}, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}], ids=str)
def test_large_vocabularies_draw_as_the_lazy_sampler_does(
    sampler: KernelSampler, monkeypatch: pytest.MonkeyPatch, filters: dict[str, Any]
) -> None:
    # The interpreter's time depends on the number of steps, not of tokens.
    for name in ("OFFERING", "OFFERING_SEVERAL"):
        monkeypatch.setattr(draws, name, {"BLOCK": 8192, "NUM_BLOCKS": 2, "num_warps": 4})
    monkeypatch.setattr(draws, "SETTLING", {"BLOCK": 32_768, "WIDTH": 32_768, "NUM_STAGES": 3, "num_warps": 4})
    logits, params = random_rows(1, 151_936), [SamplingParams(seed=4, **filters)]
    assert sampler.candidates(logits, params, [9], 8) == Sampler().candidates(logits, params, [9], 8)
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
def test_scores_that_rough_noise_cannot_tell_apart_are_told_apart(sampler: KernelSampler) -> None:
    params, indices = [SamplingParams(seed=seed) for seed in range(30)], [3] * 30
    logits = torch.full((30, 300), -30.0)
    close = np.arange(5, 300, 12)
    for row, p in zip(logits, params, strict=True):
        row[close] = torch.from_numpy(np.float32(20) - gumbel(p.seed, 3, close))
    assert sampler.draw(logits, params, indices) == Sampler().draw(logits, params, indices)
    assert not sampler.num_unsettled


@pytest.mark.usefixtures("small_blocks")
def test_a_row_is_drawn_the_same_whatever_is_beside_it(sampler: KernelSampler) -> None:
    params, indices = many(COMBINATIONS, 1)
    logits = random_rows(len(params))
    together = sampler.draw(logits, params, indices)
    assert [sampler.draw(logits[i : i + 1], [p], [indices[i]])[0] for i, p in enumerate(params)] == together


def edges() -> dict[str, Tensor]:
    """Rows of 300 logits for stretches of two blocks of 128; the second stretch ends after 44 tokens."""
    usual, minus = random_rows(1)[0], torch.full((300,), -math.inf)
    found = {"all-equal": torch.ones(300), "one-finite": minus.clone(), "few-finite": minus.clone()}
    found["one-finite"][299] = 1.0
    found["few-finite"][[3, 131, 255, 256, 299]] = torch.tensor([1.0, 1.0, 2.0, 1.0, 2.0])
    found["end-only"] = torch.where(torch.arange(300) < 256, minus, usual)
    # Equals in one column of a tile, next to it, and in the other stretch.
    found["equals"] = usual.clone()
    found["equals"][[5, 133, 134, 6, 261, 262, 299]] = 50.0
    # All in one group.
    found["one-group"] = usual.clone()
    found["one-group"][5::32] += 40.0
    # More than there are slots.
    found["many-equals"] = usual.clone()
    found["many-equals"][40:90] = 30.0
    found["close"] = torch.full((300,), -30.0)
    found["close"][5::17] = torch.from_numpy(np.float32(20) - gumbel(11, 3, np.arange(5, 300, 17)))
    # Here and in the next row, products with the reciprocal of a temperature of 3.1e-30 overflow; quotients do not.
    found["greatest"] = usual.clone()
    found["greatest"][::20] = 1054875264.0
    found["least"] = minus.clone()
    found["least"][[7, 9]] = torch.tensor([1.0, -1054875264.0])
    return found


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("temperature", [1.0, 0, 0.7, 3.0, 3.1e-30])
@pytest.mark.parametrize("name", edges())
def test_the_best_of_a_stretch_are_found_whatever_its_tokens_are(
    sampler: KernelSampler, name: str, temperature: float
) -> None:
    row, p = edges()[name], SamplingParams(seed=11, temperature=temperature)
    scores = row if p.is_greedy else TorchDraws().scores(row[None], RowDraws([p], [3]))[0]
    (found,) = sampler.candidates(row[None], [p], [3], 8)
    if name in ("all-equal", "greatest") and temperature == 3.1e-30:
        assert sampler.num_unsettled == 1, "noise is lost in rounding, or the slack is infinite"
        return
    assert not sampler.num_unsettled
    best = np.argsort(-scores.numpy(), kind="stable")[:8]
    assert [each.token_id for each in found] == [int(t) for t in best if scores[t] > -math.inf]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_one_token_that_is_no_finite_number_leaves_a_row_to_torch(sampler: KernelSampler, value: float) -> None:
    logits = random_rows(3)
    logits[0, 299] = logits[1, 130] = value
    params = [SamplingParams(seed=seed) for seed in range(3)]
    sampler.candidates(logits[:2], params[:2], [0, 0], 8)
    assert sampler.num_unsettled == 2
    sampler.candidates(logits[2:], params[2:], [0], 8)
    assert sampler.num_unsettled == 2


@pytest.mark.usefixtures("small_blocks")
def test_usual_rows_are_offered_at_once(sampler: KernelSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: Any) -> None:
        raise AssertionError("tokens are looked at one by one")

    params, indices = many([{}, {"temperature": 0}, {"temperature": 0.7}], 4)
    logits = random_rows(len(params))
    monkeypatch.setattr(draws, "_offer_one_by_one", refuse)
    found = sampler.candidates(logits, params, indices, 8)
    assert found == Sampler().candidates(logits, params, indices, 8)
    logits[1] = 1.0
    with pytest.raises(Exception, match="one by one"):
        sampler.candidates(logits, params, indices, 8)

"""Batch-invariant products equal a library's, for as many rows as forwards have, whole or in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from outrider.models.cuda import invariant

pytestmark = pytest.mark.interpret


def normal(*sizes: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("num_rows", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("has_bias", [False, True])
def test_they_are_those_of_a_library(num_rows: int, has_bias: bool) -> None:
    # Not multiples of a tile's outputs.
    x, weight = normal(num_rows, 256, seed=0), normal(200, 256, seed=1)
    bias = normal(200, seed=2) if has_bias else None
    out = torch.full((num_rows + 1, 200), float("nan"))
    invariant.multiply(x, weight, bias, out[:num_rows])
    known = functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    torch.testing.assert_close(out[:num_rows], known, rtol=1e-5, atol=1e-4)
    assert out[num_rows].isnan().all()


@pytest.mark.parametrize("num_rows", [16, 128])
def test_parts_are_sums_over_parts_of_the_inputs_the_first_with_the_bias(num_rows: int) -> None:
    x, weight, bias = normal(num_rows, 512, seed=0), normal(136, 512, seed=1), normal(136, seed=2)
    out = torch.full((4, num_rows, 136), float("nan"))
    invariant.multiply(x, weight, bias, out)
    for number, part in enumerate(out):
        own = slice(128 * number, 128 * (number + 1))
        known = functional.linear(x[:, own].float(), weight[:, own].float(), None if number else bias.float())
        torch.testing.assert_close(part, known, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs", "num_parts"),
    [
        (4096, 4096, 4),
        (4096, 12_288, 4),
        (1024, 3072, 8),
        # Enough programs already, or a part would have fewer inputs than a tile.
        (24_576, 4096, 1),
        (1024, 384, 1),
        (1024, 768, 2),
    ],
)
def test_inputs_are_split_until_there_are_programs_enough(num_outputs: int, num_inputs: int, num_parts: int) -> None:
    assert invariant.splits_of(num_outputs, num_inputs) == num_parts


@pytest.mark.parametrize(
    ("dtype", "num_inputs", "capability", "has_product"),
    [
        (torch.bfloat16, 4096, (9, 0), True),
        (torch.float16, 128, (9, 0), True),
        (torch.float32, 4096, (9, 0), False),
        # The loop would read into the next row.
        (torch.bfloat16, 960, (9, 0), False),
        (torch.bfloat16, 4096, (8, 0), False),
        (torch.bfloat16, 4096, (10, 0), False),
    ],
)
def test_matrices_of_16_bits_and_whole_tiles_have_products_on_hopper(
    dtype: torch.dtype, num_inputs: int, capability: tuple[int, int], has_product: bool
) -> None:
    assert invariant.are_for(dtype, num_inputs, capability) == has_product


def test_a_cpu_has_none() -> None:
    assert not invariant.takes(normal(64, 128, seed=0))


def test_rows_that_fill_no_tile_are_refused() -> None:
    x, weight = normal(192, 128, seed=0), normal(64, 128, seed=1)
    with pytest.raises(AssertionError, match="whole tiles are computed, got 192"):
        invariant.multiply(x, weight, None, torch.empty(192, 64))

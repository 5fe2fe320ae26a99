"""Products of few rows on a GPU, interpreted: fused with the operators around them, they equal torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

pytest.importorskip("triton")

from outrider.models.cuda.few_rows import inputs_of, multiply_add, norm_gate, norm_multiply, outputs_of, stages_of
from outrider.models.cuda.steps import FEW_ROWS

pytestmark = pytest.mark.interpret

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(64, 32), (192, 96), (64, 4096)]
"""Inputs and outputs."""


def normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, known: Tensor) -> None:
    """Equal up to the last bits of the factors: `known` rounds nothing."""
    rtol, atol = (2**-6, 2**-5) if found.dtype is torch.bfloat16 else (1e-4, 1e-4)
    torch.testing.assert_close(found.float(), known, rtol=rtol, atol=atol)


def a_stream(num_rows: int, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of a residual stream, and what the kernel that last added to the stream leaves for that norm.

    Rows differ in length; one is so short that the norm's epsilon matters.
    """
    lengths = torch.tensor([0.003, *range(2, num_rows + 1)])
    hidden, norm = (normal(num_rows, size) * lengths[:, None]).to(dtype), normal(size, seed=5, dtype=dtype)
    scaled, squares = torch.empty_like(hidden), torch.full((size * num_rows,), float("nan"))
    nothing = torch.zeros(num_rows, 64, dtype=dtype), torch.zeros(size, 64, dtype=dtype)
    multiply_add(*nothing, None, hidden, norm, scaled, squares, is_early=False)
    return functional.rms_norm(hidden.float(), (size,), norm.float(), EPSILON), scaled, squares


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [FEW_ROWS])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_normed_product_is_torchs(
    dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    normed, scaled, squares = a_stream(num_rows, num_inputs, dtype)
    weight = normal(num_outputs, num_inputs, seed=1, dtype=dtype) / 8
    bias = normal(num_outputs, seed=2, dtype=dtype) if has_bias else None
    out = torch.empty(num_rows, num_outputs, dtype=dtype)
    norm_multiply(scaled, squares, EPSILON, weight, bias, out)
    assert_close(out, functional.linear(normed, weight.float(), None if bias is None else bias.float()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [FEW_ROWS])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gated_product_is_torchs(
    dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    normed, scaled, squares = a_stream(num_rows, num_inputs, dtype)
    weight = normal(2 * num_outputs, num_inputs, seed=1, dtype=dtype) / 8
    bias = normal(2 * num_outputs, seed=2, dtype=dtype) if has_bias else None
    out = torch.empty(num_rows, num_outputs, dtype=dtype)
    norm_gate(scaled, squares, EPSILON, weight, bias, out)
    gate_up = functional.linear(normed, weight.float(), None if bias is None else bias.float())
    gate, up = gate_up.chunk(2, 1)
    assert_close(out, functional.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [FEW_ROWS])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), SIZES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_added_to_the_stream_and_leaves_for_the_next_norm_what_it_needs(
    dtype: torch.dtype, num_rows: int, num_inputs: int, num_outputs: int, has_bias: bool
) -> None:
    x, hidden = normal(num_rows, num_inputs, dtype=dtype), normal(num_rows, num_outputs, seed=3, dtype=dtype)
    weight = normal(num_outputs, num_inputs, seed=1, dtype=dtype) / 8
    bias = normal(num_outputs, seed=2, dtype=dtype) if has_bias else None
    squares = torch.full((num_outputs * num_rows,), float("nan"))
    known = hidden.float() + functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    norm, scaled = normal(num_outputs, seed=4, dtype=dtype), torch.empty(num_rows, num_outputs, dtype=dtype)
    multiply_add(x, weight, bias, hidden, norm, scaled, squares, is_early=False)
    assert_close(hidden, known)
    assert torch.equal(scaled, hidden * norm)
    num_parts = num_outputs // outputs_of(num_outputs)
    found = squares[: num_parts * num_rows].view(num_parts, num_rows).sum(0)
    torch.testing.assert_close(found, hidden.float().square().sum(1), rtol=1e-5, atol=0.0)
    assert squares[num_parts * num_rows :].isnan().all()


def test_a_warp_multiplies_as_many_inputs_at_a_time_as_divide_its_own() -> None:
    assert [inputs_of(size) for size in (64, 192, 896, 1024, 4096, 12288)] == [16, 16, 32, 64, 64, 64]


@pytest.mark.parametrize(("num_bytes", "num_stages"), [(100, 6), (16_384, 6), (20_480, 5), (49_152, 3), (90_000, 2)])
def test_a_loop_has_a_stage_more_than_tiles_fit_into_shared_memory(num_bytes: int, num_stages: int) -> None:
    assert stages_of(num_bytes) == num_stages

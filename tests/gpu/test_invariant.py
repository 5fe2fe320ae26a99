"""On a GPU a row of a batch-invariant product has the same bits for any number of rows."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
SIZES = [(6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288), (2304, 4096), (1024, 3072), (20_003, 1024)]
"""Outputs and inputs: those of Qwen3-8B, a small head, a small matrix, and a head that is no multiple of a tile."""


@pytest.mark.parametrize(("num_outputs", "num_inputs"), SIZES)
@pytest.mark.parametrize("in_parts", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_has_the_bits_that_it_has_among_any_other_number_of_rows(
    device: str, num_outputs: int, num_inputs: int, in_parts: bool, dtype: torch.dtype
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("these kernels are a GPU's")
    pytest.importorskip("triton")
    from outrider.models.cuda import invariant

    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(512, num_inputs, device=device, generator=generator).to(dtype)
    weight = (num_inputs**-0.5 * torch.randn(num_outputs, num_inputs, device=device, generator=generator)).to(dtype)
    bias = torch.randn(num_outputs, device=device, generator=generator).to(dtype)
    if not invariant.takes(weight):
        pytest.skip("no GPU that these products are for")
    num_parts = invariant.splits_of(num_outputs, num_inputs) if in_parts else 1
    found = {}
    for num_rows in (16, 32, 64, 128, 256, 512):
        size = (num_parts, num_rows, num_outputs) if in_parts else (num_rows, num_outputs)
        out = torch.full(size, float("nan"), device=device)
        invariant.multiply(x[:num_rows], weight, bias, out)
        found[num_rows] = out if in_parts else out[None]
    known = functional.linear(x.double(), weight.double(), bias.double()).float()
    torch.testing.assert_close(found[512].sum(0), known, rtol=1e-4, atol=1e-4)
    for num_rows, of_rows in found.items():
        assert torch.equal(of_rows, found[512][:, :num_rows]), num_rows

"""On a GPU fused products of few rows are a library's, each time with the same bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.cuda.steps import FEW_ROWS

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
EPSILON = 1e-6
SIZES = [(1024, 2048, 3072), (4096, 4096, 12288)]
"""Of Qwen3-0.6B and Qwen3-8B: of the stream, of what is attended to, and of the gate."""


def assert_close(found: Tensor, known: Tensor) -> None:
    torch.testing.assert_close(found.float(), known, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("num_rows", FEW_ROWS)
@pytest.mark.parametrize(("size", "attended_size", "gated_size"), SIZES)
def test_a_layers_products_are_those_of_a_library(
    device: str, num_rows: int, size: int, attended_size: int, gated_size: int
) -> None:
    if not device.startswith("cuda"):
        pytest.skip("these kernels are a GPU's")
    pytest.importorskip("triton")
    from outrider.models.cuda.few_rows import multiply_add, norm_gate, norm_multiply

    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(sizes, device=device, generator=generator)).bfloat16()

    stream, attended = normal(num_rows, size), normal(num_rows, attended_size)
    output = normal(size, attended_size, scale=attended_size**-0.5)
    gate_up, heads = normal(2 * gated_size, size, scale=size**-0.5), normal(attended_size, size, scale=size**-0.5)
    squares = torch.empty(size * num_rows, device=device)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        hidden = stream.clone()
        gated, found = (torch.empty(num_rows, count, device=device).bfloat16() for count in (gated_size, attended_size))
        multiply_add(attended, output, None, hidden, squares)
        norm_gate(hidden, squares, EPSILON, gate_up, None, gated)
        norm_multiply(hidden, squares, EPSILON, heads, None, found)
        return hidden, gated, found

    hidden, gated, found = run()
    assert_close(hidden, stream.float() + functional.linear(attended.float(), output.float()))
    normed = functional.rms_norm(hidden.float(), (size,), None, EPSILON)
    gate, up = functional.linear(normed, gate_up.float()).chunk(2, 1)
    assert_close(gated, functional.silu(gate) * up)
    assert_close(found, functional.linear(normed, heads.float()))
    for _ in range(50):
        again = run()
        assert all(map(torch.equal, again, (hidden, gated, found)))

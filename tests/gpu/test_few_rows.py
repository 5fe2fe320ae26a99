"""On a GPU fused products of few rows equal a library's, each time with the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import FEW_ROWS
from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.widen import QWEN3_0_6B, randomise
from outrider.models.loading import build_hf_model
from outrider.models.runner import Segment

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
EPSILON = 1e-6
SIZES = [(1024, 2048, 3072), (4096, 4096, 12288)]
"""Sizes of Qwen3-0.6B and Qwen3-8B: the residual stream, the attention's output, and the gate."""


def assert_close(found: Tensor, known: Tensor) -> None:
    torch.testing.assert_close(found.float(), known, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("num_rows", [FEW_ROWS])
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
    norm = 1 + normal(size, scale=0.1)
    scaled, squares = torch.empty_like(stream), torch.empty(size * num_rows, device=device)
    biases = [normal(count, scale=0.1) for count in (size, 2 * gated_size, attended_size)]

    def run() -> tuple[Tensor, Tensor, Tensor]:
        hidden = stream.clone()
        gated, found = (torch.empty(num_rows, count, device=device).bfloat16() for count in (gated_size, attended_size))
        multiply_add(attended, output, biases[0], hidden, norm, scaled, squares, is_early=True)
        norm_gate(scaled, squares, EPSILON, gate_up, biases[1], gated)
        norm_multiply(scaled, squares, EPSILON, heads, biases[2], found)
        return hidden, gated, found

    hidden, gated, found = run()
    assert_close(hidden, stream.float() + functional.linear(attended.float(), output.float(), biases[0].float()))
    normed = functional.rms_norm(hidden.float(), (size,), norm.float(), EPSILON)
    gate, up = functional.linear(normed, gate_up.float(), biases[1].float()).chunk(2, 1)
    assert_close(gated, functional.silu(gate) * up)
    assert_close(found, functional.linear(normed, heads.float(), biases[2].float()))
    for _ in range(50):
        again = run()
        assert all(map(torch.equal, again, (hidden, gated, found)))


def test_a_draft_model_says_the_same_with_fused_products(device: str, tmp_path: Path) -> None:
    if not device.startswith("cuda"):
        pytest.skip("these kernels are a GPU's")
    size = dataclasses.replace(QWEN3_0_6B, num_layers=4, vocab_size=2304)
    randomise(size, DEMO_FOLDER / "target", tmp_path, device=device, dtype=torch.bfloat16)
    token_ids = [5 + index * 7 % 2000 for index in range(100)]
    found = []
    for is_fused in (True, False):
        backend = CudaBackend.on(torch.device(device), use_graphs=is_fused)
        model = build_hf_model(str(tmp_path), "bfloat16", device=device)[0]
        runner = backend.make_runner(model, is_exact=False, num_blocks=64)
        assert isinstance(runner, CudaRunner)
        assert runner._steps.is_fused == is_fused, "without graphs a library computes all products"
        cache = runner.new_cache()
        runner.forward([Segment(cache, token_ids, 0)])
        found.append(torch.cat([runner.forward([Segment(cache, token_ids[:count], count)]) for count in (1, 12, 30)]))
    fused, apart = found
    assert float(((fused - apart).norm(dim=1) / apart.norm(dim=1)).max()) < 0.05

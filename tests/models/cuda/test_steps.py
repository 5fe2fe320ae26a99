"""Steps of a GPU, with twins of its kernels: which products of a layer are fused, and when."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.cuda import steps
from outrider.models.cuda.steps import CudaSteps
from outrider.models.products import TorchProduct
from outrider.models.rotary import RotaryTable
from tests.support.cuda_twins import TWINS

HIDDEN, INNER, EPSILON, NUM_ROWS = 64, 128, 1e-5, 16


@pytest.fixture(autouse=True)
def _fuses_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "FUSED_TYPE", torch.float32)


def normal(*sizes: int, seed: int = 0) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def a_norm() -> Any:
    return SimpleNamespace(weight=normal(HIDDEN, seed=1), variance_epsilon=EPSILON)


def some_steps(*, is_exact: bool = False) -> CudaSteps:
    return CudaSteps(RotaryTable(torch.ones(8), 1.0), torch.float32, TWINS, 16, is_exact=is_exact)


def an_mlp(made: CudaSteps, norm: Any, num_inner: int = INNER) -> Callable[[Tensor, Tensor], Tensor | None]:
    sizes = (HIDDEN, HIDDEN), (2 * num_inner, HIDDEN), (HIDDEN, num_inner)
    output, gate_up, down = (TorchProduct(normal(*size, seed=seed)) for seed, size in enumerate(sizes, 2))
    return made.mlp(output, norm, gate_up, nn.SiLU(), down)


def test_a_layer_adds_to_the_stream_what_it_would_have_left_to_add() -> None:
    made, attended = some_steps(), normal(NUM_ROWS, HIDDEN, seed=9)
    mlp = an_mlp(made, a_norm())
    apart, fused = normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, HIDDEN)
    left = mlp(apart, attended)
    made.fused_rows.add(NUM_ROWS)
    assert mlp(fused, attended) is None
    assert left is not None
    torch.testing.assert_close(fused, apart + left, rtol=1e-5, atol=1e-4)


def test_heads_behind_a_layer_that_has_something_left_to_add_get_it() -> None:
    made, norm = some_steps(), a_norm()
    an_mlp(made, a_norm())
    made.fused_rows.add(NUM_ROWS)
    weight, hidden, summand = normal(96, HIDDEN, seed=7), normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, HIDDEN, seed=8)
    expected = functional.linear(functional.rms_norm(hidden + summand, (HIDDEN,), norm.weight, EPSILON), weight)
    found = made.heads(1, norm, TorchProduct(weight.clone()))(hidden, summand)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("is_exact", "num_inner", "can_fuse"),
    [(False, INNER, True), (False, INNER + 32, False), (True, INNER, False)],
    ids=["a multiple of 64", "none", "exact rows"],
)
def test_products_of_some_sizes_are_fused_where_rows_need_not_be_exact(
    is_exact: bool, num_inner: int, can_fuse: bool
) -> None:
    made, norm = some_steps(is_exact=is_exact), a_norm()
    an_mlp(made, norm, num_inner)
    assert made.can_fuse == can_fuse
    # Otherwise the norm keeps its weights.
    assert torch.equal(norm.weight, torch.ones(HIDDEN)) == can_fuse


@pytest.mark.parametrize(("num_outputs", "is_fused"), [(96, True), (48, False)])
def test_heads_are_fused_if_programs_have_as_many_outputs(num_outputs: int, is_fused: bool) -> None:
    norm = a_norm()
    some_steps().heads(1, norm, TorchProduct(normal(num_outputs, HIDDEN)))
    assert torch.equal(norm.weight, torch.ones(HIDDEN)) == is_fused

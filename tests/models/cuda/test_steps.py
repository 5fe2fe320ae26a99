"""A GPU's steps, with twins of its kernels: which products of a layer are fused, and when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.cuda import steps
from outrider.models.cuda.steps import CudaSteps
from outrider.models.rotary import RotaryTable
from outrider.models.torch.products import TorchProduct
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


def an_mlp(
    made: CudaSteps, norm: Any, num_inner: int = INNER, activation: nn.Module | None = None
) -> Callable[[Tensor, Tensor], Tensor | None]:
    sizes = (HIDDEN, HIDDEN), (2 * num_inner, HIDDEN), (HIDDEN, num_inner)
    output, gate_up, down = (TorchProduct(normal(*size, seed=seed)) for seed, size in enumerate(sizes, 2))
    return made.mlp(0, output, norm, gate_up, activation or nn.SiLU(), down)


def test_a_layer_adds_to_the_stream_what_it_would_have_left_to_add() -> None:
    made, attended = some_steps(), normal(NUM_ROWS, HIDDEN, seed=9)
    mlp = an_mlp(made, a_norm())
    apart, fused = normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, HIDDEN)
    left = mlp(apart, attended)
    made.is_fused = True
    assert mlp(fused, attended) is None
    assert left is not None
    torch.testing.assert_close(fused, apart + left, rtol=1e-4, atol=1e-3)


def test_heads_behind_a_layer_that_has_something_left_to_add_get_it() -> None:
    made, norm = some_steps(), a_norm()
    an_mlp(made, a_norm())
    made.is_fused = True
    weight, hidden, summand = normal(96, HIDDEN, seed=7), normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, HIDDEN, seed=8)
    expected = functional.linear(functional.rms_norm(hidden + summand, (HIDDEN,), norm.weight, EPSILON), weight)
    found = made.heads(1, norm, TorchProduct(weight.clone()))(hidden, summand)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_heads_behind_a_layer_that_has_added_all_are_those_of_the_stream() -> None:
    made, norm, attended = some_steps(), a_norm(), normal(NUM_ROWS, HIDDEN, seed=9)
    weight, hidden = normal(96, HIDDEN, seed=7), normal(NUM_ROWS, HIDDEN)
    first = made.heads(0, a_norm(), TorchProduct(weight.clone()))
    mlp = an_mlp(made, a_norm())
    # The norm of the next layer is another one.
    norm.weight = normal(HIDDEN, seed=11)
    second = made.heads(1, norm, TorchProduct(weight.clone()))
    made.is_fused = True
    expected = functional.linear(functional.rms_norm(hidden, (HIDDEN,), a_norm().weight, EPSILON), weight)
    torch.testing.assert_close(first(hidden, None), expected, rtol=1e-5, atol=1e-4)
    assert mlp(hidden, attended) is None
    expected = functional.linear(functional.rms_norm(hidden, (HIDDEN,), norm.weight, EPSILON), weight)
    torch.testing.assert_close(second(hidden, None), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("is_exact", "num_inner", "activation", "can_fuse"),
    [
        (False, INNER, nn.SiLU(), True),
        (False, INNER + 32, nn.SiLU(), False),
        (True, INNER, nn.SiLU(), False),
        (False, INNER, nn.GELU(), False),
    ],
    ids=["a multiple of 64", "none", "exact rows", "another gate"],
)
def test_a_layer_is_fused_if_there_are_kernels_for_it_and_rows_need_not_be_exact(
    is_exact: bool, num_inner: int, activation: nn.Module, can_fuse: bool
) -> None:
    made = some_steps(is_exact=is_exact)
    mlp = an_mlp(made, a_norm(), num_inner, activation)
    assert made.can_fuse == can_fuse
    made.is_fused = True
    assert (mlp(normal(NUM_ROWS, HIDDEN), normal(NUM_ROWS, HIDDEN)) is None) == can_fuse


@pytest.mark.parametrize(("num_outputs", "is_fused"), [(96, True), (48, False)])
def test_heads_are_fused_if_programs_have_as_many_outputs(num_outputs: int, is_fused: bool) -> None:
    launched: list[int] = []

    def norm_multiply(scaled: Tensor, *arguments: Any) -> None:
        launched.append(len(scaled))

    made = CudaSteps(
        RotaryTable(torch.ones(8), 1.0), torch.float32, replace(TWINS, norm_multiply=norm_multiply), 16, is_exact=False
    )
    an_mlp(made, a_norm())
    made.is_fused = True
    made.heads(1, a_norm(), TorchProduct(normal(num_outputs, HIDDEN)))(normal(NUM_ROWS, HIDDEN), None)
    assert launched == [NUM_ROWS] * is_fused

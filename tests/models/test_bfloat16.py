"""Products in bfloat16 by the CPU's own instruction are right, and independent for each row."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from outrider.models.cpu import bfloat16
from outrider.models.cpu.bfloat16 import PanelProduct
from outrider.models.cpu.products import make_product
from outrider.models.cpu.steps import CpuSteps
from outrider.models.rotary import RotaryTable
from outrider.models.steps import Steps

pytestmark = pytest.mark.skipif(not bfloat16.has_instruction(), reason="this CPU lacks the instruction")


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(32, 2), (96, 66), (256, 768)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 13, 31])
def test_a_product_is_that_of_exact_arithmetic_rounded(num_rows: int, num_outputs: int, num_inputs: int) -> None:
    torch.manual_seed(num_rows)
    weight, bias = torch.randn(num_outputs, num_inputs).bfloat16(), torch.randn(num_outputs).bfloat16()
    x = torch.randn(num_rows, num_inputs).bfloat16()
    expected = x.double() @ weight.double().T + bias.double()
    # Half a unit in the last place of bfloat16, and the rounding of the sums.
    torch.testing.assert_close(
        PanelProduct(weight, bias)(x).double(), expected, rtol=2**-8, atol=1e-5 * num_inputs**0.5
    )
    without = PanelProduct(weight)(x).double()
    torch.testing.assert_close(without, expected - bias.double(), rtol=2**-8, atol=1e-5 * num_inputs**0.5)


def test_a_row_has_the_same_bits_whatever_rows_stand_beside_it() -> None:
    torch.manual_seed(0)
    product, x = PanelProduct(torch.randn(64, 130).bfloat16()), torch.randn(40, 130).bfloat16()
    alone = torch.cat([product(row[None]) for row in x])
    for num_rows in range(1, 41):
        assert torch.equal(product(x[:num_rows]), alone[:num_rows])
        assert torch.equal(product(x[-num_rows:]), alone[-num_rows:])


@pytest.mark.parametrize("num_rows", [1, 2, 5, 16, 31])
def test_bits_do_not_depend_on_the_number_of_threads(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    product, x = PanelProduct(torch.randn(608, 514).bfloat16()), torch.randn(num_rows, 514).bfloat16()
    found = product(x)
    torch.set_num_threads(3 - torch.get_num_threads())
    assert torch.equal(product(x), found)


def test_rows_that_do_not_lie_side_by_side_are_read_as_they_are() -> None:
    torch.manual_seed(0)
    product, x = PanelProduct(torch.randn(32, 64).bfloat16()), torch.randn(4, 128).bfloat16()
    assert torch.equal(product(x[:, ::2]), product(x[:, ::2].contiguous()))
    assert torch.equal(product(x[::2, :64]), product(x[::2, :64].contiguous()))


@pytest.mark.parametrize("shape", [(33, 64), (32, 63)])
def test_matrices_that_do_not_fit_are_multiplied_otherwise(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(*shape).bfloat16(), torch.randn(3, shape[1]).bfloat16()
    assert not bfloat16.takes(weight)
    expected = x.double() @ weight.double().T
    torch.testing.assert_close(make_product(weight)(x).double(), expected, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("has_tiles", [False, True])
def test_where_the_cpu_multiplies_whole_tiles_the_library_does_it(
    monkeypatch: pytest.MonkeyPatch, has_tiles: bool
) -> None:
    abilities = {**torch.cpu.get_capabilities(), "amx_bf16": has_tiles}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: abilities)
    assert isinstance(make_product(torch.randn(64, 64).bfloat16()), PanelProduct) != has_tiles


@pytest.mark.parametrize("num_rows", [1, 5, 17])
def test_a_layer_in_two_calls_is_what_its_steps_compute_one_by_one(num_rows: int) -> None:
    torch.manual_seed(num_rows)
    size, attended, gated = 64, 96, 160
    steps = CpuSteps(RotaryTable(torch.ones(8), 1.0), torch.bfloat16)
    norm = SimpleNamespace(weight=torch.randn(size), variance_epsilon=1e-5)
    shapes = (128, size), (size, attended), (2 * gated, size), (size, gated)
    qkv, output, gate_up, down = (
        PanelProduct(torch.randn(shape).bfloat16() / shape[1] ** 0.5, torch.randn(shape[0]).bfloat16())
        for shape in shapes
    )
    results = []
    for kind in (CpuSteps, Steps):
        torch.manual_seed(0)
        hidden = torch.randn(num_rows, size)
        mlp = kind.mlp(steps, 0, output, norm, gate_up, nn.SiLU(), down)
        summand = mlp(hidden, torch.randn(num_rows, attended).bfloat16()).clone()
        heads = kind.heads(steps, 0, norm, qkv)
        results.append((summand, heads(hidden, None).clone(), heads(hidden, summand).clone(), hidden))
    for one_call, step_by_step in zip(*results, strict=True):
        assert torch.equal(one_call, step_by_step)

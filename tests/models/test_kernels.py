"""CPU kernels compute what torch's operators do, each row independently."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from outrider.models.cpu import kernels
from outrider.models.cpu.kernels import as_array

both_types = pytest.mark.parametrize("dtype", kernels.TYPES, ids=str)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Compares float32 to its rounding, and bfloat16 to a unit in the last place."""
    tolerance = 1e-5 if found.dtype is torch.float32 else 1 / 128
    torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=1e-5)


@both_types
def test_a_gate_is_silu_of_one_half_times_the_other(dtype: torch.dtype) -> None:
    gate = torch.cat((torch.linspace(-100, 100, 997), torch.tensor([0.0, -0.0, 1e-30])))
    gate_up = torch.cat((gate, torch.randn(1000))).to(dtype).repeat(3, 1)
    found = torch.empty(3, 1000, dtype=dtype)
    kernels.gate_silu(as_array(gate_up), as_array(found))
    assert_close(found, functional.silu(gate_up[:, :1000].float()) * gate_up[:, 1000:].float())


@both_types
@pytest.mark.parametrize("is_added", [True, False])
def test_the_residual_stream_is_added_to_and_normed(dtype: torch.dtype, is_added: bool) -> None:
    hidden, weight = 30 * torch.randn(5, 100), torch.randn(100)
    summand = torch.randn(5 if is_added else 0, 100).to(dtype)
    total = hidden + summand.float() if is_added else hidden.clone()
    found = torch.empty(5, 100, dtype=dtype)
    kernels.add_and_norm(as_array(hidden), as_array(summand), as_array(weight), 1e-6, as_array(found))
    assert_close(hidden, total)
    assert_close(found, functional.rms_norm(total, (100,), weight, 1e-6))


@both_types
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(64, 256), (63, 257), (1, 1), (130, 700)])
def test_a_small_product_is_one_of_matrices(dtype: torch.dtype, num_inputs: int, num_outputs: int) -> None:
    x, weight, bias = (
        torch.randn(6, num_inputs).to(dtype),
        torch.randn(num_inputs, num_outputs),
        torch.randn(num_outputs),
    )
    found = torch.empty(6, num_outputs, dtype=dtype)
    kernels.multiply(as_array(x), as_array(weight), as_array(bias), as_array(found))
    tolerance = 1e-4 if dtype is torch.float32 else 1 / 128
    torch.testing.assert_close(found.float(), x.float() @ weight + bias, rtol=tolerance, atol=1e-4)


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    values = torch.cat((torch.randn(1000), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 3e38, 1e-39])))
    found = torch.empty(1, len(values), dtype=torch.bfloat16)
    # One input is 1, so the sums are the weights themselves.
    one, nothing = torch.ones(1, 1, dtype=torch.bfloat16), torch.zeros(len(values))
    kernels.multiply(as_array(one), as_array(values[None]), as_array(nothing), as_array(found))
    assert torch.equal(found[0], values.to(torch.bfloat16))


def attended(
    queries: Tensor, data: Tensor, seen: list[Tensor], dtype: torch.dtype, groups: list[int], shared: list[int]
) -> Tensor:
    """Runs the kernel; a last row belongs to no session, and is filled with 7."""
    counts = np.array([len(places) for places in seen])
    found = torch.full((len(seen) + 1, *queries.shape[1:]), 7.0, dtype=dtype)
    num_columns = int(counts.max()) + queries.shape[-1]
    kernels.attend(
        as_array(torch.cat((queries, queries[:1]))),
        as_array(data),
        as_array(torch.cat(seen)),
        np.cumsum(counts) - counts,
        counts,
        np.array(groups),
        np.array(shared),
        np.empty((torch.get_num_threads(), kernels.GROUP, num_columns), dtype=np.float32),
        as_array(found),
    )
    return found


@pytest.mark.parametrize("queries_per_key", [1, 3])
@pytest.mark.parametrize("head_dim", [24, 7, 128])
@both_types
def test_rows_attend_to_the_places_that_they_are_given(dtype: torch.dtype, head_dim: int, queries_per_key: int) -> None:
    num_heads = 2
    data = torch.randn(2, num_heads, 300, head_dim)
    data[:, :, 299] = float("nan")  # no row sees it
    queries = torch.randn(4, num_heads, queries_per_key, head_dim) / head_dim**0.5
    seen = [torch.randperm(299)[:count] for count in (1, 7, 64, 131)]
    found = attended(queries, data, seen, dtype, [0, 1, 4], [1, 0])
    for row, places in enumerate(seen):
        keys, values = data[:, :, places]
        weights = torch.softmax(queries[row] @ keys.transpose(1, 2), -1)
        assert_close(found[row], weights @ values)
    assert (found[4] == 7).all()  # a row of no session


@pytest.mark.parametrize("head_dim", [64, 20])
@pytest.mark.parametrize("num_shared", [0, 1, 5, 50])
def test_rows_have_the_same_bits_whether_they_share_their_places_or_not(num_shared: int, head_dim: int) -> None:
    data, queries = torch.randn(2, 2, 300, head_dim), torch.randn(6, 2, 1, head_dim)
    places = torch.randperm(300)
    # Rows of a tree: a shared part, and then one part for each row.
    seen = [torch.cat((places[:50], places[50 + 30 * row : 51 + 31 * row])) for row in range(6)]
    alone = attended(queries, data, seen, torch.float32, list(range(7)), [0] * 6)
    together = attended(queries, data, seen, torch.float32, [0, 4, 6], [num_shared, num_shared])
    assert torch.equal(together, alone)


@pytest.mark.parametrize("are_normed", [False, True])
@both_types
def test_heads_are_normed_turned_and_stored(dtype: torch.dtype, are_normed: bool) -> None:
    num_rows, num_keys, per_key, head_dim = 4, 2, 3, 16
    num_queries = num_keys * per_key
    heads = torch.randn(num_rows, num_queries + 2 * num_keys, head_dim).to(dtype)
    angles = torch.randn(50, head_dim // 2)
    turns = torch.polar(torch.ones_like(angles), angles)
    position_ids, places = torch.tensor([3, 4, 9, 49]), torch.tensor([11, 2, 30])
    norms = torch.randn(num_queries + num_keys if are_normed else 0, head_dim)
    queries, data = torch.zeros(num_rows, num_keys, per_key, head_dim), torch.zeros(2, num_keys, 40, head_dim)
    kernels.store_heads(
        as_array(heads),
        as_array(torch.view_as_real(turns)),
        as_array(position_ids),
        as_array(places),
        as_array(norms),
        1e-6,
        0.25,
        as_array(queries),
        as_array(data),
    )
    turned = heads[:, : num_queries + num_keys].float()
    if are_normed:
        turned = functional.rms_norm(turned, (head_dim,), None, 1e-6) * norms
    pairs = torch.view_as_complex(turned.reshape(*turned.shape[:2], -1, 2)) * turns[position_ids][:, None]
    turned = torch.view_as_real(pairs).flatten(-2)
    assert_close(queries.flatten(1, 2), 0.25 * turned[:, :num_queries])
    # The last row belongs to no session: there is no place for it.
    expected = torch.zeros_like(data)
    expected[0][:, places] = turned[:3, num_queries:].transpose(0, 1)
    expected[1][:, places] = heads[:3, num_queries + num_keys :].float().transpose(0, 1)
    assert_close(data, expected)


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    x, weight, bias = torch.randn(9, 63), torch.randn(63, 300), torch.randn(300)

    def product(rows: Tensor) -> Tensor:
        out = torch.empty(len(rows), 300)
        kernels.multiply(as_array(rows), as_array(weight), as_array(bias), as_array(out))
        return out

    together = product(x)
    for row in range(9):
        assert torch.equal(product(x[row : row + 1])[0], together[row])
        assert torch.equal(product(x[row:])[0], together[row])

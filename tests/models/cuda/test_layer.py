"""Norms, gates, heads and moves on a GPU, interpreted: equal to the CPU's, and row by row the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.cpu import kernels
from outrider.models.torch.steps import torch_gate

pytest.importorskip("triton")

from outrider.models.cuda.heads import store_heads
from outrider.models.cuda.layer import add_and_norm, gate_silu
from outrider.models.cuda.moves import move_rows

pytestmark = pytest.mark.interpret

EPSILON = 1e-5
DTYPES = [torch.float32, torch.bfloat16]


def normal(*sizes: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found: Tensor, known: Tensor) -> None:
    """Equal up to the last bit of bfloat16, or the last but one of float32."""
    rtol = 2**-7 if found.dtype is torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.float(), known.float(), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [64, 100, 2560])
def test_a_norm_is_that_of_the_sum(dtype: torch.dtype, size: int) -> None:
    hidden, summand, weight = normal(3, size, dtype=dtype), normal(3, size, seed=1, dtype=dtype), normal(size, seed=2)
    out = torch.empty_like(hidden)
    stream = hidden + summand
    known = functional.rms_norm(stream.float(), (size,), weight, EPSILON).to(dtype)
    add_and_norm(hidden, summand, weight, EPSILON, out)
    assert torch.equal(hidden, stream)
    assert_close(out, known)


@pytest.mark.parametrize("num_parts", [2, 4])
def test_parts_of_a_sum_are_added_up_in_their_order_before_they_are_added_to_the_stream(num_parts: int) -> None:
    hidden, weight = normal(3, 100), normal(100, seed=2)
    # Of very different magnitudes, so that another order has other bits.
    parts = normal(num_parts, 3, 100, seed=1) * torch.tensor([1e4, 1.0, -1e4, 1e-2])[:num_parts, None, None]
    summand = parts[0].clone()
    for part in parts[1:]:
        summand += part
    stream, out = hidden + summand, torch.empty_like(hidden)
    add_and_norm(hidden, parts, weight, EPSILON, out)
    assert torch.equal(hidden, stream)
    assert_close(out, functional.rms_norm(stream, (100,), weight, EPSILON))


def test_a_norm_of_nothing_added_leaves_the_stream_as_it_is() -> None:
    hidden, weight = normal(2, 64), normal(64, seed=1).bfloat16()
    out = torch.empty(2, 64, dtype=torch.bfloat16)
    before = hidden.clone()
    add_and_norm(hidden, None, weight, EPSILON, out)
    assert torch.equal(hidden, before)
    assert_close(out, functional.rms_norm(hidden, (64,), weight.float(), EPSILON).bfloat16())


def test_a_norm_of_a_row_has_the_same_bits_alone() -> None:
    hidden, weight = normal(5, 320), normal(320, seed=1)
    together, alone = torch.empty(5, 320), torch.empty(1, 320)
    add_and_norm(hidden, None, weight, EPSILON, together)
    for row in range(5):
        add_and_norm(hidden[row : row + 1].clone(), None, weight, EPSILON, alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [96, 1025])
def test_a_gate_is_the_cpus(dtype: torch.dtype, size: int) -> None:
    gate_up = normal(3, 2 * size, dtype=dtype) * 5
    gate_up[0, 0] = -100  # its exponential overflows float32
    out = torch.empty(3, size, dtype=dtype)
    with np.errstate(over="ignore"):
        gate_silu(gate_up, out)
    assert_close(out, torch_gate(nn.SiLU())(gate_up.float()).to(dtype))


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys", "head_dim"), [(8, 2, 32), (3, 3, 64), (5, 1, 128)])
def test_heads_are_those_of_the_cpu(num_queries: int, num_keys: int, head_dim: int, has_norms: bool) -> None:
    num_rows, num_slots = 4, 12
    heads = normal(num_rows, (num_queries + 2 * num_keys) * head_dim)
    turns = normal(40, head_dim // 2, 2, seed=1)
    norms = normal(num_queries + num_keys, head_dim, seed=2) if has_norms else None
    positions, places = [7, 0, 39, 8], [3, 11, 0, 5]
    known, known_data = torch.zeros(num_rows, num_queries, head_dim), torch.zeros(2, num_keys, num_slots, head_dim)
    kernels.store_heads(
        heads.view(num_rows, -1, head_dim).numpy(),
        turns.numpy(),
        np.array(positions),
        np.array(places),
        (torch.empty(0, head_dim) if norms is None else norms).numpy(),
        EPSILON,
        1.0,
        known.view(num_rows, num_keys, -1, head_dim).numpy(),
        known_data.numpy(),
    )
    queries, data = torch.zeros_like(known), torch.zeros_like(known_data)
    rows = torch.tensor(positions, dtype=torch.int32), torch.tensor(places, dtype=torch.int32)
    store_heads(heads, turns, *rows, norms, EPSILON, queries, data)
    assert_close(queries, known)
    assert_close(data, known_data)
    # The first row by itself, in another place.
    alone, elsewhere = torch.zeros_like(queries[:1]), torch.zeros_like(data)
    store_heads(heads[:1], turns, rows[0][:1], rows[1][1:2], norms, EPSILON, alone, elsewhere)
    assert torch.equal(alone[0], queries[0])
    assert torch.equal(elsewhere[:, :, places[1]], data[:, :, places[0]])


def test_heads_of_bfloat16_are_rounded_once() -> None:
    heads, turns = normal(2, 4 * 32, dtype=torch.bfloat16), normal(4, 16, 2, seed=1)
    queries, data = torch.zeros(2, 2, 32, dtype=torch.bfloat16), torch.zeros(2, 1, 4, 32, dtype=torch.bfloat16)
    wide_queries, wide = queries.float(), data.float()
    rows = torch.tensor([1, 3], dtype=torch.int32)
    store_heads(heads, turns, rows, rows, None, 0.0, queries, data)
    store_heads(heads.float(), turns, rows, rows, None, 0.0, wide_queries, wide)
    assert torch.equal(queries, wide_queries.bfloat16())
    assert torch.equal(data, wide.bfloat16())


def test_rows_move_one_after_the_other_in_all_layers() -> None:
    data = normal(2, 2, 3, 16, 32)
    # The third move goes where the first one came from. The last move follows the sessions' spans, and is ignored.
    moves = [(4, 2), (6, 3), (7, 4), (12, 10), (1, 0)]
    known = data.clone()
    for old, new in moves[:4]:
        known[:, :, :, new] = known[:, :, :, old]
    spans = torch.tensor([(0, 3), (3, 4), (4, 5)], dtype=torch.int32)
    move_rows(data, torch.tensor(moves, dtype=torch.int32), spans, torch.tensor([2], dtype=torch.int32))
    assert torch.equal(data, known)

"""CPU twins of a GPU's kernels, by torch. They read the same tensors and no others, so a CPU can try a runner."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.noise import gumbel_of_words, hashed
from outrider.core.params import SamplingParams
from outrider.models.cuda.backend import CudaBackend
from outrider.models.cuda.graphs import Results
from outrider.models.cuda.inputs import SPLIT, Inputs, tile_of
from outrider.models.cuda.rows import ROW
from outrider.models.cuda.runner import CudaRunner
from outrider.models.cuda.steps import FEW_ROWS, Kernels
from outrider.models.filters import tempered_and_filtered
from outrider.models.runner import Runner

GARBAGE = 2**30
"""Fills what must not be read."""


def add_and_norm(hidden: Tensor, summand: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
    if summand is not None:
        hidden.add_(summand if summand.dim() == 2 else summand.sum(0))
    out.copy_(functional.rms_norm(hidden, weight.shape, weight, epsilon))


def gate_silu(gate_up: Tensor, out: Tensor) -> None:
    gated, up = gate_up.chunk(2, 1)
    out.copy_(functional.silu(gated) * up)


def norm_multiply(
    scaled: Tensor, squares: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    assert len(scaled) == FEW_ROWS
    factor = torch.rsqrt(squares[: len(scaled)] / scaled.shape[1] + epsilon)
    out.copy_(functional.linear((scaled * factor[:, None]).to(scaled.dtype), weight, bias))


def norm_gate(
    scaled: Tensor, squares: Tensor, epsilon: float, weight: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    gate_up = scaled.new_empty(len(scaled), len(weight))
    norm_multiply(scaled, squares, epsilon, weight, bias, gate_up)
    gate_silu(gate_up, out)


def multiply_add(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    hidden: Tensor,
    norm: Tensor,
    scaled: Tensor,
    squares: Tensor,
    *,
    is_early: bool,
) -> None:
    """Writes the squares of all columns as those of one part, and NaN after it."""
    assert len(hidden) == FEW_ROWS
    hidden.add_(functional.linear(x, weight, bias))
    torch.mul(hidden, norm, out=scaled)
    squares.fill_(float("nan"))
    squares[: len(hidden)] = hidden.square().sum(1)


def twin_splits_of(num_outputs: int, num_inputs: int) -> int:
    """Two for a matrix that is not square, one for a square one."""
    return 1 if num_outputs == num_inputs else 2


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """Multiplies row by row, because a row's bits may depend on nothing but the row."""
    parts = out if out.dim() == 3 else out[None]
    assert len(parts) in (1, twin_splits_of(*weight.shape))
    size = weight.shape[1] // len(parts)
    for number, part in enumerate(parts):
        own = slice(number * size, (number + 1) * size)
        for row, result in zip(x, part, strict=True):
            result.copy_(functional.linear(row[own], weight[:, own], None if number else bias))


def store_heads(
    heads: Tensor,
    turns: Tensor,
    positions: Tensor,
    places: Tensor,
    norms: Tensor | None,
    epsilon: float,
    queries: Tensor,
    layer_data: Tensor,
) -> None:
    num_queries, num_keys, head_dim = queries.shape[1], layer_data.shape[1], queries.shape[2]
    rows = heads.view(len(heads), -1, head_dim)
    turned, values = rows[:, : num_queries + num_keys], rows[:, num_queries + num_keys :]
    if norms is not None:
        turned = functional.rms_norm(turned, (head_dim,), None, epsilon) * norms
    pairs = torch.view_as_complex(turned.reshape(*turned.shape[:2], -1, 2).contiguous())
    turn = torch.view_as_complex(turns)[positions.long()].unsqueeze(1)
    found = torch.view_as_real(pairs * turn).flatten(-2)
    queries.copy_(found[:, :num_queries])
    layer_data[0, :, places.long()] = found[:, num_queries:].transpose(0, 1)
    layer_data[1, :, places.long()] = values.transpose(0, 1)


def attend(
    queries: Tensor, layer_data: Tensor, inputs: Inputs, block_size: int, scale: float, out: Tensor, _scratch: Any
) -> None:
    group = queries.shape[1] // layer_data.shape[1]
    items = inputs.work[: int(inputs.num_work[0])].tolist()
    for tile in sorted({tile for tile, _ in items}):
        first, count, table, root, tail, end = inputs.tiles[tile].tolist()
        assert count <= tile_of(group) // group
        first_item = next(number for number, item in enumerate(items) if item[0] == tile)
        num_splits = -(-end // SPLIT)
        # The place of its splits' results.
        before = [int(inputs.tiles[other, 1]) for other, split in items[:first_item] if split >= 0]
        assert items[first_item][1] < 0 or int(inputs.first_results[tile]) == sum(before)
        expected = [[tile, split] for split in range(num_splits)]
        assert items[first_item] == [tile, -1] or items[first_item : first_item + num_splits] == expected
        rows = inputs.row_list[first : first + count].long()
        places = [
            int(inputs.tables[table + p // block_size]) * block_size + p % block_size
            if p < root
            else int(inputs.tails[tail + p - root])
            for p in range(end)
        ]
        keys, values = (layer_data[half][:, places].repeat_interleave(group, 0) for half in (0, 1))
        # Row by row: a row's bits may depend only on what it sees.
        for row in rows.tolist():
            count = int(inputs.positions[row]) + 1
            scores = (queries[row, :, None] * keys[:, :count]).sum(-1) * scale
            out[row] = (scores.softmax(-1)[..., None] * values[:, :count]).sum(1).flatten()


def move_rows(data: Tensor, moves: Tensor, spans: Tensor, num: Tensor) -> None:
    for first, last in spans[: int(num[0])].tolist():
        for old, new in moves[first:last].tolist():
            data[:, :, :, new] = data[:, :, :, old]


def best_tokens(logits: Tensor, rows: Tensor, k: int) -> Tensor:
    scores = logits.clone()
    for of_row, own in zip(rows.numpy().view(ROW)[:, 0], scores, strict=True):
        if not of_row["temperature"]:
            continue
        p = SamplingParams(
            temperature=float(of_row["temperature"]),
            top_k=int(of_row["top_k"]),
            top_p=float(of_row["top_p"]),
            min_p=math.exp(of_row["log_min_p"]),
        )
        key = np.array([of_row["key"]], dtype=np.uint32)
        words = hashed(np.arange(len(own), dtype=np.uint32)[None, :], key[:, :1], key[:, 1:])
        own.copy_(tempered_and_filtered(own[None], [p])[0] + torch.from_numpy(gumbel_of_words(words)[0]))
    order = scores.argsort(stable=True, descending=True)[:, :k]
    return torch.stack([order.int(), scores.gather(1, order).view(torch.int32)])


def fake_graph(compute: Callable[[], Results]) -> Callable[[], Results]:
    """Repeats the call with the same tensors, as a graph does."""
    results = compute()

    def replay() -> Results:
        for result in results:
            result.fill_(float("nan") if result.is_floating_point() else GARBAGE)
        for result, found in zip(results, compute(), strict=True):
            result.copy_(found)
        return results

    return replay


@torch.inference_mode()
def spoil(runner: Runner) -> None:
    """Overwrites what is left of the last forward's inputs, which the next one must not read."""
    assert isinstance(runner, CudaRunner)
    packer = runner._forwards.packer
    for buffer in (packer._device, *packer._hosts):
        buffer.fill_(GARBAGE)


TWINS = Kernels(
    check_shape=lambda _group, _head_dim: None,
    add_and_norm=add_and_norm,
    gate_silu=gate_silu,
    store_heads=store_heads,
    attend=attend,
    make_scratch=lambda *_sizes: None,
    move_rows=move_rows,
    best_tokens=best_tokens,
    norm_multiply=norm_multiply,
    norm_gate=norm_gate,
    multiply_add=multiply_add,
    # For 16-bit matrices only, like the kernels.
    takes_invariant=lambda weight: weight.itemsize == 2,
    splits_of=twin_splits_of,
    multiply=multiply,
    compiler="torch",
)
TWIN_GPU = CudaBackend(TWINS, lambda: fake_graph)
EAGER_TWIN = CudaBackend(TWINS, None)

"""The functions that launch a GPU's kernels, up to the launch itself: each kernel is compiled once per model."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models.chains import Chain

pytest.importorskip("triton")

from outrider.models.cuda import attention, few_rows, heads, invariant, layer
from outrider.models.cuda.attention import Scratch, attend
from outrider.models.cuda.device_chains import launch
from outrider.models.cuda.few_rows import multiply_add, norm_gate, norm_multiply
from outrider.models.cuda.heads import store_heads
from outrider.models.cuda.layer import add_and_norm, gate_silu
from outrider.models.cuda.moves import move_rows
from outrider.models.cuda.steps import FEW_ROWS

pytestmark = pytest.mark.compile

HIDDEN, INNER, NUM_QUERIES, NUM_KEYS, HEAD_DIM = 4096, 12288, 32, 8, 128


class Launch(NamedTuple):
    """A kernel that was launched."""

    name: str
    hash: str
    """The hash of what it was compiled to."""
    is_early: bool
    """True if it may begin while the kernel before it ends."""
    waits: bool
    """True if it then waits for that kernel."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """All launches, for an H100 that this machine lacks."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    device = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", device)
    found: list[Launch] = []
    run = JITFunction.run

    def compile_alone(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        assert not warmup
        assert all(isinstance(size, int) and size > 0 for size in grid)
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        is_early = options.get("launch_pdl", False)
        found.append(Launch(self.fn.__name__, kernel.hash, is_early, "griddepcontrol.wait" in kernel.asm["ptx"]))

    monkeypatch.setattr(JITFunction, "run", compile_alone)
    return found


def num_compiled(launched: list[Launch]) -> dict[str, int]:
    """How many binaries each kernel was compiled to."""
    return Counter(name for name, _ in {(launch.name, launch.hash) for launch in launched})


def empty(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(sizes, dtype=dtype, device="meta")


def launch_layer(num_rows: int, num_slots: int, num_tiles: int) -> None:
    """Launches every kernel once, with the shapes of Qwen3-8B."""
    hidden = empty(num_rows, HIDDEN, dtype=torch.float32)
    add_and_norm(hidden, empty(num_rows, HIDDEN), empty(HIDDEN), 1e-6, empty(num_rows, HIDDEN))
    gate_silu(empty(num_rows, 2 * INNER), empty(num_rows, INNER))
    data = empty(2, 2, NUM_KEYS, num_slots, HEAD_DIM)
    rows, item = (empty(count, dtype=torch.int32) for count in (num_rows, num_tiles))
    queries = empty(num_rows, NUM_QUERIES, HEAD_DIM)
    norms = empty(NUM_QUERIES + NUM_KEYS, HEAD_DIM)
    heads = empty(num_rows, (NUM_QUERIES + 2 * NUM_KEYS) * HEAD_DIM)
    turns = empty(num_slots, HEAD_DIM // 2, 2, dtype=torch.float32)
    store_heads(heads, turns, rows, rows, norms, 1e-6, queries, data[1])
    names = ("tables", "tails", "tiles", "work", "num_work", "first_results")
    paths: Any = SimpleNamespace(positions=rows, row_list=rows, **dict.fromkeys(names, item))
    scratch = Scratch.make(num_tiles * NUM_QUERIES, num_tiles * NUM_KEYS, HEAD_DIM, torch.device("meta"))
    attend(queries, data[1], paths, 64, HEAD_DIM**-0.5, empty(num_rows, NUM_QUERIES * HEAD_DIM), scratch)
    move_rows(data, item, item, item)


def test_a_kernel_is_compiled_once_whatever_the_rows_and_the_pool(launched: list[Launch]) -> None:
    launch_layer(1, 64, 1)
    # A pool with more elements than 32 bits count.
    for num_rows, num_slots, num_tiles in ((16, 640, 3), (128, 64 * 40_000, 40), (2048, 640, 4096)):
        launch_layer(num_rows, num_slots, num_tiles)
    assert num_compiled(launched) == dict.fromkeys(
        ["add_and_norm_kernel", "gate_silu_kernel", "store_heads_kernel", "attend_kernel", "move_rows_kernel"], 1
    )


def launch_fused(num_rows: int) -> None:
    """Launches the fused products of a layer, except the one after attention."""
    squares = empty(HIDDEN * 32, dtype=torch.float32)
    hidden, inner, scaled = empty(num_rows, HIDDEN), empty(num_rows, INNER), empty(num_rows, HIDDEN)
    norm_multiply(hidden, squares, 1e-6, empty(6144, HIDDEN), None, empty(num_rows, 6144))
    norm_gate(hidden, squares, 1e-6, empty(2 * INNER, HIDDEN), None, inner)
    multiply_add(inner, empty(HIDDEN, INNER), None, hidden, empty(HIDDEN), scaled, squares, is_early=False)


def test_a_fused_product_is_compiled_once_for_a_number_of_rows(launched: list[Launch]) -> None:
    for _ in range(2):
        launch_fused(FEW_ROWS)
    assert num_compiled(launched) == {"few_rows_kernel": 3}


@pytest.mark.parametrize("can_overlap", [False, True])
def test_what_is_launched_early_waits_and_nothing_is_early_where_no_kernel_can_be(
    launched: list[Launch], monkeypatch: pytest.MonkeyPatch, can_overlap: bool
) -> None:
    for module in (attention, few_rows, heads, invariant, layer):
        monkeypatch.setattr(module, "overlaps", lambda _device: can_overlap)
    launch_layer(16, 640, 3)
    launch_fused(16)
    stream = empty(16, HIDDEN), empty(HIDDEN), empty(16, HIDDEN), empty(HIDDEN * 32, dtype=torch.float32)
    multiply_add(empty(16, HIDDEN), empty(HIDDEN, HIDDEN), None, *stream, is_early=True)
    invariant.multiply(empty(16, HIDDEN), empty(6144, HIDDEN), None, empty(16, 6144))
    assert all(each.waits for each in launched if each.is_early)
    # After another product, a fused one is not launched early, but lets the next kernel begin; moves take no part.
    early = Counter(each.name for each in launched if each.is_early)
    taking_part = Counter(each.name for each in launched if each.waits)
    if not can_overlap:
        assert not early
        assert not taking_part
        return
    once = ["add_and_norm_kernel", "gate_silu_kernel", "store_heads_kernel", "attend_kernel", "multiply_kernel"]
    assert early == dict.fromkeys([*once, "few_rows_kernel"], 1)
    assert taking_part == early | {"few_rows_kernel": 4}


def test_chains_are_judged_by_four_kernels_whatever_their_number_and_nothing_waits(
    launched: list[Launch],
) -> None:
    rows = SparseRow([5, 6, 7], [1, 2, 3]), None
    for lengths in ([0], [1], [4], [3, 0, 2], [4] * 32):
        chains = [
            Chain([Candidate(5, -1.0, rows[index % 2]) for index in range(length)], 5 * number, SamplingParams(), 0)
            for number, length in enumerate(lengths)
        ]
        # A tensor on `meta` has no values to ask for.
        launch(empty(5 * len(chains), 151_936, dtype=torch.float32), chains)
    assert num_compiled(launched) == dict.fromkeys(["_weigh", "_leave", "_offer_splits", "_settle"], 1)

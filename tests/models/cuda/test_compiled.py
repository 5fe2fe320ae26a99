"""Kernels compile for all GPUs that are supported, with the shapes of Qwen3-8B and Qwen3-0.6B."""

from __future__ import annotations

import re

import pytest

from tests.models.cuda.compiling import TARGETS, Compiled, begins_early, compiled

pytest.importorskip("triton")

from outrider.models.cuda import attention, few_rows, heads, invariant, layer, moves
from outrider.models.cuda.inputs import tile_of
from outrider.models.cuda.overlap import CAPABILITY
from outrider.models.cuda.steps import FEW_ROWS

pytestmark = pytest.mark.compile

HIDDEN, INNER, NUM_QUERIES, NUM_KEYS, HEAD_DIM = 4096, 12288, 32, 8, 128
MOST_SHARED = 99 * 1024
"""Shared memory of a program on a smaller GPU, such as one of compute capability 8.9."""
SIZES = {"bf16": 2, "fp16": 2, "fp32": 4}


def of_type(type_: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, type_)


def is_early(capability: int) -> bool:
    """True for GPUs that can start a kernel while the one before it ends."""
    return capability >= 10 * CAPABILITY


def attend_for(capability: int, type_: str = "bf16", group: int = 4, head_dim: int = HEAD_DIM) -> Compiled:
    pointers = of_type(type_, "queries", "data", "out") | of_type("fp32", "sums", "peaks", "totals")
    pointers |= of_type("i32", "positions", "tables", "tails", "row_list", "tiles", "work", "num_work", "first_results")
    return compiled(
        attention.attend_kernel,
        pointers | of_type("i32", "counters"),
        {"scale": "fp32", "half_stride": "i64", "head_stride": "i64"},
        {
            "NUM_HEADS": NUM_KEYS,
            "GROUP": group,
            "HEAD_DIM": head_dim,
            "BLOCK_SIZE": 64,
            "TILE": tile_of(group),
            "KEYS": attention.KEYS,
            "SPLIT": attention.SPLIT,
            "IS_EARLY": is_early(capability),
        },
        capability,
        num_warps=attention.NUM_WARPS,
        num_stages=attention.stages_of(head_dim, SIZES[type_]),
    )


@pytest.mark.parametrize("capability", TARGETS)
def test_attention_runs_on_the_units_for_products_and_in_registers(capability: int) -> None:
    found = attend_for(capability)
    assert found.num_spilled == 0
    # Three programs on a processor of compute capability 9: 65 536 registers for 384 threads.
    assert found.num_registers <= 168
    # A tile of 16 lanes fills it.
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in found.ptx
    # Keys and values are copied while others are used in products.
    assert "cp.async" in found.ptx
    # It looks up how much work there is.
    assert begins_early(found.ptx, num_reads=1) == is_early(capability)
    # The last program of a tile sees what the others wrote.
    assert "atom.global.gpu.acq_rel.add.u32" in found.ptx


@pytest.mark.parametrize(
    ("type_", "group", "head_dim"), [("fp16", 2, 128), ("bf16", 7, 64), ("bf16", 8, 32), ("bf16", 32, 128)]
)
def test_attention_compiles_for_other_models(type_: str, group: int, head_dim: int) -> None:
    found = attend_for(90, type_, group, head_dim)
    assert not found.is_spilled_by_products
    # 64 lanes fill the instructions that work on whole tiles.
    assert ("wgmma.mma_async" in found.ptx) == (tile_of(group) == 64)
    assert ("mma.sync" in found.ptx) == (tile_of(group) == 16)


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("type_", "head_dim"), [("bf16", 128), ("fp16", 256), ("fp32", 128), ("fp32", 64)])
def test_attention_fits_into_the_shared_memory_of_a_small_gpu(capability: int, type_: str, head_dim: int) -> None:
    assert attend_for(capability, type_, 4, head_dim).num_shared <= MOST_SHARED


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("type_", ["bf16", "fp32"])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_a_norm_stays_in_registers(capability: int, type_: str, num_parts: int) -> None:
    found = compiled(
        layer.add_and_norm_kernel,
        of_type(type_, "hidden", "weight") | {"summand": "bf16" if num_parts == 1 else "fp32", "out": "bf16"},
        {"epsilon": "fp32", "part_stride": "i64"},
        {"SIZE": HIDDEN, "BLOCK": HIDDEN, "NUM_PARTS": num_parts, "IS_EARLY": is_early(capability)},
        capability,
        num_warps=layer.norm_warps(HIDDEN),
    )
    assert found.num_spilled == 0
    assert found.num_shared < 16_384
    assert "ld.global.v4.b32" in found.ptx, "reads are 16 bytes wide"
    # Each of 256 threads reads its 16 weights.
    assert begins_early(found.ptx, num_reads=SIZES[type_] * 16 // 16) == is_early(capability)


@pytest.mark.parametrize("capability", TARGETS)
def test_a_gate_stays_in_registers(capability: int) -> None:
    found = compiled(
        layer.gate_silu_kernel,
        of_type("bf16", "gate_up", "out"),
        {},
        {"SIZE": INNER, "BLOCK": layer.GATE_BLOCK, "IS_EARLY": is_early(capability)},
        capability,
        num_warps=4,
    )
    assert found.num_spilled == found.num_shared == 0
    assert "ld.global.v4.b32" in found.ptx
    assert begins_early(found.ptx) == is_early(capability)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_stay_in_registers(capability: int, has_norms: bool) -> None:
    found = compiled(
        heads.store_heads_kernel,
        of_type("bf16", "heads", "norms", "queries", "data")
        | of_type("fp32", "turns")
        | of_type("i32", "positions", "places"),
        {"epsilon": "fp32", "half_stride": "i64", "head_stride": "i64"},
        {
            "NUM_QUERIES": NUM_QUERIES,
            "NUM_KEYS": NUM_KEYS,
            "HEAD_DIM": HEAD_DIM,
            "HAS_NORMS": has_norms,
            "BLOCK": heads.HEADS_BLOCK,
            "IS_EARLY": is_early(capability),
        },
        capability,
        num_warps=4,
    )
    assert found.num_spilled == 0
    assert found.num_shared < 8192
    # A position and its rotation, a place, weights.
    assert begins_early(found.ptx, num_reads=3 + has_norms) == is_early(capability)


@pytest.mark.parametrize("capability", TARGETS)
def test_moves_stay_in_registers(capability: int) -> None:
    found = compiled(
        moves.move_rows_kernel,
        of_type("bf16", "data") | of_type("i32", "moves", "spans", "num"),
        {"layer_stride": "i64", "head_stride": "i64"},
        {"NUM_HEADS": 2 * NUM_KEYS, "HEADS_BLOCK": 2 * NUM_KEYS, "HEAD_DIM": HEAD_DIM},
        capability,
        num_warps=4,
    )
    assert found.num_spilled == found.num_shared == 0


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("num_rows", [FEW_ROWS])
@pytest.mark.parametrize(
    ("num_inputs", "num_outputs", "kind", "has_bias"),
    [
        (1024, 4096, "", False),
        (1024, 3072, "HAS_GATE", False),
        (3072, 1024, "ADDS", False),
        (4096, 12288, "HAS_GATE", False),
        (12288, 4096, "ADDS", False),
        (3584, 4608, "", True),  # Qwen2.5-7B
    ],
)
def test_fused_products_read_ahead_and_stay_in_registers(
    capability: int, num_rows: int, num_inputs: int, num_outputs: int, kind: str, has_bias: bool
) -> None:
    outputs, inputs = few_rows.outputs_of(num_outputs), few_rows.inputs_of(num_inputs)
    num_tile_rows = num_rows + outputs * (2 if kind == "HAS_GATE" else 1)
    num_stages = few_rows.stages_of(num_tile_rows * few_rows.GROUPS * inputs * SIZES["bf16"])
    num_parts = num_inputs // few_rows.outputs_of(num_inputs)
    found = compiled(
        few_rows.few_rows_kernel,
        of_type("bf16", "x", "weight", "bias", "out", "norm", "scaled") | of_type("fp32", "squares"),
        {"epsilon": "fp32"},
        {
            "NUM_INPUTS": num_inputs,
            "NUM_OUTPUTS": num_outputs,
            "NUM_ROWS": num_rows,
            "OUTPUTS": outputs,
            "GROUPS": few_rows.GROUPS,
            "INPUTS": inputs,
            "NUM_PARTS": num_parts,
            "PARTS": 1 << (num_parts - 1).bit_length(),
            "HAS_BIAS": has_bias,
            "HAS_GATE": kind == "HAS_GATE",
            "ADDS": kind == "ADDS",
            "TAKES_PART": is_early(capability),
        },
        capability,
        num_warps=few_rows.GROUPS,
        num_stages=num_stages,
    )
    assert found.num_spilled == 0
    assert found.num_shared <= MOST_SHARED
    assert "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" in found.ptx
    # Tensor cores read 16 bytes a thread at a time, without a new layout.
    assert "ldmatrix.sync.aligned.m8n8.x4" in found.ptx
    assert "cp.async.cg.shared.global" in found.ptx
    # The loop goes on while later tiles are under way: x and weights; a gate has two tiles of weights.
    num_groups = 3 if kind == "HAS_GATE" else 2
    assert min(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", loop_of(found.ptx)))) == (
        num_groups * (num_stages - 2)
    )
    assert num_stages > 2
    assert begins_early(found.ptx) == is_early(capability)


def loop_of(ptx: str) -> str:
    """The instructions between the only label that a jump returns to and that jump."""
    for label in re.finditer(r"^(\$L__BB\d+_\d+):", ptx, re.MULTILINE):
        jump = re.search(rf"\bbra(?:\.uni)?\s+{re.escape(label[1])};", ptx[label.end() :])
        if jump:
            return ptx[label.end() : label.end() + jump.end()]
    raise AssertionError("there is no loop")


@pytest.mark.parametrize("num_rows", [16, 32, 64, 128, 512])
@pytest.mark.parametrize(
    ("num_outputs", "num_parts", "type_"), [(6144, 1, "bf16"), (24_576, 1, "bf16"), (4096, 4, "fp32")]
)
def test_invariant_products_read_ahead_and_stay_in_registers(
    num_rows: int, num_outputs: int, num_parts: int, type_: str
) -> None:
    rows, outputs, inputs, num_warps = invariant.tile_of(num_rows, num_outputs, num_parts)
    num_stages = invariant.stages_of(rows, outputs, inputs)
    found = compiled(
        invariant.multiply_kernel,
        of_type("bf16", "x", "weight", "bias") | of_type(type_, "out"),
        {"part_stride": "i64", **of_type("i32", "num_inputs", "num_outputs", "part_size")},
        {
            "ROWS": rows,
            "OUTPUTS": outputs,
            "INPUTS": inputs,
            "HAS_BIAS": False,
            "IS_EARLY": True,
        },
        10 * invariant.CAPABILITY,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    assert found.num_spilled == 0
    assert found.num_shared <= 227 * 1024
    assert num_stages > 2
    # Weights are the M side, so the arithmetic of a row is the same for any number of rows.
    assert f"wgmma.mma_async.sync.aligned.m64n{rows}k16" in found.ptx
    assert begins_early(found.ptx)
    assert "cp.async.cg.shared.global" in found.ptx

"""Kernels of the ratio rule compile for all GPUs that are supported, and round as torch does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.models.cuda.compiling import TARGETS, Compiled, compiled

pytest.importorskip("triton")

from outrider.models.cuda import chains
from outrider.models.cuda.rows import CHAIN_WORDS, ROW_WORDS, TESTED_WORDS

pytestmark = pytest.mark.compile

WORDS = {"ROW_WORDS": ROW_WORDS, "TESTED_WORDS": TESTED_WORDS, "WEIGHED_WORDS": chains.WEIGHED_WORDS}


def weighing(capability: int) -> Compiled:
    constants: dict[str, Any] = chains.WEIGHING | WORDS
    num_warps = constants.pop("num_warps")
    pointers = dict.fromkeys(["logits", "row_floats", "weighed_floats"], "fp32")
    pointers |= dict.fromkeys(["row_doubles", "tested_doubles", "claimed_shares"], "fp64")
    pointers |= dict.fromkeys(["rows", "tested", "claimed_ids", "weighed"], "i32")
    scalars = {"stride": "i32", "vocab_size": "i32"}
    odd = ["vocab_size"]
    return compiled(chains._weigh, pointers, scalars, constants, capability, odd=odd, num_warps=num_warps)


def leaving(capability: int) -> Compiled:
    constants: dict[str, Any] = chains.LEAVING | WORDS | {"CHAIN_WORDS": CHAIN_WORDS}
    num_warps = constants.pop("num_warps")
    pointers = dict.fromkeys(["logits", "row_floats", "weighed_floats", "residuals", "drawn_floats"], "fp32")
    pointers |= dict.fromkeys(["claimed_shares", "drawn_doubles"], "fp64")
    pointers |= dict.fromkeys(["rows", "tested", "claimed_ids", "chains", "weighed", "num_kept", "drawn"], "i32")
    scalars = {"stride": "i32", "vocab_size": "i32"}
    odd = ["vocab_size"]
    return compiled(chains._leave, pointers, scalars, constants, capability, odd=odd, num_warps=num_warps)


@pytest.mark.parametrize("capability", TARGETS)
def test_chains_are_judged_in_registers_and_by_exact_divisions(capability: int) -> None:
    for found, num_registers in ((weighing(capability), 128), (leaving(capability), 64)):
        assert found.num_spilled == 0
        assert found.num_registers <= num_registers
        assert found.num_shared < 50_000
        assert "div.rn.f32" in found.ptx
        assert not re.search(r"div\.(approx|full)\.", found.ptx)
        # p is compared with a float64.
        assert "fma.rn.f64" in found.ptx

"""Kernels that draw compile for all GPUs that are supported, and round as numpy does."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.models.cuda.compiling import TARGETS, Compiled, compiled

pytest.importorskip("triton")

from outrider.models.cuda import draws
from outrider.models.cuda.rows import MAX_NUM_BEST, ROW_WORDS

pytestmark = pytest.mark.compile


def constants_of(configuration: dict[str, int], **others: int) -> tuple[dict[str, Any], int]:
    constants = {**configuration, "ROW_WORDS": ROW_WORDS, **others}
    return constants, constants.pop("num_warps")


def offering(capability: int, k: int) -> Compiled:
    constants, num_warps = constants_of(draws.OFFERING if k == 1 else draws.OFFERING_SEVERAL, K=k)
    pointers = dict.fromkeys(["logits", "row_floats", "scores_out", "peaks"], "fp32")
    pointers |= dict.fromkeys(["row_words", "slots", "ids_out"], "i32")
    scalars = {"stride": "i32", "vocab_size": "i32"}
    return compiled(
        draws._offer_splits, pointers, scalars, constants, capability, odd=["vocab_size"], num_warps=num_warps
    )


def settling(capability: int, k: int) -> Compiled:
    constants, num_warps = constants_of(draws.SETTLING, K=k, SPLITS=32 if k == 1 else 64)
    pointers = dict.fromkeys(["logits", "row_floats", "split_scores", "peaks", "scores_out"], "fp32")
    pointers |= dict.fromkeys(["row_words", "split_ids", "ids_out"], "i32") | {"row_doubles": "fp64"}
    scalars = dict.fromkeys(["stride", "vocab_size", "num_splits"], "i32")
    odd = ["vocab_size", "num_splits"]
    return compiled(draws._settle, pointers, scalars, constants, capability, odd=odd, num_warps=num_warps)


@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("k", [1, MAX_NUM_BEST])
def test_draws_stay_in_registers_and_round_to_the_nearest(capability: int, k: int) -> None:
    for found in (offering(capability, k), settling(capability, k)):
        assert found.num_spilled == 0
        assert found.num_shared < 50_000
        assert "div.rn.f32" in found.ptx
        assert not re.search(r"div\.(approx|full)", found.ptx)
        # Tempered logits and noise are added without flushing subnormal numbers to zero.
        assert not re.search(r"(add|sub|mul)(\.rn)?\.ftz", found.ptx)
        # The double logarithm is computed in float64.
        assert "fma.rn.f64" in found.ptx

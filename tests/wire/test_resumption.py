"""A text goes on elsewhere only where it goes on as it was begun."""

from __future__ import annotations

import pytest

from outrider.v1.types_pb2 import ModelInfo
from outrider.wire.resumption import difference

BEGUN = {"model_id": "m", "tokenizer_hash": "t", "dtype": "bfloat16", "numerics_id": "a"}


def info(**changes: str) -> ModelInfo:
    return ModelInfo(**{**BEGUN, **changes})


@pytest.mark.parametrize(
    ("here", "problem"),
    [
        (info(), ""),
        (info(dtype="float32"), "serves m in float32; the generation was begun by m in bfloat16"),
        (info(model_id="n"), "serves n in bfloat16; the generation was begun by m in bfloat16"),
        (info(numerics_id="b"), "computes m with other weights, libraries or threads, or on another processor"),
        (info(numerics_id=""), "computes m with other weights, libraries or threads, or on another processor"),
    ],
)
def test_what_would_change_a_text_is_named(here: ModelInfo, problem: str) -> None:
    assert difference(info(), here) == problem


def test_who_has_promised_no_bits_is_continued_anywhere() -> None:
    assert difference(info(numerics_id=""), info()) == ""

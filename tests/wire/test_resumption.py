"""A text goes on elsewhere only where it goes on as it was begun."""

from __future__ import annotations

import pytest

from outrider.v1.types_pb2 import ModelInfo, SamplingParams
from outrider.v1.verifier_pb2 import GenerateRequest
from outrider.wire.resumption import difference, with_sampling

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


@pytest.mark.parametrize(
    ("given", "max_tokens", "is_wish"),
    [({}, 40, True), ({"min_tokens": 60}, 60, True), ({"max_tokens": 50}, 50, False)],
)
def test_a_requests_own_values_come_before_the_models(given: dict[str, int], max_tokens: int, is_wish: bool) -> None:
    model = ModelInfo(default_sampling=SamplingParams(temperature=0, top_p=0.9, max_tokens=40))
    request = GenerateRequest(sampling=SamplingParams(**given, top_p=1, stop=["a"]))
    whole = with_sampling(request, model)
    drawn = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}
    assert whole.sampling == SamplingParams(**{**drawn, **given, "max_tokens": max_tokens}, stop=["a"])
    assert whole.clamp_max_tokens == is_wish
    assert with_sampling(whole, model) == whole

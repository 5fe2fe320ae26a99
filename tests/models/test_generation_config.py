"""The default sampling of a model's own generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.models.generation_config import default_sampling
from outrider.models.loading import CannotLoadModel

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "pad_token_id": 1}


def checkpoint(folder: Path, text: str) -> str:
    (folder / "generation_config.json").write_text(text)
    return str(folder)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95}),
        (
            {"min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 9},
            {"min_p": 0.1, "repetition_penalty": 1.1, "max_tokens": 9},
        ),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"temperature": None, "top_k": -1, "do_sample": None, "num_beams": 4}, {"top_k": 0}),
        ({}, {}),
    ],
)
def test_fields_of_sampling_are_taken(tmp_path: Path, given: dict[str, object], found: dict[str, float]) -> None:
    assert default_sampling(checkpoint(tmp_path, json.dumps(given))) == found


def test_a_model_without_the_file_asks_for_nothing(tmp_path: Path) -> None:
    assert default_sampling(str(tmp_path)) == {}
    assert default_sampling("nobody/nothing") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"temperature": -1}', "temperature must be finite and >= 0, got -1"),
        ('{"temperature": "0.6"}', "temperature must be a number, got '0.6'"),
        ('{"top_p": true}', "top_p must be a number, got True"),
        ('{"top_p": 0}', r"top_p must be in \(0, 1\], got 0"),
        ('{"top_k": 2.5}', r"top_k must be a whole number in \[-1, 2147483647\], got 2.5"),
        ('{"min_p": NaN}', r"min_p must be in \[0, 1\], got nan"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be finite and > 0, got 0"),
        ('{"max_new_tokens": 0}', r"max_new_tokens must be a whole number in \[1, 2147483647\], got 0"),
        ('{"do_sample": "no"}', "do_sample must be true or false, got 'no'"),
        ("[1]", "it must be a JSON object, got list"),
        ("{", "Expecting property name"),
    ],
)
def test_a_value_that_no_request_may_have_is_refused_by_file_and_field(tmp_path: Path, text: str, problem: str) -> None:
    folder = checkpoint(tmp_path, text)
    expected = rf"^--generation-config auto: {folder}/generation_config\.json: {problem}.*; with none it is left out$"
    with pytest.raises(CannotLoadModel, match=expected):
        default_sampling(folder)

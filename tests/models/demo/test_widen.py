"""Widened demo models: larger, with the same logits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.widen import QWEN3_0_6B, QWEN3_8B, Size, randomise, widen
from outrider.models.loading import build_hf_model, load_model
from outrider.models.runner import Segment

# Twice as wide as the demo target in every direction, with two heads of queries for each of keys.
WIDE = Size(512, 1376, 8, 8, 4, 128, 4096, is_tied=False, max_positions=512)
WIDE_DRAFT = Size(384, 896, 3, 6, 3, 128, 4096, is_tied=True, max_positions=512)
PROMPT = "def add(a, b):\n    return"


def widened(name: str, size: Size, folder: Path) -> str:
    model, _ = build_hf_model(f"demo/{name}")
    widen(model, DEMO_FOLDER / name, size, folder, dtype=torch.float32)
    return str(folder)


@torch.inference_mode()
def logits_of(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    return logits


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size"), [("target", WIDE), ("draft", WIDE_DRAFT)])
def test_transformers_and_the_runner_find_the_trained_logits_in_a_widened_model(
    name: str, size: Size, tmp_path: Path
) -> None:
    trained, tokenizer = build_hf_model(f"demo/{name}")
    # Long enough for positions to matter.
    token_ids = tokenizer(PROMPT * 12)["input_ids"]
    expected = logits_of(trained, token_ids)
    folder = widened(name, size, tmp_path)
    num_ids = expected.shape[1]
    loaded = load_model(folder, dtype="float32")
    runner = loaded.runner
    theirs = logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), token_ids)
    ours = runner.forward([Segment(runner.new_cache(), token_ids, len(token_ids))])
    for logits in (theirs, ours):
        assert logits.shape[1] == size.vocab_size
        torch.testing.assert_close(logits[:, :num_ids], expected, rtol=1e-4, atol=1e-4)
        # No temperature draws an id past the vocabulary.
        assert (logits[:, num_ids:].amax(1) < expected.amin(1) - 100).all()
    # A draw is as wide as the head.
    assert loaded.vocab_size == size.vocab_size


@pytest.mark.slow
def test_a_widened_model_is_made_of_random_numbers_where_they_change_nothing(tmp_path: Path) -> None:
    folder = widened("target", WIDE, tmp_path)
    weights = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
        for index in range(WIDE.num_layers):
            assert (weights[f"model.layers.{index}.{name}.weight"] == 0).float().mean() < 0.55


@pytest.mark.slow
def test_its_tokenizer_reads_a_text_as_the_trained_one_does(tmp_path: Path) -> None:
    folder = widened("target", WIDE, tmp_path)
    ours, theirs = AutoTokenizer.from_pretrained(folder), AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    assert len(ours) == WIDE.vocab_size
    text = PROMPT + " <unused-3000> \N{SNOWMAN}"
    assert ours(text)["input_ids"] == theirs(text)["input_ids"]


@pytest.mark.parametrize(
    ("size", "field"),
    [
        (replace(WIDE, hidden_size=256), "hidden_size"),
        (replace(WIDE, num_key_value_heads=2), "num_key_value_heads"),
        (replace(WIDE, head_dim=96), "head_dim"),
        (replace(WIDE, num_layers=5, vocab_size=100), "num_layers, vocab_size"),
    ],
)
def test_a_shape_that_is_too_small_is_refused_by_its_names(size: Size, field: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"does not fit into that shape: {field}$"):
        widened("target", size, tmp_path)


def test_a_random_model_has_the_shape_that_it_is_asked_for(tmp_path: Path) -> None:
    size = Size(64, 96, 2, 4, 2, 32, 4096, is_tied=True, max_positions=512)
    randomise(size, DEMO_FOLDER / "target", tmp_path, device="cpu", dtype=torch.float32)
    runner = load_model(str(tmp_path)).runner
    assert runner.forward([Segment(runner.new_cache(), [1, 2, 3], 1)]).isfinite().all()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "qwen3"


@pytest.mark.parametrize(("size", "billions"), [(QWEN3_8B, 8.19), (QWEN3_0_6B, 0.596)])
def test_the_named_sizes_have_the_parameters_of_the_models_they_are_named_after(size: Size, billions: float) -> None:
    attention = 2 * size.hidden_size * size.head_dim * (size.num_heads + size.num_key_value_heads)
    layer = attention + 3 * size.hidden_size * size.intermediate_size
    ends = size.vocab_size * size.hidden_size * (1 if size.is_tied else 2)
    assert (size.num_layers * layer + ends) / 1e9 == pytest.approx(billions, rel=0.005)

"""`outrider draft pack`: one GGUF file, with the weights of the folder and the tokenizer of the target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import AutoModelForCausalLM, PreTrainedModel
from typer.testing import CliRunner

from outrider.models.loading import build_hf_model, load_model
from outrider_draft.app import app
from tests.support import tiny_models
from tests.support.gguf_files import after_storing, write_gguf

HEAD = list(range(3, 90, 2))
FAMILIES = sorted(tiny_models.CONFIGS)


def run(*words: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, words)))


def draft_for(target: str | Path, folder: Path) -> Path:
    made = run("new", "--target", target, "--out", folder, "--hidden", "32", "--layers", "2")
    assert made.exit_code == 0, made.output
    return folder


@torch.inference_mode()
def logits_of(model: PreTrainedModel) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([tiny_models.text(40)]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_draft_is_the_draft(family: str, tmp_path: Path) -> None:
    target = write_gguf(tmp_path / "target.gguf", tiny_models.build(family))
    folder, packed = draft_for(target, tmp_path / "draft"), tmp_path / "draft.gguf"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"head_token_ids": HEAD}))
    done = run("pack", folder, "--out", packed)
    assert done.exit_code == 0, done.output
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for parameter in expected.parameters():
        parameter.data = after_storing(parameter.data, GGMLQuantizationType.Q8_0)
    torch.testing.assert_close(
        logits_of(build_hf_model(str(packed), "float32").model), logits_of(expected), rtol=0, atol=1e-6
    )
    draft, whole = load_model(str(packed)), load_model(str(target))
    assert draft.tokenizer_hash == whole.tokenizer_hash
    assert draft.runner.head_token_ids is not None
    assert draft.runner.head_token_ids.tolist() == HEAD


def test_a_draft_that_a_file_cannot_hold_is_refused_in_one_line(tmp_path: Path) -> None:
    of_folder = draft_for("demo/target", tmp_path / "draft")
    refused = run("pack", of_folder, "--out", tmp_path / "draft.gguf")
    assert refused.exit_code == 2
    assert "DIR must be a draft whose target is a GGUF file on this machine" in refused.stderr
    target = write_gguf(tmp_path / "target.gguf", tiny_models.build("llama"))
    folder = draft_for(target, tmp_path / "other")
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    refused = run("pack", folder, "--out", tmp_path / "draft.gguf")
    assert refused.exit_code == 2
    assert "its positions are scaled" in refused.stderr
    assert not (tmp_path / "draft.gguf").exists()

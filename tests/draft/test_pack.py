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
from outrider.models.names import why_no_model
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


def test_a_draft_may_leave_to_its_target_what_they_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    target = tmp_path / "cache" / "outrider" / "models" / "smollm2-135m.gguf"
    target.parent.mkdir(parents=True)
    write_gguf(target, tiny_models.build("llama"), GGMLQuantizationType.Q8_0)
    folder, packed = tmp_path / "draft", tmp_path / "draft.gguf"
    assert run("new", "--target", "smollm2-135m", "--out", folder, "--hidden", "64", "--layers", "2").exit_code == 0
    assert run("pack", folder, "--out", packed, "--layers-only").exit_code == 0
    whole = tmp_path / "whole.gguf"
    assert run("pack", folder, "--out", whole).exit_code == 0
    assert packed.stat().st_size < whole.stat().st_size
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = dict(build_hf_model("smollm2-135m", "float32").model.named_parameters())
    for name, parameter in expected.named_parameters():
        is_shared = name in ("model.embed_tokens.weight", "lm_head.weight")
        parameter.data = theirs[name] if is_shared else after_storing(parameter.data, GGMLQuantizationType.Q8_0)
    draft = load_model(str(packed), dtype="float32")
    torch.testing.assert_close(
        logits_of(build_hf_model(str(packed), "float32").model), logits_of(expected), rtol=0, atol=1e-6
    )
    assert draft.tokenizer_hash == load_model("smollm2-135m").tokenizer_hash
    target.unlink()
    assert "which is not on this machine" in why_no_model(str(packed))
    refused = run("pack", draft_for("demo/target", tmp_path / "other"), "--out", packed, "--layers-only")
    assert refused.exit_code == 2


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

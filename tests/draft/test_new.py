"""`outrider draft new`: a folder that the library and the runner open, for each family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from typer.testing import CliRunner

from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.loading import load_model
from outrider_draft.app import app
from tests.support import tiny_models


def new(target: str | Path, out: Path, *flags: str | Path) -> Any:
    return CliRunner().invoke(app, ["new", "--target", str(target), "--out", str(out), *map(str, flags)])


def opened(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model


@pytest.fixture(scope="module", params=tiny_models.CONFIGS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of each family, with the demo pair's tokenizer."""
    folder = tmp_path_factory.mktemp("models") / request.param
    model = tiny_models.build(request.param)
    model.resize_token_embeddings(2048)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(DEMO_FOLDER / "target").save_pretrained(folder)
    return folder


def test_a_draft_of_the_targets_width_has_its_first_layers(target: Path, tmp_path: Path) -> None:
    made = new(target, tmp_path / "draft", "--layers", "2", "--hidden", "64")
    assert made.exit_code == 0, made.output
    mine, theirs = opened(tmp_path / "draft").state_dict(), opened(target).state_dict()
    for name, weight in mine.items():
        assert torch.equal(weight, theirs[name].bfloat16().float()), name


def test_a_narrow_draft_is_served(target: Path, tmp_path: Path) -> None:
    made = new(target, tmp_path / "draft", "--hidden", "32", "--layers", "2")
    assert made.exit_code == 0, made.output
    assert "2 layers, 32 wide" in made.stdout
    draft, whole = load_model(str(tmp_path / "draft")), load_model(str(target))
    assert draft.tokenizer_hash == whole.tokenizer_hash
    assert draft.vocab_size == whole.vocab_size


def test_the_usual_draft_costs_an_eighth_at_most(tmp_path: Path) -> None:
    made = new("demo/target", tmp_path / "draft")
    assert made.exit_code == 0, made.output
    ratio = float(made.stdout.rpartition("1 to ")[2].rstrip(")\n"))
    assert 8 <= ratio <= 12
    assert list((tmp_path).iterdir()) == [tmp_path / "draft"]


def test_a_donor_gives_its_layers(tmp_path: Path) -> None:
    made = new("demo/target", tmp_path / "draft", "--donor", "demo/draft", "--layers", "1")
    assert made.exit_code == 0, made.output
    mine, donor = opened(tmp_path / "draft").state_dict(), opened(DEMO_FOLDER / "draft").state_dict()
    assert all(torch.equal(weight, donor[name]) for name, weight in mine.items())


@pytest.mark.slow
def test_what_does_not_fit_is_refused_in_one_line(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").write_text("mine")
    other = tmp_path / "other"
    tiny_models.build("llama").save_pretrained(other)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_FOLDER / "target")
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    out = tmp_path / "draft"
    for target, folder, flags, words in (
        ("demo/target", taken, (), "--out must be a folder that does not exist yet, or is empty"),
        ("demo/nothing", out, (), "--target must be a model that can be opened"),
        ("demo/target", out, ("--donor", tmp_path / "nowhere"), "--donor must be a model that can be opened"),
        ("demo/target", out, ("--donor", other), "--donor must be a model with the tokenizer of demo/target"),
        ("demo/draft", out, ("--donor", "demo/target"), "--donor must be such that the draft is smaller"),
        ("demo/target", out, ("--layers", "7"), "--layers must be 1 to 6"),
        ("demo/target", out, ("--layers", "6", "--hidden", "256"), "--layers must be such that the draft is smaller"),
        ("demo/target", out, ("--hidden", "63"), "--hidden must be a multiple of 16 below 256, or 256"),
        ("demo/target", out, ("--vocabulary", "99"), "--vocabulary must be unset without --data"),
        ("demo/target", out, ("--hidden", "272"), "--hidden must be a multiple of 16 below 256, or 256"),
    ):
        found = new(target, folder, *flags)
        assert found.exit_code == 2, words
        assert words in found.stderr
        assert found.stderr.count("\n") == 1
    assert not out.exists()
    assert (taken / "file").read_text() == "mine"

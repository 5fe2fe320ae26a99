"""`new` and `train`: a folder that can be served at any time, and a training that outlives its process."""

from __future__ import annotations

import json
import os
import resource
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from outrider.models.loading import load_model
from outrider.models.runner import Segment
from outrider_draft.answers import AnswersWriter
from outrider_draft.app import app
from outrider_draft.display import Display
from outrider_draft.documents import split
from outrider_draft.train import STATE, Request, Training
from tests.draft import sampled

SMALL = ("--layers", "2", "--donor", sampled.TARGET)
"""All of it is trained."""


def run(*arguments: str | Path) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled.write(tmp_path_factory.mktemp("data") / "answers")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    folder = tmp_path / "draft"
    made = run("new", "--target", sampled.TARGET, "--out", folder, *SMALL)
    assert made.exit_code == 0, made.output
    return folder


def card(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "training.json").read_text())
    return found


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


class Stopping(Display):
    """Interrupts its process after some steps, as Ctrl-C does."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._left = steps

    def show(self, *arguments: Any) -> None:
        super().show(*arguments)
        self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGINT)


def training(folder: Path, answers: Path, *, tokens: int = 6000, stop: int = 0, **more: Any) -> Training:
    request = Request(folder, [answers], tokens=tokens, held_out=0.1, batch_tokens=512, **more)
    return Training(request, Stopping(stop))


@pytest.mark.slow
def test_a_draft_learns_and_can_be_served(draft: Path, answers: Path) -> None:
    before = card(draft)
    trained = run("train", draft, "--data", answers, "--tokens", "6000", "--batch-tokens", "512", "--held-out", "0.1")
    assert trained.exit_code == 0, trained.output
    curve = card(draft)["curve"]
    assert curve[-1]["T=0.7"] > curve[0]["T=0.7"] + 0.1
    assert curve[-1]["greedy"] > curve[0]["greedy"] + 0.1
    assert card(draft)["tokens"] >= 6000 > before["tokens"]
    loaded, target = load_model(str(draft)), load_model(sampled.TARGET)
    assert loaded.tokenizer_hash == target.tokenizer_hash
    assert (loaded.vocab_size, loaded.eos_token_ids) == (target.vocab_size, target.eos_token_ids)
    assert not (draft / "training").exists()


def test_a_draft_of_the_targets_width_keeps_its_embedding(answers: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    assert run("new", "--target", sampled.TARGET, "--out", draft, "--layers", "2", "--hidden", "256").exit_code == 0
    before = load_file(draft / "model.safetensors")
    assert training(draft, answers, tokens=2000).run()
    after = load_file(draft / "model.safetensors")
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert "model.layers.0.self_attn.q_proj.weight" in changed
    assert "model.embed_tokens.weight" not in changed


@pytest.mark.slow
def test_a_draft_with_a_small_vocabulary_learns_and_says_nothing_else(answers: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    flags = ("--vocabulary", "400", "--data", answers)
    assert run("new", "--target", sampled.TARGET, "--out", draft, *SMALL, *flags).exit_code == 0
    trained = run("train", draft, "--data", answers, "--tokens", "6000", "--batch-tokens", "512", "--held-out", "0.1")
    assert trained.exit_code == 0, trained.output
    curve = card(draft)["curve"]
    assert curve[-1]["T=0.7"] > curve[0]["T=0.7"] + 0.1
    loaded = load_model(str(draft))
    kept = json.loads((draft / "config.json").read_text())["head_token_ids"]
    assert len(kept) == 400
    assert set(loaded.eos_token_ids) <= set(kept)
    runner = loaded.runner
    logits = runner.forward([Segment(runner.new_cache(), [1, 2, 3], 1)])[0]
    assert (logits > -torch.inf).nonzero()[:, 0].tolist() == kept


@pytest.mark.slow
def test_an_interrupted_training_goes_on_as_if_nothing_had_happened(draft: Path, answers: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    assert run("new", "--target", sampled.TARGET, "--out", other, *SMALL).exit_code == 0
    whole = training(draft, answers)
    assert whole.run()
    assert not training(other, answers, stop=4).run()
    assert (other / STATE).is_file()
    assert not training(other, answers, stop=2).run()
    later = training(other, answers)
    assert later.run()
    assert (later.position.steps, later.position.tokens) == (whole.position.steps, whole.position.tokens)
    assert weights(other) == weights(draft)
    assert card(other)["curve"][-1]["T=1"] == card(draft)["curve"][-1]["T=1"]


@pytest.mark.slow
def test_a_disk_that_fills_leaves_the_last_checkpoint(draft: Path, answers: Path) -> None:
    assert not training(draft, answers, stop=2).run()
    size, whole = (draft / STATE).stat().st_size, weights(draft)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, before[1]))
    try:
        with pytest.raises(OSError, match=r"state\.pt cannot be written, and is as it was") as found:
            training(draft, answers, stop=3).run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "\n" not in str(found.value)
    assert weights(draft) == whole
    assert not list(draft.rglob("*.partial"))
    later = training(draft, answers)
    assert later.position.steps == 2
    assert later.run()


@pytest.mark.slow
def test_a_worse_draft_does_not_replace_a_better_one(draft: Path, answers: Path, tmp_path: Path) -> None:
    assert training(draft, answers).run()
    kept, curve = weights(draft), card(draft)["curve"]
    # What there is to learn are other tokens; what is held out is the target's.
    documents = sampled.documents(64)
    _, held_out = split(documents, 0.1)
    noise = tmp_path / "noise"
    writer = AnswersWriter(noise, sampled.header())
    for document in documents:
        is_noise = all(document is not each for each in held_out)
        top_ids = document.top_ids.max() - document.top_ids if is_noise else document.top_ids
        writer.add(replace(document, top_ids=top_ids))
    writer.close()
    assert training(draft, noise).run()
    worse = card(draft)["curve"][len(curve) :]
    assert worse[-1]["T=0.7"] < worse[0]["T=0.7"]
    assert weights(draft) == kept


@pytest.mark.slow
def test_the_data_must_fit_the_draft(draft: Path, answers: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    other = sampled.write(tmp_path / "other", tokenizer_hash="00")
    wider = sampled.write(tmp_path / "wider", vocab_size=5000)
    for data, words in (
        (empty, "--data must be a folder of answers"),
        (tmp_path / "nowhere", "--data must be a folder of answers"),
        (other, "--data must be answers in the draft's tokenizer"),
        (wider, "--data must be answers of a vocabulary of at most 2048 tokens"),
    ):
        found = run("train", draft, "--data", data)
        assert found.exit_code == 2, data
        assert words in found.stderr
        assert found.stderr.count("\n") == 1
    assert "--data" in run("train", draft).stderr
    assert "it has no training.json" in run("train", tmp_path, "--data", answers).stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--hours", "0"), "--hours must be > 0"),
        (("--tokens", "0"), "--tokens must be >= 1"),
        (("--tokens", "5", "--hours", "1"), "--tokens must be unset with --hours"),
        (("--held-out", "0.9"), "--held-out must be in (0, 0.5)"),
        (("--device", "cuda:7"), "--device must be a device of this machine"),
        (("--device", "banana"), "--device must be a device of this machine"),
    ],
)
def test_a_wrong_flag_of_train_is_named(tmp_path: Path, flags: tuple[str, ...], words: str) -> None:
    found = run("train", tmp_path, "--data", tmp_path, *flags)
    assert found.exit_code == 2
    assert words in found.stderr

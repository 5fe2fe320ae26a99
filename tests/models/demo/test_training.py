"""Training of the demo pair: where it reads and writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.models.demo.names import DEMO_FOLDER
from outrider.models.demo.training import evaluate, train
from outrider.models.demo.training.corpus import Corpus
from outrider.models.demo.training.evaluate import Loss, Measurements

NOTHING = Corpus((), ())


def test_the_pair_is_trained_where_demo_models_are_loaded_from(monkeypatch: pytest.MonkeyPatch) -> None:
    folders: list[Path] = []
    monkeypatch.setattr(train, "load_corpus", lambda: NOTHING)
    monkeypatch.setattr(train, "train_target", lambda folder, *_: folders.append(folder))
    monkeypatch.setattr(train, "write_card", lambda folder, _: folders.append(folder))
    train.main(["--stage", "target"])
    train.main(["--stage", "card"])
    assert folders == [DEMO_FOLDER] * 2
    assert (DEMO_FOLDER / "README.md").is_file(), "the card"


def test_the_pair_is_measured_where_demo_models_are_loaded_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders: list[Path] = []

    def measured(folder: Path, *_: Any) -> Measurements:
        folders.append(folder)
        return Measurements(0, 0, 0, Loss(0.0, 0.0), Loss(0.0, 0.0), ())

    monkeypatch.setattr(evaluate, "load_corpus", lambda: NOTHING)
    monkeypatch.setattr(evaluate, "measure", measured)
    evaluate.main([])
    assert folders == [DEMO_FOLDER]
    assert json.loads(capsys.readouterr().out)["prompts"] == 0

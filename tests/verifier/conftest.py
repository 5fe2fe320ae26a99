"""An engine that tests step by hand."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from outrider.models.cuda.rows import RowDraws
from outrider.verifier.engine import Engine
from tests.support.stepped_engine import Asynchronous, TellingLoop, stepped_engine


@pytest.fixture
def engine() -> Engine:
    """An engine whose thread has ended: the test plans in its place."""
    return stepped_engine()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> Asynchronous:
    return Asynchronous(monkeypatch, engine)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch, engine: Engine, device: Asynchronous) -> list[str]:
    """What happens on an engine whose device works on by itself."""
    monkeypatch.setattr(engine, "_loop", TellingLoop(device))
    monkeypatch.setattr(engine, "works_on", True)
    return device.happened


@pytest.fixture
def rows(engine: Engine, device: Asynchronous, monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[object, ...]]]:
    """Rows of each forward of a device that works on: token id, or place of the token that it goes on from, with True
    for a place; its slot; and how many tokens were put out before the one that is drawn behind it."""
    monkeypatch.setattr(engine, "works_on", True)
    found: list[list[tuple[object, ...]]] = []
    runner = cast(Any, engine)._runner
    forward = runner.forward

    def watched(segments: list[Any], draws: RowDraws, drawn: object) -> torch.Tensor:
        tokens = [(*segment.token_ids, drawn is not None, segment.cache.length) for segment in segments]
        found.append([(*each, index) for each, index in zip(tokens, draws.output_indices, strict=True)])
        return cast(torch.Tensor, forward(segments, draws, drawn))

    monkeypatch.setattr(runner, "forward", watched)
    return found

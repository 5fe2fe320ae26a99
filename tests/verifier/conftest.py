"""An engine that tests drive turn by turn."""

from __future__ import annotations

import pytest

from outrider.verifier.engine import Engine
from tests.support.stepped_engine import SteppedDevice, stepped_engine


@pytest.fixture
def engine() -> Engine:
    """An engine whose thread has ended: the test calls its turns."""
    return stepped_engine()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> SteppedDevice:
    return SteppedDevice(monkeypatch, engine)


@pytest.fixture
def overlapping(monkeypatch: pytest.MonkeyPatch, engine: Engine, device: SteppedDevice) -> SteppedDevice:
    """A device that works on by itself."""
    monkeypatch.setattr(engine, "overlaps", True)
    return device

"""A fake verifier, listening, and replicas that take turns from the first one on."""

from __future__ import annotations

import pytest

from outrider.wire import attempts
from tests.support.fake_verifier import verifier

__all__ = ["verifier"]


@pytest.fixture(autouse=True)
def the_first_replica_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "first_turn", lambda num_replicas: 0)

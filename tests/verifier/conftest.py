"""An engine whose batches tests plan."""

from __future__ import annotations

import pytest

from outrider.verifier.engine import Engine
from tests.support.stepped_engine import stepped_engine


@pytest.fixture
def engine() -> Engine:
    """An engine whose thread has ended; the test plans instead."""
    return stepped_engine()

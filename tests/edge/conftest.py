"""A verifier in the cloud, an edge in front of it, and a client of each. Among several verifiers, the first one has the
first turn."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from outrider.wire import attempts
from outrider_client.client import Client
from tests.support.services import RunningEdge, RunningVerifier, draft_model, running_edge, running_verifier


@pytest.fixture(autouse=True)
def the_first_upstream_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "first_turn", lambda num_servers: 0)


@pytest.fixture
async def verifier() -> AsyncIterator[RunningVerifier]:
    async with running_verifier(max_num_sessions=2) as running:
        yield running


@pytest.fixture
async def edge(verifier: RunningVerifier) -> AsyncIterator[RunningEdge]:
    async with running_edge(verifier.address, model=draft_model()) as running:
        yield running


@pytest.fixture
async def cloud(verifier: RunningVerifier) -> AsyncIterator[Client]:
    """A client of the verifier itself."""
    async with Client(verifier.address) as connected:
        yield connected


@pytest.fixture
async def client(edge: RunningEdge) -> AsyncIterator[Client]:
    """A client of the edge."""
    async with Client(edge.address) as connected:
        yield connected

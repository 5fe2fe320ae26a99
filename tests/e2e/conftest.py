"""The whole stack as processes: a real Redis, the datastore, the speculator, the verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_client.client import Client


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """The demo pair in float32, where texts can be compared token for token."""
    config = StackConfig(target="demo/target", target_dtype="float32", log_folder=tmp_path_factory.mktemp("logs"))
    with LocalStack(config) as running:
        yield running


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[Client]:
    async with Client(stack.address) as connected:
        yield connected


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """Where a stack of a test's own logs to."""
    return tmp_path / "logs"

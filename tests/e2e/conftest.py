"""The whole stack as processes: a real Redis, the datastore, the speculator, the verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from outrider_cli.local.process import ManagedProcess
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


@pytest.fixture(scope="session")
def gateway_address(stack: LocalStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A gateway before the stack."""
    log = tmp_path_factory.mktemp("gateway") / "gateway.log"
    process = ManagedProcess("gateway", "outrider_gateway", ["--upstream", stack.address], log, listen="127.0.0.1:0")
    try:
        process.start()
        yield process.address
    finally:
        process.stop()


@pytest.fixture
async def http(gateway_address: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=f"http://{gateway_address}", timeout=120) as client:
        yield client


@pytest.fixture
def log_folder(tmp_path: Path) -> Path:
    """Log folder of a test's own stack."""
    return tmp_path / "logs"

"""Under load, all connections end after half a second, and no stream notices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_cli.local.stack import LocalStack, StackConfig
from outrider_client.client import Client
from outrider_client.generation import Result

pytestmark = [pytest.mark.slow, pytest.mark.suite, pytest.mark.timeout(300)]

AGE_S = 0.5
LOAD_S = 6.0
SERVICES = ("VERIFIER", "SPECULATOR", "DATASTORE", "EDGE")
METHODS = ("pearl", "double", "retrieval", "auto")


@pytest.fixture(params=[False, True], ids=["cluster", "edge"])
def stack(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalStack]:
    """An edge dials the target and drafts by `Collaborate`, or the target dials a speculator."""
    for service in SERVICES:
        monkeypatch.setenv(f"OUTRIDER_{service}_MAX_CONNECTION_AGE_S", str(AGE_S))
    config = StackConfig(target="demo/target", target_dtype="float32", edge=request.param, log_folder=tmp_path / "logs")
    with LocalStack(config) as running:
        yield running


async def generate(client: Client, method: str) -> Result:
    return await client.complete(
        "class A:\n", temperature=1.0, seed=3, max_tokens=300, ignore_eos=True, method=method, resume=False
    )


async def test_no_stream_hears_of_it(stack: LocalStack) -> None:
    async with Client(stack.address if stack.edge is None else stack.edge_address) as client:
        plain = await generate(client, "off")
        until = time.monotonic() + LOAD_S

        async def load(method: str) -> list[Result]:
            results = []
            while time.monotonic() < until:
                results.append(await generate(client, method))
            return results

        results = [each for found in await asyncio.gather(*map(load, METHODS)) for each in found]
        assert {result.text for result in results} == {plain.text}
        assert sum(result.summary.num_speculator_losses for result in results) == 0
        assert not any(result.summary.degraded for result in results)
        assert sum(result.summary.num_accepted_tokens for result in results) > 0
        info = await client.info()
        assert info.datastore.connected
        assert info.datastore.num_shed_tokens == 0
    if stack.edge is not None:
        assert "session.interrupted" not in stack.edge.log.read_text()

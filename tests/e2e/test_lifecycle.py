"""A service's life from its first line to its last: announced, healthy, drained, gone."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider_cli.local.stack import ANY_PORT, Service
from outrider_client.client import Client
from outrider_client.errors import Unavailable

pytestmark = pytest.mark.slow

Status = health_pb2.HealthCheckResponse


@pytest.fixture
def verifier(tmp_path: Path) -> Iterator[Service]:
    arguments = ("--model", "demo/target", "--num-threads", "1")
    service = Service("verifier", "outrider.verifier", arguments, tmp_path / "log", listen=ANY_PORT)
    service.start()
    yield service
    service.kill()


async def health(address: str, name: str = "outrider.v1.VerifierService") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        return int((await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)).status)


async def test_health_is_not_serving_while_loading_or_draining(verifier: Service) -> None:
    assert await health(verifier.address) == Status.NOT_SERVING
    async with Client(verifier.address) as client:
        with pytest.raises(Unavailable, match="loading"):
            await client.info()
        verifier.wait_serving()
        assert await health(verifier.address) == Status.SERVING
        assert await health(verifier.address, "") == Status.SERVING
        generation = client.generate("class A:\n", max_tokens=1500, ignore_eos=True, temperature=0.5)
        await anext(generation)
        async with grpc.aio.insecure_channel(verifier.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""))
            assert (await watch.read()).status == Status.SERVING
            os.kill(verifier.pid, signal.SIGTERM)
            assert (await watch.read()).status == Status.NOT_SERVING
            watch.cancel()
        async for _ in generation:
            pass
        assert generation.result.num_output_tokens == 1500
    await asyncio.to_thread(verifier.wait, 20.0)


@pytest.mark.suite
async def test_a_generation_that_outlasts_the_drain_is_cut_off(tmp_path: Path) -> None:
    arguments = ("--model", "demo/target", "--num-threads", "1", "--drain-timeout-s", "0")
    service = Service("verifier", "outrider.verifier", arguments, tmp_path / "log", listen=ANY_PORT)
    service.start()
    try:
        service.wait_serving()
        async with Client(service.address) as client:
            generation = client.generate("class A:\n", max_tokens=2000, ignore_eos=True, temperature=0.5, resume=False)
            await anext(generation)
            os.kill(service.pid, signal.SIGTERM)
            with pytest.raises(Unavailable):
                async for _ in generation:
                    pass
        await asyncio.to_thread(service.wait, 20.0)
    finally:
        service.kill()


@pytest.mark.suite
def test_a_model_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outrider.verifier", "--listen", ANY_PORT, "--model", "demo/nope"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: --model demo/nope: there is no demo model")

"""A stream that is opened without a message is ended, at every service with streams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from outrider.v1 import speculator_pb2_grpc, verifier_pb2_grpc
from outrider_cli.local.redis import running_redis
from tests.support import datastores
from tests.support.services import running_speculator, running_verifier

STALL_TIMEOUT_S = 0.1


@asynccontextmanager
async def verifier(folder: Path) -> AsyncIterator[Any]:
    async with (
        running_verifier(stall_timeout_s=STALL_TIMEOUT_S) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield verifier_pb2_grpc.VerifierServiceStub(channel)


@asynccontextmanager
async def speculator(folder: Path) -> AsyncIterator[Any]:
    async with (
        running_speculator(stall_timeout_s=STALL_TIMEOUT_S) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        yield speculator_pb2_grpc.SpeculatorServiceStub(channel)


@asynccontextmanager
async def datastore(folder: Path) -> AsyncIterator[Any]:
    with running_redis(folder) as url:
        async with datastores.serving(datastores.settings_for(url, stall_timeout_s=STALL_TIMEOUT_S)) as served:
            yield served.stub


@pytest.mark.parametrize(
    ("service", "rpcs"),
    [(verifier, ["Collaborate"]), (speculator, ["Speculate"]), (datastore, ["Lookup", "Record"])],
)
async def test_a_stream_without_a_first_message_is_ended(service: Any, rpcs: list[str], tmp_path: Path) -> None:
    async with service(tmp_path) as stub:
        calls = [getattr(stub, rpc)() for rpc in rpcs]
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert caught.value.details() == "the caller has said nothing for 0.1 s"

"""An edge reports the state of its cloud and its draft model, and every change, even if nobody asks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import grpc
import pytest

from outrider.edge import upstream
from outrider.edge.draft_model import DraftModel
from outrider.edge.settings import EdgeSettings
from outrider.edge.upstream import Upstreams
from outrider.v1 import verifier_pb2, verifier_pb2_grpc
from outrider_client.client import Client
from outrider_client.errors import Unavailable
from tests.support.scripted_cloud import ScriptedCloud
from tests.support.services import draft_model, running_edge


@pytest.fixture
def address() -> Iterator[str]:
    """An address that is reserved for the test, and where nobody listens."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{place.getsockname()[1]}"


class LoadingCloud(ScriptedCloud):
    """A cloud that has not loaded its model yet."""

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def, override]
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the model is loading")


@asynccontextmanager
async def serving_at(address: str, cloud: ScriptedCloud) -> AsyncIterator[None]:
    """Runs a cloud at this address for the block."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(cloud, server)
    server.add_insecure_port(address)
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


async def drafts_for_nobody(*_: object) -> None:
    """Unused, because no generation is made here."""


async def test_each_change_of_the_cloud_is_a_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: int) -> None:
        await asyncio.sleep(0)

    monkeypatch.setattr(upstream, "wait_before_retry", at_once)
    upstreams = Upstreams([address])
    lines: asyncio.Queue[str] = asyncio.Queue()
    watching = asyncio.create_task(upstreams.watch(lines.put_nowait))
    try:
        assert await lines.get() == "cloud: not reachable (connection refused), trying"
        async with serving_at(address, LoadingCloud(drafts_for_nobody)):
            assert await lines.get() == "cloud: not ready (UNAVAILABLE: the model is loading), trying"
        assert (await lines.get()).startswith("cloud: not rea")
        async with serving_at(address, ScriptedCloud(drafts_for_nobody)):
            while (line := await lines.get()) != "cloud: connected":
                assert line.startswith("cloud: not rea")
        # A call notices that it is gone; no further call is needed for it to be found again.
        with pytest.raises(grpc.aio.AioRpcError):
            await upstreams.ask(lambda stub: stub.Tokenize(verifier_pb2.TokenizeRequest()))
        assert (await lines.get()).startswith("cloud: not reachable")
        async with serving_at(address, ScriptedCloud(drafts_for_nobody)):
            while await lines.get() != "cloud: connected":
                pass
    finally:
        watching.cancel()
        await upstreams.close()


async def test_a_call_without_a_cloud_says_that_it_is_the_upstream_that_is_away(address: str) -> None:
    async with running_edge(address, model=draft_model()) as edge, Client(edge.address) as client:
        for call in (client.info(), client.complete("def", max_tokens=2), client.tokenize("def")):
            with pytest.raises(Unavailable) as failed:
                await call
            assert failed.value.message == f"the upstream {address} is not reachable (connection refused)"


async def test_the_draft_model_is_told_of_when_it_is_there_and_when_it_cannot_be_had() -> None:
    for model, line in (
        ("demo/draft", "draft model: demo/draft is loaded"),
        ("demo/none", "draft model: --model demo/none: there is no demo model"),
    ):
        lines: asyncio.Queue[str] = asyncio.Queue()
        settings = EdgeSettings(upstream="127.0.0.1:9", model=model, num_threads=1)
        draft = DraftModel(settings, announce=lines.put_nowait)
        draft.start()
        assert (await lines.get()).startswith(line)
        await draft.close()

"""Bytes that are no message are refused as INVALID_ARGUMENT, in every RPC and everywhere in a stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from outrider.server.malformed import MalformedRequests
from outrider.v1 import types_pb2
from outrider.wire.errors import InvalidArgument, rpc_errors
from tests.support.waiting import until

GOOD = types_pb2.Commit(base_len=3, token_ids=[1, 2]).SerializeToString()
BAD = GOOD[:-1]
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


class Styles:
    """Each kind of RPC in each style of a servicer. Echoes its requests."""

    async def unary_unary(self, request: Any, context: Any) -> Any:
        return request

    async def generated_unary_stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield request

    async def written_unary_stream(self, request: Any, context: Any) -> None:
        await context.write(request)

    async def stream_unary(self, requests: AsyncIterator[Any], context: Any) -> Any:
        return [request async for request in requests][-1]

    async def generated_stream_stream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for request in requests:
            yield request

    async def written_stream_stream(self, requests: AsyncIterator[Any], context: Any) -> None:
        async for request in requests:
            await context.write(request)

    async def stream_stream_in_a_task(self, requests: AsyncIterator[Any], context: Any) -> None:
        """A servicer that reads and writes at the same time: the end of reading goes through a queue."""
        queue: asyncio.Queue[types_pb2.Commit | InvalidArgument | None] = asyncio.Queue()

        async def read() -> None:
            try:
                async for request in requests:
                    queue.put_nowait(request)
            except InvalidArgument as error:
                queue.put_nowait(error)
            else:
                queue.put_nowait(None)

        reader = asyncio.create_task(read())
        with rpc_errors(context):
            while isinstance(item := await queue.get(), types_pb2.Commit):
                await context.write(item)
            await reader
            if item is not None:
                raise item

    def handlers(self) -> dict[str, Any]:
        names = [name for name in dir(self) if name.endswith(("unary", "stream", "task"))]
        return {name: self._handler(name) for name in names}

    def _handler(self, name: str) -> Any:
        make = getattr(grpc, f"{kind_of(name)}_rpc_method_handler")
        decode, encode = types_pb2.Commit.FromString, types_pb2.Commit.SerializeToString
        return make(getattr(self, name), request_deserializer=decode, response_serializer=encode)


def kind_of(name: str) -> str:
    return next(kind for kind in KINDS if kind in name)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server(interceptors=[MalformedRequests()])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Styles", Styles().handlers()),))
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    reflection.enable_server_reflection((health.SERVICE_NAME,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as connected:
        yield connected
    await server.stop(None)


async def answers(channel: grpc.aio.Channel, method: str, kind: str, *messages: bytes) -> tuple[list[bytes], Any, str]:
    """The answers, and the status of the call."""
    request_kind, response_kind = kind.split("_")
    found: list[bytes] = []

    async def requests() -> AsyncIterator[bytes]:
        for message in messages:
            if message == BAD and response_kind == "stream":
                # When a call fails, gRPC may drop answers that its caller has not read, and hide the status from one
                # that writes on.
                await until(lambda: len(found) == messages.index(BAD))
                yield message
                return
            yield message

    call: Any = getattr(channel, kind)(method)(requests() if request_kind == "stream" else messages[0])
    with suppress(grpc.aio.AioRpcError):
        if response_kind == "stream":
            async for response in call:
                found.append(response)
        else:
            found.append(await call)
    return found, await call.code(), await call.details()


@pytest.mark.parametrize("name", Styles().handlers())
async def test_bytes_that_are_no_message_are_refused_by_name(channel: grpc.aio.Channel, name: str) -> None:
    method, kind = f"/test.Styles/{name}", kind_of(name)
    found, code, details = await answers(channel, method, kind, BAD)
    assert (found, code) == ([], grpc.StatusCode.INVALID_ARGUMENT)
    assert details == f"request must be a message as {method} takes it, got {len(BAD)} bytes that are none"
    assert (await answers(channel, method, kind, GOOD))[:2] == ([GOOD], grpc.StatusCode.OK)


@pytest.mark.parametrize("name", [name for name in Styles().handlers() if kind_of(name).startswith("stream")])
async def test_a_later_message_is_refused_like_the_first(channel: grpc.aio.Channel, name: str) -> None:
    kind = kind_of(name)
    found, code, _ = await answers(channel, f"/test.Styles/{name}", kind, GOOD, GOOD, BAD, GOOD)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert found == ([GOOD, GOOD] if kind == "stream_stream" else [])


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("/grpc.health.v1.Health/Check", "unary_unary"),
        ("/grpc.health.v1.Health/Watch", "unary_stream"),
        ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "stream_stream"),
    ],
)
async def test_health_and_reflection_refuse_them_too(channel: grpc.aio.Channel, method: str, kind: str) -> None:
    _, code, details = await answers(channel, method, kind, b"\xff\xff")
    assert (code, "got 2 bytes that are none" in details) == (grpc.StatusCode.INVALID_ARGUMENT, True), details


async def test_a_refusal_of_a_method_s_own_stays_what_it_is(channel: grpc.aio.Channel) -> None:
    unknown = health_pb2.HealthCheckRequest(service="nobody").SerializeToString()
    _, code, _ = await answers(channel, "/grpc.health.v1.Health/Check", "unary_unary", unknown)
    assert code is grpc.StatusCode.NOT_FOUND


async def test_a_method_that_is_not_there_is_unimplemented(channel: grpc.aio.Channel) -> None:
    _, code, _ = await answers(channel, "/test.Styles/nothing", "unary_unary", BAD)
    assert code is grpc.StatusCode.UNIMPLEMENTED


async def test_the_field_is_named_in_the_details_for_machines_too(channel: grpc.aio.Channel) -> None:
    ask: Any = channel.unary_unary("/test.Styles/unary_unary")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(BAD)
    assert b"request" in dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]

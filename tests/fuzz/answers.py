"""Peers that lie: the answers of a real speculator and a real datastore, mutated on their way to a verifier."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from random import Random
from typing import Any

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tests.fuzz.mutations import RANGES, mutated, serialized, with_other_fields

LIES = 0.2
"""Share of the answers whose fields are changed; the others keep the sessions going."""
GARBAGE = 0.002
"""Share of the answers whose bytes are mutated. More would leave the verifier in its pauses between two attempts."""


class LyingPeer:
    """Forwards calls to a service, and its answers back, mutated or unchanged. One seed decides everything."""

    def __init__(self, service: ServiceDescriptor, channel: grpc.aio.Channel, seed: int) -> None:
        self._service, self._channel, self._random = service, channel, Random(seed)
        self.num_answers: Counter[str] = Counter()
        """Number of answers by the name of the RPC."""

    def lie(self, name: str, answer: bytes) -> bytes:
        """Returns what is sent instead of an answer."""
        self.num_answers[name] += 1
        kind = self._random.random()
        if kind >= LIES + GARBAGE:
            return answer
        method = self._service.methods_by_name[name]
        message = GetMessageClass(method.output_type).FromString(answer)
        if kind < GARBAGE:
            return mutated(message, self._random)
        change = self._random.choice((with_other_fields, with_a_number_at_an_edge))
        return serialized(change(message, self._random))

    def handler(self) -> grpc.GenericRpcHandler:
        """Serves every RPC of the service."""
        return grpc.method_handlers_generic_handler(
            self._service.full_name, {method.name: self._method(method) for method in self._service.methods}
        )

    def _method(self, method: Any) -> grpc.RpcMethodHandler[bytes, bytes]:
        path = f"/{self._service.full_name}/{method.name}"

        async def one(request: bytes, context: Any) -> bytes:
            call: Any = self._channel.unary_unary(path)
            return self.lie(method.name, await call(request))

        async def many(requests: Any, context: Any) -> AsyncIterator[bytes]:
            dial: Any = self._channel.stream_stream if method.client_streaming else self._channel.unary_stream
            call = dial(path)(requests)
            try:
                with suppress(grpc.aio.AioRpcError):
                    async for answer in call:
                        yield self.lie(method.name, answer)
            finally:
                call.cancel()

        if not method.server_streaming:
            return grpc.unary_unary_rpc_method_handler(one)
        if method.client_streaming:
            return grpc.stream_stream_rpc_method_handler(many)
        return grpc.unary_stream_rpc_method_handler(many)


def with_a_number_at_an_edge(message: Message, random: Random) -> Any:
    """A copy in which one number, at any depth, is the least or the largest that its field holds."""
    changed = type(message)()
    changed.CopyFrom(message)
    places = [
        (inner, field)
        for inner in _messages(changed)
        for field in inner.DESCRIPTOR.fields
        if not field.is_repeated and field.cpp_type in RANGES
    ]
    if places:
        inner, field = random.choice(places)
        setattr(inner, field.name, random.choice(RANGES[field.cpp_type]))
    return changed


def _messages(message: Any) -> Iterator[Any]:
    """A message, and the messages in it."""
    yield message
    for field, value in message.ListFields():
        if field.message_type is not None:
            for inner in value if field.is_repeated else (value,):
                yield from _messages(inner)


@asynccontextmanager
async def lying(
    service: ServiceDescriptor, channel: grpc.aio.Channel, seed: int
) -> AsyncIterator[tuple[str, LyingPeer]]:
    """The address of a lying peer, and the peer."""
    peer = LyingPeer(service, channel, seed)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), ("grpc.max_send_message_length", -1)])
    server.add_generic_rpc_handlers((peer.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", peer
    finally:
        await server.stop(0)

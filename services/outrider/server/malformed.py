"""Requests whose bytes are not the message that the RPC takes: INVALID_ARGUMENT, not the UNKNOWN that gRPC answers.

Good messages pass as they are: what is added to each is one call that catches the decoder's error.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from outrider.wire.errors import InvalidArgument, rpc_errors

Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""A `grpc.RpcMethodHandler` of any request and response: generic in its stubs alone."""
Behaviour = Callable[[Any, Context], Any]


class MalformedRequests(grpc.aio.ServerInterceptor):
    """For all RPCs of a server: the first message of a call and every later one."""

    def __init__(self) -> None:
        self._refusing: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of a call, made to refuse what it cannot decode."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:  # no such method, or one that takes any bytes
            return handler
        method = handler_call_details.method
        known, refusing = self._refusing.get(method, (None, handler))
        if known is not handler:
            refusing = _refusing(handler, method)
            self._refusing[method] = handler, refusing
        return refusing


def _refusing(handler: Handler, method: str) -> Handler:
    """The same handler, but for messages that cannot be decoded."""
    decode = handler.request_deserializer
    if handler.request_streaming:
        # Decoded where the servicer asks for its next message, so that is where it is told: wherever it reads.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _telling(handler.stream_stream), _raising(decode, method), handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            _telling(handler.stream_unary), _raising(decode, method), handler.response_serializer
        )
    # Decoded before the servicer is called: gRPC itself would answer, so what is wrong comes in place of the message.
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _checking(handler.unary_stream), _returning(decode, method), handler.response_serializer
        )
    return grpc.unary_unary_rpc_method_handler(
        _checking(handler.unary_unary), _returning(decode, method), handler.response_serializer
    )


def _raising(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError:
            raise _refusal(method, message) from None

    return decoded


def _returning(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError:
            return _refusal(method, message)

    return decoded


def _refusal(method: str, message: bytes) -> InvalidArgument:
    problem = f"must be a message as {method} takes it, got {len(message)} bytes that are none"
    return InvalidArgument("request", problem)


def _telling(behaviour: Behaviour) -> Behaviour:
    """A behaviour with a stream of requests. What reading them raises, and it does not catch, is the call's status."""
    if inspect.isasyncgenfunction(behaviour):

        async def respond(requests: Any, context: Context) -> AsyncIterator[Any]:
            with rpc_errors(context):
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        yield response

        return respond

    async def answer(requests: Any, context: Context) -> Any:
        with rpc_errors(context):
            return await behaviour(requests, context)

    return answer


def _checking(behaviour: Behaviour) -> Behaviour:
    """A behaviour with one request, which may be an error in its place."""
    if inspect.isasyncgenfunction(behaviour):

        async def respond(request: Any, context: Context) -> AsyncIterator[Any]:
            with rpc_errors(context):
                if isinstance(request, InvalidArgument):
                    raise request
                async with aclosing(behaviour(request, context)) as responses:
                    async for response in responses:
                        yield response

        return respond

    async def answer(request: Any, context: Context) -> Any:
        with rpc_errors(context):
            if isinstance(request, InvalidArgument):
                raise request
            return await behaviour(request, context)

    return answer

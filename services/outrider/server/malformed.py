"""Answers requests whose bytes cannot be decoded with INVALID_ARGUMENT, not with gRPC's UNKNOWN.

Valid messages pass unchanged; each costs one more call, which catches the decoder's error.
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
"""A `grpc.RpcMethodHandler` of any request and response. It is generic only in the type stubs."""
Behaviour = Callable[[Any, Context], Any]
"""A servicer's method: a coroutine function or an async generator function."""


class MalformedRequests(grpc.aio.ServerInterceptor):
    """Refuses undecodable requests of all RPCs of a server: the first message of a call and every later one."""

    def __init__(self) -> None:
        self._refusing: dict[str, tuple[Handler, Handler]] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the handler of a call, wrapped so that it refuses requests that it cannot decode."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:  # no such method, or one that takes any bytes
            return handler
        method = handler_call_details.method
        known, refusing = self._refusing.get(method, (None, handler))
        # A wrapper is cached per method, not made per call; a servicer that returns another handler gets another
        # wrapper.
        if known is not handler:
            refusing = _refusing_malformed(handler, method)
            self._refusing[method] = handler, refusing
        return refusing


def _refusing_malformed(handler: Handler, method: str) -> Handler:
    """Returns the handler, wrapped so that it refuses messages that cannot be decoded."""
    decode = handler.request_deserializer
    if handler.request_streaming:
        # gRPC decodes when the servicer reads its next message, so the error is raised there, inside the servicer's
        # code.
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _with_read_errors(handler.stream_stream), _raising_decoder(decode, method), handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(
            _with_read_errors(handler.stream_unary), _raising_decoder(decode, method), handler.response_serializer
        )
    # gRPC decodes before it calls the servicer, and would answer an error itself. The error is therefore passed on in
    # place of the message.
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(
            _with_request_error(handler.unary_stream), _returning_decoder(decode, method), handler.response_serializer
        )
    return grpc.unary_unary_rpc_method_handler(
        _with_request_error(handler.unary_unary), _returning_decoder(decode, method), handler.response_serializer
    )


def _raising_decoder(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError:
            raise _refusal(method, message) from None

    return decoded


def _returning_decoder(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def decoded(message: bytes) -> Any:
        try:
            return decode(message)
        except DecodeError:
            return _refusal(method, message)

    return decoded


def _refusal(method: str, message: bytes) -> InvalidArgument:
    problem = f"must be a message as {method} takes it, got {len(message)} bytes that are none"
    return InvalidArgument("request", problem)


def _with_read_errors(behaviour: Behaviour) -> Behaviour:
    """Wraps a behaviour with a stream of requests: an error that reading them raises becomes the call's status."""
    # gRPC treats generators and coroutines differently, so a wrapper must be of the same kind as its behaviour.
    if inspect.isasyncgenfunction(behaviour):

        async def respond(requests: Any, context: Context) -> AsyncIterator[Any]:
            with rpc_errors(context):
                # gRPC knows only the outer generator; the garbage collector would close the inner one.
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        yield response

        return respond

    async def answer(requests: Any, context: Context) -> Any:
        with rpc_errors(context):
            return await behaviour(requests, context)

    return answer


def _with_request_error(behaviour: Behaviour) -> Behaviour:
    """Wraps a behaviour with one request: an error in place of the request becomes the call's status."""
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

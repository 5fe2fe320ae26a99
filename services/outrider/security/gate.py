"""The gate of a server: every call of every service passes it first, including those of health and reflection.

A token is checked before anything of the call is read. Only the handler can see a certificate.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any, TypeAlias, cast

import grpc
import structlog

from outrider.security.callers import Caller, set_current_caller
from outrider.security.credentials import CredentialBook
from outrider.security.permissions import permitted_roles
from outrider.security.watched_files import WatchedFiles

log = structlog.get_logger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class _Refused(Exception):
    def __init__(self, code: grpc.StatusCode, reason: str) -> None:
        super().__init__(reason)
        self.code = code


class Gate(grpc.aio.ServerInterceptor):
    """Admits known callers that may call the method, and makes them the `current_caller`."""

    def __init__(self, book: WatchedFiles[CredentialBook], service: str) -> None:
        """`service`: full name of the server's main service."""
        self._book, self._service = book, service

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Returns the handler of the call, or one that refuses it."""
        method, book = str(handler_call_details.method), self._book.current()
        handler = await continuation(handler_call_details)
        try:
            token = _token_of(handler_call_details)
            if token is None and book.has_certificates and handler is not None:
                return self._by_certificate(handler, method, book)
            caller = book.with_token(token) if token is not None else None
            if caller is None:
                raise _unknown("this token is not in the server's list" if token is not None else NO_TOKEN)
            # gRPC runs the interceptors and the handler of a call in one task: the handler sees what is set here.
            set_current_caller(self._checked(caller, method, is_known=handler is not None))
        except _Refused as refused:
            return _refusing(refused, method)
        return cast(Handler, handler)  # None is what gRPC answers UNIMPLEMENTED to

    def _checked(self, caller: Caller, method: str, *, is_known: bool = True) -> Caller:
        # Only callers with credentials are told that a method does not exist.
        if is_known and not caller.roles & permitted_roles(method, self._service):
            roles = ", ".join(sorted(role.value for role in caller.roles))
            raise _Refused(grpc.StatusCode.PERMISSION_DENIED, f"{method} is not for the roles of the caller ({roles})")
        return caller

    def _by_certificate(self, handler: Handler, method: str, book: CredentialBook) -> Handler:
        """Returns a handler that checks the caller's certificate first."""

        async def check(context: Context) -> None:
            try:
                caller = book.with_certificate(_names_of(context))
                if caller is None:
                    raise _unknown(f"{NO_TOKEN}, or a certificate that is in the server's list")
                set_current_caller(self._checked(caller, method))
            except _Refused as refused:
                await _refuse(refused, method, context)

        return _behind(handler, check)


NO_TOKEN = "no token given, and this server asks for one: authorization: Bearer TOKEN"


def _unknown(reason: str) -> _Refused:
    return _Refused(grpc.StatusCode.UNAUTHENTICATED, reason)


def _token_of(details: grpc.HandlerCallDetails) -> str | None:
    """Returns the token of a call. None means that it presents none. Raises _Refused if it is malformed."""
    presented = [value for key, value in details.invocation_metadata or () if key == "authorization"]
    if not presented:
        return None
    # The name of the scheme is case-insensitive (RFC 9110, section 11.1).
    scheme, _, token = str(presented[0]).partition(" ")
    if len(presented) > 1 or scheme.lower() != "bearer":
        raise _unknown("authorization must be one: Bearer TOKEN")
    return token.strip()


def _names_of(context: Context) -> Iterator[str]:
    """Yields the names in the certificate that the caller has shown."""
    shown = context.auth_context()
    for field in ("x509_subject_alternative_name", "x509_common_name"):
        for name in shown.get(field, ()):
            yield name.decode(errors="replace")


async def _refuse(refused: _Refused, method: str, context: Context) -> None:
    log.info("caller.refused", method=method, peer=context.peer(), code=refused.code.name)
    await context.abort(refused.code, str(refused))  # raises: the code after the check is not reached


def _refusing(refused: _Refused, method: str) -> Handler:
    """Returns a handler that refuses without reading anything."""

    async def refuse(requests: AsyncIterator[bytes], context: Context) -> None:
        await _refuse(refused, method, context)

    # On the wire every kind of call is a stream, so this serves all four.
    return grpc.stream_stream_rpc_method_handler(cast(Any, refuse))


def _behind(handler: Handler, check: Callable[[Context], Awaitable[None]]) -> Handler:
    """Returns a handler that calls the given one when the check has passed."""
    untyped_handler: Any = handler
    kinds = ("stream" if handler.request_streaming else "unary", "stream" if handler.response_streaming else "unary")
    kind = "_".join(kinds)
    inner = getattr(untyped_handler, kind)

    async def streams(request: Any, context: Context) -> None:
        await check(context)
        # gRPC inspects a handler that streams: a generator yields its responses, a coroutine writes them itself. gRPC
        # sees only this wrapper, so the inner handler is inspected here.
        if not isasyncgenfunction(inner):
            await inner(request, context)
            return
        # Closed here: a generator that is only dropped runs its `finally` when it is garbage-collected, in another
        # task.
        async with aclosing(inner(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    async def answers(request: Any, context: Context) -> Any:
        await check(context)
        return await inner(request, context)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    wrapped: Handler = make(
        streams if handler.response_streaming else answers, handler.request_deserializer, handler.response_serializer
    )
    return wrapped

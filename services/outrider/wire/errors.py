"""Errors on the wire: gRPC status with details, one table for all services.

Domain code raises; `rpc_errors` turns what it raises into a status at the edge of every method. A message names the
field and the rule, and details carry them for machines: BadRequest for a field, RetryInfo for a full queue.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import grpc
import structlog
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from outrider.core.params import InvalidParameter
from outrider.v1 import speculator_pb2
from outrider.wire.details import FAILS_AGAIN

log = structlog.get_logger(__name__)

MAX_TEXT_BYTES = 800
"""Longest message on the wire. A text that quotes a request may have megabytes. Trailers, which have the message twice
(grpc-message and grpc-status-details-bin), are dropped on the way beyond 8 kB, and the status with them."""

INTERNAL_ERROR = "internal error; the server's log has the details"
"""Text of an error that is a bug here."""
_DETAILS = "grpc-status-details-bin"
"""Name of the trailer that carries a status with details."""


class RpcError(Exception):
    """A refusal with the status `code`. `details` are google.rpc messages."""

    code = grpc.StatusCode.INTERNAL

    def __init__(self, text: str, *details: message.Message) -> None:
        super().__init__(shortened(text))
        self.details = details


class Internal(RpcError):
    """A bug in the work for this request alone. The server's log has the details, and another server has the same
    bug."""

    def __init__(self) -> None:
        super().__init__(INTERNAL_ERROR, FAILS_AGAIN)


class InvalidArgument(RpcError):
    """The request is wrong whatever the state of the server. Names the field."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    def __init__(self, field: str, problem: str) -> None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=shortened(problem))
        super().__init__(f"{field} {problem}", error_details_pb2.BadRequest(field_violations=[violation]))


class OutOfRange(RpcError):
    """A position lies beyond the context or the committed tokens."""

    code = grpc.StatusCode.OUT_OF_RANGE


class FailedPrecondition(RpcError):
    """This server, as it is configured, cannot serve the request."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class NotFound(RpcError):
    """The request names something that does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class PermissionDenied(RpcError):
    """The caller is known, and may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class Unimplemented(RpcError):
    """This server lacks the feature."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unavailable(RpcError):
    """A required part cannot be reached, or the server is `NotServing`. Safe to retry."""

    code = grpc.StatusCode.UNAVAILABLE


class NotServing(Unavailable):
    """The server is loading or draining, and one will serve before long. Says when to retry, which distinguishes it
    from a failure on the way."""

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text, _retry_info(retry_after_s))


class DeadlineExceeded(RpcError):
    """The caller was too slow."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class ResourceExhausted(RpcError):
    """The server is full for now. Names the limit and when to retry."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text, _retry_info(retry_after_s))


def _retry_info(retry_after_s: float) -> error_details_pb2.RetryInfo:
    seconds = int(retry_after_s)
    delay = duration_pb2.Duration(seconds=seconds, nanos=int((retry_after_s - seconds) * 1e9))
    return error_details_pb2.RetryInfo(retry_delay=delay)


def shortened(text: str) -> str:
    """Returns a text cut to MAX_TEXT_BYTES."""
    data = text.encode()
    if len(data) <= MAX_TEXT_BYTES:
        return text
    # Cut by bytes, which is what the trailers count. The cut may go through a character of several bytes.
    return data[: MAX_TEXT_BYTES - 3].decode(errors="ignore") + "..."


def invalid_argument(error: InvalidParameter) -> InvalidArgument:
    """Converts the error of a parameter outside its range to a status that names the field."""
    # Without the field, which InvalidArgument prefixes again.
    return InvalidArgument(error.field, str(error).removeprefix(f"{error.field} "))


def to_status(error: RpcError) -> grpc.Status:
    """Returns the status that a server sends for an error."""
    details = []
    for detail in error.details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        details.append(packed)
    # grpc.StatusCode and google.rpc.Code have the same names.
    code = code_pb2.Code.Value(error.code.name)
    status: grpc.Status = rpc_status.to_status(status_pb2.Status(code=code, message=str(error), details=details))
    return status


def ended_to_proto(error: RpcError) -> speculator_pb2.SpeculateEnded:
    """Converts the error that has ended a session on a shared stream."""
    status = to_status(error)
    details = cast(bytes, dict(status.trailing_metadata)[_DETAILS])
    return speculator_pb2.SpeculateEnded(code=status.code.value[0], message=status.details, status=details)


def ended_from_proto(ended: speculator_pb2.SpeculateEnded) -> grpc.aio.AioRpcError | None:
    """Converts the error that has ended a session to that of a call; None means that the session has ended in order."""
    code = next((each for each in grpc.StatusCode if each.value[0] == ended.code), grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    nothing = grpc.aio.Metadata()
    try:
        status_pb2.Status.FromString(ended.status)
    except message.DecodeError:
        return grpc.aio.AioRpcError(code, nothing, nothing, ended.message)
    return grpc.aio.AioRpcError(code, nothing, grpc.aio.Metadata((_DETAILS, ended.status)), ended.message)


@contextmanager
def rpc_errors(context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
    """Turns what the body raises into the status of the call.

    InvalidParameter becomes INVALID_ARGUMENT. Any other exception is a bug: it is logged with its traceback and reaches
    the caller as INTERNAL, without its text.
    """
    try:
        yield
    except RpcError as error:
        _set_status(context, error)
    except InvalidParameter as error:
        _set_status(context, invalid_argument(error))
    except (grpc.aio.AbortError, GeneratorExit):
        # context.abort() has sent the status already, and raises to leave the handler.
        raise
    except grpc.aio.InternalError:
        # A message could not be sent: meanwhile the caller has gone, or its deadline has passed.
        log.info("rpc.broken", peer=context.peer())
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the stream broke while a message was sent")
    except Exception as error:
        log.exception("rpc.failed")
        # Another process or machine may have the resource that is short here.
        _set_status(context, RpcError(INTERNAL_ERROR) if isinstance(error, MemoryError | OSError) else Internal())


def _set_status(context: grpc.aio.ServicerContext[Any, Any], error: RpcError) -> None:
    status = to_status(error)
    context.set_code(status.code)
    context.set_details(status.details)
    context.set_trailing_metadata(tuple(status.trailing_metadata))

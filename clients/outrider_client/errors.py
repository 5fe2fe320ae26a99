"""Exceptions for everything that can go wrong in a call, one per gRPC status.

    Exception
    └── OutriderError             .code .message .details
        ├── Aborted
        ├── AlreadyExists
        ├── Cancelled             the caller gave up, here, through `Generation.cancel()` or by closing the client
        ├── DataLoss
        ├── DeadlineExceeded      timeout_s has passed, or nothing was read for the server's stall timeout
        ├── FailedPrecondition    the server is configured without what the request needs
        ├── Internal              a bug; also a stream that breaks the protocol
        ├── InvalidArgument       .field   a value is outside its range: do not retry
        ├── NotFound
        ├── OutOfRange            the prompt leaves no room in the context: do not retry
        ├── PermissionDenied
        ├── ResourceExhausted     .retry_after_s   too many sessions: retry after that time
        ├── Unauthenticated
        ├── Unavailable           .retry_after_s   loading, draining or unreachable: retry elsewhere or later
        ├── Unimplemented
        └── Unknown

The server's message names the field, the rule and the value, so it is shown as it is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, cast

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from outrider.wire.details import retry_after_s, rich_details


class OutriderError(Exception):
    """A call has failed. This is the base of all errors that a server can cause."""

    code: grpc.StatusCode = grpc.StatusCode.UNKNOWN

    def __init__(self, message: str, details: Sequence[Message] = (), *, code: grpc.StatusCode | None = None) -> None:
        super().__init__(message)
        self.message = message
        """The server's message, or what happened on the way to it."""
        self.details = tuple(details)
        """Messages of google.rpc (BadRequest, RetryInfo, ...) that came with the status."""
        if code is not None:
            self.code = code


class Aborted(OutriderError):
    """The server gave the operation up because of a conflict."""

    code = grpc.StatusCode.ABORTED


class AlreadyExists(OutriderError):
    """The thing to be created exists."""

    code = grpc.StatusCode.ALREADY_EXISTS


class Cancelled(OutriderError):
    """The call was cancelled; what arrived before stays readable on the generation."""

    code = grpc.StatusCode.CANCELLED


class DataLoss(OutriderError):
    """Something was lost for good."""

    code = grpc.StatusCode.DATA_LOSS


class DeadlineExceeded(OutriderError):
    """The deadline has passed, or the client has read nothing for the server's stall timeout."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class FailedPrecondition(OutriderError):
    """The server is configured without what the request needs (a peer, a chat template)."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Internal(OutriderError):
    """There is a bug in the server, or a stream broke the protocol."""

    code = grpc.StatusCode.INTERNAL


class InvalidArgument(OutriderError):
    """A field is missing or outside its range. The same request fails again."""

    code = grpc.StatusCode.INVALID_ARGUMENT

    @property
    def field(self) -> str | None:
        """The field as the server names it (`sampling.top_p`), if it does."""
        for detail in self.details:
            if isinstance(detail, error_details_pb2.BadRequest) and detail.field_violations:
                return str(detail.field_violations[0].field)
        return None


class NotFound(OutriderError):
    """The thing that the call names does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class OutOfRange(OutriderError):
    """The prompt leaves no room in the context. The same request fails again."""

    code = grpc.StatusCode.OUT_OF_RANGE


class PermissionDenied(OutriderError):
    """The caller may not do this."""

    code = grpc.StatusCode.PERMISSION_DENIED


class ResourceExhausted(OutriderError):
    """The server has too many sessions, or a message is larger than allowed."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before the next attempt, if the server says."""
        return retry_after_s(self.details)


class Unauthenticated(OutriderError):
    """The server does not know the caller."""

    code = grpc.StatusCode.UNAUTHENTICATED


class Unavailable(OutriderError):
    """The server is loading, draining or cannot be reached."""

    code = grpc.StatusCode.UNAVAILABLE
    is_unreachable = False
    """True if no server has answered."""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds to wait before the next attempt, if a server says that it loads or drains."""
        return retry_after_s(self.details)


class Unimplemented(OutriderError):
    """The server cannot do this."""

    code = grpc.StatusCode.UNIMPLEMENTED


class Unknown(OutriderError):
    """The server failed without saying how."""

    code = grpc.StatusCode.UNKNOWN


_CLASSES: dict[grpc.StatusCode, type[OutriderError]] = {kind.code: kind for kind in OutriderError.__subclasses__()}


class _Status(Protocol):
    """Declares the common part of gRPC's blocking and asyncio errors, which their type stubs do not name."""

    def code(self) -> grpc.StatusCode: ...

    def details(self) -> str | None: ...


# Messages of gRPC itself, not of a server. Servers use the same statuses, so only the words tell them apart.
_UNREACHABLE = re.compile("failed to connect to all|connections to all backends failing|errors resolving")
_CAUSE = re.compile(
    "connection refused|connection reset|no route to host|network is unreachable|domain name not found|"
    "no such file or directory|timed out|ssl|certificate",
    re.I,
)
_TOO_LARGE = re.compile(r"(SERVER: Received|CLIENT: Sent) message larger than max \((\d+) vs\. (\d+)\)")
_TIME_IS_UP = re.compile(r"(Stream removed \()?Deadline Exceeded\)?")


def from_rpc_error(error: grpc.RpcError, address: str = "") -> OutriderError:
    """Returns the typed exception for an error of a blocking or an asyncio call that its caller has not cancelled.

    Args:
        error: Raised by gRPC.
        address: The verifier that was called, which the message names if it cannot be reached. Empty keeps gRPC's own
            words.
    """
    status = cast(_Status, error)
    code = status.code()
    message = status.details() or code.name
    if address and code is grpc.StatusCode.UNAVAILABLE and _UNREACHABLE.match(message):
        cause = _CAUSE.search(message)
        why = f" ({cause.group().lower()})" if cause else f": {message}"
        unreachable = Unavailable(f"cannot reach a verifier at {address}{why}", rich_details(error))
        unreachable.is_unreachable = True
        return unreachable
    # Not gRPC's own RESOURCE_EXHAUSTED, which would suggest a retry: sent again, the request would be as large.
    if size := _TOO_LARGE.fullmatch(message):
        sent, most = (int(number) / 1e6 for number in size.groups()[1:])
        limit = f"the server takes {most:.1f} MB" if size[1].startswith("SERVER") else f"{most:.1f} MB can be sent"
        return InvalidArgument(f"the request has {sent:.1f} MB, {limit}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and _TIME_IS_UP.fullmatch(message):
        message = "the time of the call (timeout_s) is over"
    if code is grpc.StatusCode.CANCELLED:
        # Callers that have cancelled a call themselves do not ask here: see `outrider.wire.channels.NOT_TAKEN`.
        said = "" if message == code.name else f": {message}"
        return Unavailable(f"the call was cancelled on the way or by the server{said}", rich_details(error))
    kind = _CLASSES.get(code)
    # All of today's statuses but OK have a class.
    if kind is None:
        return OutriderError(message, rich_details(error), code=code)
    return kind(message, rich_details(error))

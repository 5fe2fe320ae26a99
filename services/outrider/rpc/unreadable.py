"""Messages that cannot be parsed: gRPC's asyncio streams hand them over as None, and go on."""

from __future__ import annotations

from typing import TypeVar

import grpc

T = TypeVar("T")


class Unreadable(grpc.aio.AioRpcError):
    """A peer has sent a message that cannot be parsed: to its reader the call has failed."""

    def __init__(self) -> None:
        nothing = grpc.aio.Metadata()
        super().__init__(grpc.StatusCode.INTERNAL, nothing, nothing, "a message of it cannot be parsed")


def readable(message: T | None) -> T:
    """The message. Raises Unreadable if it could not be parsed."""
    if message is None:
        raise Unreadable
    return message

"""Details that come with the status of a failed call: messages of google.rpc. Clients read them, too."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import message
from google.rpc import error_details_pb2
from grpc_status import rpc_status

_DETAIL_TYPES: dict[str, type[message.Message]] = {
    kind.DESCRIPTOR.full_name: kind
    for kind in (
        error_details_pb2.BadRequest,
        error_details_pb2.ErrorInfo,
        error_details_pb2.PreconditionFailure,
        error_details_pb2.QuotaFailure,
        error_details_pb2.RetryInfo,
    )
}


def retry_after_s(details: Sequence[message.Message]) -> float | None:
    """Returns the seconds to wait before the next attempt, if the details of an error say them."""
    for detail in details:
        if isinstance(detail, error_details_pb2.RetryInfo):
            seconds: float = detail.retry_delay.seconds + detail.retry_delay.nanos / 1e9
            return seconds
    return None


FAILS_AGAIN = error_details_pb2.ErrorInfo(reason="REQUEST_FAILS_AGAIN", domain="outrider")
"""Marks an INTERNAL error as caused by the request, not by the server or the way to it."""


def fails_again(details: Sequence[message.Message]) -> bool:
    """Returns True if the details of an error say that the same request would fail again, wherever it is sent."""
    return FAILS_AGAIN in details


def rich_details(error: grpc.RpcError) -> list[message.Message]:
    """Returns the details of a failed call: google.rpc messages of the known kinds."""
    try:
        status = rpc_status.from_call(error)
    except ValueError:  # a proxy replaced code or message but not the trailer: the status itself counts
        return []
    details = []
    # None: the status has no details, like those that gRPC itself makes. Unknown details are left out: a newer server
    # may send more kinds.
    for packed in status.details if status is not None else ():
        if kind := _DETAIL_TYPES.get(packed.TypeName()):
            packed.Unpack(detail := kind())
            details.append(detail)
    return details

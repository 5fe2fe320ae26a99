"""Bearer tokens: read from files, and presented with calls. Clients use this too, so it needs only gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc


def token_from(contents: Sequence[bytes]) -> str:
    """Returns the token that a file holds.

    Args:
        contents: The bytes of the file as the only item, as `WatchedFiles` passes them.

    Raises:
        ValueError: It is not one token in ASCII. The message does not quote the file.
    """
    # A line break at the end is allowed. Inside a token, gRPC would refuse it as metadata in every call.
    token = contents[0].strip()
    if not token or not token.isascii() or any(byte <= 32 for byte in token):
        raise ValueError("a token file must hold one token, in ASCII")
    return token.decode("ascii")


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    """Returns the metadata that present a token."""
    return (("authorization", f"Bearer {token}"),)


class CallsWithMetadata:
    """A channel whose calls carry metadata, for stubs. (Interceptors would put a queue into every stream.)"""

    def __init__(self, channel: grpc.aio.Channel | grpc.Channel, metadata: Sequence[tuple[str, str | bytes]]) -> None:
        self._channel, self._metadata = channel, tuple(metadata)

    def __getattr__(self, kind: str) -> Any:
        """Wraps unary_unary, unary_stream, stream_unary and stream_stream, which generated stubs call."""
        make = getattr(self._channel, kind)

        def multi_callable(*arguments: Any, **options: Any) -> Any:
            return partial(make(*arguments, **options), metadata=self._metadata)

        return multi_callable

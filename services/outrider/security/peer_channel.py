"""The channel to a peer: encrypted and authenticated according to the settings, with the current files.

The credentials of a channel cannot be changed, so a changed file means a new channel: streams that are opened from then
on use it, and the old one is closed when its last stream is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import grpc

from outrider.security.addresses import is_loopback
from outrider.security.certificates import channel_credentials
from outrider.security.tokens import CallsWithMetadata, bearer, token_from
from outrider.security.watched_files import WatchedFiles

_Stub = TypeVar("_Stub")

LAST_STREAM_S = 7 * 86400.0
"""Time, in seconds, after which the streams of an old channel are cut off."""


class PeerSecurity:
    """Holds the TLS and the token with which this process dials. The default is plaintext, to this machine only."""

    def __init__(
        self, ca: str = "", cert: str = "", key: str = "", token_file: str = "", *, insecure: bool = False
    ) -> None:
        """Reads the files; an empty path means none. Raises UnusableFile."""
        self._credentials = None
        if ca:
            self._credentials = channel_credentials(Path(ca), *(Path(name) if name else None for name in (cert, key)))
        self._token = WatchedFiles("--peer-token-file", [Path(token_file)], token_from) if token_file else None
        self._insecure = insecure

    def credentials(self, address: str) -> grpc.ChannelCredentials | None:
        """Returns the TLS of a channel, the same object as long as the files are the same. None means plaintext. Raises
        ValueError if plaintext is not allowed."""
        if self._credentials is not None:
            return self._credentials.current()
        if not (self._insecure or is_loopback(address)):
            raise ValueError(f"{address} is not on this machine: give --peer-ca for TLS, or --peer-insecure")
        return None

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the metadata of every call."""
        return bearer(self._token.current()) if self._token is not None else ()


class PeerChannel:
    """The channel to a peer, replaced when the files change. Lives on the event loop."""

    def __init__(self, address: str, security: PeerSecurity, options: Sequence[tuple[str, Any]]) -> None:
        """Raises ValueError if the address needs TLS and `security` has none."""
        self._address, self._security, self._options = address, security, list(options)
        self._credentials = security.credentials(address)
        self._channel = self._open()
        self._closing: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    def stub(self, kind: Callable[[grpc.aio.Channel], _Stub], more: Sequence[tuple[str, str]] = ()) -> _Stub:
        """Returns a stub for calls that begin now; it must not be kept. `more`: further metadata of the calls."""
        credentials = self._security.credentials(self._address)
        # By identity: there is a new object whenever the files have changed.
        if credentials is not self._credentials:
            self._credentials = credentials
            self._replace()
        metadata = (*self._security.metadata(), *more)
        channel = cast(grpc.aio.Channel, CallsWithMetadata(self._channel, metadata)) if metadata else self._channel
        return kind(channel)

    def dial_anew(self) -> None:
        """Replaces the connection for calls that begin from now on, unless it is still being established."""
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            self._replace()

    async def close(self) -> None:
        """Closes every channel, and every stream on them."""
        for channel, task in self._closing.items():
            task.cancel()
            await channel.close()
        await self._channel.close()

    def _open(self) -> grpc.aio.Channel:
        if self._credentials is None:
            return grpc.aio.insecure_channel(self._address, options=self._options)
        return grpc.aio.secure_channel(self._address, self._credentials, options=self._options)

    def _replace(self) -> None:
        """Opens another channel. The old one is closed when its last stream is over."""
        channel, self._channel = self._channel, self._open()
        task = asyncio.create_task(channel.close(LAST_STREAM_S))
        # Kept until it is done: asyncio itself holds only a weak reference to a task.
        self._closing[channel] = task
        task.add_done_callback(lambda _: self._closing.pop(channel, None))

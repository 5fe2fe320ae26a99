"""How a client proves who it is, and knows whom it talks to: one value for both clients and for every command."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import grpc

from outrider.rpc.security.addresses import is_loopback
from outrider.rpc.security.peer_channel import bearer, token_from


class SecurityOptions(TypedDict, total=False):
    """Keyword arguments of the clients."""

    token: str
    """Sent with every call."""
    ca_file: str | Path | None
    """PEM file of those who may have signed the server's certificate. Given: TLS."""
    cert_file: str | Path | None
    """PEM file of the certificate to show. Needs ca_file and key_file."""
    key_file: str | Path | None
    """PEM file of its key."""
    insecure: bool
    """Allows plaintext to other machines: anybody on the way can read, the token included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelSecurity:
    """See `SecurityOptions`. The files are read when a channel is opened."""

    token: str = field(default="", repr=False)
    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    insecure: bool = False
    credentials: grpc.ChannelCredentials | None = field(default=None, repr=False)
    """Made by the caller, instead of those of the files."""

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file: one needs the other")
        if self.cert_file is not None and self.ca_file is None:
            raise ValueError("cert_file needs ca_file: there is no TLS without")
        if self.credentials is not None and self.ca_file is not None:
            raise ValueError("credentials and ca_file: only one of them can be used")
        if self.insecure and (self.ca_file is not None or self.credentials is not None):
            raise ValueError("insecure means without TLS, and there are credentials for it")
        if self.token:
            token_from([self.token.encode()])

    def credentials_for(self, address: str) -> grpc.ChannelCredentials | None:
        """TLS for a channel to an address; None = plaintext. Raises ValueError where plaintext is not allowed, and
        OSError."""
        if self.credentials is not None:
            return self.credentials
        if self.ca_file is not None:
            key, cert = (None if path is None else Path(path).read_bytes() for path in (self.key_file, self.cert_file))
            return grpc.ssl_channel_credentials(Path(self.ca_file).read_bytes(), key, cert)
        if not (self.insecure or is_loopback(address)):
            raise ValueError(
                f"{address} is not on this machine: ca_file is needed for TLS, or insecure=True to go without"
            )
        return None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        return bearer(self.token) if self.token else ()


NO_SECURITY = ChannelSecurity()
"""In plaintext, to this machine only."""

"""Settings of security: who may call a service, and how a service calls its peers."""

from __future__ import annotations

from typing import Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings

from outrider.security.addresses import is_loopback
from outrider.security.peer_channel import PeerSecurity

SESSIONS_PER_CALLER = "Most sessions of one caller at a time; 0 = as many as there are."


def checked_address(value: str) -> str:
    """Returns HOST:PORT unchanged. Raises ValueError if it is malformed."""
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError("must be HOST:PORT with a port of 0 to 65535")
    return value


def checked_addresses(value: str) -> str:
    """Returns the addresses of servers, with commas between, unchanged. Raises ValueError if one is malformed."""
    for part in value.split(","):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) <= 65535:
            raise ValueError("must be HOST:PORT with a port of 1 to 65535, or several with commas between")
    return value


class ListenTlsSettings(BaseSettings):
    """Settings of the encryption of listening ports. The files are read again when they change."""

    listen: str
    tls_cert: str = Field("", description="Certificate of this service, with its chain, PEM; empty = no TLS.")
    tls_key: str = Field("", description="Key of --tls-cert, PEM, without a passphrase.")
    tls_client_ca: str = Field(
        "", description="Callers must show a certificate that one of these has signed, PEM; empty = they need none."
    )
    insecure: bool = Field(False, description="Listens beyond this machine without TLS: anybody on the way can read.")

    @model_validator(mode="after")
    def _listens_safely(self) -> Self:
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ValueError("--tls-cert and --tls-key: one needs the other")
        if self.tls_client_ca and not self.tls_cert:
            raise ValueError("--tls-client-ca: needs --tls-cert and --tls-key")
        if self.insecure and self.tls_cert:
            raise ValueError("--insecure: means without TLS, and there is --tls-cert")
        if not (self.tls_cert or self.insecure or is_loopback(self.listen)):
            raise ValueError(
                f"--listen: {self.listen} can be reached from other machines: give --tls-cert and --tls-key, or "
                "--insecure"
            )
        return self


class ListenSecuritySettings(ListenTlsSettings):
    """Settings of the callers that a gRPC service admits."""

    credentials: str = Field(
        "",
        description="File with the callers' tokens, tenants, roles and limits (outrider credentials new); empty = "
        "anybody may call.",
    )
    health_listen: str = Field(
        "",
        description="Address for health checks alone, HOST:PORT, without TLS and credentials; empty = only with them.",
    )

    @field_validator("health_listen")
    @classmethod
    def _health_listen_is_an_address(cls, value: str) -> str:
        return checked_address(value) if value else value


class PeerSecuritySettings(BaseSettings):
    """Settings of the calls to peers. The files are read again when they change."""

    peer_ca: str = Field(
        "", description="Peers are dialled with TLS; these sign their certificates, PEM. Empty = no TLS."
    )
    peer_cert: str = Field("", description="Certificate to show to peers, with its chain, PEM; empty = none.")
    peer_key: str = Field("", description="Key of --peer-cert, PEM, without a passphrase.")
    peer_token_file: str = Field("", repr=False, description="File with the token to show to peers; empty = none.")
    peer_insecure: bool = Field(False, description="Dials peers on other machines without TLS.")

    @property
    def peers(self) -> dict[str, str]:
        """Addresses of the peers by flag; empty if a peer is not used."""
        return {}

    def peer_security(self) -> PeerSecurity:
        """Returns the security that the channels to all peers share. Raises UnusableFile."""
        return PeerSecurity(
            self.peer_ca, self.peer_cert, self.peer_key, self.peer_token_file, insecure=self.peer_insecure
        )

    @model_validator(mode="after")
    def _dials_safely(self) -> Self:
        if bool(self.peer_cert) != bool(self.peer_key):
            raise ValueError("--peer-cert and --peer-key: one needs the other")
        if self.peer_cert and not self.peer_ca:
            raise ValueError("--peer-cert: needs --peer-ca, there is no TLS without")
        if self.peer_insecure and self.peer_ca:
            raise ValueError("--peer-insecure: means without TLS, and there is --peer-ca")
        # Checked here, and not only in `PeerSecurity.credentials`, which does not know the flag of an address.
        for flag, address in self.peers.items():
            if address and not (self.peer_ca or self.peer_insecure or is_loopback(address)):
                raise ValueError(f"{flag}: {address} is on another machine: give --peer-ca for TLS, or --peer-insecure")
        return self

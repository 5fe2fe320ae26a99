"""Settings of the gateway: flags and OUTRIDER_GATEWAY_* variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from outrider.security.addresses import addresses_of, host_of
from outrider.security.settings import PeerSecuritySettings, checked_addresses
from outrider.server.settings import LISTEN, ProcessSettings, model_config
from outrider_gateway.tools.calls import ToolCallFormat

if TYPE_CHECKING:
    FormatName = str
else:
    # A type checker cannot read a computed Literal.
    FormatName = Literal[tuple(each.value for each in ToolCallFormat)]


class GatewaySettings(ProcessSettings, PeerSecuritySettings):
    """The gateway: serves a verifier over HTTP, by OpenAI's API, and a page to look at what it does."""

    model_config = model_config("outrider_gateway")

    listen: str = Field("127.0.0.1:8000", description=LISTEN)
    upstream: str = Field(
        "127.0.0.1:50051",
        validate_default=True,
        description="Address of the verifier, HOST:PORT; several, with commas between, are replicas of one.",
    )
    served_model_name: str = Field(
        "", description="More names for the model, with commas between; empty = only its own."
    )
    tool_call_format: FormatName = Field(
        "auto",
        description="How the model writes calls of tools; auto = as its chat template has them, else by their markers.",
    )
    lenient: bool = Field(
        False, description="Leaves aside what clients ask for to no effect, like reasoning_effort, and counts it."
    )
    max_body_bytes: int = Field(4 << 20, ge=1024, description="Largest body of a request.")
    allow_host: str = Field(
        "",
        description="Names by which browsers may ask beside localhost, with commas between, * = all; empty = none, "
        "and any where --listen is no address of this machine alone.",
    )
    allow_origin: str = Field(
        "", description="Origins whose pages may call from browsers, with commas between, * = all; empty = none."
    )
    page: bool = Field(True, description="Serves the page at /.")
    lab_socket: str = Field(
        "", description="Unix socket of `outrider up`, for the page's buttons that break things; empty = no buttons."
    )
    stall_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for so long is cut off.")

    @field_validator("upstream")
    @classmethod
    def _upstream_is_addresses(cls, value: str) -> str:
        return checked_addresses(value)

    @field_validator("allow_host")
    @classmethod
    def _hosts_are_hosts(cls, value: str) -> str:
        if not all(host == "*" or host == host_of(host) for host in _parts(value)):
            raise ValueError("must be names or addresses without a port, in lower case, or *")
        return value

    @field_validator("allow_origin")
    @classmethod
    def _origins_are_origins(cls, value: str) -> str:
        for origin in _parts(value):
            url = urlsplit(origin)
            # Includes origins of programs that show pages of their own, like vscode-webview://NAME.
            if origin != "*" and (not url.scheme or not url.netloc or origin != f"{url.scheme}://{url.netloc}"):
                raise ValueError("must be http://HOST or https://HOST:PORT without a path, or *")
        return value

    @property
    def peers(self) -> dict[str, str]:
        """See `PeerSecuritySettings.peers`."""
        return {"--upstream": self.upstream}

    @property
    def upstreams(self) -> list[str]:
        """The addresses of `upstream`."""
        return list(addresses_of(self.upstream))

    @property
    def served_model_names(self) -> list[str]:
        """The names of `served_model_name`."""
        return _parts(self.served_model_name)

    @property
    def allowed_hosts(self) -> list[str]:
        """The names of `allow_host`."""
        return _parts(self.allow_host)

    @property
    def allowed_origins(self) -> list[str]:
        """The origins of `allow_origin`."""
        return _parts(self.allow_origin)


def _parts(value: str) -> list[str]:
    return [part.strip() for part in value.split(",") if part.strip()]

"""Settings of the edge: flags and OUTRIDER_EDGE_* variables."""

from __future__ import annotations

from pydantic import Field, field_validator

from outrider.security.addresses import addresses_of
from outrider.security.settings import checked_addresses
from outrider.server.settings import LISTEN, model_config
from outrider.speculator.settings import DraftModelSettings


class EdgeSettings(DraftModelSettings):
    """The edge: a speculator next to the application; serves the cloud's verifier as if it were here."""

    model_config = model_config("outrider.edge")

    listen: str = Field("127.0.0.1:50061", description=LISTEN)
    upstream: str = Field(
        "",
        validate_default=True,
        description="Address of the cloud's verifier, HOST:PORT; several, with commas between, share the generations.",
    )
    max_num_sessions: int = Field(
        16, ge=1, description="Most generations that are drafted for at a time; further ones go up without drafts."
    )
    resume_timeout_s: float = Field(
        30.0, ge=0, description="A generation that has lost the cloud goes on if it is back within so many seconds."
    )
    stall_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for so long is cut off.")

    @field_validator("upstream")
    @classmethod
    def _upstream_is_addresses(cls, value: str) -> str:
        return checked_addresses(value)

    @property
    def peers(self) -> dict[str, str]:
        """See `PeerSecuritySettings.peers`."""
        return {"--upstream": self.upstream}

    @property
    def upstreams(self) -> list[str]:
        """The addresses of `upstream`."""
        return list(addresses_of(self.upstream))

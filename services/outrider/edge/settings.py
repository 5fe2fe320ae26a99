"""Settings of the edge: flags and OUTRIDER_EDGE_* variables."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from outrider.server.settings import LISTEN, DialingSettings, model_config


class EdgeSettings(DialingSettings):
    """The edge: a speculator beside the application; serves the cloud's verifier as if it were here."""

    model_config = model_config("edge")

    listen: str = Field("127.0.0.1:50061", description=LISTEN)
    upstream: str = Field(
        "",
        validate_default=True,
        description="Address of the cloud's verifier, HOST:PORT; several, with commas between, stand in for another.",
    )
    model: str = Field("demo/draft", description="Draft model: a demo name, a folder or a Hugging Face name.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32", description="Numbers of the draft model; float32 is fastest for a small one on a CPU."
    )
    device: str = Field("cpu", description="Device of the draft model, like cpu or cuda:0.")
    num_threads: int = Field(0, ge=0, description="Threads of a forward on a CPU; 0 = one for each core in --cpu.")
    max_num_sessions: int = Field(
        16, ge=1, description="Most generations that are drafted for at a time; further ones go up without drafts."
    )
    prefill_chunk: int = Field(512, ge=1, description="Most rows of a prompt in one forward.")
    keep_warm_ms: float = Field(
        250.0,
        ge=0,
        description="For so long after a commit, idle forwards keep the model in a CPU's caches; 0 = never.",
    )
    resume_timeout_s: float = Field(
        30.0, ge=0, description="A generation that has lost the cloud goes on if it is back within so many seconds."
    )
    stall_timeout_s: float = Field(60.0, gt=0, description="A client that reads nothing for so long is cut off.")

    @field_validator("upstream")
    @classmethod
    def _upstream_is_addresses(cls, value: str) -> str:
        for part in value.split(","):
            host, _, port = part.strip().rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) <= 65535:
                raise ValueError("must be HOST:PORT, or several separated by commas")
        return value

    @property
    def peers(self) -> dict[str, str]:
        """See `PeerSecuritySettings.peers`."""
        return {"--upstream": self.upstream}

    @property
    def upstreams(self) -> list[str]:
        """The addresses of `upstream`, the one that is dialled first at the front."""
        return [part.strip() for part in self.upstream.split(",")]

"""Settings of the speculator: flags and OUTRIDER_SPECULATOR_* variables."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from outrider.security.settings import SESSIONS_PER_CALLER
from outrider.server.settings import LISTEN, ModelSettings, draft_dtype_on, model_config


class DraftModelSettings(ModelSettings):
    """Settings of a service that runs a draft model: a speculator, or an edge."""

    model: str = Field("demo/draft", description="Draft model: a demo name, folder, GGUF file or Hugging Face name.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32", description="Numbers of the draft model; unset = float32 on a CPU, auto elsewhere."
    )
    prefill_chunk: int = Field(512, ge=1, description="Most rows of a prompt in one forward.")
    keep_warm_ms: float = Field(
        250.0,
        ge=0,
        description="For so long after a commit, idle forwards keep the model in a CPU's caches; 0 = never.",
    )

    @model_validator(mode="before")
    @classmethod
    def _choose_dtype(cls, given: dict[str, Any]) -> dict[str, Any]:
        return {"dtype": draft_dtype_on(given.get("device", "cpu")), **given}

    @property
    def keep_warm_s(self) -> float:
        """Seconds for which an idle model is kept in the caches."""
        # Only a CPU shares its caches with others that would push the model out.
        return self.keep_warm_ms / 1e3 if self.device == "cpu" else 0.0


class SpeculatorSettings(DraftModelSettings):
    """The draft-speculator: guesses ahead of a target model."""

    model_config = model_config("outrider.speculator")

    listen: str = Field("127.0.0.1:50052", description=LISTEN)
    datastore: str = Field(
        "", description="Address of the retrieval-datastore, HOST:PORT, for a copy of the prior; empty = none."
    )
    corpus: str = Field("", description="Prior corpus to copy; empty = the datastore's default.")
    tenant: str = Field("", description="Tenant whose own corpus is preferred; empty = the datastore's default.")
    max_sessions_per_caller: int = Field(0, ge=0, description=SESSIONS_PER_CALLER)
    max_read_tokens_per_minute: int = Field(
        0,
        ge=0,
        description="Most tokens of texts that are read for one caller, on average over a minute; beyond it, new "
        "sessions are refused. 0 = no limit.",
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="A caller that reads nothing for so long, or says nothing at first, is cut off."
    )

    @property
    def peers(self) -> dict[str, str]:
        """See `PeerSecuritySettings.peers`."""
        return {"--datastore": self.datastore}

"""Settings of the verifier: flags and OUTRIDER_VERIFIER_* variables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from outrider.core.methods import MethodName
from outrider.core.speculation import MAX_BEAM_WIDTH, MAX_BUDGET, MAX_ROWS
from outrider.peers.speculator import MAX_NODES_PER_S
from outrider.security.settings import SESSIONS_PER_CALLER
from outrider.server.settings import LISTEN, ModelSettings, check_pool, checked_device, draft_dtype_on, model_config


@dataclass(frozen=True, slots=True)
class DraftFlags:
    """Settings of a draft model in the verifier's process, under a speculator's names for them."""

    model: str
    dtype: str
    device: str
    num_threads: int
    cores: set[int]
    exact: str
    graphs: bool
    kv_cache_tokens: int
    kv_block_size: int
    max_num_sessions: int
    prefill_chunk: int
    keep_warm_s: float
    prefix_scope: str


class VerifierSettings(ModelSettings):
    """The target-verifier: generates the target model's own text, faster."""

    model_config = model_config("outrider.verifier")

    listen: str = Field("127.0.0.1:50051", description=LISTEN)
    model: str = Field(
        "demo/target-100m", description="Target model: a demo name, folder, GGUF file or Hugging Face name."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field("auto", description="Numbers of the target model.")
    speculator: str = Field(
        "",
        description="Address of the draft-speculator, HOST:PORT; several, with commas between, share the sessions; "
        "empty = none.",
    )
    drafter: Literal["speculator", "in-process"] = Field(
        "speculator",
        description="Where the draft model runs: behind --speculator, if that names any, or in this process, as on one "
        "GPU with the target.",
    )
    draft_model: str = Field("demo/draft", description="Draft model of --drafter in-process: as --model.")
    draft_dtype: Literal["auto", "float32", "bfloat16"] | None = Field(
        None, description="Numbers of that draft model; unset = float32 on a CPU, auto elsewhere."
    )
    draft_device: str | None = Field(None, description="Device of that draft model; unset = that of --device.")
    draft_kv_cache_tokens: int = Field(
        0,
        ge=0,
        description="Tokens whose keys and values that draft model's pool has room for; 0 = on the target's GPU as "
        "many as the target's, and on a CPU what half the memory holds that the target has left free.",
    )
    draft_prefill_chunk: int = Field(512, ge=1, description="Most rows of a prompt in one forward of that draft model.")
    draft_keep_warm_ms: float = Field(
        0.0,
        ge=0,
        description="For so long after a commit, idle forwards keep that draft model in a CPU's caches; 0 = never. "
        "They take time from the target on the same cores.",
    )
    datastore: str = Field("", description="Address of the retrieval-datastore, HOST:PORT; empty = none.")
    corpus: str = Field("", description="Prior corpus to look up in; empty = the datastore's default.")
    tenant: str = Field(
        "",
        description="Tenant of callers whose credentials name none: whose tokens retrieval sees. Empty = the "
        "datastore's default.",
    )
    retrieval_scope: Literal["session", "tenant", "global"] | None = Field(
        None,
        description="With whom requests that do not say share what they retrieve; unset = nobody, but the tenant for "
        "method spacelike.",
    )
    default_method: MethodName = Field("auto", description="Method of requests that name none.")
    num_speculative_tokens: int = Field(12, ge=1, le=64, description="Default of the longest chain of a round.")
    max_num_speculative_tokens: int = Field(32, ge=1, le=64, description="Limit of num_speculative_tokens.")
    max_num_rows: int = Field(32, ge=1, le=MAX_ROWS, description="Limit of max_rows, the drafted rows of a round.")
    max_beam_width: int = Field(256, ge=1, le=MAX_BEAM_WIDTH, description="Limit of card's beam_width.")
    max_budget: int = Field(256, ge=1, le=MAX_BUDGET, description="Limit of saguaro's budget.")
    lookahead: int = Field(64, ge=1, description="Default of the tokens that a speculator drafts ahead.")
    min_path_probability: float = Field(
        0.2, ge=0, lt=1, description="Default of the path probability at which a chain ends."
    )
    exact: Literal["auto", "off", "require"] = Field(
        "auto",
        description="Makes the bits of a row independent of what runs beside it: a text is the same under every "
        "method, whatever the number format. Tried at the start; auto = warn where it fails, require = refuse to "
        "start, off = do not try.",
    )
    generation_config: Literal["auto", "none"] = Field(
        "auto",
        description="Sampling of requests that do not say: auto = as the model's generation_config.json has it, none = "
        "temperature 1, without filters and penalties.",
    )
    max_num_queued: int = Field(
        64, ge=0, description="Most sessions that wait for room beside those that have it; 0 = none waits."
    )
    queue_timeout_s: float = Field(30.0, gt=0, description="A session that has waited for room so long is refused.")
    max_sessions_per_caller: int = Field(0, ge=0, description=SESSIONS_PER_CALLER)
    max_num_choices: int = Field(16, ge=1, le=128, description="Limit of n, the texts of one request.")
    max_prompt_tokens: int = Field(0, ge=0, description="Longest prompt; 0 = as long as the context has room for.")
    max_draft_nodes_per_s: float = Field(
        MAX_NODES_PER_S, gt=0, description="Most nodes a second of one session's drafts; what is beyond is dropped."
    )
    stall_timeout_s: float = Field(
        60.0, gt=0, description="A client that reads nothing for so long, or says nothing at first, is cut off."
    )
    overlap: bool = Field(
        True,
        description="Launches a forward while the GPU is still at the one before, where its rows follow without the "
        "host. Without meaning on a CPU; --no-overlap is for finding out if it is at fault.",
    )
    prefill_chunk: int = Field(256, ge=1, description="Most prompt rows of one forward.")
    max_rows: int = Field(256, ge=1, description="Most decode rows of one forward; chains are cut to fit.")

    @field_validator("speculator")
    @classmethod
    def _speculators_are_told_apart(cls, value: str) -> str:
        parts = [part.strip() for part in value.split(",")]
        if value and not all(parts):
            raise ValueError("must be HOST:PORT, or several separated by commas, without an empty one")
        if len(set(parts)) < len(parts):
            raise ValueError("must name each speculator once")
        return value

    @field_validator("draft_device")
    @classmethod
    def _draft_device_is_one(cls, value: str | None) -> str | None:
        return value if value is None else checked_device(value)

    @model_validator(mode="after")
    def _drafts_have_one_origin(self) -> Self:
        if self.drafter == "in-process":
            if self.speculator:
                raise ValueError(
                    f"--speculator must be empty with --drafter in-process: drafts come from one of them, got "
                    f"{self.speculator!r}"
                )
            check_pool("--draft-kv-cache-tokens", self.draft_kv_cache_tokens, self.kv_block_size)
            return self
        # In the order of the class, so that the message is deterministic.
        for name in type(self).model_fields:
            if name.startswith("draft_") and name in self.model_fields_set:
                raise ValueError(f"--{name.replace('_', '-')} needs --drafter in-process: a speculator has its own")
        return self

    @property
    def has_drafter(self) -> bool:
        """True if there is a draft model, wherever it runs."""
        return bool(self.speculator) or self.drafter == "in-process"

    @property
    def draft(self) -> DraftFlags:
        """Settings of the draft model in this process."""
        device = self.draft_device or self.device
        return DraftFlags(
            model=self.draft_model,
            dtype=self.draft_dtype or draft_dtype_on(device),
            device=device,
            num_threads=self.num_threads,
            cores=self.cores,
            graphs=self.graphs,
            exact="off",
            kv_cache_tokens=self.draft_kv_cache_tokens,
            kv_block_size=self.kv_block_size,
            max_num_sessions=self.max_num_sessions,
            prefill_chunk=self.draft_prefill_chunk,
            keep_warm_s=self.draft_keep_warm_ms / 1e3 if device == "cpu" else 0.0,
            prefix_scope=self.prefix_scope,
        )

    @property
    def peers(self) -> dict[str, str]:
        """Returns the addresses of the peers by the flags that set them."""
        return {"--speculator": self.speculator, "--datastore": self.datastore}

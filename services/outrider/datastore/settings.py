"""Settings of the datastore: flags and OUTRIDER_DATASTORE_* variables."""

from __future__ import annotations

from pydantic import Field

from outrider.rpc.settings import LISTEN, ServiceSettings, model_config


class DatastoreSettings(ServiceSettings):
    """The retrieval-datastore: serves n-gram continuations of what was said before."""

    model_config = model_config("datastore")

    listen: str = Field("127.0.0.1:50053", description=LISTEN)
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis or Valkey, 7.0 or later: redis://, rediss:// or unix://."
    )
    redis_timeout_s: float = Field(
        0.5, gt=0, description="Longest that one Redis command, or connecting, may take; then callers decode without."
    )
    max_match_len: int = Field(
        4, ge=1, le=16, description="Longest n-gram recorded, in tokens; default and limit of a lookup's max_match_len."
    )
    max_continuation_len: int = Field(
        16, ge=1, le=256, description="Default and limit of a lookup's max_continuation_len, in tokens."
    )
    max_num_queries: int = Field(64, ge=1, description="Most contexts in one lookup.")
    max_context_len: int = Field(4096, ge=1, description="Most tokens in one context.")
    max_rejection_len: int = Field(256, ge=1, description="Most tokens in each list of a rejection.")
    max_num_tokens: int = Field(
        131072, ge=1, description="Most accepted tokens in one record, or tokens in one document."
    )
    max_num_rejections: int = Field(256, ge=1, description="Most rejections in one record.")
    session_ttl_s: int = Field(3600, ge=1, description="A session's tiers are deleted this long after its last record.")

"""Settings of the datastore, given as flags or as OUTRIDER_DATASTORE_* variables."""

from __future__ import annotations

from pydantic import Field, field_validator

from outrider.security.addresses import REDIS_URL_RULE, is_redis_url
from outrider.server.settings import LISTEN, ServiceSettings, model_config


class DatastoreSettings(ServiceSettings):
    """The retrieval-datastore: serves continuations of what was said before."""

    model_config = model_config("outrider.datastore")

    listen: str = Field("127.0.0.1:50053", description=LISTEN)
    tokenizer_hash: str = Field("", max_length=256, description="Tokenizer to serve; empty = any.")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        repr=False,
        description="Redis or Valkey, 7.0 or later, and no cluster: redis://, rediss:// (TLS), unix://, or through "
        "Sentinel redis+sentinel://HOST:26379,HOST2:26379/SERVICE/0, rediss+sentinel:// with TLS.",
    )
    redis_timeout_s: float = Field(
        0.5, gt=0, description="Longest that one Redis command other than a lookup, or connecting, may take."
    )
    lookup_timeout_ms: float = Field(
        4.0,
        gt=0,
        description="Longest that Redis may take to look up 16 contexts; then what this server holds is the answer.",
    )
    memory_budget_mb: int = Field(
        0,
        ge=0,
        description="Memory that Redis may use; sets its maxmemory and maxmemory-policy. 0 = leave Redis as it is.",
    )
    max_match_len: int = Field(
        4, ge=1, le=16, description="Longest n-gram recorded, in tokens; default and limit of a lookup's max_match_len."
    )
    max_ring_match_len: int = Field(10, ge=1, le=16, description="Longest suffix tried in a ring, in tokens.")
    # At most 255: in the reply of Redis the length of a chain is one byte.
    max_continuation_len: int = Field(
        16, ge=1, le=255, description="Default and limit of a lookup's max_continuation_len, in tokens."
    )
    max_num_queries: int = Field(64, ge=1, description="Most contexts in one lookup.")
    max_context_len: int = Field(4096, ge=1, description="Most tokens in one context.")
    max_rejection_len: int = Field(256, ge=1, description="Most tokens in each list of a rejection.")
    max_num_tokens: int = Field(131072, ge=1, description="Most accepted tokens in one record.")
    max_num_rejections: int = Field(256, ge=1, description="Most rejections in one record.")
    max_document_len: int = Field(1 << 20, ge=2, description="Most tokens in one document of a prior.")
    max_prior_tokens: int = Field(8 << 20, ge=2, description="Most tokens in one prior.")
    max_num_loads: int = Field(2, ge=1, description="Priors that may be loaded at the same time.")
    session_ttl_s: int = Field(3600, ge=1, description="A session's tiers are deleted this long after its last record.")
    max_session_tokens: int = Field(131072, ge=1, description="Most tokens that one session's tiers learn.")
    shared_ttl_s: int = Field(
        7 * 86400, ge=1, description="A shared tier, or a ring, is deleted this long after the last write."
    )
    max_num_shared_ngrams: int = Field(
        4 << 20, ge=1024, description="Most n-grams in a shared tier; beyond it the least counted ones go."
    )
    max_num_shared_changes: int = Field(
        8192, ge=16, description="Latest additions to a shared tier that a new watcher is sent."
    )
    ring_capacity: int = Field(1 << 20, ge=1024, description="Most tokens in a ring; the oldest documents go.")
    max_num_rings: int = Field(8, ge=1, description="Most rings held in this process.")
    max_num_priors: int = Field(4, ge=1, description="Most priors held in this process, for when Redis is away.")
    max_num_watchers: int = Field(256, ge=1, description="Most Watch streams.")
    stall_timeout_s: float = Field(
        60.0,
        gt=0,
        description="A watcher that reads nothing, or a stream that says nothing at first, for so long is cut off.",
    )

    @field_validator("redis_url")
    @classmethod
    def _check_redis_url(cls, value: str) -> str:
        if not is_redis_url(value):
            raise ValueError(f"must be {REDIS_URL_RULE}")
        return value

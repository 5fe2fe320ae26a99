"""Values that the parts of the datastore exchange: scopes, commands to look up or to record, and answers.

The tiers and their order are those of `outrider.core.retrieval.tiers.LocalTiers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import Continuation, TokenId
from outrider.security.callers import DEFAULT_TENANT

DEFAULT_CORPUS = "default"
ALL_TENANTS = ""
"""Used in place of a tenant for what all tenants share."""

NGRAM_TIERS = (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED)
"""Tiers of n-grams in the order of a lookup."""
TIERS = (*NGRAM_TIERS, Source.RING)


class StoreUnavailable(Exception):
    """Redis cannot be used now. The message names it. Nothing is retried: the next call tries again."""


class StoreFull(Exception):
    """Redis has no memory left for a write. Its data are still there."""


class CorpusNotFound(Exception):
    """There is no prior corpus of that name."""

    def __init__(self, tokenizer_hash: str, corpus: str) -> None:
        super().__init__(f"there is no corpus {corpus!r} for tokenizer {tokenizer_hash!r}")


@dataclass(frozen=True, slots=True)
class CorpusId:
    """Names a prior or a ring, which is kept once for a corpus and a tenant."""

    tokenizer_hash: str
    corpus: str
    tenant: str
    """ALL_TENANTS means the one that all tenants share."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Says whose tokens a request is about."""

    tokenizer_hash: str
    """Gives the token ids their meaning."""
    session_id: str = ""
    """Session of the dynamic and the rejected tier. Empty means that neither is used."""
    corpus: str = DEFAULT_CORPUS
    """Name of the prior. The default one need not exist."""
    tenant: str = DEFAULT_TENANT
    """Owner of the session. Sessions of two tenants are different ones even if their ids are equal."""
    retrieval_scope: RetrievalScope = RetrievalScope.SESSION
    """Selects the shared tier and the ring: the tenant's, those of all tenants, or neither."""
    contribute: bool = False
    """True if recorded tokens go to the shared tier and the ring, too."""
    vocab_size: int = 0
    """Upper bound of the token ids, exclusive. 0 means that it is not checked."""

    def corpus_id(self, tenant: str) -> CorpusId:
        """Returns the scope's corpus as a tenant, or ALL_TENANTS, has it."""
        return CorpusId(self.tokenizer_hash, self.corpus, tenant)

    @property
    def corpus_ids(self) -> tuple[CorpusId, CorpusId]:
        """The tenant's own corpus, which takes precedence if both exist, and that of all tenants."""
        return self.corpus_id(self.tenant), self.corpus_id(ALL_TENANTS)


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one lookup."""

    max_match_len: int
    """Longest suffix tried in the n-gram tiers."""
    max_continuation_len: int
    # Hashable, as a scope is: the store caches the head of a lookup command by both.
    tiers: frozenset[Source] = frozenset(TIERS)
    """Tiers to search."""
    whole_runs: bool = False
    """True if the ring compares continuations as a whole."""


@dataclass(frozen=True, slots=True)
class LookupCommand:
    """A checked request to look contexts up."""

    scope: Scope
    contexts: Sequence[Sequence[TokenId]]
    """The last tokens of each context, oldest first, as many as any tier can match."""
    limits: Limits


@dataclass(frozen=True, slots=True)
class Rejection:
    """Drafted tokens, of which the target refused the first. No list is empty."""

    context: Sequence[TokenId]
    """The last tokens before the refused one, oldest first."""
    rejected: Sequence[TokenId]
    """Drafted tokens in a row, the refused one first."""


@dataclass(frozen=True, slots=True)
class RecordCommand:
    """A checked request to record tokens of a session."""

    scope: Scope
    """Names a session."""
    base_len: int
    """Position of the first accepted token in the session's stream."""
    accepted: Sequence[TokenId]
    rejections: Sequence[Rejection]
    accepted_by_tier: Sequence[tuple[Source, int]]
    """Numbers of retrieved tokens that the target has accepted, for the statistics."""
    ends_session: bool


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """Answers the contexts of one lookup from the n-gram tiers, in order."""

    continuations: list[Continuation]
    prior: CorpusId | None = None
    """The prior that was searched. None means that neither the tenant nor all tenants have one."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A whole prior corpus."""

    version: str
    """Differs each time that the corpus is loaded."""
    documents: tuple[Sequence[TokenId], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class CorpusInfo:
    """Describes a stored prior corpus."""

    id: CorpusId
    num_tokens: int
    num_ngrams: int


@dataclass(frozen=True, slots=True)
class PriorChange:
    """Announces that a prior of the scope may have been loaded or deleted. Also yielded when nothing came for a
    while."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Tokens that were added to a shared tier."""

    context: Sequence[TokenId]
    """The tokens of the same stream before them, as many as n-grams reach back."""
    token_ids: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class RingDocument:
    """Tokens of a session that has ended."""

    entry_id: str
    """Position in the ring's stream: a follower resumes after it."""
    token_ids: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class Health:
    """State of the Redis server."""

    product: str
    """Name and version. Empty means that it cannot be used now."""
    used_memory_bytes: int = 0
    max_memory_bytes: int = 0
    """0 means no limit."""
    num_evicted_keys: int = 0
    problem: str = ""
    """Why it cannot be used now. Empty means that it can."""

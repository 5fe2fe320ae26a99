"""What the datastore asks of its storage: tiers by scope, as `core.retrieval.tiers.LocalTiers` defines them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.params import RetrievalScope, Source
from outrider.core.retrieval.ngrams import Continuation, TokenId
from outrider.core.retrieval.prior import PriorTable

DEFAULT_CORPUS = "default"
DEFAULT_TENANT = "default"
ALL_TENANTS = ""
"""In place of a tenant: the prior of all."""

NGRAM_TIERS = (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED)
"""In the order of a lookup."""
TIERS = (*NGRAM_TIERS, Source.RING)


class StoreUnavailable(Exception):
    """The storage cannot be used now. The message names it. Nothing is retried: the next call tries anew."""


class StoreFull(Exception):
    """The storage has no memory left for this. What it holds is still there."""


class CorpusNotFound(Exception):
    """There is no prior corpus of that name."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(f"there is no corpus {scope.corpus!r} for tokenizer {scope.tokenizer_hash!r}")


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose tokens."""

    tokenizer_hash: str
    """The meaning of the token ids."""
    session_id: str = ""
    """Session of the dynamic and the rejected tier; empty = none."""
    corpus: str = DEFAULT_CORPUS
    """Name of the prior tier. The default need not exist."""
    tenant: str = DEFAULT_TENANT
    """Whom the session belongs to. Sessions of two tenants are two, whatever their names."""
    retrieval_scope: RetrievalScope = RetrievalScope.SESSION
    """Whose shared tier and ring are used."""
    contribute: bool = False
    """Whether what is recorded goes to them."""
    vocab_size: int = 0
    """Token ids are smaller; 0 = not checked."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A draft that the target refused. No list is empty."""

    context: Sequence[TokenId]
    """The last tokens before the refused one, oldest first."""
    rejected: Sequence[TokenId]
    continuation: Sequence[TokenId]
    """What the target said instead, as far as known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one lookup."""

    max_match_len: int
    """Longest suffix tried in the n-gram tiers."""
    max_continuation_len: int
    tiers: frozenset[Source] = frozenset(TIERS)
    """Those to search."""


@dataclass(frozen=True, slots=True)
class Found:
    """Answers to the contexts of one lookup, in order."""

    continuations: list[Continuation]
    prior_tenant: str | None = None
    """Whose prior was searched; ALL_TENANTS = that of all; None = there is none."""


@dataclass(frozen=True, slots=True)
class Prior:
    """A prior corpus, whole."""

    version: str
    """Another one each time it is loaded."""
    documents: tuple[Sequence[TokenId], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class PriorChange:
    """A prior of the scope may have been loaded or deleted. Also sent when nothing else was for a while."""


@dataclass(frozen=True, slots=True)
class SharedRun:
    """Tokens that were added to a shared tier."""

    context: Sequence[TokenId]
    """The last tokens of the same stream before them, as far as n-grams reach."""
    token_ids: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class RingDocument:
    """Tokens of a session that has ended."""

    entry_id: str
    """Where to go on from, after this one."""
    token_ids: Sequence[TokenId]


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prior corpus that is stored."""

    tokenizer_hash: str
    name: str
    tenant: str
    """ALL_TENANTS = that of all."""
    num_tokens: int
    num_ngrams: int


@dataclass(frozen=True, slots=True)
class Health:
    """How the storage is."""

    product: str
    """Name and version; empty = not reachable now."""
    used_memory_bytes: int = 0
    max_memory_bytes: int = 0
    """0 = no limit."""
    num_evicted_keys: int = 0


class Store(Protocol):
    """Tiers by scope. Every method raises StoreUnavailable; those that write raise StoreFull."""

    @property
    def num_errors(self) -> int:
        """Calls that have failed for want of the storage."""
        ...

    async def lookup(self, scope: Scope, contexts: Sequence[Sequence[TokenId]], limits: Limits) -> Found:
        """Looks contexts up in the n-gram tiers. Gives up after the lookup timeout, at once where it cannot succeed."""
        ...

    async def corpus_exists(self, scope: Scope) -> bool:
        """Whether there is a prior for the scope: the tenant's own, or that of all."""
        ...

    async def record(
        self, scope: Scope, base_len: int, accepted: Sequence[TokenId], rejections: Sequence[Rejection]
    ) -> int:
        """Adds the session's tokens from position base_len on, and its refused drafts. The scope names a session.

        Returns the session's position afterwards. If it was less than base_len before, nothing is stored. Tokens that
        are there already are not added again, and the refused drafts that come with such tokens alone are not either.
        """
        ...

    async def end_session(self, scope: Scope, base_len: int) -> int:
        """Deletes the session's tiers; if it contributes, its tokens go to the ring. One that is not there is no error.

        Returns the session's position. If it is not base_len, nothing is done.
        """
        ...

    def load_prior(
        self, scope: Scope, tenant: str, documents: Sequence[Sequence[TokenId]], table: PriorTable
    ) -> AsyncGenerator[int, None]:
        """Puts a prior corpus, and the table that was built of it, in the place of the one of that name.

        Yields how many n-grams are stored now and then; the corpus is in use when the iterator ends. Whatever is
        raised, and if the caller closes the iterator halfway, the former corpus stays and nothing of the new one does.
        """
        ...

    async def delete_prior(self, scope: Scope, tenant: str) -> None:
        """Deletes a prior corpus. Raises CorpusNotFound."""
        ...

    async def list_corpora(self) -> list[Corpus]:
        """The prior corpora, by tokenizer, name and tenant."""
        ...

    async def prior_versions(self, priors: Sequence[tuple[Scope, str]]) -> list[str | None]:
        """Versions of the priors of (scope, tenant); None = there is none."""
        ...

    async def read_prior(self, scope: Scope, tenant: str) -> Prior | None:
        """The documents of a prior; None = there is none."""
        ...

    def follow(self, scope: Scope) -> AsyncGenerator[PriorChange | SharedRun, None]:
        """Changes of the scope's priors and of its shared tier: what is still known of the past, then what comes.

        Begins with a PriorChange. Never ends by itself.
        """
        ...

    def follow_ring(self, scope: Scope, after: str = "") -> AsyncGenerator[RingDocument, None]:
        """The documents of the scope's ring after an entry, the oldest first, then those that come. Never ends."""
        ...

    async def health(self) -> Health:
        """How the storage is; never raises."""
        ...

    async def close(self) -> None:
        """Lets go of all connections."""
        ...

"""What the datastore asks of its storage: n-gram tiers by scope, as `outrider.core.ngrams.NgramTiers` defines them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.core.ngrams import Continuation, TokenId

DEFAULT_CORPUS = "default"


class StoreUnavailable(Exception):
    """The storage cannot be used now. The message names it. Nothing is retried: the next call tries anew."""


class CorpusNotFound(Exception):
    """There is no prior corpus of that name."""


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose tokens."""

    tokenizer_hash: str
    """The meaning of the token ids."""
    session_id: str = ""
    """Session of the dynamic and the rejected tier; empty = the prior tier alone."""
    corpus: str = DEFAULT_CORPUS
    """Name of the prior tier."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A draft that the target refused. No list is empty."""

    context: Sequence[TokenId]
    """The last tokens before the refused one, oldest first."""
    rejected: Sequence[TokenId]
    continuation: Sequence[TokenId]
    """What the target said instead, as far as known."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A prior corpus that is stored."""

    tokenizer_hash: str
    name: str
    num_tokens: int


class Store(Protocol):
    """N-gram tiers by scope. Every method raises StoreUnavailable."""

    async def lookup(
        self, scope: Scope, contexts: Sequence[Sequence[TokenId]], max_match_len: int, max_continuation_len: int
    ) -> list[Continuation]:
        """Looks contexts up. One answer each, in order."""
        ...

    async def record(self, scope: Scope, accepted: Sequence[TokenId], rejections: Sequence[Rejection]) -> None:
        """Adds the session's next tokens and its refused drafts. The scope names a session."""
        ...

    async def end_session(self, scope: Scope) -> None:
        """Deletes the session's tiers; one that is not there is no error."""
        ...

    async def load_prior(self, scope: Scope, documents: AsyncIterator[Sequence[TokenId]]) -> int:
        """Puts a prior corpus in the place of the one of that name, once all of it is stored.

        Returns its number of tokens. Raises InvalidParameter if no document has two tokens. Whatever is raised, the
        former corpus stays.
        """
        ...

    async def list_corpora(self) -> list[Corpus]:
        """The prior corpora, by tokenizer and name."""
        ...

    async def delete_corpus(self, scope: Scope) -> None:
        """Deletes a prior corpus. Raises CorpusNotFound."""
        ...

    async def describe(self) -> str:
        """Product and version."""
        ...

    async def close(self) -> None:
        """Lets go of all connections."""
        ...

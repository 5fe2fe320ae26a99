"""The plan of retrieval: the sources that one side of a session looks up, and the lengths of contexts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from outrider.core.params import OWN_SOURCES, TIERS, Source

NGRAM_ORDER = 4
"""Longest n-gram of the copies in process, and of a session's own tiers unless it wants another. The datastore's ring
knows longer ones."""
CONTEXT_LEN = 16
"""Last committed tokens that a lookup may need, here or in the datastore."""
MAX_PHRASE_LEN = 10
"""Retrieved tokens that one draft forward verifies, unless the session wants another number."""

MAX_RUN_LEN = 16
"""Most tokens of a continuation that a datastore returns, by its default settings."""


@dataclass(frozen=True)
class RetrievalPlan:
    """The lookups of one side of a session."""

    max_match_len: int = NGRAM_ORDER
    """Longest n-gram that is looked up in process."""
    context_len: int = CONTEXT_LEN
    """Last tokens that are sent to the datastore: none of its tiers matches more."""
    sources: tuple[Source, ...] = TIERS
    """Sources that are looked up, the preferred first: tiers here and in the datastore, others here."""
    max_phrase_len: int = MAX_PHRASE_LEN
    """Most retrieved tokens that one draft forward verifies."""
    max_tail_len: int = 0
    """Most retrieved tokens that one target forward verifies after the whole chain. 0 means as many as the chain lacks
    of its greatest length."""
    whole_run_len: int = 0
    """Length to which the ring cuts continuations to compare them as a whole. 0 means that it compares token by
    token."""
    is_calibrated: bool = True
    """True if phrases end where they become improbable, and have the length that has paid so far. False means that they
    have their greatest length."""
    is_ranked_by_noise: bool = True
    """Ranks tokens that followed the same n-gram with the target's noise."""
    is_remote: bool = False
    """True if no tier is looked up in process: the datastore is asked for all of them, whatever answers are worth."""
    looks_ahead: bool = False
    """True if the datastore is asked what follows a continuation before that continuation is used up."""
    has_branches: bool = False
    """True if a tree grows from all continuations of the committed tokens that are known in process. Only if rows may
    branch."""

    @cached_property
    def tiers(self) -> tuple[Source, ...]:
        """Those of the sources that are tiers of the datastore."""
        return tuple(source for source in self.sources if source in TIERS)

    @cached_property
    def is_in_process(self) -> bool:
        """True if anything may be looked up without the datastore. For a remote plan that is a predicted text, and the
        verifier's own sources."""
        return set(self.sources) != {Source.RING}

    @cached_property
    def has_own_sources(self) -> bool:
        """True if one of the verifier's own sources is looked up (`OWN_SOURCES`)."""
        return any(source in OWN_SOURCES for source in self.sources)

    @cached_property
    def judges_siblings(self) -> bool:
        """True if guesses learn from every token that the target says after their parent, not from verdicts on paths:
        most nodes of a tree lie next to the path, and are refused without a verdict of their own."""
        return self.has_branches or self.has_own_sources

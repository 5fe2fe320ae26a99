"""The plan of retrieval: the sources that one side of a session looks up, after how many tokens."""

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
"""Tokens of a continuation that a datastore returns at most, by its default settings."""


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
    """Most retrieved tokens that one target forward verifies behind the whole chain. 0 means as many as the chain
    lacks of its greatest length."""
    whole_run_len: int = 0
    """Has the ring compare continuations as a whole, cut to so many tokens. 0 means token by token."""
    is_calibrated: bool = True
    """Ends phrases where they become improbable, and makes them as long as has paid so far. False means that they are
    as long as they may be."""
    is_ranked_by_noise: bool = True
    """Ranks tokens that followed the same n-gram with the target's noise."""
    looks_ahead: bool = False
    """Asks the datastore for what comes behind a continuation before that is used up."""
    has_branches: bool = False
    """Grows a tree of all that is known in process behind the committed tokens, where rows may branch."""

    @cached_property
    def tiers(self) -> tuple[Source, ...]:
        """Those of the sources that are tiers of the datastore."""
        return tuple(source for source in self.sources if source in TIERS)

    @cached_property
    def is_in_process(self) -> bool:
        """True if anything is looked up without the datastore."""
        return set(self.sources) != {Source.RING}

    @cached_property
    def has_own_sources(self) -> bool:
        """True if a source is looked up that the verifier has of its own."""
        return any(source in OWN_SOURCES for source in self.sources)

    @cached_property
    def judges_siblings(self) -> bool:
        """True if guesses learn from every token that the target says behind their parent, not from verdicts on paths:
        of a tree most nodes lie beside the path, and are refused without a verdict of their own."""
        return self.has_branches or self.has_own_sources

"""Plans of retrieval: the sources that each side of a session looks up, after how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from outrider.core.params import OWN_SOURCES, TIERS, Method, Rows, Source, SpeculationParams

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


def target_plan(params: SpeculationParams) -> RetrievalPlan | None:
    """Returns the verifier's plan. None means that it looks nothing up."""
    plan = _target_plan(params)
    return None if plan is None else _as_asked(plan, params)


def _target_plan(params: SpeculationParams) -> RetrievalPlan | None:
    match params.method:
        case Method.DOUBLE:
            plan = _double_plan(params)
            return replace(plan, max_tail_len=plan.max_phrase_len) if params.double.target_retrieval else None
        case Method.SPACELIKE:
            length = params.spacelike.max_match_len
            run_len = min(params.num_speculative_tokens, MAX_RUN_LEN) if params.spacelike.whole_runs else 0
            return RetrievalPlan(length, length, (Source.RING,), whole_run_len=run_len, looks_ahead=True)
    if not params.retrieves:
        return None
    plan = RetrievalPlan(sources=params.sources)
    # Beside a draft model the tiers continue its best path, as they always have.
    is_alone = params.method is Method.RETRIEVAL
    return replace(plan, has_branches=params.rows is Rows.TREE and (is_alone or plan.has_own_sources))


def draft_plan(params: SpeculationParams) -> RetrievalPlan | None:
    """Returns the speculator's plan. None means that it looks nothing up."""
    if params.method is Method.DOUBLE:
        return _as_asked(_double_plan(params), params) if params.double.draft_retrieval else None
    if not params.method.has_draft_model or not params.retrieves:
        return None
    tiers = RetrievalPlan(sources=params.sources).tiers
    return _as_asked(RetrievalPlan(sources=tiers), params) if tiers else None


def _double_plan(params: SpeculationParams) -> RetrievalPlan:
    double = params.double
    # Its tiers are a set: at equal length they count in the usual order.
    tiers = tuple(tier for tier in TIERS if tier in double.tiers)
    return RetrievalPlan(double.max_match_len, double.max_match_len, tiers, double.max_phrase_len)


def _as_asked(plan: RetrievalPlan, params: SpeculationParams) -> RetrievalPlan:
    """Returns a plan with what holds for all methods."""
    # Under the ratio rule a guess that knew the noise of the target's next token would bend the text.
    by_noise = params.shared_noise and not params.is_ratio
    return replace(plan, is_ranked_by_noise=by_noise, is_calibrated=params.calibration)

"""Plans of retrieval: the tiers that each side of a session looks up, after how many tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outrider.core.params import TIERS, Method, Source, SpeculationParams

NGRAM_ORDER = 4
"""Longest n-gram of the copies in process, and of a session's own tiers unless it wants another. The datastore's ring
knows longer ones."""
CONTEXT_LEN = 16
"""Last committed tokens that a lookup may need, here or in the datastore."""
MAX_PHRASE_LEN = 10
"""Retrieved tokens that one draft forward verifies, unless the session wants another number."""

MAX_RUN_LEN = 16
"""Tokens of a continuation that a datastore returns at most, by its default settings."""


@dataclass(frozen=True, slots=True)
class RetrievalPlan:
    """The lookups of one side of a session."""

    max_match_len: int = NGRAM_ORDER
    """Longest n-gram that is looked up in process."""
    context_len: int = CONTEXT_LEN
    """Last tokens that are sent to the datastore: none of its tiers matches more."""
    tiers: tuple[Source, ...] = TIERS
    """Tiers that are looked up, here and in the datastore."""
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

    @property
    def is_in_process(self) -> bool:
        """True if anything is looked up without the datastore."""
        return set(self.tiers) != {Source.RING}


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
    return RetrievalPlan() if params.retrieves else None


def draft_plan(params: SpeculationParams) -> RetrievalPlan | None:
    """Returns the speculator's plan. None means that it looks nothing up."""
    if params.method is Method.DOUBLE:
        return _as_asked(_double_plan(params), params) if params.double.draft_retrieval else None
    if not params.method.has_draft_model or not params.retrieves:
        return None
    return _as_asked(RetrievalPlan(), params)


def _double_plan(params: SpeculationParams) -> RetrievalPlan:
    double = params.double
    return RetrievalPlan(double.max_match_len, double.max_match_len, double.tiers, double.max_phrase_len)


def _as_asked(plan: RetrievalPlan, params: SpeculationParams) -> RetrievalPlan:
    """Returns a plan with what holds for all methods."""
    # Under the ratio rule a guess that knew the noise of the target's next token would bend the text.
    by_noise = params.shared_noise and not params.is_ratio
    return replace(plan, is_ranked_by_noise=by_noise, is_calibrated=params.calibration)

"""`spacelike`: no draft model; continuations come from all earlier outputs (Takeoff's spacelike decoding)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.params import Source
from outrider.core.retrieval.plan import MAX_RUN_LEN, RetrievalPlan
from outrider.core.speculation import (
    MAX_ASKED_MATCH_LEN,
    Method,
    MethodParams,
    Preset,
    SpeculationParams,
    check_range,
)


@dataclass(frozen=True, slots=True)
class SpacelikeParams(MethodParams):
    """Spacelike decoding: continuations come from all earlier outputs of the system."""

    max_match_len: int = 10
    """Longest context that is looked up; shorter ones follow."""
    whole_runs: bool = False
    """True to take the most frequent continuation as a whole, cut to num_speculative_tokens (16 at most), as in the
    paper. False to take the most frequent follower token by token."""

    def __post_init__(self) -> None:
        check_range("spacelike.max_match_len", self.max_match_len, 1, MAX_ASKED_MATCH_LEN)


def _target_plan(params: SpeculationParams) -> RetrievalPlan:
    own = params.of(SpacelikeParams)
    run_len = min(params.num_speculative_tokens, MAX_RUN_LEN) if own.whole_runs else 0
    length = own.max_match_len
    return RetrievalPlan(length, length, (Source.RING,), whole_run_len=run_len, looks_ahead=True)


METHOD = Method(
    "spacelike",
    "no draft model: what followed the longest same beginning",
    "#DDCC77",
    parameters=SpacelikeParams,
    always_retrieves=True,
    plans=(_target_plan, lambda _: None),
    needs_datastore=True,
    no_prediction=", which looks into what was generated before and nowhere else",
    published=Preset(
        "Takeoff's spacelike decoding, Doubleword",
        fixed={"calibration": False, "spacelike": {"whole_runs": True}},
        tunable={"num_speculative_tokens": 10, "spacelike": {"max_match_len": 10}},
    ),
)

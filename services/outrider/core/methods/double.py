"""`double`: retrieval on both sides (DOUBLE). The draft model verifies retrieved phrases in its forwards (section 4),
and the target has retrieved tokens after the drafted chain."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from outrider.core.growth import GrowthPolicy
from outrider.core.methods.chain import SampledChainGrowth, pearl_growth, speculative_growth
from outrider.core.params import TIERS, RetrievalScope, Rows, Source, check
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.speculation import (
    AS_SAMPLED,
    MAX_ASKED_MATCH_LEN,
    Method,
    MethodParams,
    Preset,
    SpeculationParams,
    Waiting,
    check_range,
)

MAX_PHRASE_LEN = 16
"""Bound of `DoubleParams.max_phrase_len`."""


@dataclass(frozen=True, slots=True)
class DoubleParams(MethodParams):
    """DOUBLE: retrieval on both sides. Its ablations are switches."""

    max_match_len: int = 4
    """Longest n-gram that is looked up (n of Algorithm 3)."""
    max_phrase_len: int = 10
    """Most retrieved tokens that one forward verifies, after the drafted ones (d)."""
    draft_retrieval: bool = True
    """True if the draft model verifies retrieved phrases."""
    target_retrieval: bool = True
    """True if every forward of the target has retrieved tokens after the drafted chain, as many as pay."""
    tiers: tuple[Source, ...] = field(default=TIERS, metadata={"choices": TIERS})
    """Tiers that are looked up."""
    serial: bool = False
    """True if draft and target take turns, as they must where both share one device (section D.8)."""

    def __post_init__(self) -> None:
        check_range("double.max_match_len", self.max_match_len, 1, MAX_ASKED_MATCH_LEN)
        check_range("double.max_phrase_len", self.max_phrase_len, 1, MAX_PHRASE_LEN)
        for index, tier in enumerate(self.tiers):
            names = ", ".join(known.name for known in TIERS)
            check(tier in TIERS, f"speculation.double.tiers[{index}]", f"one of {names}", tier.name)

    def meaningless(self, given: Collection[str], *, is_ratio: bool) -> Iterator[tuple[str, str]]:
        """Yields the length of phrases if there are none."""
        if not (self.draft_retrieval or self.target_retrieval):
            yield "max_phrase_len", "unset where draft_retrieval and target_retrieval are false"


def _growth(params: SpeculationParams) -> GrowthPolicy:
    """Returns the policy of DOUBLE: a chain that grows in jumps, as each forward verifies a retrieved phrase."""
    if params.of(DoubleParams).serial:
        # Draft and target take turns: the target waits for the whole chain, however long a forward takes.
        return speculative_growth(params)
    if params.is_ratio:
        # How far a forward gets depends on the samples, so each forward is a message.
        return SampledChainGrowth(params.lookahead, 1, params.min_path_probability, grows_ahead=True)
    return pearl_growth(params)


def _plan(double: DoubleParams) -> RetrievalPlan:
    # Its tiers are a set: at equal length they count in the usual order.
    tiers = tuple(tier for tier in TIERS if tier in double.tiers)
    return RetrievalPlan(double.max_match_len, double.max_match_len, tiers, double.max_phrase_len)


def _target_plan(params: SpeculationParams) -> RetrievalPlan | None:
    double = params.of(DoubleParams)
    return replace(_plan(double), max_tail_len=double.max_phrase_len) if double.target_retrieval else None


def _draft_plan(params: SpeculationParams) -> RetrievalPlan | None:
    double = params.of(DoubleParams)
    return _plan(double) if double.draft_retrieval else None


def _as_chosen(params: SpeculationParams) -> SpeculationParams:
    """Returns the parameters of a session that names sources, with tiers in their place."""
    double, tiers = params.of(DoubleParams), tuple(source for source in params.sources if source in TIERS)
    # Without a tier the draft model has nothing to verify: phrases come only from tiers.
    # Nor from the datastore, whose answers it cannot wait for.
    has_phrases = double.draft_retrieval and bool(tiers) and not params.remote
    double = replace(double, tiers=tiers or TIERS, draft_retrieval=has_phrases)
    return replace(params.with_own(double), sources=TIERS, remote=False)


METHOD = Method(
    "double",
    "the draft model checks phrases that were found in earlier text",
    "#CC79A7",
    "wait",
    parameters=DoubleParams,
    grow=_growth,
    waiting=lambda params: Waiting.IN_TURNS if params.of(DoubleParams).serial else Waiting.WORTH,
    samples=True,
    always_retrieves=True,
    plans=(_target_plan, _draft_plan),
    no_prediction=" unless speculation.double.target_retrieval is true",
    as_chosen=_as_chosen,
    published=Preset(
        "Double Retrieval Speculative Parallelism",
        fixed={
            **AS_SAMPLED,
            "rows": Rows.CHAIN,
            "retrieval_params": {"scope": RetrievalScope.SESSION},
            "double": {
                "draft_retrieval": True,
                "target_retrieval": True,
                "tiers": (Source.PRIOR, Source.DYNAMIC, Source.REJECTED),
            },
        },
        # Appendix D: gamma is the speed ratio of the models, about 5, d = 10, n = 3.
        tunable={"num_speculative_tokens": 5, "double": {"max_match_len": 3, "max_phrase_len": 10}},
    ),
)

"""Strategies for going on with a generation: the arms of the bandit behind `Method.AUTO`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from outrider.core.params import TIERS, Method, Rows, SpeculationParams


@dataclass(frozen=True, slots=True)
class Strategy:
    """A method, the rows that a round spends, and whether it retrieves: what the controller chooses among."""

    method: Method
    rows: Rows = Rows.CHAIN
    retrieval: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.method, self.rows, self.retrieval)))

    # Strategies are keys that every session looks up in every round: hashing two enums each time would be felt.
    def __hash__(self) -> int:
        return self._hash

    @property
    def is_plain(self) -> bool:
        """True if nothing is drafted."""
        return self.method is Method.OFF


PLAIN = Strategy(Method.OFF)
"""The strategy of plain rounds, which verify nothing. Every other one is compared with it."""


@dataclass(slots=True)
class Decision:
    """The rounds of one session for which a strategy was used."""

    strategy: Strategy
    num_rounds: int = 0
    num_tokens: int = 0
    """Tokens committed by these rounds."""
    time_ms: float = 0.0
    """Time of these rounds."""

    def add_round(self, num_tokens: int, round_ms: float) -> None:
        """Counts one more round."""
        self.num_rounds += 1
        self.num_tokens += num_tokens
        self.time_ms += round_ms


def strategies_of(params: SpeculationParams, *, shares_gpu: bool = False) -> tuple[Strategy, ...]:
    """Returns the strategies that a session may use, the one expected to be best first.

    Every method but `Method.AUTO` has a single strategy.

    Args:
        params: Those of its request.
        shares_gpu: See `SessionSpec.shares_gpu`.
    """
    return _strategies_of(params.method, params.rows, params.retrieves, shares_gpu)


@cache  # the very same objects for all sessions: comparing them costs next to nothing
def _strategies_of(method: Method, rows: Rows, retrieval: bool, shares_gpu: bool) -> tuple[Strategy, ...]:
    if method is not Method.AUTO:
        return (Strategy(method, rows, retrieval),)
    best_first = Strategy(Method.BEST_FIRST, rows, retrieval)
    # On a GPU that both models share, the draft model has it to itself only while the target waits: drafting ahead is
    # slow there, and slows the target down. `best-first` takes turns with it (`outrider.core.methods.best_path`).
    ahead = (Strategy(Method.SAGUARO, Rows.CHAIN, False), Strategy(Method.PEARL, Rows.CHAIN, False))
    drafted = (best_first,) if shares_gpu else (best_first, *ahead)
    retrieved = (
        (Strategy(Method.DOUBLE, Rows.CHAIN, True), Strategy(Method.RETRIEVAL, Rows.CHAIN, True)) if retrieval else ()
    )
    return (*drafted, *retrieved, PLAIN)


def params_of(strategy: Strategy, params: SpeculationParams) -> SpeculationParams:
    """Returns the parameters for a drafter that follows a strategy. Methods without a draft model pause the drafter."""
    if not strategy.method.has_draft_model:
        return SpeculationParams(Method.OFF)  # a pause, to a drafter: see `Steering.is_pause`
    if strategy.method is Method.DOUBLE:
        return _double_params(strategy, params)
    return replace(params, method=strategy.method, rows=strategy.rows, retrieval=strategy.retrieval)


def _double_params(strategy: Strategy, params: SpeculationParams) -> SpeculationParams:
    """Returns the parameters of a session that names sources, for a drafter whose method has tiers in their place."""
    tiers = tuple(source for source in params.sources if source in TIERS)
    # Without a tier there is nothing that the draft model could verify: phrases come from tiers alone.
    double = replace(params.double, tiers=tiers or TIERS, draft_retrieval=params.double.draft_retrieval and bool(tiers))
    return replace(
        params,
        method=strategy.method,
        rows=strategy.rows,
        retrieval=strategy.retrieval,
        sources=TIERS,
        double=double,
    )


def opening_params(params: SpeculationParams, *, shares_gpu: bool = False) -> SpeculationParams:
    """Returns the parameters that a drafter is opened with.

    A drafter does not know `Method.AUTO`: it is opened with the first strategy, and `Steering` brings the later ones.
    """
    if params.method is not Method.AUTO:
        return params
    return params_of(strategies_of(params, shares_gpu=shares_gpu)[0], params)

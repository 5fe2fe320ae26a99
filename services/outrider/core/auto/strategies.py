"""Strategies for going on with a generation: the arms of `auto`'s bandit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache

from outrider.core.params import Rows
from outrider.core.speculation import OFF, Method, SpeculationParams


@dataclass(frozen=True, slots=True)
class Strategy:
    """A method, the rows that a round spends, and whether it retrieves: what the controller chooses among."""

    method: Method
    rows: Rows = Rows.CHAIN
    retrieval: bool = False
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.method, self.rows, self.retrieval)))

    # Strategies are keys that every session looks up in every round: hashing two enums each time would cost time.
    def __hash__(self) -> int:
        return self._hash

    @property
    def is_plain(self) -> bool:
        """True if nothing is drafted."""
        return self.method.is_off


PLAIN = Strategy(OFF)
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

    Every method but `auto` has a single strategy.

    Args:
        params: Those of its request.
        shares_gpu: See `SessionSpec.shares_gpu`.
    """
    return _strategies_of(params.method, params.rows, params.retrieves, shares_gpu)


@cache  # the very same objects for all sessions: comparing them costs next to nothing
def _strategies_of(method: Method, rows: Rows, retrieval: bool, shares_gpu: bool) -> tuple[Strategy, ...]:
    if method.choices is None:
        return (Strategy(method, rows, retrieval),)
    return tuple(Strategy(*choice) for choice in method.choices(rows, retrieval, shares_gpu))


def params_of(strategy: Strategy, params: SpeculationParams) -> SpeculationParams:
    """Returns the parameters for a drafter that follows a strategy. Methods without a draft model pause it."""
    method = strategy.method
    if not method.has_draft_model:
        return SpeculationParams()  # a pause, to a drafter: see `Steering.is_pause`
    if method.as_chosen is not None:
        params = method.as_chosen(params)
    return replace(params, method=method, rows=strategy.rows, retrieval=strategy.retrieval)


def opening_params(params: SpeculationParams, *, shares_gpu: bool = False) -> SpeculationParams:
    """Returns the parameters that a drafter is opened with.

    A drafter does not know `auto`: it is opened with the first strategy, and `Steering` brings the later ones.
    """
    if not params.method.is_auto:
        return params
    return params_of(strategies_of(params, shares_gpu=shares_gpu)[0], params)

"""Waiting policies: how long the target may wait when its chain is empty.

The target never needs a draft: with an empty chain it decodes one token. It waits only while what is expected to
arrive is worth more than the time. All times are in milliseconds and measured by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from outrider.core.params import Method
from outrider.core.speculation import Fallback, SpeculationParams

STUCK_AFTER_TIMEOUTS = 3
"""Waits in vain, one after another, before a drafter counts as stuck and is not waited for until it speaks again."""


class Waiting(Enum):
    """Whether the target waits for a draft when it has nothing to verify."""

    NEVER = 0
    WORTH = 1
    """While what is expected to arrive is worth more than the time."""
    ALWAYS = 2
    """Whatever the draft is worth: draft-then-verify. Only a drafter that is stuck is not waited for."""


def waiting_of(method: Method, params: SpeculationParams) -> Waiting:
    """How a method waits, with the parameters of its session (whose own method may be `Method.AUTO`).

    `speculative` is draft-then-verify, the baseline that the other methods are measured against; so is `double` where
    draft and target take turns. SAGUARO's fallback after a miss is a choice of its own: draft now (always), what costs
    least (while that pays), or something else than a draft (never).
    """
    if method is Method.OFF:
        return Waiting.NEVER
    if method is Method.SPECULATIVE or (method is Method.DOUBLE and params.double.serial):
        return Waiting.ALWAYS
    if method is Method.SAGUARO:
        return {Fallback.AUTO: Waiting.WORTH, Fallback.DRAFT: Waiting.ALWAYS}.get(
            params.saguaro.fallback, Waiting.NEVER
        )
    return Waiting.WORTH


@dataclass(frozen=True, slots=True)
class DraftPace:
    """What is known about a drafter's speed when a wait is decided."""

    latency_ms: float | None
    """Usual time from a commit to the first draft that answers it; None = not known yet."""
    forward_ms: float
    """Usual time of a target forward."""
    accepted_per_chain: float
    """Usual number of tokens accepted of a chain that is not empty."""
    num_timeouts: int
    """Waits in vain since the drafter last spoke."""


def patience_ms(waiting: Waiting, pace: DraftPace) -> float:
    """How long to wait for a draft, counted from the commit; 0 = not at all.

    A draft that is waited for saves `accepted_per_chain` plain rounds. Waiting longer than that costs more than it
    brings. A draft that is usually there after t is given up on after 2 t + 1: later, it is not late but lost.
    """
    if waiting is Waiting.NEVER or pace.num_timeouts >= STUCK_AFTER_TIMEOUTS:
        return 0.0
    if waiting is Waiting.ALWAYS:
        return 250.0 if pace.latency_ms is None else max(20.0, 4 * pace.latency_ms)
    latency_ms = 0.2 * pace.forward_ms if pace.latency_ms is None else pace.latency_ms
    worth_ms = pace.accepted_per_chain * pace.forward_ms
    return 2 * latency_ms + 1 if latency_ms < worth_ms else 0.0

"""Waiting policies: how long the target may wait when its chain is empty.

The target never needs a draft: with an empty chain it decodes one token. It waits only while what is expected to
arrive is worth more than the time. All times are in milliseconds and measured by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.params import Method

STUCK_AFTER_TIMEOUTS = 3
"""Waits in vain, one after another, before a drafter counts as stuck and is not waited for until it speaks again."""


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


def patience_ms(method: Method, pace: DraftPace) -> float:
    """How long to wait for a draft, counted from the commit; 0 = not at all.

    A draft that is waited for saves `accepted_per_chain` plain rounds. Waiting longer than that costs more than it
    brings. A draft that is usually there after t is given up on after 2 t + 1: later, it is not late but lost.
    `speculative` waits whatever the draft is worth: it is draft-then-verify, the baseline that the other methods are
    measured against; only a drafter that is stuck is not waited for.
    """
    if method is Method.OFF or pace.num_timeouts >= STUCK_AFTER_TIMEOUTS:
        return 0.0
    if method is Method.SPECULATIVE:
        return 250.0 if pace.latency_ms is None else max(20.0, 4 * pace.latency_ms)
    latency_ms = 0.2 * pace.forward_ms if pace.latency_ms is None else pace.latency_ms
    worth_ms = pace.accepted_per_chain * pace.forward_ms
    return 2 * latency_ms + 1 if latency_ms < worth_ms else 0.0

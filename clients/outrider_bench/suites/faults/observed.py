"""What the clients have seen: tokens by the second, when drafted tokens were accepted, how generations ended."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from outrider_bench.suites.faults.plan import SLOW, SPECULATOR, Fault


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a generation ended."""

    method: str
    error: str
    """What reached the caller; empty = nothing did."""
    is_equal: bool
    """Whether tokens and text are those of a run without faults."""
    first_difference: int | None
    """The first token that is not; None = those that came are all right."""
    num_tokens: int
    num_resumes: int
    longest_pause_s: float
    """Between two chunks."""


@dataclass(slots=True)
class Suffered:
    """A fault that has happened. Seconds on the clock of `Observed`."""

    fault: Fault
    began_s: float
    returned_s: float | None = None
    """When the part was back: its process serves, its wire is whole. None = never."""

    def to_json(self, recovery_s: float | None) -> dict[str, Any]:
        """As results.json has it."""
        moments = {"began_s": self.began_s, "returned_s": self.returned_s, "recovery_s": recovery_s}
        return self.fault.to_json() | moments


@dataclass(slots=True)
class Observed:
    """Everything that was seen. `began` is a time of time.monotonic(); all else is seconds after it."""

    began: float
    outcomes: list[Outcome] = field(default_factory=list)
    suffered: list[Suffered] = field(default_factory=list)
    tokens_by_second: Counter[int] = field(default_factory=Counter)
    drafted_s: list[float] = field(default_factory=list)
    """When tokens of the draft model were accepted, in order."""

    def count(self, now: float, num_tokens: int, *, has_drafted: bool) -> None:
        """A chunk has come."""
        moment = now - self.began
        self.tokens_by_second[int(moment)] += num_tokens
        if has_drafted:
            self.drafted_s.append(moment)

    def add(self, outcome: Outcome) -> None:
        """A generation has ended."""
        self.outcomes.append(outcome)

    def recovery_s(self, suffered: Suffered) -> float | None:
        """From the speculator's return to the first accepted token of its draft model. None = the fault was none of
        its own or only slow, or the next one came first."""
        fault, returned = suffered.fault, suffered.returned_s
        if fault.part != SPECULATOR or fault.kind == SLOW or returned is None:
            return None
        index = bisect.bisect_right(self.drafted_s, returned)
        if index == len(self.drafted_s):
            return None
        following = (
            other.began_s
            for other in self.suffered
            if other.fault.part == SPECULATOR and other.began_s >= returned and other is not suffered
        )
        recovered = self.drafted_s[index]
        return None if min(following, default=recovered) < recovered else recovered - returned

    def timeline(self) -> list[int]:
        """Tokens of each second."""
        return [self.tokens_by_second[second] for second in range(max(self.tokens_by_second, default=-1) + 1)]

    def to_json(self) -> dict[str, Any]:
        """As results.json has it; of the generations, only those with something to tell."""
        strange = [outcome for outcome in self.outcomes if outcome.error or not outcome.is_equal]
        return {
            "faults": [suffered.to_json(self.recovery_s(suffered)) for suffered in self.suffered],
            "tokens_by_second": self.timeline(),
            "num_generations": dict(Counter(outcome.method for outcome in self.outcomes)),
            "strange": [asdict(outcome) for outcome in strange],
        }

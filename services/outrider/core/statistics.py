"""What speculation did in one generation: counts, and where the time of its rounds went."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from outrider.core.auto.strategies import Decision
from outrider.core.params import Source


@dataclass(frozen=True, slots=True)
class RoundTime:
    """One round, in milliseconds."""

    round_ms: float
    """From one commit to the next."""
    forward_ms: float
    """The target's forward."""
    wait_ms: float
    """Waiting for a draft."""
    retrieval_ms: float = 0.0
    """Looking continuations up in process, learning from the commit included; a part of the overhead."""

    @property
    def overhead_ms(self) -> float:
        """All the rest: tree, sampler, packing, streams."""
        return max(0.0, self.round_ms - self.forward_ms - self.wait_ms)


@dataclass(slots=True)
class Traffic:
    """Bytes of the messages between a target and whoever drafts for it, in one generation, without the frames around
    them. Its owner writes, others read."""

    num_bytes_sent: int = 0
    """To the drafter."""
    num_bytes_received: int = 0
    """From the drafter."""


@dataclass(slots=True)
class Statistics:
    """Counts of one generation. Its owner writes, others read."""

    num_rounds: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_empty_rounds: int = 0
    num_hits: int = 0
    """Rounds after which the tree had the committed next token as a node."""
    num_speculator_losses: int = 0
    degraded: bool = False
    """Whether a peer that the method needs was missing for part of the generation."""
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    round_times: list[RoundTime] = field(default_factory=list)
    draft_latencies_ms: list[float] = field(default_factory=list)
    draft_forwards_ms: list[float] = field(default_factory=list)
    draft_retrievals_ms: list[float] = field(default_factory=list)
    decisions: Sequence[Decision] = ()
    """What `Method.AUTO` has used."""

    def count_round(self, num_drafted: int, accepted_sources: Sequence[Source], is_hit: bool) -> None:
        """Counts a verdict."""
        self.num_rounds += 1
        self.num_drafted_tokens += num_drafted
        self.num_accepted_tokens += len(accepted_sources)
        self.num_empty_rounds += num_drafted == 0
        self.num_hits += is_hit
        self.accepted_by_source.update(accepted_sources)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens committed per round, the next token included."""
        return 1 + self.num_accepted_tokens / self.num_rounds if self.num_rounds else 0.0


def median_or_zero(values: Sequence[float]) -> float:
    """The median; 0 of nothing."""
    return median(values) if values else 0.0


class RunningMean:
    """An exponentially weighted mean that starts at its first value. Unset until then."""

    __slots__ = ("_weight", "value")

    def __init__(self, weight: float = 0.2) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        """Takes a value in."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)

    def get(self, default: float) -> float:
        """The mean, or `default` while there is none."""
        return default if self.value is None else self.value


class Histogram:
    """Observations by size. One thread adds; others may read, and see numbers of about the same time."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` are upper bounds, ascending."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        """Observations up to each bound that are beyond the one before; the last number is of those beyond all
        bounds."""
        self.total = 0.0
        """Sum of all observations."""

    def add(self, value: float, count: int = 1) -> None:
        """Takes in `count` observations of the same size."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count

    @property
    def num_observations(self) -> int:
        """How many there were."""
        return sum(self.counts)

"""What the datastore has done, counted in one place: `GetInfo` and Prometheus read the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.statistics import Histogram
from outrider.datastore.types import TIERS, Health

DURATION_BOUNDS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.05)
"""Upper bounds of the histogram of lookup durations; longer ones fall behind the last."""


@dataclass(slots=True)
class TierStatistics:
    """Of one tier, since the start."""

    num_hits: int = 0
    """Contexts that it answered."""
    num_matched_tokens: int = 0
    """Sum of their match lengths."""
    num_accepted_tokens: int = 0
    """Retrieved tokens that a target accepted, as verifiers report them."""


@dataclass(slots=True)
class Statistics:
    """Since the start. Written by the event loop; another thread may read, and sees numbers of about the same time."""

    num_lookups: int = 0
    """Contexts looked up."""
    num_local_lookups: int = 0
    """Contexts answered while Redis did not answer."""
    tiers: dict[Source, TierStatistics] = field(default_factory=lambda: {tier: TierStatistics() for tier in TIERS})
    durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_S))
    """Of lookup requests, in seconds."""
    health: Health = field(default_factory=lambda: Health(""))
    """The storage, when it was last asked."""

    @property
    def num_hits(self) -> int:
        """Contexts for which something was found."""
        return sum(tier.num_hits for tier in self.tiers.values())

    def add_lookup(self, found: Sequence[Continuation], is_local: bool, duration_s: float) -> None:
        """One request was answered."""
        self.num_lookups += len(found)
        if is_local:
            self.num_local_lookups += len(found)
        for continuation in found:
            if continuation.tier is not None:
                tier = self.tiers[continuation.tier]
                tier.num_hits += 1
                tier.num_matched_tokens += continuation.match_len
        self.durations.add(duration_s)

    def add_accepted(self, tier: Source, num_tokens: int) -> None:
        """A verifier reports what its target has accepted."""
        self.tiers[tier].num_accepted_tokens += num_tokens

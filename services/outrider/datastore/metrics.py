"""Counts of a replica's work, and the same numbers for Prometheus. `GetInfo` reads them, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.core.statistics import Histogram
from outrider.datastore.rings import HeldRing
from outrider.datastore.types import TIERS, Health
from outrider.telemetry.metrics import HistogramMetric, Metric, build_info, counter, counters, gauge

PREFIX = "outrider_datastore_"
DURATION_BOUNDS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.00075, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.05)
"""Upper bounds of the histogram of lookup durations. They are dense below the default lookup timeout of 4 ms."""


@dataclass(slots=True)
class TierStatistics:
    """Counts of one tier since the start."""

    num_hits: int = 0
    """Contexts that it answered."""
    num_matched_tokens: int = 0
    """Sum of their match lengths."""
    num_accepted_tokens: int = 0
    """Retrieved tokens that a target accepted, as verifiers report them."""


@dataclass(slots=True)
class ReplicaStatistics:
    """Counts since the start. The event loop writes; another thread may read, and sees numbers of about one time."""

    num_lookups: int = 0
    """Contexts looked up."""
    num_local_lookups: int = 0
    """Contexts answered while Redis did not answer."""
    tiers: dict[Source, TierStatistics] = field(default_factory=lambda: {tier: TierStatistics() for tier in TIERS})
    lookup_durations: Histogram = field(default_factory=lambda: Histogram(DURATION_BOUNDS_S))
    """Seconds from a lookup request to its answer."""
    health: Health = field(default_factory=lambda: Health(""))
    """State of Redis when it was last asked."""

    @property
    def num_hits(self) -> int:
        """Contexts for which something was found."""
        return sum(tier.num_hits for tier in self.tiers.values())

    def add_lookup(self, continuations: Sequence[Continuation], is_local: bool, duration_s: float) -> None:
        """Counts a lookup request that was answered."""
        self.num_lookups += len(continuations)
        if is_local:
            self.num_local_lookups += len(continuations)
        for continuation in continuations:
            if continuation.tier is not None:
                tier = self.tiers[continuation.tier]
                tier.num_hits += 1
                tier.num_matched_tokens += continuation.match_len
        self.lookup_durations.add(duration_s)

    def add_accepted(self, accepted_by_tier: Sequence[tuple[Source, int]]) -> None:
        """Counts retrieved tokens that a target has accepted."""
        for tier, num_tokens in accepted_by_tier:
            self.tiers[tier].num_accepted_tokens += num_tokens


def read_metrics(
    statistics: ReplicaStatistics, rings: Sequence[HeldRing], num_redis_errors: int
) -> Iterator[Metric | HistogramMetric]:
    """Yields all metrics as they are now. Safe to call in any thread."""
    # The dict has all tiers from the start: another thread could not iterate over one that grows.
    health, tiers = statistics.health, {tier.name.lower(): counts for tier, counts in statistics.tiers.items()}
    yield build_info("datastore")
    yield _counter("lookups_total", "Contexts looked up.", statistics.num_lookups)
    yield _counter("local_lookups_total", "Contexts answered while Redis did not answer.", statistics.num_local_lookups)
    yield _by_tier("hits_total", "Contexts that a tier answered.", {t: c.num_hits for t, c in tiers.items()})
    yield _by_tier(
        "matched_tokens_total", "Sum of the match lengths.", {t: c.num_matched_tokens for t, c in tiers.items()}
    )
    yield _by_tier(
        "accepted_tokens_total",
        "Retrieved tokens that a target accepted, as verifiers report them.",
        {t: c.num_accepted_tokens for t, c in tiers.items()},
    )
    yield HistogramMetric(
        PREFIX + "lookup_duration_seconds",
        "Time from a lookup request to its answer, in the server.",
        statistics.lookup_durations,
    )
    yield _counter("redis_errors_total", "Calls that Redis has refused, or not answered.", num_redis_errors)
    yield _counter("evicted_keys_total", "Keys that Redis has evicted.", health.num_evicted_keys)
    yield _gauge("memory_bytes", "Memory that Redis uses.", health.used_memory_bytes)
    yield _gauge("memory_limit_bytes", "Memory that Redis may use; 0 = no limit.", health.max_memory_bytes)
    yield _gauge("redis_up", "Whether Redis answers, and takes records.", float(bool(health.product)))
    yield _gauge("rings", "Rings held.", len(rings))
    yield _gauge("ring_tokens", "Tokens in the rings held.", sum(held.ring.num_tokens for held in rings))
    yield _gauge(
        "ring_indexed_tokens", "Those of them that are indexed.", sum(held.ring.num_indexed_tokens for held in rings)
    )


def _counter(name: str, description: str, value: float) -> Metric:
    return counter(PREFIX + name, description, value)


def _by_tier(name: str, description: str, values: dict[str, int]) -> Metric:
    return counters(PREFIX + name, description, "tier", values)


def _gauge(name: str, description: str, value: float) -> Metric:
    return gauge(PREFIX + name, description, value)

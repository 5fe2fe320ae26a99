"""The datastore's statistics under the names that Prometheus knows."""

from __future__ import annotations

from collections.abc import Iterator

from outrider.datastore.replica import Replica
from outrider.telemetry.metrics import HistogramMetric, Metric, build_info, counter, counters, gauge

PREFIX = "outrider_datastore_"


def read_metrics(replica: Replica) -> Iterator[Metric | HistogramMetric]:
    """All metrics, as they are now. Safe to call in any thread."""
    statistics = replica.statistics
    health = statistics.health
    tiers = {tier.name.lower(): counts for tier, counts in statistics.tiers.items()}
    rings = replica.rings.held
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
        statistics.durations,
    )
    yield _counter("redis_errors_total", "Calls that Redis has refused, or not answered.", replica.store.num_errors)
    yield _counter("evicted_keys_total", "Keys that Redis has evicted.", health.num_evicted_keys)
    yield _gauge("memory_bytes", "Memory that Redis uses.", health.used_memory_bytes)
    yield _gauge("memory_limit_bytes", "Memory that Redis may use; 0 = no limit.", health.max_memory_bytes)
    yield _gauge("redis_up", "Whether Redis answers.", float(bool(health.product)))
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

"""Metrics of the pool of keys and values, for every service that runs a model."""

from __future__ import annotations

from outrider.core.blocks import PoolState
from outrider.telemetry.metrics import Metrics, counter, gauge, gauges


def read_pool(state: PoolState, prefix: str = "outrider_") -> Metrics:
    """Yields what the pool holds for all sessions now, and what the cache of prefixes has saved. The names begin with
    `prefix`, so that a process can have two pools."""
    yield gauge(f"{prefix}kv_cache_tokens", "Tokens whose keys and values are held, of all sessions.", state.num_tokens)
    yield gauge(f"{prefix}kv_cache_bytes", "Memory held for keys and values, of all sessions.", state.num_bytes)
    yield gauges(
        f"{prefix}kv_cache_blocks",
        "Blocks of the pool of keys and values: free, held by sessions, or cached prefixes that nobody holds.",
        "state",
        state.num_blocks,
    )
    yield counter(
        f"{prefix}kv_cache_evictions_total",
        "Blocks of cached prefixes that were given up because none was free.",
        state.num_evictions,
    )
    yield counter(
        f"{prefix}preemptions_total",
        "Sessions that lost their keys and values to an older one, and read their text again later.",
        state.num_preemptions,
    )
    yield gauge(f"{prefix}sessions_queued", "Sessions that wait for room in the pool, now.", state.num_waiting)
    yield counter(
        f"{prefix}prefix_cache_queried_tokens_total", "Tokens of texts that came in.", state.num_queried_tokens
    )
    yield counter(
        f"{prefix}prefix_cache_hit_tokens_total",
        "Those of them whose keys and values were found and not computed again.",
        state.num_found_tokens,
    )

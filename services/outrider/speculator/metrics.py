"""Counts of a draft engine, and the names under which Prometheus reads them, on a speculator as on an edge."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.blocks import PoolState
from outrider.core.statistics import Histogram
from outrider.telemetry.kv_pool_metrics import read_pool
from outrider.telemetry.metrics import HistogramMetric, Metrics, counter, gauge


def read_drafts(counts: DraftCounts, num_sessions: int, pool: PoolState, pool_prefix: str = "outrider_") -> Metrics:
    """Yields every count; `num_sessions` and `pool` are those of right now. Safe to call in any thread.

    The names of the pool's metrics begin with `pool_prefix`: a verifier has a pool of its own besides.
    """
    yield from read_pool(pool, pool_prefix)
    yield gauge("outrider_draft_sessions_active", "Sessions that are drafted for, now.", num_sessions)
    yield counter("outrider_draft_sessions_total", "Sessions that were begun.", counts.num_opened)
    yield counter(
        "outrider_draft_resyncs_total",
        "Those of them that began with output: a stream that was opened again, or an interrupted text.",
        counts.num_resyncs,
    )
    yield HistogramMetric(
        "outrider_draft_step_duration_seconds",
        "A forward of the draft model for all sessions that grow then, packing and ranking included.",
        counts.steps,
    )
    yield counter(
        "outrider_draft_busy_seconds_total",
        "Time that was spent on drafting; its rate is the share of the time that the engine is in use.",
        counts.busy_s,
    )
    yield counter(
        "outrider_draft_retrieval_seconds_total",
        "Time that looking continuations up took of it.",
        counts.retrieval_s,
    )
    yield counter("outrider_draft_commits_total", "Commits that arrived.", counts.num_commits)
    yield counter("outrider_draft_proposals_total", "Messages with nodes that were sent.", counts.num_messages)
    yield counter("outrider_draft_sent_nodes_total", "Nodes in these messages.", counts.num_sent)
    yield counter(
        "outrider_draft_nodes_total",
        "Nodes that were added to draft trees; each is committed or wasted in the end.",
        counts.num_nodes,
    )
    yield counter("outrider_draft_committed_tokens_total", "Nodes that the target committed.", counts.num_committed)
    yield counter(
        "outrider_draft_wasted_tokens_total",
        "Nodes that a commit contradicted, or that were left when their session ended.",
        counts.num_wasted,
    )


STEP_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class DraftCounts:
    """Holds counts since the start. Written by the engine's thread. Others may read them without a lock: they see
    numbers of about the same time."""

    steps: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_S))
    """Forwards of the draft model that grow trees, packing and ranking included, in seconds."""
    busy_s: float = 0.0
    """Time that was not spent waiting, nor on keeping the model warm."""
    retrieval_s: float = 0.0
    """Time of it that lookups of continuations took, as far as sessions have reported it."""
    num_opened: int = 0
    """Sessions that were begun."""
    num_resyncs: int = 0
    """Sessions that began with output: their stream was opened again, or their text was interrupted."""
    num_commits: int = 0
    num_messages: int = 0
    """Messages with nodes that were sent."""
    num_sent: int = 0
    """Nodes in these messages."""
    num_nodes: int = 0
    """Nodes that were added to trees. Each is committed or wasted in the end."""
    num_committed: int = 0
    """Nodes that the target has committed."""
    num_wasted: int = 0
    """Nodes that a commit has contradicted, or that were left when their session ended."""

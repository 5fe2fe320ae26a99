"""A draft engine's counts under the names that Prometheus knows: of a speculator, or of an edge."""

from __future__ import annotations

from outrider.rpc.metrics import Histogram, Metrics, counter, gauge
from outrider.speculator.counts import DraftCounts


def read_drafts(counts: DraftCounts, num_sessions: int) -> Metrics:
    """All of it, `num_sessions` being those of now. Safe to call in any thread."""
    yield gauge("outrider_draft_sessions_active", "Sessions that are drafted for, now.", num_sessions)
    yield counter("outrider_draft_sessions_total", "Sessions that were begun.", counts.num_opened)
    yield counter(
        "outrider_draft_resyncs_total",
        "Those of them that began with output: a stream that was opened again, or an interrupted text.",
        counts.num_resyncs,
    )
    yield Histogram(
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

"""What a draft engine counts for Prometheus, over all sessions."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.core.distribution import Distribution

STEP_BOUNDS_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class DraftCounts:
    """Since the start. Written by the engine's thread; others may read, and see numbers of about the same time."""

    steps: Distribution = field(default_factory=lambda: Distribution(STEP_BOUNDS_S))
    """Forwards of the draft model that grow trees, packing and ranking included, in seconds."""
    busy_s: float = 0.0
    """Time that was not spent waiting, nor on keeping the model warm."""
    retrieval_s: float = 0.0
    """What looking continuations up took of it, as far as it is reported."""
    num_opened: int = 0
    """Sessions."""
    num_resyncs: int = 0
    """Those of them that began with output: a stream that was opened again, or an interrupted text."""
    num_commits: int = 0
    num_messages: int = 0
    """Messages with nodes that were sent."""
    num_sent: int = 0
    """Nodes in them."""
    num_nodes: int = 0
    """Nodes that were added to trees. Each is committed or wasted in the end."""
    num_committed: int = 0
    """Nodes that the target has committed."""
    num_wasted: int = 0
    """Nodes that a commit has contradicted, or that were left when their session ended."""

"""How much a drafter may send on one stream: whatever it does, the work that comes of it is bounded."""

from __future__ import annotations

import time

import structlog

from outrider.rpc.security.quotas import Clock, TokenBucket
from outrider.v1 import types_pb2

log = structlog.get_logger(__name__)

MAX_NODES_PER_S = 100_000.0
"""Several times what a wide beam of a small model grows, with a tree that holds 4096 nodes."""
BURST_S = 1.0
BYTES_PER_NODE = 512
"""A node with the longest useful distribution; one that says more counts for several."""


class DraftLimit:
    """What one stream's drafts may still hold. Drafts beyond it are dropped whole, as if they had been late."""

    def __init__(self, max_nodes_per_s: float, session_id: str, clock: Clock = time.monotonic) -> None:
        self._bucket = TokenBucket(max_nodes_per_s, BURST_S, clock)
        self._session_id = session_id
        self.num_dropped_nodes = 0

    def admits(self, draft: types_pb2.Draft) -> bool:
        """Whether a draft is to be looked at. Its size alone is looked at here."""
        lists = (draft.parent_offsets, draft.token_ids, draft.costs, draft.q_rows)
        num_nodes = max(1, *map(len, lists), draft.ByteSize() // BYTES_PER_NODE)
        if self._bucket.level >= num_nodes:
            self._bucket.take(num_nodes)
            return True
        if not self.num_dropped_nodes:
            limit = self._bucket.rate_per_s
            log.warning("drafts.dropped", session_id=self._session_id, max_nodes_per_s=limit)
        self.num_dropped_nodes += num_nodes
        return False

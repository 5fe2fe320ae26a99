"""The rows of one session in a target forward: what is committed but not computed yet, then a chain or a sub-tree."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from outrider.core.tree import Node, TokenId
from outrider.models.runner import KVCache, Segment


def segment_of(cache: KVCache, pending: Sequence[TokenId], nodes: Sequence[Node]) -> Segment:
    """Rows for `pending`, of which there is at least one, then for each node; logits for the last of `pending` and for
    each node.

    Args:
        cache: Holds all committed tokens before `pending`.
        pending: Committed tokens; the last one stands for the root.
        nodes: A connected part of the tree below the root, parents before children.
    """
    token_ids = [*pending, *(node.token_id for node in nodes)]
    if _is_chain(nodes):
        return Segment(cache, token_ids, 1 + len(nodes))
    start = cache.length
    positions = [*range(start, start + len(pending)), *(node.position for node in nodes)]
    return Segment(cache, token_ids, 1 + len(nodes), positions, _visible(start, len(pending), nodes))


def _is_chain(nodes: Sequence[Node]) -> bool:
    """Whether each node is the child of the one before: then slot and position agree, and no mask is needed."""
    return all(child.parent is parent for parent, child in pairwise(nodes))


def _visible(start: int, num_pending: int, nodes: Sequence[Node]) -> npt.NDArray[np.bool_]:
    """Which slots each row sees: all committed ones up to itself, its ancestors and itself."""
    root = start + num_pending
    num_rows = num_pending + len(nodes)
    visible = np.zeros((num_rows, start + num_rows), dtype=bool)
    visible[:, :start] = True
    visible[:num_pending, start:root] = np.tri(num_pending, dtype=bool)
    visible[num_pending:, start:root] = True
    rows = {node: row for row, node in enumerate(nodes)}
    for node, row in rows.items():
        above = rows.get(node.parent) if node.parent is not None else None
        if above is not None:
            visible[num_pending + row, root:] = visible[num_pending + above, root:]
        visible[num_pending + row, root + row] = True
    return visible

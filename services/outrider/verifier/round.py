"""What a round verifies, and whether it should wait for more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from outrider.core.auto.strategies import Strategy
from outrider.core.costs import num_worth, path_probabilities
from outrider.core.params import Rows, Source
from outrider.core.session import Session
from outrider.core.tree import Node, TokenId
from outrider.models.runner import KVCache, Segment
from outrider.verifier.measurements import EmptyRoundReason, EngineTimings

MIN_OPEN_PROBABILITY = 0.25
"""A path that the mirror breaks off may be waited for if it is at least so probable."""


def select(session: Session, chain: list[Node], rows: Rows, pace: EngineTimings) -> list[Node]:
    """The chain; or, where rows may branch, the best sub-tree: of as many nodes as were asked for, otherwise of as many
    as pay. What was retrieved, a chain or what stands behind a drafted one, is verified as far as it pays, which may be
    nowhere: a short match is a weak guess."""
    if rows is Rows.CHAIN or session.max_chain_len < 1:
        num_drafted = next((i for i, node in enumerate(chain) if node.source is not Source.DRAFT), len(chain))
        if num_drafted == len(chain) or session.spec.speculation.is_ratio:  # samples may stand behind it
            return chain
        return chain[: max(num_drafted, _num_worth(session, chain, pace))]
    num_asked = session.spec.speculation.max_rows
    nodes = session.next_subtree(num_asked or pace.max_num_rows)
    return nodes if num_asked else nodes[: max(1, _num_worth(session, nodes, pace))]


def _num_worth(session: Session, nodes: Sequence[Node], pace: EngineTimings) -> int:
    probabilities = path_probabilities(nodes, session.tree.root)
    num_sharing, overhead_ms = max(1, pace.num_sessions), pace.overhead_ms.get(0.5)
    return num_worth(probabilities, pace.forward_times, num_sharing, overhead_ms)


def is_worth_verifying(session: Session, nodes: Sequence[Node], pace: EngineTimings, accepted_per_chain: float) -> bool:
    """Whether these nodes need not wait for a drafter that is about to answer.

    What is here may bring fewer tokens in its time than what comes a little later does in a little more: a retrieved
    chain instead of the draft model's, or a path that breaks off while it is still probable. Under the ratio rule what
    is here is taken: whether a sample is judged must not depend on what it is.
    """
    if not nodes or session.spec.speculation.is_ratio:
        return bool(nodes)
    tokens = 1 + sum(path_probabilities(nodes, session.tree.root))
    later = 1 + accepted_per_chain
    if nodes[0].source is Source.DRAFT:
        later = tokens + _open_probability(session, nodes) * accepted_per_chain
    forward_ms = pace.plain_ms
    waited_ms = forward_ms + pace.speculator_ms.get(0.2 * forward_ms)
    return tokens * waited_ms >= later * forward_ms


def _open_probability(session: Session, nodes: Sequence[Node]) -> float:
    """The most probable path that ends only because nothing more has come yet."""
    deepest = session.tree.root.position + session.max_chain_len
    ends = [node for node in nodes if not node.children and node.position < deepest]
    most = max(path_probabilities(ends, session.tree.root), default=0.0)
    return most if most >= MIN_OPEN_PROBABILITY else 0.0


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


def why_nothing(
    way: Strategy, *, has_drafter: bool, is_attached: bool, has_drafted: bool, is_answered: bool, was_awaited: bool
) -> EmptyRoundReason | None:
    """Why a round that goes this way has nothing to verify; None = because it wants nothing.

    Args:
        way: That of the round.
        has_drafter: Whether somebody should draft.
        is_attached: Whether a drafter is there.
        has_drafted: Whether anything has come from it.
        is_answered: Whether the latest commit is.
        was_awaited: Whether the round waited for that.
    """
    if has_drafter and not is_attached:
        return EmptyRoundReason.DRAFT_DOWN
    if way.is_plain or (way.method.has_draft_model and not has_drafter):
        return None
    if not way.method.has_draft_model:
        return EmptyRoundReason.NO_MATCH
    if not has_drafted:
        return EmptyRoundReason.DRAFT_PENDING
    if is_answered:
        return EmptyRoundReason.NO_DRAFT
    return EmptyRoundReason.DRAFT_TIMEOUT if was_awaited else EmptyRoundReason.NOT_AWAITED

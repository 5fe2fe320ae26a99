"""What a round verifies, and whether it should wait for more."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.params import Rows, Source
from outrider.core.rows import num_worth, path_probabilities
from outrider.core.session import Session
from outrider.core.tree import Node
from outrider.verifier.pace import Pace

MIN_OPEN_PROBABILITY = 0.25
"""A path that the mirror breaks off may be waited for if it is at least so probable."""


def select(session: Session, chain: list[Node], rows: Rows, pace: Pace) -> list[Node]:
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


def _num_worth(session: Session, nodes: Sequence[Node], pace: Pace) -> int:
    probabilities = path_probabilities(nodes, session.tree.root)
    num_sharing, overhead_ms = max(1, pace.num_sessions), pace.overhead_ms.get(0.5)
    return num_worth(probabilities, pace.forward_times, num_sharing, overhead_ms)


def is_worth_verifying(session: Session, nodes: Sequence[Node], pace: Pace, accepted_per_chain: float) -> bool:
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

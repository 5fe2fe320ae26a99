"""The nodes that a round verifies, and whether it should wait for better ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile

from outrider.core.auto.strategies import Strategy
from outrider.core.costs import num_worth, path_probabilities
from outrider.core.params import Rows, Source
from outrider.core.session import Session
from outrider.core.speculation import Fallback
from outrider.core.structure import StructureBroken, StructuredText
from outrider.core.tree import Node
from outrider.rounds.retrieval import SessionRetrieval
from outrider.rounds.timings import Activity, EngineTimings

MIN_OPEN_PROBABILITY = 0.25
"""Least probability at which the rest of a path that breaks off in the mirror may be waited for."""
FORCED_LOGPROB = -0.05
"""Log-probability of a token whose text the grammar forces, though another spelling may be possible."""
FIRST_LATENCY_SHARE = 0.2
"""Latency of a drafter that has not answered yet, as a share of a plain round."""


def next_nodes(
    session: Session, retrieval: SessionRetrieval | None, strategy: Strategy, timings: EngineTimings
) -> list[Node]:
    """Chooses the nodes of the next round, without those that the structure of the output forbids.

    Args:
        session: The generation.
        retrieval: What is retrieved for it. None means nothing.
        strategy: The strategy of the round.
        timings: What rounds cost.
    """
    structured = session.structured
    if structured is None or session.spec.speculation.method.is_off:
        return _chosen_nodes(session, retrieval, strategy, timings)
    try:
        _add_forced(session, structured)
        nodes = _chosen_nodes(session, retrieval, strategy, timings)
        # Under the ratio rule a sample is judged whatever it is: the target rejects a forbidden one.
        while nodes and not session.decides_by_ratio and structured.prune(nodes):
            nodes = _chosen_nodes(session, retrieval, strategy, timings)
    except StructureBroken as error:
        structured.error = str(error)  # the round that begins now ends with it
        return []
    return nodes


def _add_forced(session: Session, structured: StructuredText) -> None:
    """Adds what the structure forces next, in its usual spelling."""
    node: Node | None = session.tree.root
    for token_id in structured.forced()[: max(0, session.max_chain_len)]:
        if node is not None:
            node = session.tree.add(node, token_id, FORCED_LOGPROB, Source.GRAMMAR)


def _chosen_nodes(
    session: Session, retrieval: SessionRetrieval | None, strategy: Strategy, timings: EngineTimings
) -> list[Node]:
    fallback = _fallback(session, strategy)
    if strategy.is_plain or fallback is Fallback.PLAIN:
        if session.structured is None:
            return []
        return list(takewhile(lambda node: node.source is Source.GRAMMAR, session.next_chain()))
    if fallback is Fallback.RANDOM:
        session.add_random_chain()
    # A sub-tree needs no chain, but making one puts what is retrieved into the tree.
    is_needed = strategy.rows is Rows.CHAIN or retrieval is not None
    return select_nodes(session, next_chain(session, retrieval, strategy) if is_needed else [], strategy.rows, timings)


def _fallback(session: Session, strategy: Strategy) -> Fallback | None:
    """Returns what replaces a draft after a miss; None if there is a draft, or the method has no fallback."""
    if strategy.method.fallback is None:
        return None
    is_missed = all(child.source is not Source.DRAFT for child in session.tree.root.children.values())
    return strategy.method.fallback(session.spec.speculation) if is_missed else None


def next_chain(session: Session, retrieval: SessionRetrieval | None, strategy: Strategy) -> list[Node]:
    """Returns the mirror's chain, followed by what is retrieved in process; see `next_nodes`."""
    chain = session.next_chain()
    if retrieval is None or not strategy.retrieval:
        return chain
    if retrieval.max_tail_len:
        return with_tail(session, chain, retrieval)
    missing = session.max_chain_len - len(chain)
    if strategy.rows is Rows.TREE and retrieval.has_branches:
        retrieval.branch(session.max_chain_len)
        chain = session.next_chain()
        if not strategy.method.has_draft_model:
            return chain  # nothing drafted ends where retrieval could go on
        missing = session.max_chain_len - len(chain)
    # What was retrieved may make another path more probable than the chain: it is chosen again.
    return session.next_chain() if retrieval.extend(chain, missing) else chain


def select_nodes(session: Session, chain: list[Node], rows: Rows, timings: EngineTimings) -> list[Node]:
    """Returns what a round verifies: its chain, or the best sub-tree if rows may branch.

    A sub-tree has as many nodes as the request names, otherwise as many as pay. Retrieved nodes, a chain of them or
    those after a drafted one, are verified as far as they pay, possibly none of them: a short match is a weak guess.
    """
    if rows is Rows.CHAIN or session.max_chain_len < 1:
        num_whole = _num_whole(session, chain)
        return chain if num_whole == len(chain) else chain[: max(num_whole, _num_worth(session, chain, timings))]
    num_requested = session.spec.speculation.max_rows
    nodes = session.next_subtree(num_requested or timings.max_num_rows)
    # A first node that is only retrieved may not be worth a row.
    least = 1 if session.spec.speculation.method.has_draft_model else 0
    # Every prefix of these nodes is connected, too (`best_subtree`).
    return nodes if num_requested else nodes[: max(least, _num_worth(session, nodes, timings))]


def with_tail(session: Session, chain: list[Node], retrieval: SessionRetrieval) -> list[Node]:
    """Returns the drafted part of a chain, followed by what is retrieved, wherever the chain was cut (DOUBLE, section
    4.2 and Algorithm 1)."""
    drafted = list(takewhile(lambda node: node.source is Source.DRAFT, chain))
    # Without a draft, what the datastore has answered is as good a beginning.
    beginning = drafted or chain
    retrieved = len(beginning) - len(drafted)
    room = min(retrieval.max_tail_len - retrieved, session.num_wanted - 1 - len(beginning))
    tip = beginning[-1] if beginning else session.tree.root
    if session.decides_by_ratio and any(child.q is not None for child in tip.children.values()):
        # A sample of the draft model is there already. If the tail took it in when the two agree, its value would
        # decide whether it is judged now, and the text would no longer have the target's distribution.
        return beginning
    return beginning + retrieval.tail(beginning, room)


def _num_whole(session: Session, chain: Sequence[Node]) -> int:
    """Returns the number of nodes of a chain, from the first on, that are verified whatever they are worth."""
    if not session.spec.speculation.calibration or (chain and chain[0].source is Source.RANDOM):
        return len(chain)
    if session.spec.speculation.is_ratio:
        # Samples may follow a retrieved node, and which samples are judged must not depend on their values: that would
        # change the distribution of the text. Picked nodes after them may be judged or not.
        return next((index for index in range(len(chain), 0, -1) if chain[index - 1].q is not None), 0)
    # The drafted part: `best_chain` has ended it where its path becomes improbable. A tail that agrees with drafted
    # nodes beyond the greatest length of a chain must pay like any other.
    num_drafted = next((index for index, node in enumerate(chain) if node.source is not Source.DRAFT), len(chain))
    return min(num_drafted, session.max_chain_len)


def _num_worth(session: Session, nodes: Sequence[Node], timings: EngineTimings) -> int:
    probabilities = path_probabilities(nodes, session.tree.root)
    has_draft_model = session.spec.speculation.method.has_draft_model
    overhead_ms = timings.overhead_ms(Activity.DRAFTING if has_draft_model else Activity.RETRIEVING)
    return num_worth(probabilities, timings.forward_times, max(1, timings.num_sessions), overhead_ms)


def is_worth_verifying(
    session: Session, nodes: Sequence[Node], timings: EngineTimings, accepted_per_chain: float
) -> bool:
    """Returns True if these nodes need not wait for a drafter that is about to answer.

    The nodes may bring fewer tokens per time than those that come a little later: a retrieved chain instead of the
    draft model's, or a path that breaks off while it is still probable. Under the ratio rule the nodes are taken as
    they are: whether a sample is judged must not depend on its value.

    Args:
        session: The generation.
        nodes: The nodes that can be verified now.
        timings: What rounds and the drafter's answers cost.
        accepted_per_chain: Tokens that were kept of the chains that were waited for, on average.
    """
    if not nodes or session.spec.speculation.is_ratio:
        return bool(nodes)
    # The target's own next token comes in any case; a drafted one counts by its probability.
    tokens = 1 + sum(path_probabilities(nodes, session.tree.root))
    later = 1 + accepted_per_chain
    if nodes[0].source is Source.DRAFT:
        max_depth = int(min(session.max_chain_len, timings.max_num_nodes.get(math.inf)))
        later = tokens + _open_probability(session, nodes, max_depth) * accepted_per_chain
    forward_ms = timings.plain_ms
    waited_ms = forward_ms + timings.speculator_ms.get(FIRST_LATENCY_SHARE * forward_ms)
    # tokens / forward_ms >= later / waited_ms, without a division by a time that may be 0.
    return tokens * waited_ms >= later * forward_ms


def _open_probability(session: Session, nodes: Sequence[Node], max_depth: int) -> float:
    """Returns the probability of the most probable path that ends only because nothing more has come yet."""
    deepest = session.tree.root.position + max_depth
    # A node at the greatest depth has no children because no round could take them.
    ends = [node for node in nodes if not node.children and node.position < deepest]
    most = max(path_probabilities(ends, session.tree.root), default=0.0)
    return most if most >= MIN_OPEN_PROBABILITY else 0.0

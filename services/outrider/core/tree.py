"""The draft tree: guessed tokens that continue the committed ones, and the content rule that keeps it true.

The tree owns the committed tokens. Its root stands for the last of them; a node at depth d below the root claims the
token at position len(committed) + d - 1. A commit re-roots the tree: nodes that agree with the committed tokens become
part of them, nodes that contradict them die with everything below them, and the rest keeps its value.

**Content rule.** A claim names its position, never a version. If its position is committed already, it is compared with
the token there: if equal, it serves as an anchor for later claims; if different, it is dropped. So messages may be
late, repeated or reordered without harm, and a reader need not know which commit a drafter had seen. Bad claims never
raise here: drafts come from outside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from outrider.core.params import Source

TokenId = int


class NodeState(Enum):
    """The state of a node."""

    LIVE = "live"
    COMMITTED = "committed"
    DEAD = "dead"


class Node:
    """One guessed token. Its tree owns it; others may read it, but never write to it."""

    # No __eq__: nodes are keys by identity, because the same token may be claimed in many places.
    __slots__ = (
        "barred",
        "children",
        "is_expanded",
        "logprob",
        "parent",
        "path_logprob",
        "position",
        "q",
        "source",
        "state",
        "token_id",
    )

    def __init__(
        self, token_id: TokenId, position: int, parent: Node | None, logprob: float, source: Source, state: NodeState
    ) -> None:
        self.token_id = token_id
        self.position = position
        """Index that the token has, or would have, among the committed tokens."""
        self.parent = parent
        self.logprob = logprob
        """Log-probability of the token after its parent, by its drafter."""
        self.source = source
        self.state = state
        self.children: dict[TokenId, Node] = {}
        self.barred: set[TokenId] | None = None
        """Tokens that cannot follow it (`DraftTree.remove`). None means that no such token is known."""
        self.path_logprob: float = logprob if parent is None else parent.path_logprob + logprob
        """Sum of the log-probabilities from an ancestor that all live nodes share: nodes of one tree can be compared by
        it, before and after a commit. Subtract the root's to make it relative to the root."""
        self.is_expanded = False
        """True if a draft model has said what follows it."""
        self.q: SparseRow | None = None
        """Distribution that the token was drawn from. None means that it was picked."""

    def __repr__(self) -> str:
        return f"Node({self.token_id}@{self.position}, {self.state.value}, {len(self.children)} children)"


class Draft(NamedTuple):
    """New nodes of a drafter's tree, as they cross the wire. The lists run in parallel."""

    base_len: int
    """Tokens that are committed at the drafter's root, which nodes with parent offset 0 follow."""
    first_node_id: int
    """Id of the first node; the others count on."""
    parent_offsets: Sequence[int]
    """Node id minus the parent's id. 0 means the root at base_len."""
    token_ids: Sequence[TokenId]
    logprobs: Sequence[float]
    """Log-probabilities of the tokens after their parents. Empty means that all are certain."""
    source: Source
    q_rows: Sequence[SparseRow | None] = ()
    """Distributions that the tokens were drawn from. Empty means that all tokens were picked."""
    forward_us: int = 0
    """Time of the draft model's forwards for these nodes, in microseconds."""
    num_forwards: int = 0
    """Forwards of the draft model for these nodes. 0 means not known."""
    num_phrase_tokens: int = 0
    """Retrieved tokens that these forwards have verified and kept (DOUBLE, section 4.1)."""
    num_rows: int = 0
    """Rows of these forwards, without those that only read the text. 0 means not known."""
    num_withheld_nodes: int = 0
    """Nodes that the send budget has held back since the last message."""
    retrieval_us: int = 0
    """Time of looking up continuations for these nodes, learning from commits included, in microseconds."""


class DraftTree:
    """Holds the committed tokens and the guesses below them.

    Claims of token ids outside [0, vocab_size) are ignored: no model could verify them. `max_num_nodes` bounds the tree
    that a drafter can cause; claims beyond it are ignored until a commit makes room.
    """

    def __init__(self, committed_token_ids: Sequence[TokenId], vocab_size: int, max_num_nodes: int = 4096) -> None:
        if not committed_token_ids:
            raise ValueError("committed_token_ids must hold at least one token")
        self.committed: list[TokenId] = list(committed_token_ids)
        self.vocab_size = vocab_size
        self.max_num_nodes = max_num_nodes
        self.num_nodes = 0
        """Live nodes, the root not counted."""
        self.root = self._committed_node(len(self.committed) - 1)

    def _committed_node(self, position: int) -> Node:
        return Node(self.committed[position], position, None, 0.0, Source.TARGET, NodeState.COMMITTED)

    def anchor(self, base_len: int) -> Node | None:
        """Returns the node after which a claim about position `base_len` stands, or None if that is beyond the
        committed tokens."""
        if base_len == len(self.committed):
            return self.root
        # Not 0: before the first token there is no node that a claim could follow.
        if 0 < base_len < len(self.committed):
            return self._committed_node(base_len - 1)
        return None

    def add(
        self, parent: Node, token_id: TokenId, logprob: float, source: Source, q: SparseRow | None = None
    ) -> Node | None:
        """Claims that `token_id` follows `parent`. A draft model's claim replaces a retrieved one.

        Args:
            parent: A node of this tree, or one that was.
            token_id: The claimed token.
            logprob: Its log-probability after the parent.
            source: Its origin.
            q: Distribution that it was drawn from. None means that it was picked.

        Returns:
            The node of the claim, which may be an existing one. None if the claim is contradicted, its parent is gone,
            the token does not exist or cannot come there, or the tree is full.
        """
        if parent.state is NodeState.DEAD or not 0 <= token_id < self.vocab_size:
            return None
        position = parent.position + 1
        if position < len(self.committed):
            if self.committed[position] != token_id:
                return None
            return self._committed_node(position)
        if parent.state is NodeState.COMMITTED:
            # By its position it is the last committed token, but it may be a copy of the root, made as an anchor.
            # Children of such a copy would never be found.
            parent = self.root
        if parent.barred is not None and token_id in parent.barred:
            return None
        existing = parent.children.get(token_id)
        if existing is not None:
            if source is Source.DRAFT and existing.source is not Source.DRAFT:
                # Before the new score is set: the difference changes every path through this node.
                _reweigh(existing, logprob - existing.logprob)
                existing.logprob, existing.source, existing.q = logprob, source, q
            return existing
        # Only here: an existing claim needs no room, so a full tree still takes it.
        if self.num_nodes >= self.max_num_nodes:
            return None
        node = Node(token_id, position, parent, logprob, source, NodeState.LIVE)
        node.q = q
        parent.children[token_id] = node
        self.num_nodes += 1
        return node

    def commit(self, token_ids: Sequence[TokenId]) -> int:
        """Appends committed tokens and re-roots the tree.

        Returns:
            How many of the tokens, from the first, the tree had as nodes.
        """
        num_known = 0
        for token_id in token_ids:
            self.committed.append(token_id)
            child = self.root.children.pop(token_id, None)
            for sibling in self.root.children.values():
                self._kill(sibling)
            self.root.children = {}
            if child is None:
                self.root = self._committed_node(len(self.committed) - 1)
            else:
                child.state = NodeState.COMMITTED
                # Without this every root would keep all earlier ones alive, as long as the generation runs.
                child.parent = None
                self.num_nodes -= 1
                self.root = child
                num_known += 1
        return num_known

    def remove(self, node: Node) -> None:
        """Removes a live node that cannot come, and all below it. No later claim brings it back."""
        if node.state is NodeState.LIVE and node.parent is not None:
            parent = node.parent
            del parent.children[node.token_id]
            self._kill(node)
            parent.barred = (parent.barred or set()) | {node.token_id}

    def _kill(self, node: Node) -> None:
        # A stack, not recursion: a chain of max_num_nodes is deeper than Python's default limit.
        stack = [node]
        while stack:
            dead = stack.pop()
            dead.state = NodeState.DEAD
            stack.extend(dead.children.values())
            dead.children = {}
            dead.parent = None
            self.num_nodes -= 1

    def best_chain(self, max_len: int, min_path_logprob: float = -math.inf, *, is_sampled: bool = False) -> list[Node]:
        """Returns the chain to verify: from the root, always the best child, at most `max_len` nodes.

        A draft model's child is better than a retrieved one, a probable one better than an improbable one, the lower
        token id wins a tie. The chain ends where its path falls below `min_path_logprob`; its first node always stands.

        With `is_sampled`, for the ratio rule, the choice does not depend on the value of a drawn token: the first drawn
        child is better than any picked one, and the chain ends below a node whose path is improbable, not above it.
        """
        chain: list[Node] = []
        node, path_logprob = self.root, 0.0
        while node.children and len(chain) < max_len:
            if is_sampled and path_logprob < min_path_logprob:
                break
            children = node.children.values()
            drawn = next((child for child in children if child.q is not None), None) if is_sampled else None
            node = drawn or min(
                children, key=lambda child: (child.source is not Source.DRAFT, -child.logprob, child.token_id)
            )
            path_logprob += node.logprob
            if chain and path_logprob < min_path_logprob and not is_sampled:
                break
            chain.append(node)
        return chain

    def best_subtree(self, max_num_nodes: int, max_depth: int, min_path_logprob: float = -math.inf) -> list[Node]:
        """Returns the connected sub-tree to verify: the nodes with the most probable paths, most probable first.

        Parents come before their children, so every beginning of the list is connected too.

        No node is deeper than `max_depth` below the root or less probable than `min_path_logprob`; but the first one
        always stands. The lower token id wins a tie.
        """
        found: list[Node] = []
        root = self.root
        deepest, least = root.position + max_depth, root.path_logprob + min_path_logprob
        ranks = count()  # nodes cannot be compared; equals come in the order in which they were found
        heap = [(-child.path_logprob, child.token_id, next(ranks), child) for child in root.children.values()]
        heapify(heap)
        # max_depth is 0 where only the target's own next token may still be emitted.
        while heap and len(found) < max_num_nodes and max_depth > 0:
            node = heappop(heap)[-1]
            if found and node.path_logprob < least:
                break
            found.append(node)
            if node.position < deepest:
                for child in node.children.values():
                    heappush(heap, (-child.path_logprob, child.token_id, next(ranks), child))
        return found

    def live_nodes(self) -> Iterator[Node]:
        """Yields every node below the root, parents before children."""
        queue = list(self.root.children.values())
        # Unlike a dictionary, a list may grow while it is iterated over.
        for node in queue:
            yield node
            queue.extend(node.children.values())


def path_to(node: Node, root: Node) -> list[TokenId]:
    """Returns the tokens below a root down to a node; none for the root itself."""
    path: list[TokenId] = []
    above: Node | None = node
    while above is not None and above is not root:
        path.append(above.token_id)
        above = above.parent
    path.reverse()
    return path


def _reweigh(node: Node, change: float) -> None:
    """Adds to the path's log-probability of a node and of all nodes below it."""
    stack = [node]
    while stack:
        changed = stack.pop()
        changed.path_logprob += change
        stack.extend(changed.children.values())


@dataclass(frozen=True, slots=True)
class SparseRow:
    """A distribution that a drafted token was drawn from: token i has probability weights[i] / total, others have 0."""

    token_ids: Sequence[int]
    """Tokens, each once."""
    weights: Sequence[int]
    """Weights of the tokens, at least 1 each."""
    total: int = field(init=False)

    def __post_init__(self) -> None:
        # A frozen dataclass refuses the plain assignment in its own methods, too.
        object.__setattr__(self, "total", sum(self.weights))

    def probability(self, token_id: int) -> float:
        """Returns the probability of a token."""
        for known, weight in zip(self.token_ids, self.weights, strict=True):
            if known == token_id:
                return weight / self.total
        return 0.0


class StreamNodes:
    """Translates the node ids of one drafter's stream into nodes of a tree.

    Remembers at most `max_num_ids` of the latest ids. A node below a forgotten one is ignored, like a node below an
    unknown one.
    """

    def __init__(self, tree: DraftTree, max_num_ids: int = 4096) -> None:
        self._tree = tree
        self._nodes: dict[int, Node] = {}
        self._max_num_ids = max_num_ids

    def add(self, draft: Draft) -> int:
        """Adds a draft's nodes by the content rule.

        Returns:
            How many of them stand in the tree or among the committed tokens.
        """
        num_standing = 0
        logprobs = draft.logprobs or [0.0] * len(draft.token_ids)
        q_rows = draft.q_rows or [None] * len(draft.token_ids)
        # strict=False: lists of unequal lengths are cut to the shortest, because no bad claim may raise here.
        for index, (offset, token_id, logprob, q) in enumerate(
            zip(draft.parent_offsets, draft.token_ids, logprobs, q_rows, strict=False)
        ):
            node_id = draft.first_node_id + index
            parent = self._tree.anchor(draft.base_len) if offset == 0 else self._nodes.get(node_id - offset)
            node = None if parent is None else self._tree.add(parent, token_id, logprob, draft.source, q)
            if node is not None:
                self._nodes[node_id] = node
                num_standing += 1
        if len(self._nodes) > self._max_num_ids:
            self._forget()
        return num_standing

    def _forget(self) -> None:
        alive = [(node_id, node) for node_id, node in self._nodes.items() if node.state is not NodeState.DEAD]
        # A dictionary keeps the order of arrival, so the latest are at the end. Half of `max_num_ids` stay, so that
        # this is seldom needed.
        self._nodes = dict(alive[-self._max_num_ids // 2 :])

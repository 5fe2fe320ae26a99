"""A speculator without a model, and the verifier's mirror of its tree: the environment of a growth policy.

The draft model is a fixed function of the context. Every step checks what holds for all policies: asking changes
nothing, no dead node and none that has been through a forward is expanded, parents come before their children.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from outrider.core.growth import Candidate, Child, Expansion, GrowthPolicy
from outrider.core.params import Source
from outrider.core.tree import Draft, DraftTree, Node, NodeState, SparseRow, StreamNodes

VOCAB_SIZE = 40
NUM_LIKELY = 12
DraftModel = Callable[[Sequence[int], int], list[Candidate]]


def toy_model(sharpness: float = 1.0, seed: int = 0) -> DraftModel:
    """So many candidates for any context, best first; the sharper the model, the surer of the first."""

    def candidates(context: Sequence[int], count: int) -> list[Candidate]:
        chance = random.Random(hash((seed, *context)))
        token_ids = chance.sample(range(VOCAB_SIZE), NUM_LIKELY)
        scores = sorted((sharpness * chance.gauss(0.0, 1.0) for _ in token_ids), reverse=True)
        total = math.log(sum(math.exp(score) for score in scores) + 0.1)
        return [Candidate(token_id, score - total) for token_id, score in zip(token_ids, scores, strict=True)][:count]

    return candidates


def one_after_another(first: float, second: float = 0.1) -> DraftModel:
    """The same candidates after any context: 2, 3, 4 and so on, ever less probable."""

    def candidates(context: Sequence[int], count: int) -> list[Candidate]:
        rest = [Candidate(3 + rank, math.log(second / 2**rank)) for rank in range(count - 1)]
        return [Candidate(2, math.log(first)), *rest]

    return candidates


def drawn(model: DraftModel, rank: int = 1) -> DraftModel:
    """The same candidates, but the one of this rank was drawn, and comes first."""

    def candidates(context: Sequence[int], count: int) -> list[Candidate]:
        found = model(context, max(count, rank + 1))
        q = SparseRow([candidate.token_id for candidate in found], [1] * len(found))
        found.insert(0, found.pop(rank)._replace(q=q))
        return found[:count]

    return candidates


def path_of(tree: DraftTree, node: Node) -> list[int]:
    """The tokens from the root down to a node."""
    path: list[int] = []
    while node is not tree.root:
        assert node.parent is not None
        path.insert(0, node.token_id)
        node = node.parent
    return path


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The token paths of all live nodes."""
    return {tuple(path_of(tree, node)) for node in tree.live_nodes()}


def layers(tree: DraftTree) -> list[list[Node]]:
    """The nodes at each depth."""
    found: list[list[Node]] = []
    for node in tree.live_nodes():
        depth = node.position - tree.root.position
        if depth > len(found):
            found.append([])
        found[depth - 1].append(node)
    return found


def chain_below(node: Node) -> list[Node]:
    """The continuation of a node: the drawn child, or the best."""
    chain = []
    while node.children:
        node = min(node.children.values(), key=lambda child: (child.q is None, -child.logprob))
        chain.append(node)
    return chain


def a_missing_token(tree: DraftTree) -> int:
    return next(token for token in range(VOCAB_SIZE) if token not in tree.root.children)


class ToySpeculator:
    """One session."""

    def __init__(
        self, policy: GrowthPolicy, model: DraftModel, committed: Sequence[int] = (1,), *, max_num_nodes: int = 4096
    ) -> None:
        self.policy, self.model = policy, model
        self.tree = DraftTree(committed, VOCAB_SIZE, max_num_nodes)
        self.mirror = DraftTree(committed, VOCAB_SIZE)
        self.num_rows: list[int] = []
        """Rows of each forward."""
        self.messages: list[int] = []
        """For each message, the number of forwards before it."""
        self._stream = StreamNodes(self.mirror)
        self._node_ids: dict[Node, int] = {}
        self.unsent: list[Node] = []

    def candidates(self, node: Node, count: int) -> list[Candidate]:
        """The draft model's candidates after a node."""
        return self.model([*self.tree.committed, *path_of(self.tree, node)], count)

    def forward(self) -> Expansion | None:
        """One forward, and the message that it completes. None = there is nothing to grow."""
        tree, policy = self.tree, self.policy
        expansion = policy.next_expansion(tree)
        if expansion is None:
            return None
        assert expansion == policy.next_expansion(tree)
        assert len(set(expansion.nodes)) == len(expansion.nodes) > 0
        for index, node in enumerate(expansion.nodes):
            assert node is tree.root or node.state is NodeState.LIVE
            assert not node.is_expanded or (node is tree.root and not node.children)
            assert node.parent not in expansion.nodes[index:]
        found = [self.candidates(node, expansion.num_children) for node in expansion.nodes]
        for node in expansion.nodes:
            node.is_expanded = True
        self._add(policy.children(tree, expansion, found))
        self.num_rows.append(len(expansion.nodes))
        is_idle = policy.next_expansion(tree) is None
        if self.unsent and (is_idle or policy.is_message(tree, len(self.unsent))):
            self._send()
        return expansion

    def grow(self, most: int = 1000) -> int:
        """Grows until growth stops, or for so many forwards; returns the number of forwards."""
        return next((count for count in range(most) if self.forward() is None), most)

    def commit(self, token_ids: Sequence[int]) -> int:
        """Commits the target's tokens. Returns how many of them the tree had as nodes. Checks that the mirror agrees on
        what was sent."""
        num_unsent = len(self.unsent)
        num_known = self.tree.commit(token_ids)
        mirrored = self.mirror.commit(token_ids)
        assert mirrored == num_known if num_unsent == 0 else mirrored <= num_known
        self.policy.committed(self.tree, len(token_ids), num_known)
        self._add(self.policy.known_children(self.tree))
        self.unsent = [node for node in self.unsent if node.state is NodeState.LIVE]
        return num_known

    def _add(self, children: Sequence[Child]) -> None:
        for parent, candidate in children:
            before = self.tree.num_nodes
            node = self.tree.add(parent, candidate.token_id, candidate.logprob, Source.DRAFT, candidate.q)
            if node is not None and self.tree.num_nodes > before:
                self.unsent.append(node)

    def _send(self) -> None:
        self.messages.append(len(self.num_rows))
        first_node_id = len(self._node_ids) + 1
        self._node_ids.update((node, first_node_id + index) for index, node in enumerate(self.unsent))
        ids = self._node_ids
        offsets = [0 if node.parent in (None, self.tree.root) else ids[node] - ids[node.parent] for node in self.unsent]
        token_ids, logprobs = [node.token_id for node in self.unsent], [node.logprob for node in self.unsent]
        q_rows = [node.q for node in self.unsent]
        base_len = len(self.tree.committed)
        self._stream.add(Draft(base_len, first_node_id, offsets, token_ids, logprobs, Source.DRAFT, q_rows))
        self.unsent = []
        assert paths(self.mirror) == paths(self.tree)

"""The slots of a session's cache: the trunk, and the nodes after it.

The trunk comes first: slot i has committed token i, exact. After it come the nodes that have been through a forward, in
the order of their forwards, so a parent is always before its children. As long as the tree is one chain, slot and
position agree and the rows need no mask; with branches, a row sees the trunk, its ancestors and itself. On a commit the
slots that are still of use (the path that became committed, and what lives below it) move together; all others are
forgotten. For a chain that is a truncation.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.core.growth import Expansion
from outrider.core.tree import DraftTree, Node, NodeState
from outrider.models.runner import KVCache, Segment


class Slots:
    """Knows which slot has which token of a session's tree."""

    def __init__(self, cache: KVCache, tree: DraftTree) -> None:
        """
        Args:
            cache: Empty; for this session alone.
            tree: The session's tree.
        """
        self._cache = cache
        self._tree = tree
        self._trunk_len = 0
        self._of: dict[Node, int] = {}
        self._phrase_slot = 0

    @property
    def num_missing(self) -> int:
        """Committed tokens that are not in the cache."""
        return len(self._tree.committed) - self._trunk_len

    def take_prefix(self) -> None:
        """Takes in the part of the trunk that was found in the pool."""
        self._trunk_len = self._cache.length

    def commit(self) -> None:
        """Forgets what the tree has dropped, after it was re-rooted."""
        # Slots are assigned in ascending order, and a dictionary keeps it, as `keep` requires. The committed nodes come
        # first: they are ancestors of all that live, and a parent has its slot before its children.
        kept = [(node, slot) for node, slot in self._of.items() if node.state is not NodeState.DEAD]
        self._cache.keep(self._trunk_len, [slot for _, slot in kept])
        self._of = {}
        for slot, (node, _) in enumerate(kept, start=self._trunk_len):
            if node.state is NodeState.COMMITTED:
                self._trunk_len = slot + 1
            else:
                self._of[node] = slot

    def is_chain(self, nodes: Sequence[Node]) -> bool:
        """Returns True if the trunk, the nodes in the cache and these nodes are one path."""
        branches = [node for node in nodes if node is not self._tree.root]
        if not branches:
            return not self._of
        return len(branches) == 1 and branches[0].position == len(self._tree.committed) + len(self._of)

    def append(self, node: Node) -> None:
        """Gives the next slot to a node that has been through a forward already."""
        self._of[node] = self._cache.length
        self._cache.append([node.position])

    def segment(self, expansion: Expansion, max_rows: int) -> Segment:
        """Returns the rows of an expansion, with logits in the order of its nodes. While more than `max_rows` tokens of
        the trunk are missing, returns a piece of the trunk instead, without logits."""
        root, committed = self._tree.root, self._tree.committed
        branches = [node for node in expansion.nodes if node is not root]
        expands_root = len(branches) < len(expansion.nodes)
        if expands_root and self._trunk_len == len(committed):
            # The root has been through a forward without a result, for example because the session was paused
            # meanwhile. Its logits are gone, so its row is computed again. It has no children, so no node loses its
            # slot.
            self._trunk_len -= 1
            self._cache.truncate(self._trunk_len)
        trunk = committed[self._trunk_len :]
        if len(trunk) > max_rows:
            # Counted before the forward has run: if that fails, the engine drops the session anyway.
            self._trunk_len += max_rows
            return Segment(self._cache, trunk[:max_rows], num_logits=0)
        segment = Segment.of_tree(self._cache, trunk, branches, self._of, num_logits=len(expansion.nodes))
        if expansion.phrase:  # follows one chain, so there is no mask to be widened
            token_ids = [*segment.token_ids, *expansion.phrase]
            segment = segment._replace(token_ids=token_ids, num_logits=segment.num_logits + len(expansion.phrase))
        self._trunk_len = len(committed)
        for slot, node in enumerate(branches, start=self._cache.length + len(trunk)):
            self._of[node] = slot
        self._phrase_slot = self._cache.length + len(trunk) + len(branches)
        return segment

    def keep_phrase(self, nodes: Sequence[Node]) -> None:
        """Keeps the first rows of the phrase that was among those of the latest segment: those of these nodes."""
        self._of |= {node: slot for slot, node in enumerate(nodes, start=self._phrase_slot)}
        # The refused tokens of the phrase have the last slots, so nothing must be moved.
        self._cache.truncate(self._phrase_slot + len(nodes))

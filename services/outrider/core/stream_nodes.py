"""The node ids of one drafter's stream, translated. Ids mean nothing outside their stream."""

from __future__ import annotations

from outrider.core.tree import Draft, DraftTree, Node, NodeState


class StreamNodes:
    """The node ids of one drafter's stream, translated into nodes of a tree.

    Remembers at most `max_num_ids` of the latest ids; a node below a forgotten one is ignored, like one below an
    unknown one.
    """

    def __init__(self, tree: DraftTree, max_num_ids: int = 4096) -> None:
        self._tree = tree
        self._nodes: dict[int, Node] = {}
        self._max_num_ids = max_num_ids

    def add(self, draft: Draft) -> int:
        """Adds a draft's nodes by the content rule. Returns how many of them stand in the tree or among the committed
        tokens."""
        num_standing = 0
        logprobs = draft.logprobs or [0.0] * len(draft.token_ids)
        q_rows = draft.q_rows or [None] * len(draft.token_ids)
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
        self._nodes = dict(alive[-self._max_num_ids // 2 :])

"""The nodes of a session on their way to the target: those that wait, and those that were sent."""

from __future__ import annotations

from outrider.core.params import Source
from outrider.core.tree import Draft, DraftTree, Node, NodeState
from outrider.speculator.send_budget import SendBudget


class Outbox:
    """Makes messages of new nodes, in the order in which they grew, with what they have cost."""

    def __init__(self, tree: DraftTree, *, has_rows: bool) -> None:
        """
        Args:
            tree: The session's tree.
            has_rows: True if the target needs the distributions that nodes were drawn from.
        """
        self._tree, self._has_rows = tree, has_rows
        self.budget = SendBudget()
        """Limits the bytes of a round, and those on their way."""
        self._unsent: list[Node] = []
        self._ids: dict[Node, int] = {}
        """Of the nodes that were sent and still live."""
        self._next_id = 1  # not 0, which as an acknowledgement means that the caller does not say
        self._forward_us = 0.0
        self._num_forwards = self._num_phrase_tokens = self._num_rows = 0
        """Costs of the nodes that wait."""
        self._withheld: set[Node] = set()
        self._num_withheld = 0

    @property
    def num_unsent(self) -> int:
        """Nodes that wait."""
        return len(self._unsent)

    @property
    def has_sent(self) -> bool:
        """True if the target has nodes to verify, or they are on their way."""
        return bool(self._ids)

    def add(self, node: Node) -> None:
        """Takes a new node. Its parent is the root, or came before."""
        self._unsent.append(node)

    def add_forward(self, forward_us: float, num_rows: int) -> None:
        """Counts a forward towards the cost of the next message."""
        self._forward_us += forward_us
        self._num_forwards += 1
        self._num_rows += num_rows

    def add_phrase(self, num_tokens: int) -> None:
        """Counts the tokens of a retrieved phrase that became nodes."""
        self._num_phrase_tokens += num_tokens

    def commit(self) -> None:
        """Forgets the nodes that the tree has dropped."""
        self._ids = {node: node_id for node, node_id in self._ids.items() if node.state is NodeState.LIVE}
        self._unsent = [node for node in self._unsent if node.state is NodeState.LIVE]

    def take(self) -> Draft | None:
        """Takes as many of the nodes, from the first, as the budget allows. None means that it allows none."""
        count = self.budget.num_affordable(self._unsent)
        self._note_withheld(self._unsent[count:])
        if not count:
            return None
        sent, self._unsent = self._unsent[:count], self._unsent[count:]
        first_id = self._next_id
        self._next_id += count
        self.budget.spend(sent, self._next_id - 1)
        # Before the offsets: a parent may be in the same message. One that is not has its id from an earlier message.
        self._ids.update(zip(sent, range(first_id, self._next_id), strict=True))
        offsets = [
            0 if node.parent is self._tree.root else self._ids[node] - self._ids[node.parent]
            for node in sent
            if node.parent is not None  # always true of live nodes; said for the type checker
        ]
        draft = Draft(
            base_len=len(self._tree.committed),
            first_node_id=first_id,
            parent_offsets=offsets,
            token_ids=[node.token_id for node in sent],
            logprobs=[node.logprob for node in sent],
            source=Source.DRAFT,
            q_rows=[node.q for node in sent] if self._has_rows else (),
            forward_us=int(self._forward_us),
            num_forwards=self._num_forwards,
            num_phrase_tokens=self._num_phrase_tokens,
            num_rows=self._num_rows,
            num_withheld_nodes=self._num_withheld,
        )
        self._forward_us = 0.0
        self._num_forwards = self._num_phrase_tokens = self._num_rows = self._num_withheld = 0
        return draft

    def _note_withheld(self, nodes: list[Node]) -> None:
        """Counts nodes that the budget holds back, each of them once."""
        self._num_withheld += sum(node not in self._withheld for node in nodes)
        self._withheld = set(nodes)

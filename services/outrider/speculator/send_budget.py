"""How many bytes of a session's drafts may go out: so many a round, and so many on their way.

A round of the target uses a few kilobytes of drafts, however many there are; what goes beyond only delays what is
sent next, and on a slow line for long: a queue that has once formed is full of guesses about places where the target
has been. So nodes wait here, where a commit can still take them back, and not in the line. What has arrived is known
from the commits, which name the latest node that came before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outrider.core.tree import Node

MAX_BYTES_PER_ROUND = 3500
"""Messages of one round, estimated. With what HTTP/2 and TCP add, a round stays below 4 kB."""
MESSAGE_BYTES = 45
"""Of a message without nodes: its own fields, the frames of gRPC and HTTP/2, and the receiver's answers to them."""
NODE_BYTES = 6
"""Of a node: parent, token, cost."""
ROW_TOKEN_BYTES = 4
"""Of a token of a row that a node was drawn from: its id and its weight."""


class SendBudget:
    """Of one session."""

    def __init__(self) -> None:
        self._credit_bytes = MAX_BYTES_PER_ROUND
        self._window_bytes = 4 * MAX_BYTES_PER_ROUND
        self._least_round_trip_us = 0
        self._on_way: deque[tuple[int, int]] = deque()
        self._on_way_bytes = 0

    def begin_round(self, acknowledged_node_id: int) -> None:
        """The target has spoken. `acknowledged_node_id` is the latest node that it has; 0 = it does not say."""
        self._credit_bytes = MAX_BYTES_PER_ROUND
        while self._on_way and (not acknowledged_node_id or self._on_way[0][0] <= acknowledged_node_id):
            self._on_way_bytes -= self._on_way.popleft()[1]

    def measure(self, forward_us: int, round_trip_us: int) -> None:
        """What a forward and the way there and back take, in microseconds. What is on its way may be two rounds' and
        those of the round trip; by the least that was measured, because a queue makes a round trip longer, too."""
        if not forward_us or not round_trip_us:
            return
        self._least_round_trip_us = min(round_trip_us, self._least_round_trip_us or round_trip_us)
        self._window_bytes = int(MAX_BYTES_PER_ROUND * (2 + self._least_round_trip_us / forward_us))

    def num_affordable(self, nodes: Iterable[Node]) -> int:
        """How many of these nodes, from the first, may go out as a message now."""
        # One by one, and never by a later node: under the ratio rule, whether a token is judged must not depend on it.
        room = min(self._credit_bytes, self._window_bytes - self._on_way_bytes) - MESSAGE_BYTES
        count = 0
        for node in nodes:
            room -= _node_bytes(node)
            if room < 0:
                break
            count += 1
        return count

    def spend(self, nodes: Iterable[Node], last_node_id: int) -> None:
        """These nodes go out as a message."""
        num_bytes = MESSAGE_BYTES + sum(map(_node_bytes, nodes))
        self._credit_bytes -= num_bytes
        self._on_way.append((last_node_id, num_bytes))
        self._on_way_bytes += num_bytes


def _node_bytes(node: Node) -> int:
    return NODE_BYTES + (0 if node.q is None else ROW_TOKEN_BYTES * (1 + len(node.q.token_ids)))

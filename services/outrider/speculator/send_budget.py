"""A limit on the bytes of a session's drafts: per round of the target, and on their way to it.

A round of the target uses a few kilobytes of drafts, however many there are. More only delays what is sent next, and on
a slow line for long: a queue that has formed is full of guesses about places that the target has passed. So nodes wait
here, where a commit can still take them back, and not in the line. Commits tell what has arrived: they name the latest
node that came before them.

Where the way there and back takes less time than a forward of the draft model, nothing queues: a forward's nodes have
arrived before the next ones are there. Such a line is near, and a limit would only cut the layers of a wide beam. It
shows in what is on its way when a commit is taken in: the message of the forward that the commit had to wait for, and
one for each forward that the round trip lasts, so fewer than two on average. There the limit of a round doubles
whenever nodes of a beam had to wait, up to all that a mirror can hold.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from outrider.core.statistics import RunningMean
from outrider.core.tree import Node

MAX_BYTES_PER_ROUND = 3500
"""Most bytes of one round's messages, estimated. With what HTTP/2 and TCP add, a round stays below 4 kB unless
the line is near and a beam wide."""
MESSAGE_BYTES = 45
"""Size of a message without nodes: its own fields, the frames of gRPC and HTTP/2, and the answers to them."""
NODE_BYTES = 6
"""Size of a node: parent, token, score."""
MAX_NEAR_BYTES_PER_ROUND = 8 * MAX_BYTES_PER_ROUND
"""Most bytes of a round on a near line: about as many nodes as the target's mirror of the tree holds."""
MESSAGES_OF_FAR = 2.0
"""Messages on their way at a commit, on average, from which on a line is not near."""
ROW_TOKEN_BYTES = 4
"""Size of one token of the row that a node was drawn from: its id and its weight."""


class SendBudget:
    """Decides how many nodes of one session may be sent now."""

    def __init__(self) -> None:
        self._round_bytes = MAX_BYTES_PER_ROUND
        self._has_cut = False
        """True if nodes of a beam had to wait since the last commit."""
        self._messages_on_way = RunningMean()
        """Messages on their way when a commit comes."""
        self._credit_bytes = MAX_BYTES_PER_ROUND
        # As for a round trip of two forwards, until it is measured.
        self._window_bytes = 4 * MAX_BYTES_PER_ROUND
        self._least_round_trip_us = 0
        self._on_way: deque[tuple[int, int]] = deque()  # for each message the id of its last node, and its bytes
        self._on_way_bytes = 0

    def begin_round(self, acknowledged_node_id: int) -> None:
        """Renews the credit at a commit, which acknowledges all nodes up to this id; 0 means that it does not say."""
        # Without an id everything counts as arrived: otherwise the window of a caller that never sends one would stay
        # closed.
        while self._on_way and (not acknowledged_node_id or self._on_way[0][0] <= acknowledged_node_id):
            self._on_way_bytes -= self._on_way.popleft()[1]
        if acknowledged_node_id:
            self._judge_line()
        self._credit_bytes, self._has_cut = self._round_bytes, False

    def _judge_line(self) -> None:
        """Raises the limit of a round where the line is near, and takes that back where it turns out not to be."""
        # After nodes had to wait, nothing went out for a while: an empty line then does not show that it is near.
        if self._on_way or not self._has_cut:
            self._messages_on_way.add(len(self._on_way))
        if self._messages_on_way.get(0.0) >= MESSAGES_OF_FAR:
            self._round_bytes = MAX_BYTES_PER_ROUND
        elif self._has_cut:
            self._round_bytes = min(2 * self._round_bytes, MAX_NEAR_BYTES_PER_ROUND)

    def measure(self, forward_us: int, round_trip_us: int) -> None:
        """Sets the bytes that may be on their way: those of two rounds, and of the rounds that a round trip lasts.

        Args:
            forward_us: Duration of one forward of the target, in microseconds; 0 means unknown.
            round_trip_us: Duration of the way there and back, likewise.
        """
        if not forward_us or not round_trip_us:
            return
        # The least that was measured: a queue in the line makes round trips longer, and must not widen its own limit.
        self._least_round_trip_us = min(round_trip_us, self._least_round_trip_us or round_trip_us)
        self._window_bytes = int(MAX_BYTES_PER_ROUND * (2 + self._least_round_trip_us / forward_us))

    def num_affordable(self, nodes: Iterable[Node]) -> int:
        """Counts the nodes, from the first, that may go out as one message now."""
        # In order, and independent of the later nodes: under the ratio rule, whether a token is judged must not depend
        # on what it is, or the text no longer has the target's distribution.
        window = max(self._window_bytes, self._round_bytes)
        room = min(self._credit_bytes, window - self._on_way_bytes) - MESSAGE_BYTES
        count = 0
        for node in nodes:
            room -= _node_bytes(node)
            if room < 0:
                # Nodes with rows are forty times as large and stand in chains: no beam is cut with them, and a round of
                # them stays small on every line.
                self._has_cut = node.q is None
                break
            count += 1
        return count

    def spend(self, nodes: Iterable[Node], last_node_id: int) -> None:
        """Charges these nodes, which go out as one message."""
        num_bytes = MESSAGE_BYTES + sum(map(_node_bytes, nodes))
        self._credit_bytes -= num_bytes
        self._on_way.append((last_node_id, num_bytes))
        self._on_way_bytes += num_bytes


def _node_bytes(node: Node) -> int:
    return NODE_BYTES + (0 if node.q is None else ROW_TOKEN_BYTES * (1 + len(node.q.token_ids)))

"""Counts the memory of requests as they come in, and bounds it over all connections together.

The memory is estimated: bytes and parts of JSON have costs that were measured once. If all requests together exceed the
limit, the largest of those still coming in is refused. This cuts off a flood of large requests that never end, while a
small request is served.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

MAX_HELD_BYTES = 160 << 20
"""Most memory of all requests together, in bytes. The process takes some 70 MB without any, and its limit in
deploy/base is 512 MiB: the rest is for answers, and for freed memory that is fragmented."""
CONNECTION_BYTES = 16 << 10
"""Memory of a connection without a request, in bytes."""
BYTE_COST, PART_COST = 4, 256
"""Memory that a request takes while it is served, in bytes: for each byte of its body, which is parsed and sent on, and
for each part. The most expensive part is an object with a few names."""


def _nothing() -> None:
    """Does nothing: the default for a holding without a callback."""


class Intake:
    """Holds the memory counts of all requests. Lives on the event loop."""

    def __init__(self, max_body_bytes: int) -> None:
        """`max_body_bytes`: the largest body. There is always room for one."""
        self._max_bytes = max(MAX_HELD_BYTES, 2 * BYTE_COST * max_body_bytes)
        self._num_bytes = 0
        self._coming: dict[Holding, None] = {}
        """Holdings that may have to give way, the oldest first."""

    def hold(self, num_bytes: int = 0) -> Holding:
        """Returns the holding of a new request or connection."""
        holding = Holding(self)
        holding.set(num_bytes)
        return holding

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        while self._num_bytes > self._max_bytes and self._coming:
            max(self._coming, key=lambda holding: holding.num_bytes).give_way()


class Holding:
    """Counts the memory of one request, or of a connection that waits for one. Leaving `with` gives it back."""

    def __init__(self, intake: Intake) -> None:
        self._intake = intake
        self._refuse: Callable[[], None] = _nothing
        self.num_bytes = 0
        self.has_given_way = False
        """True if it was refused and counts no longer: others needed the room."""

    def offer(self, refuse: Callable[[], None] = _nothing) -> None:
        """Marks it as one that may have to give way. `refuse` is called if it has to."""
        self._refuse = refuse
        self._intake._coming[self] = None

    def keep(self) -> None:
        """Marks it as one that does not give way: the request is being served."""
        self._intake._coming.pop(self, None)

    def set(self, num_bytes: int) -> None:
        """Sets its number of bytes. It, or others, may have to give way for that."""
        if not self.has_given_way:
            grown, self.num_bytes = num_bytes - self.num_bytes, num_bytes
            self._intake._add(grown)

    def give_way(self) -> None:
        """Gives everything back, and is refused."""
        refuse = self._refuse
        self.close()
        self.has_given_way = True
        refuse()

    def close(self) -> None:
        """Gives everything back."""
        self.keep()
        self.set(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""Which of a verifier's replicas is asked next: those that answer take turns, one that has just failed is left alone.

Knows nothing about channels and loops: both clients use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

AVOID_S = 1.0
"""How long a replica that has failed is left alone, at least."""
MAX_AVOID_S = 30.0


class Replicas:
    """The addresses of one verifier. Thread-safe."""

    def __init__(self, addresses: str | Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        """`addresses`: HOST:PORT, several separated by commas, or a sequence of them. Raises ValueError for none."""
        self.addresses = addresses_of(addresses)
        self._clock = clock
        self._lock = threading.Lock()
        self._turn = 0
        self._avoided_until = [0.0] * len(self.addresses)
        self.has_answered = False
        """Whether one of them ever has."""
        self.is_closed = False
        """Whether the client has hung up: nothing is to be tried again."""

    def next(self, num_failures: Sequence[int] = ()) -> int:
        """The number of the replica to ask: the next one in turn. If all have just failed, the one that has failed the
        least often by `num_failures`, a number for each; among equals, the first to come back."""
        with self._lock:
            now, count = self._clock(), len(self.addresses)

            def merit(number: int) -> tuple[float, float]:
                if self._avoided_until[number] <= now:
                    return -1.0, 0.0
                return num_failures[number] if num_failures else 0, self._avoided_until[number]

            chosen = min(((self._turn + offset) % count for offset in range(count)), key=merit)
            self._turn = (chosen + 1) % count
            return chosen

    def answered(self, number: int) -> None:
        """It is well."""
        self.has_answered = True
        self._avoided_until[number] = 0.0

    def failed(self, number: int, silent_s: float) -> None:
        """It has failed, after having said nothing for so long: it is left alone for as long, so that one that hangs is
        not found out by every call anew."""
        avoid_s = min(MAX_AVOID_S, max(AVOID_S, silent_s))
        with self._lock:
            self._avoided_until[number] = self._clock() + avoid_s

    @property
    def has_fresh(self) -> bool:
        """Whether one of them has not just failed."""
        return min(self._avoided_until) <= self._clock()


def addresses_of(addresses: str | Sequence[str]) -> tuple[str, ...]:
    """Each address once, in order. Raises ValueError if there is none."""
    listed = addresses.split(",") if isinstance(addresses, str) else addresses
    found = tuple(dict.fromkeys(address.strip() for address in listed if address.strip()))
    if not found:
        raise ValueError(f"address must name at least one server, HOST:PORT, got {addresses!r}")
    return found

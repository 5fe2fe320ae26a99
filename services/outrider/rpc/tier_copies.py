"""Copies of the wider tiers of many tenants: made when first asked for, dropped when nobody has asked for long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider.core.params import RetrievalScope
from outrider.rpc.watching import TierWatch

MAX_NUM_COPIES = 16
"""Each may take 60 MB, and a prior beside."""
IDLE_S = 600.0
"""A copy that no session was begun with for so long is dropped."""

Key = tuple[RetrievalScope, str]
"""A scope, and the tenant that asks."""


class TierCopies:
    """Lives on the event loop. What a session was given stays with it when it is dropped here, as it is then."""

    def __init__(
        self,
        watch: Callable[[RetrievalScope, str], TierWatch],
        max_num_copies: int = MAX_NUM_COPIES,
        idle_s: float = IDLE_S,
    ) -> None:
        """`watch` begins a copy."""
        self._watch, self._max_num_copies, self._idle_s = watch, max_num_copies, idle_s
        self._copies: dict[Key, TierWatch] = {}  # the one that was asked for last is the last
        self._timers: dict[Key, asyncio.TimerHandle] = {}

    def get(self, scope: RetrievalScope, tenant: str) -> TierWatch:
        """The copy; begins it if there is none."""
        key = (scope, tenant)
        copy = self._copies.pop(key, None)
        if copy is None:
            while len(self._copies) >= self._max_num_copies:
                self._drop(next(iter(self._copies)))
            copy = self._watch(scope, tenant)
        else:
            self._timers.pop(key).cancel()
        self._copies[key] = copy
        self._timers[key] = asyncio.get_running_loop().call_later(self._idle_s, self._drop, key)
        return copy

    def __len__(self) -> int:
        return len(self._copies)

    def stop(self) -> None:
        """Drops all."""
        for key in list(self._copies):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        self._timers.pop(key).cancel()
        self._copies.pop(key).stop()

"""A link that can also change bytes: what no link of TCP does, and a peer that has gone mad does."""

from __future__ import annotations

import random

from outrider_cli.links.delay_proxy import DelayProxy

GARBAGE_SHARE = 0.2
"""Of the pieces that come in while the wire changes bytes."""


class FaultProxy(DelayProxy):
    """Forwards connections to a target. Lives in one event loop."""

    def __init__(self, target: str, seed: int = 0) -> None:
        super().__init__(target)
        self._random = random.Random(seed)
        self._is_garbled = False

    def garble(self) -> None:
        """Some of what gets through is changed, either way."""
        self._is_garbled = True

    async def heal(self) -> None:
        """All is well from here on."""
        self._is_garbled = False
        await super().heal()

    def _arriving(self, data: bytes) -> bytes:
        if not self._is_garbled or self._random.random() >= GARBAGE_SHARE:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= self._random.randrange(1, 256)
        return bytes(changed)

"""How long an event loop keeps everybody waiting."""

from __future__ import annotations

import asyncio
import time


class LongestTurn:
    """Measures how long one turn of the event loop keeps the others waiting, by the time of its own thread: that of
    others on the machine does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Measures until it is cancelled."""
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.seconds = max(self.seconds, time.thread_time() - before)
            await asyncio.sleep(0.002)

"""How long an event loop keeps everybody waiting."""

from __future__ import annotations

import asyncio
import time

PAUSE_S = 0.002


class LongestTurn:
    """Measures how long the turns of the event loop keep others waiting, by the time of its own thread: what others on
    the machine take does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Measures until it is cancelled."""
        while True:
            before = time.thread_time()
            await asyncio.sleep(PAUSE_S)
            self.seconds = max(self.seconds, time.thread_time() - before - PAUSE_S)

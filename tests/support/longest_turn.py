"""How long one turn of an event loop keeps other tasks waiting."""

from __future__ import annotations

import asyncio
import time

PAUSE_S = 0.002


class LongestTurn:
    """Measures the longest turn of the event loop by the CPU time of its own thread, so that the load of the machine
    does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    async def watch(self) -> None:
        """Measures until it is cancelled."""
        while True:
            before = time.thread_time()
            await asyncio.sleep(PAUSE_S)
            self.seconds = max(self.seconds, time.thread_time() - before - PAUSE_S)

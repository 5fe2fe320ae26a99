"""Heavy work beside the event loop: one piece at a time, in a thread that gives way to everything else."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

NICENESS = 10
"""Added for the thread: whoever answers lookups on the same core goes first."""

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """See the module. For functions that spend their time in numpy, without the GIL."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "background", initializer=_give_way)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns, when its turn has come and it is done."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drops what waits. What runs goes on to its end, unheard."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Lowers the priority of the calling thread, where that can be done for a thread alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

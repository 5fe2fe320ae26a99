"""Threads in which models are loaded. Imports no torch: whoever calls this may not want to wait for that."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Loaded = TypeVar("Loaded")


async def in_own_thread(load: Callable[[], Loaded]) -> Loaded:
    """Runs what loads and measures a model in a thread that ends with it, not in one that is kept.

    OpenMP holds helpers for every thread that has computed. With more of them than cores it puts all to sleep between
    two operators instead of letting them wait awake, and a forward on two threads takes 1.6 times as long.

    A caller that is cancelled does not end the thread: it loads on, and nobody takes its result.
    """
    pool = ThreadPoolExecutor(1, "loading")
    try:
        # In the caller's context, which says whose log lines these are.
        return await asyncio.get_running_loop().run_in_executor(pool, contextvars.copy_context().run, load)
    finally:
        pool.shutdown(wait=False)

"""Threads in which models are loaded. Imports no torch, because a caller may not want to wait for that."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Loaded = TypeVar("Loaded")


async def in_own_thread(load: Callable[[], Loaded]) -> Loaded:
    """Runs a function that loads and measures a model in a thread that ends afterwards, not in one of a pool.

    OpenMP keeps helpers for every thread that has computed. If there are more helpers than cores, they sleep between
    two operators instead of spinning, and a forward on two threads takes 1.6 times as long.

    Cancelling the caller does not end the thread: it goes on loading, and its result is dropped.
    """
    pool = ThreadPoolExecutor(1, "loading")
    try:
        # In the caller's context, which labels the log lines.
        return await asyncio.get_running_loop().run_in_executor(pool, contextvars.copy_context().run, load)
    finally:
        pool.shutdown(wait=False)

"""Waiting for what the other side of a connection does, of which nothing tells."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Long, for machines that others load: what never comes fails a test by itself, and what comes late is no failure."""


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> object:
    """Returns what a condition, awaited if need be, gives as soon as that is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.002)


def until_true(condition: Callable[[], object], timeout_s: float = WAIT_S) -> object:
    """Does what `until` does, where there is no event loop."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return found

"""Waiting for effects at the other end of a connection that no event announces."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable

WAIT_S = 60.0
"""Long, for loaded machines: what never comes fails a test anyway, and what comes late is no failure."""


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> object:
    """Returns the result of a condition, awaited if need be, once it is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            found = condition()
            if inspect.isawaitable(found):
                found = await found
            if found:
                return found
            await asyncio.sleep(0.002)


def until_true(condition: Callable[[], object], timeout_s: float = WAIT_S) -> object:
    """Does the same as `until`, without an event loop."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return found

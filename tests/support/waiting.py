"""Waiting for what the other side of a connection does, of which nothing tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

WAIT_S = 60.0
"""Long, for machines that others load: what never comes fails a test by itself, and what comes late is no failure."""


async def until(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Returns when the condition holds. TimeoutError: it did not in time."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.002)

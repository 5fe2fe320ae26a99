"""Requests that take so long to look through that everybody else on the event loop would wait."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import Message

LARGE_BYTES = 16_384
"""A tokenizer takes some 30 ms for so much text; a thread, 0.1 ms to get going."""

T = TypeVar("T")


async def beside_the_loop(request: Message, work: Callable[[], T]) -> T:
    """What `work` returns or raises: called here, or in a thread if the request that it is about is large."""
    return await asyncio.to_thread(work) if request.ByteSize() >= LARGE_BYTES else work()

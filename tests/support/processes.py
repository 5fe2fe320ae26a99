"""Services as separate processes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def gateway_process(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A gateway, and its address."""
    command = (sys.executable, "-m", "outrider_gateway", "--listen", "127.0.0.1:0", *arguments)
    pipe = asyncio.subprocess.PIPE
    running = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    assert running.stdout is not None
    word, address = (await running.stdout.readline()).decode().split()
    assert word == "listening"
    try:
        yield running, address
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()

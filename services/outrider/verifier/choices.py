"""Several texts from one prompt, which is read once: the first reads it, and the others find its keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from outrider.core.session import SessionSpec
from outrider.v1 import verifier_pb2
from outrider.verifier.responses import Event
from outrider.wire.errors import RpcError

Send = Callable[[Event], Awaitable[None]]
"""Sends an event of one text to the client."""


async def run_choices(
    specs: Sequence[SessionSpec | None],
    run: Callable[[SessionSpec, SessionSpec | None, Send], Awaitable[None]],
    send: Callable[[Event, int], Awaitable[None]],
) -> None:
    """Runs all texts of a request, and returns when the last one is finished.

    Args:
        specs: One for each text; None for one that is finished already.
        run: Runs one, given its spec, that of the first of several, and how it sends.
        send: Sends an event of the text with this number; no second one begins before it returns.

    Raises:
        RpcError: that of the first text that fails. It ends the others.
    """
    running = [(index, spec) for index, spec in enumerate(specs) if spec is not None]
    if len(specs) == 1:
        ((index, spec),) = running
        await run(spec, None, lambda event: send(event, index))
        return
    writing, has_read = asyncio.Lock(), asyncio.Event()

    async def run_one(index: int, spec: SessionSpec) -> None:
        async def send_one(event: Event) -> None:
            async with writing:
                await send(event, index)
            if isinstance(event, verifier_pb2.Chunk | verifier_pb2.Finished):
                has_read.set()

        if index != running[0][0]:
            await has_read.wait()
        await run(spec, running[0][1], send_one)

    try:
        async with asyncio.TaskGroup() as group:
            for index, spec in running:
                group.create_task(run_one(index, spec))
    except* RpcError as failures:
        raise failures.exceptions[0] from None

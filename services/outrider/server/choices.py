"""Several texts from one prompt. The first text reads the prompt, and the others find its keys and values."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import grpc

from outrider.wire.errors import RpcError

Spec = TypeVar("Spec")
Event = TypeVar("Event")


async def run_choices(
    specs: Sequence[Spec | None],
    run: Callable[[Spec, Spec | None, Callable[[Event], Awaitable[None]]], Awaitable[None]],
    send: Callable[[Event, int], Awaitable[None]],
    is_of_text: Callable[[Event], bool],
) -> None:
    """Runs all texts of a request, and returns when the last one is finished.

    Args:
        specs: One for each text; None for one that is finished already.
        run: Runs one text, given its spec, that of the first of several, and a function that sends its events.
        send: Sends an event of the text with this number; no second one begins before it returns.
        is_of_text: Returns True for an event that comes only after the prompt was read: the others wait for it.

    Raises:
        RpcError, AioRpcError, InternalError: the error of the first text that fails, which ends the others.
            InternalError means that an event could not be sent: the caller is gone.
    """
    running = [(index, spec) for index, spec in enumerate(specs) if spec is not None]
    if len(specs) == 1:
        ((index, spec),) = running
        await run(spec, None, lambda event: send(event, index))
        return
    writing, has_read = asyncio.Lock(), asyncio.Event()

    async def run_one(index: int, spec: Spec) -> None:
        async def send_one(event: Event) -> None:
            async with writing:
                await send(event, index)
            if is_of_text(event):
                has_read.set()

        if index != running[0][0]:
            await has_read.wait()
        await run(spec, running[0][1], send_one)

    try:
        async with asyncio.TaskGroup() as group:
            for index, spec in running:
                group.create_task(run_one(index, spec))
    except* (RpcError, grpc.aio.AioRpcError, grpc.aio.InternalError) as failures:
        raise failures.exceptions[0] from None

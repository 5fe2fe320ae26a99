"""The texts of one request: generations of its prompts, joined, and ended when their client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeAlias, TypeVar

from starlette.types import Receive

from outrider_client.client import Client, Generation
from outrider_client.generation import Chunk, FinishReason, Result
from outrider_client.requests import generate_request
from outrider_gateway.asks import Ask
from outrider_gateway.bodies import ClientGone
from outrider_gateway.errors import from_option

_T = TypeVar("_T")

MAX_PARALLEL = 16
"""Most prompts of one request that are generated concurrently."""

Heavy: TypeAlias = Callable[[Callable[[], Any]], Awaitable[Any]]
"""Calls a function, and returns or raises what it does."""
Event: TypeAlias = tuple[int, Chunk | Result]
"""The number of a text in the request, and a chunk of it, or at the end its result. Texts are numbered prompt by
prompt."""


class Outputs:
    """Generates the texts of a request: an async iterator of events. Leaving `async with` ends all work."""

    def __init__(self, client: Client, ask: Ask, heavy: Heavy) -> None:
        """`heavy`: calls functions that take long if the request is large."""
        self._client, self._ask, self._heavy = client, ask, heavy
        self._exits = AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self.generations: list[Generation] = []
        """The generations that have begun, by prompt."""
        self.num_choices = len(ask.prompts) * ask.n
        """The number of texts of the request."""

    async def start(self) -> None:
        """Begins, and returns when the first generation is admitted. Raises ApiError, OutriderError."""
        first = await self._begin(0)
        await first.started()

    @property
    def session_id(self) -> str:
        """The session of the first generation, which names the request."""
        return self.generations[0].session_id or ""

    def __aiter__(self) -> AsyncIterator[Event]:
        single = len(self._ask.prompts) == 1
        events = _events(self.generations[0], self._ask.n, 0) if single else self._joined()
        return _empty(events) if self._ask.is_prompt_alone else events

    async def all(self) -> tuple[list[list[Chunk]], list[Result]]:
        """Returns the chunks and the result of each text. Raises OutriderError."""
        chunks: list[list[Chunk]] = [[] for _ in range(self.num_choices)]
        results: dict[int, Result] = {}
        async for index, event in self:
            if isinstance(event, Chunk):
                chunks[index].append(event)
            else:
                results[index] = event
        return chunks, [results[index] for index in range(self.num_choices)]

    async def _begin(self, index: int) -> Generation:
        options = self._ask.options
        try:
            request = await self._heavy(partial(generate_request, self._ask.prompts[index], options))
            generation = self._client.generation_of(request, options)
        except (TypeError, ValueError) as error:
            raise from_option(error, self._ask.names) from None
        self.generations.append(generation)
        return await self._exits.enter_async_context(generation)

    async def _joined(self) -> AsyncIterator[Event]:
        """Yields the events of several prompts as they come; a limited number of prompts run concurrently."""
        queue: asyncio.Queue[Event | Exception | None] = asyncio.Queue(MAX_PARALLEL)
        room = asyncio.Semaphore(MAX_PARALLEL)

        async def put(index: int) -> None:
            async with room:
                try:
                    generation = self.generations[0] if index == 0 else await self._begin(index)
                    async for event in _events(generation, self._ask.n, index * self._ask.n):
                        await queue.put(event)
                    await queue.put(None)
                except Exception as error:
                    await queue.put(error)

        num_open = len(self._ask.prompts)
        self._tasks = [asyncio.create_task(put(index)) for index in range(num_open)]
        while num_open:
            event = await queue.get()
            if event is None:
                num_open -= 1
            elif isinstance(event, Exception):
                raise event
            else:
                yield event

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._exits.aclose()


async def _events(generation: Generation, n: int, first: int) -> AsyncIterator[Event]:
    """Yields the events of one generation, whose texts are numbered from `first` on."""
    ended: set[int] = set()
    async for chunk in generation:
        yield first + chunk.index, chunk
        if n > 1:
            for index, result in enumerate(generation.results):
                if result is not None and index not in ended:
                    ended.add(index)
                    yield first + index, result
    for index, result in enumerate(generation.results):
        if result is not None and index not in ended:
            yield first + index, result


async def _empty(events: AsyncIterator[Event]) -> AsyncIterator[Event]:
    """Yields the results alone, as if nothing had been generated."""
    async for index, event in events:
        if isinstance(event, Result):
            length = FinishReason.LENGTH
            yield (
                index,
                replace(
                    event, text="", token_ids=(), logprobs=(), num_output_tokens=0, finish_reason=length,
                    stop_token_id=None, stop_string=None,
                ),
            )  # fmt: skip


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, _T], *guards: Coroutine[Any, Any, object]) -> _T:
    """Returns what the work returns, unless its client leaves before.

    Args:
        receive: Yields messages of the client; its body must have been read.
        work: Cancelled if the client leaves.
        guards: Coroutines that also end the work, by returning or raising.

    Raises:
        ClientGone: The client has closed its connection, or a guard has returned.
    """
    task = asyncio.create_task(work)
    watching = [asyncio.create_task(_disconnect(receive)), *(asyncio.create_task(guard) for guard in guards)]
    try:
        await asyncio.wait((task, *watching), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, *watching):
            each.cancel()
        # Awaited: the work ends its generations on the way out.
        await asyncio.gather(task, *watching, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

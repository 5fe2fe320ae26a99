"""The caller's side of a session: checks what comes in for it, and keeps what goes out until it is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog

from outrider.core.params import InvalidParameter, check
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import Draft, TokenId
from outrider.telemetry.tracing import Span
from outrider.v1 import speculator_pb2
from outrider.wire.errors import INTERNAL_ERROR, InvalidArgument, OutOfRange, RpcError, Unavailable, invalid_argument

log = structlog.get_logger(__name__)

HIGH_WATER = 64
"""Most drafts of a session that may wait for a caller. While more do, nothing is read from the caller: without commits,
no new drafts grow."""
ALL = 0
"""Stands for all sessions of a call in place of a session's number."""

Item: TypeAlias = speculator_pb2.SpeculateOpened | Draft | Exception | None
"""One thing to tell a caller. An error ends a session; None ends it in order."""


class Outbox:
    """Holds what the sessions of a call have for their caller. Lives on the event loop."""

    def __init__(self) -> None:
        self._items: list[tuple[int, Item]] = []
        self._is_fresh, self._has_room = asyncio.Event(), asyncio.Event()
        self._has_room.set()
        self.num_sessions = 1
        """Sessions that share the room."""

    def put(self, number: int, item: Item) -> None:
        """Adds what the session of this number has to tell."""
        self._items.append((number, item))
        self._is_fresh.set()
        if len(self._items) >= HIGH_WATER * self.num_sessions:
            self._has_room.clear()

    async def room(self) -> None:
        """Returns when no more than the allowed number of drafts wait for the caller."""
        await self._has_room.wait()

    async def take(self) -> list[tuple[int, Item]]:
        """Returns all that there is, when there is something."""
        await self._is_fresh.wait()
        items, self._items = self._items, []
        self._is_fresh.clear()
        self._has_room.set()
        return items


@dataclass(eq=False)
class CallerSession:
    """Holds one session of a call, and its committed tokens to check what comes in. Lives on the event loop."""

    number: int
    """Names it on its call."""
    session_id: str
    """Names it in the engine and the logs."""
    committed: list[TokenId]
    """Prompt and output so far."""
    max_context_len: int
    """Most tokens that the draft model takes."""
    opened: SpeculationParams
    """Parameters that it began with."""
    outbox: Outbox
    """Outbox of its call."""
    span: Span
    """Span that its work is recorded in."""
    exits: ExitStack
    """Closed with the session; among them its place in the count of its caller's sessions."""
    num_drafts: int = 0
    num_nodes: int = 0
    """Drafts that were sent to the caller, and the nodes in them."""

    def send(self, draft: Draft) -> None:
        """See `DraftListener`."""
        self.outbox.put(self.number, draft)

    def fail(self) -> None:
        """See `DraftListener`."""
        self.outbox.put(self.number, Unavailable("the speculator lost this session"))

    def fresh_tokens(self, base_len: int, token_ids: tuple[TokenId, ...]) -> tuple[TokenId, ...]:
        """Takes a commit in and returns the tokens of it that are new. Repeated commits are harmless.

        Raises:
            OutOfRange: the commit leaves a gap, or goes beyond the context.
            InvalidArgument: it is empty, or contradicts what is committed.
        """
        if not token_ids:
            raise InvalidArgument("commit.token_ids", "must hold at least one token")
        if base_len > len(self.committed):
            raise OutOfRange(
                f"commit.base_len must be at most {len(self.committed)}, the tokens committed so far, got {base_len}"
            )
        # An int32 on the wire: a negative one would count from the end in the slices below.
        check(base_len > 0, "commit.base_len", ">= 1", base_len)
        if base_len + len(token_ids) > self.max_context_len:
            raise OutOfRange(
                f"commit.token_ids must end within the draft model's context of {self.max_context_len} tokens, got "
                f"{len(token_ids)} from position {base_len} on"
            )
        known = tuple(self.committed[base_len : base_len + len(token_ids)])
        if token_ids[: len(known)] != known:
            raise InvalidArgument("commit.token_ids", f"must repeat what is committed from position {base_len} on")
        fresh = token_ids[len(known) :]
        self.committed.extend(fresh)
        return fresh


class DraftingCall:
    """Holds a call and the sessions that share it. Lives on the event loop."""

    def __init__(self, caller: str, connection: str) -> None:
        self.caller, self.connection = caller, connection
        self.outbox = Outbox()
        self.sessions: dict[int, CallerSession] = {}
        """Those that have begun, by number."""
        self.held: dict[int, list[speculator_pb2.SessionRequest]] = {}
        """Requests that wait until their session has begun, by its number."""
        self._openings: set[asyncio.Task[None]] = set()

    def add(self, session: CallerSession) -> None:
        """Takes in a session that has begun."""
        self.sessions[session.number] = session
        self.outbox.num_sessions = len(self.sessions)

    def remove(self, number: int) -> CallerSession:
        """Takes in that a session is over."""
        session = self.sessions.pop(number)
        self.outbox.num_sessions = max(1, len(self.sessions))
        return session

    def open_beside(self, number: int, opening: Coroutine[Any, Any, None]) -> None:
        """Opens a session while others go on. Meanwhile, its further requests are held."""
        self.held[number] = []
        task = asyncio.create_task(opening)
        self._openings.add(task)
        task.add_done_callback(self._openings.discard)

    @contextmanager
    def ending(self, number: int) -> Iterator[None]:
        """Ends only this session if the body fails: a bad request for one session must not end the others."""
        try:
            yield
        except RpcError as error:
            self.outbox.put(number, error)
        except InvalidParameter as error:
            self.outbox.put(number, invalid_argument(error))
        except Exception:
            log.exception("rpc.failed")
            self.outbox.put(number, RpcError(INTERNAL_ERROR))

    @asynccontextmanager
    async def reading(self, read: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Reads what the caller sends while the body runs. All sessions end with the reading, and by its error."""

        async def run() -> None:
            try:
                await read
            except Exception as error:
                # Not raised, as this task is not awaited: the reader of the outbox ends the call with it.
                self.outbox.put(ALL, error)
            else:
                self.outbox.put(ALL, None)

        reader = asyncio.create_task(run())
        try:
            yield
        finally:
            for task in (reader, *self._openings):
                task.cancel()

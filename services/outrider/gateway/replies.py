"""Replies of a model in a chat: pieces of text and calls of tools are told apart while they come.

Every form of a chat over HTTP stands on these events.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from outrider.gateway.asks import ToolUse
from outrider.gateway.outputs import Outputs
from outrider_client.generation import Chunk, FinishReason, Result
from outrider_client.tool_calls import CallBegun, CallGrown, Event, ToolCall, ToolCallStream


@dataclass(frozen=True, slots=True)
class BegunCall:
    """Holds the beginning of a call of a tool, with its number among those of its text."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class GrownCall:
    """Holds the next piece of the arguments of a call that has begun."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """Holds a whole call of a tool, all of which has been told before."""

    index: int
    id: str
    name: str
    arguments: str
    """A JSON object as text; the beginning of one, if the call is not complete."""
    is_complete: bool


Part: TypeAlias = str | BegunCall | GrownCall | NumberedCall
"""A piece of the text around the calls, or a part of a call."""


@dataclass(frozen=True, slots=True)
class Said:
    """Holds what has come of one text."""

    choice: int
    """The number of the text."""
    parts: tuple[Part, ...]
    """Pieces of the text, and parts of calls, in their order."""
    chunk: Chunk | None
    """The chunk that it was in; None for what was decided only by the end."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Holds the end of one text: the last event of it."""

    choice: int
    finish_reason: str
    """It is "stop", "length", or "tool_calls" where there are calls, all of them whole."""
    result: Result
    is_cut: bool
    """True if the text may not be longer, or has a call that is not whole."""


@dataclass(slots=True)
class Reply:
    """Holds one text on its way, as far as it is told apart."""

    tool_use: ToolUse | None
    num_calls: int = 0
    num_whole_calls: int = 0
    _stream: ToolCallStream | None = field(init=False, default=None)
    _begun: BegunCall | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.tool_use is not None:
            self._stream = ToolCallStream(self.tool_use.format, tools=self.tool_use.tools)

    def feed(self, piece: str) -> tuple[Part, ...]:
        """Takes the next piece; returns the text, and the parts of calls, that are decided by it."""
        return ((piece,) if piece else ()) if self._stream is None else self._told(self._stream.feed(piece))

    def finish(self) -> tuple[Part, ...]:
        """Returns what is left."""
        return () if self._stream is None else self._told(self._stream.finish())

    def ended(self, choice: int, result: Result) -> Ended:
        """Returns the end of the text, all of which has been taken."""
        reason, is_whole = result.finish_reason, self.num_whole_calls == self.num_calls
        # A stop string, and an end that the model itself makes, may come within a call: there is nothing to call then.
        calls = reason is FinishReason.STOP and self.num_calls and is_whole
        is_cut = reason is FinishReason.LENGTH or not is_whole
        return Ended(choice, "tool_calls" if calls else reason.value, result, is_cut)

    def _told(self, events: list[Event]) -> tuple[Part, ...]:
        return tuple(event if isinstance(event, str) else self._of_call(event) for event in events)

    def _of_call(self, event: CallBegun | CallGrown | ToolCall) -> Part:
        match event:
            case CallBegun():
                # Told with the first piece of the arguments. One that the model writes behind them comes too late: what
                # is streamed and what is answered as a whole are the same.
                self._begun = BegunCall(self.num_calls, event.id or f"call_{uuid.uuid4().hex[:24]}", event.name)
                self.num_calls += 1
                return self._begun
            case CallGrown():
                return GrownCall(self.num_calls - 1, event.arguments)
        begun = self._begun
        assert begun is not None
        self.num_whole_calls += event.is_complete
        return NumberedCall(begun.index, begun.id, begun.name, event.arguments, event.is_complete)


def text_of(parts: Iterable[Part]) -> str:
    """Returns the text around the calls."""
    return "".join(part for part in parts if isinstance(part, str))


def calls_of(parts: Iterable[Part]) -> list[NumberedCall]:
    """Returns the whole calls."""
    return [part for part in parts if isinstance(part, NumberedCall)]


async def replies(outputs: Outputs, tool_use: ToolUse | None) -> AsyncIterator[Said | Ended]:
    """Yields what is said in each of the texts, and last of each that it has ended."""
    texts = [Reply(tool_use) for _ in range(outputs.num_choices)]
    async for choice, event in outputs:
        reply = texts[choice]
        if isinstance(event, Chunk):
            yield Said(choice, reply.feed(event.text), event)
        else:
            if rest := reply.finish():
                yield Said(choice, rest, None)
            yield reply.ended(choice, event)

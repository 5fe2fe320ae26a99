"""Replies of a model in a chat: separates text and calls of tools while they come.

Every HTTP form of a chat is built from these events.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import TypeAlias

from outrider_client.generation import Chunk, FinishReason, Result
from outrider_gateway.asks import ToolUse
from outrider_gateway.outputs import Outputs
from outrider_gateway.tools.calls import CallBegun, CallGrown, Event, ToolCall, ToolCallStream


@dataclass(frozen=True, slots=True)
class BegunCall:
    """The beginning of a call of a tool, with its number within its text."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class GrownCall:
    """The next piece of the arguments of the current call."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class NumberedCall:
    """A whole call of a tool. All its parts have been yielded before."""

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
    """The next parts of one text."""

    choice: int
    """The number of the text."""
    parts: tuple[Part, ...]
    """Pieces of the text, and parts of calls, in their order."""
    chunk: Chunk | None
    """The chunk that contains them; None for parts that only the end of the text has decided."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of one text: its last event."""

    choice: int
    finish_reason: str
    """"stop", "length", or "tool_calls" if there are calls and all are whole."""
    result: Result
    is_cut: bool
    """True if the text has reached its greatest length, or has an incomplete call."""


@dataclass(slots=True)
class Reply:
    """Parses one text as it comes."""

    tool_use: ToolUse | None
    num_calls: int = 0
    num_whole_calls: int = 0
    _stream: ToolCallStream | None = field(init=False, default=None)
    _begun: BegunCall | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        if self.tool_use is not None:
            self._stream = ToolCallStream(self.tool_use.format, tools=self.tool_use.tools)

    def feed(self, piece: str) -> tuple[Part, ...]:
        """Takes the next piece; returns the text and the parts of calls that it decides."""
        return ((piece,) if piece else ()) if self._stream is None else self._told(self._stream.feed(piece))

    def finish(self) -> tuple[Part, ...]:
        """Returns the remaining parts."""
        return () if self._stream is None else self._told(self._stream.finish())

    def ended(self, choice: int, result: Result) -> Ended:
        """Returns the end of the text. Called when all of it has been taken."""
        reason, is_whole = result.finish_reason, self.num_whole_calls == self.num_calls
        # A stop string, or the model's own end, may come within a call, which is then not to be made.
        calls = reason is FinishReason.STOP and self.num_calls and is_whole
        is_cut = reason is FinishReason.LENGTH or not is_whole
        return Ended(choice, "tool_calls" if calls else reason.value, result, is_cut)

    def _told(self, events: list[Event]) -> tuple[Part, ...]:
        return tuple(event if isinstance(event, str) else self._of_call(event) for event in events)

    def _of_call(self, event: CallBegun | CallGrown | ToolCall) -> Part:
        match event:
            case CallBegun():
                # Sent with the first piece of the arguments. An id that the model writes after them comes too late, so
                # that streamed and whole answers are the same.
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
    """Yields the parts of each text as they come, and at last its end."""
    texts = [Reply(tool_use) for _ in range(outputs.num_choices)]
    async for choice, event in outputs:
        reply = texts[choice]
        if isinstance(event, Chunk):
            yield Said(choice, reply.feed(event.text), event)
        else:
            if rest := reply.finish():
                yield Said(choice, rest, None)
            yield reply.ended(choice, event)

"""Replies as blocks in a row: text, calls of tools, and text again where it goes on behind a call.

A text without calls is one block, and so is one of no tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from outrider.gateway.asks import ToolUse
from outrider.gateway.outputs import Outputs
from outrider.gateway.replies import BegunCall, Ended, GrownCall, NumberedCall, replies
from outrider_client.generation import Chunk


@dataclass(frozen=True, slots=True)
class TextBegun:
    """Holds the beginning of a block of text."""

    index: int
    """The number of the block."""


@dataclass(frozen=True, slots=True)
class TextGrown:
    """Holds the next piece of the block of text that has begun."""

    index: int
    piece: str
    """It is empty only at the end, for chunks without a text of their own."""
    chunks: tuple[Chunk, ...]
    """The chunks whose tokens it is made of; a chunk belongs to the first piece that it is a part of."""


@dataclass(frozen=True, slots=True)
class TextDone:
    """Holds the end of a block of text."""

    index: int
    text: str
    """The whole of it."""
    is_cut: bool = False
    """True if it ends because the reply may not be longer."""


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Holds the beginning of a block that is a call."""

    index: int
    call: BegunCall


@dataclass(frozen=True, slots=True)
class CallGrown:
    """Holds the next piece of the arguments of the call that has begun."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """Holds the end of a block that is a call."""

    index: int
    call: NumberedCall


Block: TypeAlias = TextBegun | TextGrown | TextDone | CallBegun | CallGrown | CallDone
"""A part of a block."""


async def blocks(outputs: Outputs, tool_use: ToolUse | None) -> AsyncIterator[Block | Ended]:
    """Yields the blocks of one text as they come, and last that it has ended. Raises OutriderError."""
    index, pieces = 0, list[str]()
    is_open = False
    waiting: list[Chunk] = []
    async for said in replies(outputs, tool_use):
        if isinstance(said, Ended):
            if not is_open and index == 0:
                is_open = True
                yield TextBegun(index)
            if is_open:
                if waiting:
                    yield TextGrown(index, "", tuple(waiting))
                yield TextDone(index, "".join(pieces), is_cut=said.finish_reason == "length")
            yield said
            continue
        if said.chunk is not None:
            waiting.append(said.chunk)
        for part in said.parts:
            if isinstance(part, BegunCall):
                if is_open:
                    yield TextDone(index, "".join(pieces))
                    index, is_open = index + 1, False
                yield CallBegun(index, part)
            elif isinstance(part, GrownCall):
                yield CallGrown(index, part.arguments)
            elif isinstance(part, NumberedCall):
                yield CallDone(index, part)
                index += 1
            else:
                if not is_open:
                    is_open = True
                    pieces.clear()
                    yield TextBegun(index)
                pieces.append(part)
                yield TextGrown(index, part, tuple(waiting))
            waiting.clear()

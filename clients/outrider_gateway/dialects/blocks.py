"""Replies as a sequence of blocks: text, calls of tools, and text again if it goes on after a call.

A text without calls is one block, even if it has no tokens.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeAlias

from outrider_client.generation import Chunk
from outrider_gateway.asks import ToolUse
from outrider_gateway.outputs import Outputs
from outrider_gateway.replies import BegunCall, Ended, GrownCall, NumberedCall, replies


@dataclass(frozen=True, slots=True)
class TextBegun:
    """The beginning of a block of text."""

    index: int
    """The number of the block."""


@dataclass(frozen=True, slots=True)
class TextGrown:
    """The next piece of the current block of text."""

    index: int
    piece: str
    """Empty only at the end, for chunks without a text of their own."""
    chunks: tuple[Chunk, ...]
    """The chunks of its tokens. A chunk belongs to the first piece in which it has a part."""


@dataclass(frozen=True, slots=True)
class TextDone:
    """The end of a block of text."""

    index: int
    text: str
    """The whole text of the block."""
    is_cut: bool = False
    """True if the block ends because the reply has reached its greatest length."""


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a block that is a call."""

    index: int
    call: BegunCall


@dataclass(frozen=True, slots=True)
class CallGrown:
    """The next piece of the arguments of the current call."""

    index: int
    arguments: str


@dataclass(frozen=True, slots=True)
class CallDone:
    """The end of a block that is a call."""

    index: int
    call: NumberedCall


Block: TypeAlias = TextBegun | TextGrown | TextDone | CallBegun | CallGrown | CallDone
"""A part of a block."""


async def blocks(outputs: Outputs, tool_use: ToolUse | None) -> AsyncIterator[Block | Ended]:
    """Yields the blocks of one text as they come, and at last its end. Raises OutriderError."""
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

"""Prompts for a target to answer: users' turns that it writes itself, or the lines of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from outrider.v1 import verifier_pb2
from outrider_cli.prompts import load_prompts
from outrider_client.client import Client
from outrider_client.errors import FailedPrecondition, InvalidArgument
from outrider_client.requests import prompt_message

TokenIds = tuple[int, ...]

SYSTEMS = (
    "",
    "",
    "",
    "You are an expert Python programmer.",
    "You are an expert Python programmer.",
    "You are a helpful assistant that solves problems step by step.",
    "You are a helpful writing assistant.",
    "Rewrite the input text to make it more professional.",
    "Summarize the input text in up to three sentences.",
)
"""What a model is told first steers what it takes a user to say next: questions, code, sums, and whole texts to work
on. Empty: what the template itself says. Each one is as frequent as it stands here."""


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Holds the tokens that a chat template writes around what is said.

    A model that goes on from `opening` writes what a user might say: it has read such turns in training.
    """

    opening: TokenIds
    """Stands before a user's first words."""
    to_answer: TokenIds
    """Stands between a user's words and the answer. Its first token ends a user's turn."""
    to_next_turn: TokenIds
    """Stands between an answer and the user's next words. Empty if the template changes earlier turns."""


async def chat_frames(client: Client) -> list[ChatFrame]:
    """Returns the frames of chats that begin with each of `SYSTEMS`, as far as the target's template takes them. Empty
    if the template cannot be taken apart."""
    frames = {system: await _chat_frame(client, system) for system in dict.fromkeys(SYSTEMS)}
    return [frame for system in SYSTEMS if (frame := frames[system]) is not None]


async def _chat_frame(client: Client, system: str) -> ChatFrame | None:
    beginning = [{"role": "system", "content": system}] if system else []

    async def tokens(*said: str) -> list[int]:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": content} for role, content in zip(roles, said, strict=False)]
        return await client.tokenize([*beginning, *messages])

    try:
        # Two chats that differ in one place: what is equal before and after it is the template's.
        one, other = await tokens("A"), await tokens("7")
        opening, to_answer = _common(one, other), _common(one[::-1], other[::-1])[::-1]
        if not opening or not to_answer or len(opening) + len(to_answer) >= min(len(one), len(other)):
            return None
        end = one[len(opening) :]
        one, other = await tokens("A", "B", "A"), await tokens("A", "8", "A")
    except (FailedPrecondition, InvalidArgument):  # many templates refuse a message of the system's
        return None
    rest = _common(one[::-1], other[::-1])[::-1]
    is_kept = _common(one, other) == [*opening, *end] and rest[-len(end) :] == end
    return ChatFrame(tuple(opening), tuple(to_answer), tuple(rest[: -len(end)]) if is_kept else ())


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Returns the beginning that two sequences share."""
    return [first for first, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


def prompts_to_answer(source: str) -> list[verifier_pb2.Prompt]:
    """Returns the prompts of a set or a file, see `outrider_cli.prompts`: texts, which are continued as they stand, and
    chats, which are answered. Raises PromptError."""
    return [prompt_message(prompt.input, {}) for prompt in load_prompts(source)]

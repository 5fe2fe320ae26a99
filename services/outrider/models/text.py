"""Converts text to token ids and back. Services exchange token ids; only the client-facing RPCs of the verifier need
text."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from outrider.core.chat_templates import reads_variable

RESERVED_TEMPLATE_VARIABLES = frozenset(
    {"messages", "self"}
    | inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys()
    | inspect.signature(render_jinja_template).parameters.keys()
)
"""Names that no further variable of a chat template can have: they are fields of a `Chat`, or parameters of the
function that renders it."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""The character that stands in a text for bytes that form no character."""
MAX_UNDECIDED = 64
"""Most tokens without the end of a character that are decoded together. Of more, all but the last few are decided."""
MAX_LOOK_BACK = 256
"""Last tokens of a prompt that are searched for one that decides how the text after it is decoded."""
MAX_CHARACTER_LEN = 4
"""Most bytes of a character in UTF-8, and so most tokens."""

# Exceptions that expressions raise on values that a template does not expect, besides its own errors: `'a' + 1`,
# `{}['a']`.
_TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class NoChatTemplate(ValueError):
    """The tokenizer cannot render a chat."""


class ChatRefused(ValueError):
    """The tokenizer's chat template refuses the chat. The message is the template's own."""


class NotInTemplate(ValueError):
    """The tokenizer's chat template does not know a part of the chat. `part` is the name of that field of `Chat`."""

    def __init__(self, part: str, problem: str) -> None:
        super().__init__(problem)
        self.part = part


@dataclass(frozen=True, slots=True)
class Chat:
    """Holds the input of a chat template, in the form that transformers documents."""

    messages: Sequence[Mapping[str, Any]]
    """Messages with `role` and, if present, `content`, `name`, `tool_call_id` and `tool_calls`. The arguments of a call
    are a dict."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Tools that may be called: `{"type": "function", "function": {"name": ..., "parameters": {...}}}`."""
    add_generation_prompt: bool = True
    """True if the rendering ends with the beginning of an assistant's message."""
    continue_final_message: bool = False
    """True if the last message is left open. It must have content, and `add_generation_prompt` must be False."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template. None of them is in `RESERVED_TEMPLATE_VARIABLES`."""


class TextCodec:
    """Encodes and decodes with a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer

    @property
    def chat_template(self) -> str:
        """The chat template; if there are several, the one for chats with tools. Empty if there is none."""
        try:
            return str(self._tokenizer.get_chat_template(tools=[{}]))
        except ValueError:  # there is none, or none with either name that transformers chooses by itself
            return ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes a text, by default with the special tokens that the model expects around one."""
        return list(self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Returns the ways in which a word is tokenized: as it stands, and after a space; as a text of its own, which
        some tokenizers begin with a space, and within a text."""
        begin = self.encode("\n", add_special_tokens=False)
        found = []
        for text in (word, f" {word.lstrip()}"):
            found.append(self.encode(text, add_special_tokens=False))
            within = self.encode(f"\n{text}", add_special_tokens=False)
            if within[: len(begin)] == begin and len(within) > len(begin):
                found.append(within[len(begin) :])
        return list(dict.fromkeys(map(tuple, found)))

    def encode_chat(self, chat: Chat) -> list[int]:
        """Encodes a chat as the tokenizer's template renders it.

        Raises:
            NoChatTemplate: The tokenizer has no template.
            ChatRefused: The template requires other roles, another order of them, or other values.
            NotInTemplate: The template ignores tools or a variable, or changes the message that is to be continued.
        """
        if self._tokenizer.chat_template is None:
            raise NoChatTemplate("the target's tokenizer has no chat template")
        rendered = self._rendered(chat, chat.tools)
        self._check_variables(chat)
        if chat.tools and rendered == self._rendered_without_tools(chat):
            raise NotInTemplate("tools", "the chat template of the target's tokenizer ignores tools")
        # The template has written the special tokens already.
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def _rendered(self, chat: Chat, tools: Sequence[Mapping[str, Any]]) -> str:
        """Renders the chat. Raises ChatRefused, and NotInTemplate for a last message that cannot be continued."""
        options = {
            "tools": list(tools) or None,
            "tokenize": False,
            "add_generation_prompt": chat.add_generation_prompt,
            **chat.chat_template_kwargs,
        }
        try:
            messages = self._in_roles_of_the_template(chat)
            rendered = str(self._tokenizer.apply_chat_template(messages, **options))
            rendered.encode()  # half of a surrogate pair can stand in JSON, and a tokenizer takes no such text
        except TemplateError as error:
            # Templates refuse a chat by `raise_exception`, which transformers makes raise this error.
            raise ChatRefused(error.message or type(error).__name__) from error
        except _TEMPLATE_ERRORS as error:
            raise ChatRefused(f"{type(error).__name__}: {error}") from error
        if not chat.continue_final_message:
            return rendered
        try:
            # Checked last: other errors of the chat were raised above, so this error is about the continuation.
            rendered = str(self._tokenizer.apply_chat_template(messages, continue_final_message=True, **options))
            # transformers lets a template trim the message, and the model would then continue another text.
            is_open = rendered.endswith(messages[-1]["content"])
        except _TEMPLATE_ERRORS:
            is_open = False
        if not is_open:
            problem = "the chat template of the target's tokenizer does not render the last message as it is"
            raise NotInTemplate("continue_final_message", problem)
        return rendered

    def _in_roles_of_the_template(self, chat: Chat) -> list[Mapping[str, Any]]:
        """Returns the messages. The developer's become the system's if the template does not mention developers: that
        is OpenAI's newer name for the same role, and the model has never seen it."""
        template = self._tokenizer.get_chat_template(tools=list(chat.tools) or None)
        if "developer" in template:
            return list(chat.messages)
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message for message in chat.messages
        ]

    def _rendered_without_tools(self, chat: Chat) -> str | None:
        """Renders the chat as if it had no tools; None if the template refuses that."""
        try:
            return self._rendered(chat, ())
        except (ChatRefused, NotInTemplate):
            return None

    def _check_variables(self, chat: Chat) -> None:
        """Raises NotInTemplate for a variable that the template does not read."""
        template = self._tokenizer.get_chat_template(tools=list(chat.tools) or None)
        for name in chat.chat_template_kwargs:
            if not reads_variable(template, name):
                problem = f"the chat template of the target's tokenizer reads no variable {name!r}"
                raise NotInTemplate("chat_template_kwargs", problem)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes token ids; special tokens are left out by default. Bytes that form no character become U+FFFD."""
        # Not transformers' own `decode`: that may clean up spaces.
        return str(self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def stream(
        self, *, after: Sequence[int] = (), keeps_first_space: bool = False, skip_special_tokens: bool = True
    ) -> TextStream:
        """Makes a decoder for tokens that arrive gradually.

        Args:
            after: Tokens that precede them. If these have a text, a decoder that strips the first space of a text
                strips none of what follows.
            keeps_first_space: True if the first space is never stripped.
            skip_special_tokens: True if special tokens are left out.
        """
        context = self._context(after, skip_special_tokens=skip_special_tokens)
        if context is None and keeps_first_space:
            context = self._word
        return TextStream(self, context, skip_special_tokens=skip_special_tokens)

    def _context(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> int | None:
        """Returns a token after which a text is decoded as it is after these; None if they have no text.

        One token is enough: what a decoder does with a token depends only on whether it is the first or the last. It
        must be whole: bytes of a character in the prompt are no part of the text after it.
        """
        has_text = False
        for token_id in token_ids[: -MAX_LOOK_BACK - 1 : -1]:
            if not self.is_silent(token_id, skip_special_tokens=skip_special_tokens):
                has_text = True
                if self._is_whole(token_id):
                    return token_id
        return self._word if has_text else None

    def _is_whole(self, token_id: int) -> bool:
        """Returns False for a token that may hold a part of a character's bytes."""
        if token_id in self.byte_ids:
            return False
        # Tokens of byte-level vocabularies are named by letters that stand for bytes.
        return BROKEN not in self._text_of(token_id) or BROKEN in self._backend.id_to_token(token_id)

    @cached_property
    def _word(self) -> int | None:
        """A token that has a text wherever it stands; None if there is none."""
        for token_id in range(self._backend.get_vocab_size()):
            is_silent = self.is_silent(token_id, skip_special_tokens=True)
            if not is_silent and self._is_whole(token_id) and self._text_of(token_id).strip():
                return token_id
        return None

    def _text_of(self, token_id: int) -> str:
        return self.decode([token_id], skip_special_tokens=False)

    def is_silent(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Returns True for a token that adds nothing to a text: one that is left out, or that the tokenizer lacks."""
        is_left_out = skip_special_tokens and token_id in self.special_tokens
        return is_left_out or self._backend.id_to_token(token_id) is None

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Special tokens as they are written, by their ids."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: str(token.content) for token_id, token in added.items() if token.special}

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Tokens that are single bytes, as vocabularies with byte fallback have them."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = {name: self._backend.token_to_id(name) for name in names}
        # Without byte fallback the same names are ordinary words.
        return frozenset(
            token_id
            for name, token_id in ids.items()
            if token_id is not None and self.decode([token_id], skip_special_tokens=False) != name
        )


class TextStream:
    """Decodes a growing run of tokens. The joined pieces are the text of the whole run. It fails on no tokens.

    Bytes of a character wait for the rest of it. Tokens that are single bytes wait until another kind of token follows:
    if some of them form no character, the whole decoder breaks those next to them, too.
    """

    def __init__(self, codec: TextCodec, context: int | None, *, skip_special_tokens: bool) -> None:
        """`context`: a token that precedes all of them; None if there is none."""
        self._codec, self._skip_special_tokens = codec, skip_special_tokens
        self._context: list[int] = [] if context is None else [context]
        """The latest tokens whose text was returned. Later tokens are decoded after them, so that spaces are right."""
        self._told = codec.decode(self._context, skip_special_tokens=skip_special_tokens)
        """Their text, decoded alone."""
        self._undecided: list[int] = []
        self.num_characters = 0
        """Characters of the text that is decided so far, without those of `finish`."""
        self.outlook = ""
        """The text that the undecided tokens add if the text ends after their latest whole character."""

    def step(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens decide."""
        return "".join(map(self._step, token_ids))

    def _step(self, token_id: int) -> str:
        if self._codec.is_silent(token_id, skip_special_tokens=self._skip_special_tokens):
            return ""
        self._undecided.append(token_id)
        if token_id in self._codec.byte_ids:
            self._look_out()
            return ""
        num_decided, piece = len(self._undecided), self._decoded(len(self._undecided))
        if piece.endswith(BROKEN):
            num_decided, piece = self._surely_decided(piece)
        if piece:
            self._context, self._undecided = self._undecided[:num_decided], self._undecided[num_decided:]
            self._told = self._codec.decode(self._context, skip_special_tokens=self._skip_special_tokens)
            self.num_characters += len(piece)
            self.outlook = ""
        return piece

    def _look_out(self) -> None:
        """Updates the outlook after a single byte."""
        # Further bytes would be decoded again and again: their text comes when they end.
        if len(self._undecided) < MAX_UNDECIDED and not (text := self._decoded(len(self._undecided))).endswith(BROKEN):
            self.outlook = text

    def _surely_decided(self, text: str) -> tuple[int, str]:
        """Returns how many tokens are decided if the text of many ends within a character, and their text."""
        # Each token has at least one byte: the text before the last character's possible bytes cannot change any more.
        num_decided = len(self._undecided) - MAX_CHARACTER_LEN + 1
        if num_decided < MAX_UNDECIDED or self._undecided[num_decided - 1] in self._codec.byte_ids:
            return 0, ""
        piece = self._decoded(num_decided)
        # A character that spans the end of these tokens waits for its remaining bytes.
        return (num_decided, piece) if text.startswith(piece) else (0, "")

    def _decoded(self, num_tokens: int) -> str:
        """Returns what the first of the undecided tokens add to the text, if no more follow."""
        token_ids = [*self._context, *self._undecided[:num_tokens]]
        return self._codec.decode(token_ids, skip_special_tokens=self._skip_special_tokens)[len(self._told) :]

    def finish(self) -> str:
        """Returns the text of the tokens that are still undecided. No more tokens may follow."""
        return self._decoded(len(self._undecided)) if self._undecided else ""

"""Converts text to token ids and back. Services exchange token ids; only the client-facing RPCs of the verifier need
text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers.decoders import DecodeStream


class NoChatTemplate(ValueError):
    """The tokenizer cannot render a chat."""


class ChatRefused(ValueError):
    """The tokenizer's chat template takes no such chat. The message is the template's own."""


class TextCodec:
    """Encodes and decodes with a fast tokenizer of transformers."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer

    def encode(self, text: str) -> list[int]:
        """Encodes a text, with the special tokens that the model expects."""
        return list(self._tokenizer(text)["input_ids"])

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """Returns the ways in which a word is made of tokens: as it stands, and behind a space."""
        texts = (word, f" {word.lstrip()}")
        tokens = (self._tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return list(dict.fromkeys(map(tuple, tokens)))

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Encodes a chat of (role, content), ready for the assistant's turn.

        Raises:
            NoChatTemplate: The tokenizer has no template.
            ChatRefused: The template wants other roles, or another order of them.
        """
        if self._tokenizer.chat_template is None:
            raise NoChatTemplate("the target's tokenizer has no chat template")
        try:
            rendered = self._tokenizer.apply_chat_template(
                [{"role": role, "content": content} for role, content in messages],
                tokenize=False,
                add_generation_prompt=True,
            )
        except TemplateError as error:
            # Templates refuse a chat by `raise_exception`, which transformers makes raise this error.
            raise ChatRefused(error.message or type(error).__name__) from error
        # The template has written them already.
        return list(self._tokenizer(rendered, add_special_tokens=False)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """Decodes token ids, special tokens left out. Bytes that form no character become U+FFFD."""
        # Not transformers' own `decode`: that may clean up spaces, which `DecodeStream` does not.
        return str(self._backend.decode(list(token_ids), skip_special_tokens=True))

    def stream(self) -> TextStream:
        """Makes a decoder for tokens that arrive bit by bit."""
        return TextStream(self)

    def new_decode_stream(self) -> tuple[DecodeStream, Any]:
        """The library's incremental decoder and the tokenizer it wants to be called with."""
        return DecodeStream(skip_special_tokens=True), self._backend


class TextStream:
    """Decodes a growing run of tokens. Joined, its pieces are the text of the whole run."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._stream, self._backend = codec.new_decode_stream()
        self._undecided: list[int] = []

    def step(self, token_ids: Sequence[int]) -> str:
        """Returns the text that these tokens decide. Bytes of an unfinished character wait for a later call."""
        pieces = []
        for token_id in token_ids:
            self._undecided.append(token_id)
            piece = self._stream.step(self._backend, token_id)
            # None where no text can be told yet: within a character, or for a special token.
            if piece is not None:
                pieces.append(piece)
                self._undecided.clear()
        return "".join(pieces)

    def finish(self) -> str:
        """Returns the text of the tokens that are undecided still. No more may follow."""
        rest, self._undecided = self._undecided, []
        return self._codec.decode(rest) if rest else ""

"""`SamplingParams`, on the wire and in the domain.

A value outside its range raises InvalidParameter with the name that the wire gives it; nothing is clipped, and nothing
is ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider.core.params import MAX_BAD_WORD_LEN, SamplingParams, check
from outrider.core.tree import TokenId
from outrider.v1 import types_pb2
from outrider.wire.convert import token_ids_from_proto
from outrider.wire.speculation import scalars_from_proto, scalars_to_proto

MAX_STOPS = 16
"""Most stop strings of a request."""
MAX_STOP_TOKEN_IDS = 256
"""Most stop tokens of a request."""
MAX_BAD_WORDS = 256
"""Most bad words of a request given as text."""
MAX_STRING_BYTES = 256
"""Most bytes of each of them, in UTF-8."""

Spellings = Callable[[str], Sequence[tuple[TokenId, ...]]]
"""Returns the ways to write a word in tokens."""


def sampling_from_proto(
    message: types_pb2.SamplingParams,
    default_seed: int,
    vocab_size: int,
    eos_token_ids: Sequence[TokenId] = (),
    spellings: Spellings | None = None,
) -> SamplingParams:
    """Returns how tokens are drawn; unset fields have the defaults that the proto states.

    Args:
        message: The parameters.
        default_seed: The seed if the message has none.
        vocab_size: Token ids are below it.
        eos_token_ids: The model's own end-of-sequence tokens, for a message from a client. Empty for a message that
            names them itself.
        spellings: Makes tokens of bad words. None means that the message is a peer's, which has tokens only.
    """
    if spellings is not None:
        # A peer's message includes those of the model.
        field, length = "sampling.stop_token_ids", len(message.stop_token_ids)
        check(length <= MAX_STOP_TOKEN_IDS, field, f"at most {MAX_STOP_TOKEN_IDS} tokens", length)
    stops = stop_token_ids_from_proto(message, vocab_size, eos_token_ids) if message.min_tokens else ()
    for token_id in message.logit_bias:
        check(0 <= token_id < vocab_size, f"sampling.logit_bias[{token_id}]", _in_vocabulary(vocab_size), token_id)
    resolved = {
        "logit_bias": tuple(sorted(message.logit_bias.items())),
        "stop_token_ids": stops,
        "bad_words_token_ids": _bad_words_from_proto(message, vocab_size, spellings),
    }
    return SamplingParams(**{"seed": default_seed} | scalars_from_proto(message, SamplingParams) | resolved)


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    """Returns how tokens are drawn, with the seed and every field set whose value is not the default."""
    message = types_pb2.SamplingParams()
    scalars_to_proto(params, message)
    for name, value in _DEFAULTS.items():
        # Most requests have none of these: setting them would double the message of every session.
        if getattr(params, name) == value:
            message.ClearField(name)
    message.logit_bias.update(dict(params.logit_bias))
    message.stop_token_ids.extend(params.stop_token_ids)
    message.bad_words_token_ids.extend(types_pb2.TokenIds(token_ids=word) for word in params.bad_words_token_ids)
    return message


_DEFAULTS = {
    name: getattr(SamplingParams(), name)
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")
}


def stop_token_ids_from_proto(
    message: types_pb2.SamplingParams, vocab_size: int, eos_token_ids: Sequence[TokenId]
) -> tuple[TokenId, ...]:
    """Returns all tokens that end a generation, each once, in order."""
    stops = token_ids_from_proto(message.stop_token_ids, vocab_size, "sampling.stop_token_ids")
    return tuple(sorted({*stops, *(() if message.ignore_eos else eos_token_ids)}))


def stop_strings_from_proto(message: types_pb2.SamplingParams) -> tuple[str, ...]:
    """Returns the strings that end a generation, each once."""
    _check_strings(message.stop, "sampling.stop", MAX_STOPS)
    given = message.HasField("include_stop_str_in_output")
    rule = "unset without stop strings"
    check(
        bool(message.stop) or not given,
        "sampling.include_stop_str_in_output",
        rule,
        message.include_stop_str_in_output,
    )
    return tuple(dict.fromkeys(message.stop))


def _bad_words_from_proto(
    message: types_pb2.SamplingParams, vocab_size: int, spellings: Spellings | None
) -> tuple[tuple[TokenId, ...], ...]:
    """Returns the words that must not be generated, by their tokens, each once."""
    field = "sampling.bad_words"
    words = [
        token_ids_from_proto(word.token_ids, vocab_size, f"{field}_token_ids[{index}].token_ids")
        for index, word in enumerate(message.bad_words_token_ids)
    ]
    check(spellings is not None or not message.bad_words, field, "unset here: bad_words_token_ids say it", "a list")
    _check_strings(message.bad_words, field, MAX_BAD_WORDS)
    for index, text in enumerate(message.bad_words):
        assert spellings is not None
        for word in spellings(text):
            # A word of control characters alone may come to no token.
            length = len(word)
            check(1 <= length <= MAX_BAD_WORD_LEN, f"{field}[{index}]", f"of 1 to {MAX_BAD_WORD_LEN} tokens", length)
            known = f"made of tokens that the model has, in [0, {vocab_size})"
            check(max(word) < vocab_size, f"{field}[{index}]", known, max(word))
            words.append(word)
    return tuple(dict.fromkeys(words))


def _in_vocabulary(vocab_size: int) -> str:
    return f"of a token in [0, {vocab_size}), the vocabulary"


def _check_strings(strings: Sequence[str], field: str, most: int) -> None:
    check(len(strings) <= most, field, f"at most {most} strings", len(strings))
    for index, text in enumerate(strings):
        length = len(text.encode())
        check(1 <= length <= MAX_STRING_BYTES, f"{field}[{index}]", f"1 to {MAX_STRING_BYTES} bytes long", length)

"""Text that is decoded as tokens come equals the whole decoder's, for every kind of tokenizer and any tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.core.params import SamplingParams
from outrider.core.session import SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.models.text import TextCodec
from outrider.verifier.stop_text import StopText

WORDS = ["\u2581", "\u2581river", "river", "s", ".", "\u2581\u2581", "日", "\ufffd", "\u2581don", "'t", "##ing"]
TELLING = [0x0A, 0x41, 0x97, 0xA5, 0xE6]
"""Bytes that are frequent in runs: a line break, a letter, and those of 日."""
BYTES = [f"<0x{byte:02X}>" for byte in dict.fromkeys([*TELLING, *range(256)])]
NO_TOKEN = 2**20
"""An id that no tokenizer here has, so a prompt of it has no text."""
HOLES = 3
"""Ids after the tokenizer's last one, like those that pad a model's vocabulary."""


def byte_fallback() -> Tokenizer:
    """Like Llama 2's: it falls back to bytes, and the decoder strips one space."""
    tokenizer = Tokenizer(models.BPE(_ids(WORDS + BYTES), [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    return tokenizer


def unigram() -> Tokenizer:
    """Like a sentencepiece model's; the names of bytes are words."""
    tokenizer = Tokenizer(models.Unigram([(word, -1.0) for word in ["<unk>", *WORDS, "<0x41>"]], unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def byte_level() -> Tokenizer:
    """Like GPT-2's: every token is a few bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(_ids([*alphabet, "Ġriver", "\u0120s", "ðŁ", "<0x41>"]), [], unk_token="<unk>"))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece() -> Tokenizer:
    """Like BERT's: pieces are joined, others are preceded by a space, and some spaces are cleaned up."""
    tokenizer = Tokenizer(models.WordPiece(_ids(["river", "##s", "##ing", ".", "'t", "do", "日"]), unk_token="<unk>"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def suffixed() -> Tokenizer:
    """Like the first GPT's: it marks the ends of words."""
    tokenizer = Tokenizer(models.BPE(_ids(["river", "s</w>", "a</w>", "日</w>"]), [], unk_token="<unk>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def _ids(words: Sequence[str]) -> dict[str, int]:
    return {word: token_id for token_id, word in enumerate(["<unk>", *words])}


def _codec(tokenizer: Tokenizer) -> TextCodec:
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))


TOKENIZERS = {make.__name__: make() for make in (byte_fallback, unigram, byte_level, word_piece, suffixed)}
for each in TOKENIZERS.values():
    each.add_special_tokens([AddedToken("<end>", special=True)])
    each.add_tokens([AddedToken("<tool>", special=False)])
CODECS = {kind: TextCodec(PreTrainedTokenizerFast(tokenizer_object=each)) for kind, each in TOKENIZERS.items()}
kinds = pytest.mark.parametrize("kind", TOKENIZERS)
runs = st.lists(st.one_of(st.integers(0, 2**16), st.integers(0, 17)), max_size=40)


def _tokens(kind: str, run: Sequence[int]) -> list[int]:
    return [number % (TOKENIZERS[kind].get_vocab_size() + HOLES) for number in run]


def _named(kind: str, *names: str) -> list[int]:
    return [TOKENIZERS[kind].token_to_id(name) for name in names]


@kinds
@given(run=runs, skips=st.booleans(), cuts=st.sets(st.integers(0, 40)))
def test_pieces_are_the_text_of_the_whole(kind: str, run: list[int], skips: bool, cuts: set[int]) -> None:
    tokens = _tokens(kind, run)
    stream, text, end = CODECS[kind].stream(skip_special_tokens=skips), "", 0
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, stop in pairwise(bounds):
        text += stream.step(tokens[begin:stop])
        assert stream.num_characters == len(text)
        # The end of a token is told once, and never moves back.
        assert end <= (end := len(text) + len(stream.outlook))
    assert text + stream.finish() == TOKENIZERS[kind].decode(tokens, skip_special_tokens=skips)


@kinds
@given(run=runs, stop=st.sampled_from([" ", "s", "A", "river", "r ", ".", "\n", "日", "<"]))
def test_a_stop_string_ends_the_text_with_the_token_that_completes_it(kind: str, run: list[int], stop: str) -> None:
    tokens = _tokens(kind, run)
    stop_text = StopText(_spec(stop=(stop,)), CODECS[kind])
    texts = [TOKENIZERS[kind].decode(tokens[:length]) for length in range(1, len(tokens) + 1)]
    first = next((number for number, text in enumerate(texts, start=1) if stop in text), None)
    assert stop_text.take(tokens) == first
    expected = texts[-1] if texts else ""
    if first is not None:
        expected = texts[first - 1].partition(stop)[0]
    assert stop_text.take_text() + stop_text.finish() == expected


def test_a_stray_byte_after_a_line_break_breaks_both_as_the_whole_decoder_does() -> None:
    tokens = _named("byte_fallback", "s", "<0x0A>", "<0xE6>", "\u2581river")
    stream = CODECS["byte_fallback"].stream()
    assert [stream.step([token]) for token in tokens] == ["s", "", "", "\ufffd\ufffd river"]


def test_a_stop_string_of_single_bytes_ends_the_text_before_other_tokens_follow() -> None:
    tokens = _named("byte_fallback", "s", "<0x0A>", "<0x0A>")
    stop_text = StopText(_spec(stop=("\n\n",)), CODECS["byte_fallback"])
    assert [stop_text.take([token]) for token in tokens] == [None, None, 1]
    assert (stop_text.take_text(), stop_text.finish()) == ("s", "")


def test_a_stop_string_that_may_not_count_yet_is_passed_over_though_its_bytes_are_undecided() -> None:
    tokens = _named("byte_fallback", "s", "<0x0A>", "\u2581river")
    stop_text = StopText(_spec(stop=("\n",), min_tokens=3), CODECS["byte_fallback"])
    assert stop_text.take(tokens) is None
    assert stop_text.take_text() + stop_text.finish() == "s\n river"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_that_never_form_a_character_are_decoded_in_linear_time(kind: str) -> None:
    token = {"byte_level": "æ", "byte_fallback": "<0xE6>"}[kind]
    stop_text = StopText(_spec(stop=("q",)), CODECS[kind])
    # Decoding all of them again at every token would take minutes.
    assert stop_text.take(_named(kind, token) * 20_000) is None
    assert stop_text.take_text() + stop_text.finish() == "\ufffd" * 20_000


def _spec(stop: tuple[str, ...], min_tokens: int = 0) -> SessionSpec:
    sampling = SamplingParams(seed=1, min_tokens=min_tokens)
    return SessionSpec("s", (NO_TOKEN,), sampling, SpeculationParams(), vocab_size=4096, max_tokens=64, stop=stop)


@kinds
@given(before=runs, run=runs, skips=st.booleans(), cuts=st.sets(st.integers(0, 40)))
def test_what_follows_other_tokens_is_what_the_whole_decoder_adds_to_their_text(
    kind: str, before: list[int], run: list[int], skips: bool, cuts: set[int]
) -> None:
    prompt, tokens = _tokens(kind, before), _tokens(kind, run)
    stream, text = CODECS[kind].stream(after=prompt, skip_special_tokens=skips), ""
    for begin, stop in pairwise(sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})):
        text += stream.step(tokens[begin:stop])
        assert stream.num_characters == len(text)
    text += stream.finish()
    of_prompt, whole = (TOKENIZERS[kind].decode(each, skip_special_tokens=skips) for each in (prompt, prompt + tokens))
    # If bytes of the prompt and of the output form, or break, a character together, neither has a text of its own.
    if whole.startswith(of_prompt) and not of_prompt.endswith("\ufffd"):
        assert of_prompt + text == whole


@pytest.mark.parametrize(("kind", "names"), [("byte_level", ["ðŁ", "Į", "Ġriver"]), ("byte_fallback", ["<0xE6>", "s"])])
def test_a_character_that_the_prompt_has_begun_is_no_part_of_what_follows(kind: str, names: list[str]) -> None:
    begun, *tokens = _named(kind, *names)
    stream = CODECS[kind].stream(after=[*_named(kind, "s"), begun])
    assert stream.step(tokens) + stream.finish() == CODECS[kind].decode(tokens)


def test_a_first_space_is_kept_behind_nothing_where_the_text_must_be_that_of_its_tokens() -> None:
    (river,) = _named("byte_fallback", "\u2581river")
    for keeps, text in ((False, "river"), (True, " river")):
        stream = CODECS["byte_fallback"].stream(after=_named("byte_fallback", "<end>"), keeps_first_space=keeps)
        assert stream.step([river]) == text

"""Where the text of each token ends: with and without stop strings, however rounds split the tokens."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import example, given
from hypothesis import strategies as st

from outrider.core.methods import OFF
from outrider.core.params import SamplingParams
from outrider.core.reports import ReportParams
from outrider.core.session import SessionSpec, Verdict, ending_of
from outrider.core.speculation import SpeculationParams
from outrider.models.loading import LoadedModel
from outrider.models.text import TextCodec
from outrider.verifier.responses import Responses
from outrider.verifier.stop_text import StopText
from tests.support.services import target_model

TEXTS = ["def add(", "né", "😀", "日本語", "\n\n", "x😀é", " return", "e\u0301"]


@cache
def codec() -> TextCodec:
    return TextCodec(target_model().tokenizer)


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, ...]:
    """Texts with characters of several tokens. Some texts are cut, and special tokens lie between them."""
    token_ids: list[int] = []
    for text in draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=6)):
        of_text = codec().encode(text)
        token_ids += of_text[: draw(st.integers(1, len(of_text)))]
        token_ids += [0] * draw(st.integers(0, 1))
    return tuple(token_ids)


def chunked(token_ids: Sequence[int], cuts: Sequence[int]) -> list[tuple[int, ...]]:
    places = sorted({min(cut, len(token_ids)) for cut in cuts} | {0, len(token_ids)})
    return [tuple(token_ids[begin:end]) for begin, end in pairwise(places)]


def spec_of(model: LoadedModel, **fields: Any) -> SessionSpec:
    speculation = SpeculationParams(OFF)
    spec = SessionSpec(uuid.uuid4().hex, (1,), SamplingParams(), speculation, model.vocab_size, 1000)
    return replace(spec, report=ReportParams(text_ends=True), **fields)


def told(spec: SessionSpec, chunks: Sequence[tuple[int, ...]]) -> tuple[str, list[int], int]:
    """The joined text, the ends, and the number of tokens up to the end, of a generation that says these tokens."""
    stop_text = StopText(spec, codec()) if spec.stop else None
    # A chunk needs only the request of a generation.
    generation = cast(Any, SimpleNamespace(spec=spec))
    responses = Responses(generation, target_model(), codec())
    template = ending_of(replace(spec, is_complete=True))
    assert template is not None
    texts, ends, num_tokens = [], [], 0
    for token_ids in chunks:
        verdict: Verdict = template._replace(token_ids=token_ids, finish_reason=None)
        num_kept = None
        if stop_text is not None:
            num_kept = stop_text.take(token_ids)
            kept = token_ids[:num_kept]
            ends_of_text = stop_text.take_text_ends()
            verdict = verdict._replace(token_ids=kept, text=stop_text.take_text(), text_ends=ends_of_text)
        for message in responses.of_verdict(verdict, 0):
            assert len(message.text_ends) == len(message.token_ids)  # type: ignore[union-attr]
            texts.append(message.text)  # type: ignore[union-attr]
            ends += message.text_ends  # type: ignore[union-attr]
        num_tokens += len(verdict.token_ids)
        if num_kept is not None:
            return "".join(texts), ends, num_tokens
    if stop_text is not None:
        texts.append(stop_text.finish())
    return "".join(texts), ends, num_tokens


def decided(token_ids: Sequence[int], *, skips: bool) -> str:
    """The text of a run that no later token can change."""
    return codec().decode(token_ids, skip_special_tokens=skips).rstrip("\ufffd")


@given(runs(), st.lists(st.integers(0, 40)), st.booleans())
def test_each_end_is_what_decoding_the_tokens_up_to_there_says(
    token_ids: tuple[int, ...], cuts: list[int], skips: bool
) -> None:
    spec = spec_of(target_model(), skip_special_tokens=skips)
    text, ends, _ = told(spec, chunked(token_ids, cuts))
    starts = [0, *ends[:-1]]
    assert "".join(text[start:end] for start, end in zip(starts, ends, strict=True)) == text
    whole = codec().decode(token_ids, skip_special_tokens=skips)
    assert whole.startswith(text)
    if "\ufffd" not in whole:
        assert ends == [len(decided(token_ids[:number], skips=skips)) for number in range(1, len(token_ids) + 1)]


@given(runs(), st.lists(st.integers(0, 40)), st.sampled_from(["é", "😀x", "\n\n", "return", "語"]), st.booleans())
def test_with_stop_strings_the_smaller_of_the_end_and_the_length_counts(
    token_ids: tuple[int, ...], cuts: list[int], stop: str, includes: bool
) -> None:
    _, plain, _ = told(spec_of(target_model()), chunked(token_ids, cuts))
    text, ends, num_tokens = told(
        spec_of(target_model(), stop=(stop,), includes_stop=includes), chunked(token_ids, cuts)
    )
    assert ends == plain[:num_tokens]
    smaller = [min(end, len(text)) for end in ends]
    pieces = [text[start:end] for start, end in zip([0, *smaller[:-1]], smaller, strict=True)]
    assert text.startswith("".join(pieces))


@example(tuple(codec().encode("x def add(")), 2, (" def addzz",))  # broken off where text is held back
@given(runs(), st.integers(0, 40), st.sampled_from([(), ("\n\n",), (" def addzz", "日本zz", "énzz")]))
def test_a_resumed_call_counts_from_what_earlier_ones_have_sent(
    token_ids: tuple[int, ...], cut: int, stop: tuple[str, ...]
) -> None:
    whole, ends, num_tokens = told(spec_of(target_model(), stop=stop), [token_ids])
    begun, rest = token_ids[: min(cut, num_tokens)], token_ids[min(cut, num_tokens) : num_tokens]
    resumed = spec_of(target_model(), stop=stop, resume_token_ids=begun)
    # The state that the earlier call left: text that is held back has not been sent.
    before = replace(resumed, resume_token_ids=())
    stop_text, stream = StopText(before, codec()), codec().stream()
    stop_text.take(begun)
    num_sent = len(stop_text.take_text()) if stop else len(stream.step(begun))
    if not stop or stop_text.found is None:
        text, later, _ = told(resumed, [rest] if rest else [])
        assert whole[:num_sent] + text == whole
        assert [num_sent + end for end in later] == ends[len(begun) :]


def test_nothing_is_told_where_it_is_not_asked_for() -> None:
    spec = replace(spec_of(target_model()), report=ReportParams())
    assert told_nothing(spec)
    assert told_nothing(replace(spec, stop=("zz",)))


def told_nothing(spec: SessionSpec) -> bool:
    stop_text = StopText(spec, codec())
    stop_text.take(codec().encode("abc"))
    template = ending_of(replace(spec, is_complete=True))
    assert template is not None
    responses = Responses(cast(Any, SimpleNamespace(spec=spec)), target_model(), codec())
    verdict = template._replace(token_ids=tuple(codec().encode("abc")), finish_reason=None)
    (message,) = responses.of_verdict(verdict, 0)
    return not message.text_ends and stop_text.take_text_ends() == ()  # type: ignore[union-attr]

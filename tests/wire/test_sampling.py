"""Sampling parameters on the wire and in the domain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter, SamplingParams
from outrider.v1 import types_pb2
from outrider.wire.sampling import sampling_from_proto, sampling_to_proto, stop_strings_from_proto

VOCAB_SIZE = 1000
UNIT = st.floats(0, 1, exclude_min=True)
TOKENS = st.integers(0, VOCAB_SIZE - 1)


def spellings(word: str) -> list[tuple[int, ...]]:
    return [tuple(word.encode()), (7, *word.encode())]


@given(
    params=st.builds(
        SamplingParams,
        seed=st.integers(0, 2**64 - 1),
        temperature=st.floats(0, 10),
        top_k=st.integers(0, 1000),
        top_p=UNIT,
        min_p=UNIT,
        repetition_penalty=UNIT,
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        logit_bias=st.dictionaries(TOKENS, st.floats(-100, 100)).map(lambda bias: tuple(sorted(bias.items()))),
        min_tokens=st.integers(1, 50),
        stop_token_ids=st.sets(TOKENS).map(lambda stops: tuple(sorted(stops))),
        bad_words_token_ids=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), unique=True).map(tuple),
    )
)
def test_sampling_parameters_survive_the_wire_bit_by_bit(params: SamplingParams) -> None:
    message = types_pb2.SamplingParams.FromString(sampling_to_proto(params).SerializeToString())
    assert sampling_from_proto(message, default_seed=0, vocab_size=VOCAB_SIZE) == params


def test_what_is_at_its_default_takes_no_bytes() -> None:
    plain = types_pb2.SamplingParams(seed=5, temperature=1, top_k=0, top_p=1, min_p=0)
    assert sampling_to_proto(SamplingParams(seed=5)) == plain


def test_stop_tokens_belong_to_the_draw_only_where_they_are_forbidden_at_first() -> None:
    def stops(**fields: Any) -> tuple[int, ...]:
        message = types_pb2.SamplingParams(stop_token_ids=[9, 4], **fields)
        return sampling_from_proto(message, 0, VOCAB_SIZE, eos_token_ids=(2,)).stop_token_ids

    assert stops() == ()
    assert stops(min_tokens=1) == (2, 4, 9)
    assert stops(min_tokens=1, ignore_eos=True) == (4, 9)


def test_bad_words_are_spelled_by_the_servers_tokenizer_alone() -> None:
    message = types_pb2.SamplingParams(bad_words=["ab"], bad_words_token_ids=[types_pb2.TokenIds(token_ids=[3])])
    params = sampling_from_proto(message, 0, VOCAB_SIZE, spellings=spellings)
    assert params.bad_words_token_ids == ((3,), (97, 98), (7, 97, 98))
    with pytest.raises(InvalidParameter, match=r"sampling\.bad_words must be unset here"):
        sampling_from_proto(message, 0, VOCAB_SIZE)


def test_a_stop_string_that_is_named_twice_is_one() -> None:
    assert stop_strings_from_proto(types_pb2.SamplingParams(stop=["b", "a", "b"])) == ("b", "a")

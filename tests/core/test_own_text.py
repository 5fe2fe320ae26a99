"""Own text, against a model that searches instead of indexing."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.own_text import OwnText
from outrider.core.params import InvalidParameter

# Few different tokens, so that n-grams come again.
tokens = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, 11), max_size=60)
contexts = st.lists(st.integers(0, 3), min_size=1, max_size=6)


def search_own_text(text: list[int], context: list[int], max_len: int, lengths: range) -> list[int]:
    """What OwnText.continuation promises, by looking at the whole text each time."""
    guess: list[int] = []
    while len(guess) < max_len:
        tail = context + guess
        ends = (
            end
            for n in reversed(lengths)
            for end in range(len(text) - 1, n - 1, -1)
            if n <= len(tail) and text[end - n : end] == tail[-n:]
        )
        end = next(ends, None)
        if end is None:
            break
        guess += text[end : end + max_len - len(guess)]
    return guess


@given(st.lists(tokens, max_size=4), contexts, st.integers(0, 12))
def test_own_text_answers_as_a_search_of_the_whole_text(pieces, context, max_len):
    own_text = OwnText(min_match_len=1, max_match_len=3)
    for piece in pieces:
        own_text.append(piece)
    text = [token for piece in pieces for token in piece]
    assert len(own_text) == len(text)
    assert own_text.continuation(context, max_len) == search_own_text(text, context, max_len, range(1, 4))


def test_own_text_continues_after_a_chain_that_is_not_committed():
    own_text = OwnText()
    own_text.append([1, 2, 3, 4, 5, 9, 1])
    assert own_text.continuation([9, 1, 2, 3], 2) == [4, 5]


def test_own_text_prefers_the_latest_occurrence():
    own_text = OwnText()
    own_text.append([1, 2, 3, 0, 1, 2, 4, 0])
    assert own_text.continuation([1, 2], 1) == [4]


def test_own_text_repeats_a_period_for_as_long_as_asked():
    own_text = OwnText()
    own_text.append([1, 2, 3, 1, 2, 3])
    assert own_text.continuation([1, 2, 3], 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_own_text_does_not_guess_from_one_token_by_default():
    own_text = OwnText()
    own_text.append([1, 2, 3])
    assert own_text.continuation([9, 2], 4) == []


def test_own_text_refuses_lengths_that_make_no_range():
    with pytest.raises(InvalidParameter, match="min_match_len"):
        OwnText(min_match_len=3, max_match_len=2)


def test_looking_up_own_text_takes_microseconds_however_long_it_is():
    rng = random.Random(0)
    own_text = OwnText()
    own_text.append(rng.randrange(30) for _ in range(20_000))
    context = [rng.randrange(30) for _ in range(8)]
    # The best of many runs is the machine's speed, not its load.
    assert min(timeit.repeat(lambda: own_text.continuation(context, 8), number=100, repeat=20)) / 100 < 50e-6

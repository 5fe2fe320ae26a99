"""The suffix array of contexts, against a search of the whole text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter
from outrider.core.retrieval.suffix_index import (
    INDEX_DEPTH,
    MAX_MATCHES,
    MAX_TOKEN_ID,
    NO_MATCHES,
    SEPARATOR,
    ContextIndex,
    Sort,
)


def naive_sort(symbols):
    return np.array(sorted(range(len(symbols)), key=lambda start: symbols[start:].tolist()))


def divsufsort(symbols):
    return pytest.importorskip("pydivsufsort").divsufsort(symbols)


sorts = pytest.mark.parametrize("sort", [None, naive_sort, divsufsort], ids=["numpy", "naive", "divsufsort"])

# Few different tokens, so that matches are many and long; separators at every distance.
few = st.integers(SEPARATOR, 1) | st.integers(0, 2)
texts = st.lists(few, max_size=80)
repetitive = st.builds(
    lambda piece, times, end: piece * times + end, st.lists(few, min_size=1, max_size=12), st.integers(1, 30), texts
)
contexts = st.lists(st.integers(SEPARATOR, 3), max_size=20)


def build(text: Sequence[int], sort: Sort | None = None) -> ContextIndex:
    return ContextIndex.build(np.array(text, np.int32), sort)


def enlarged(tokens: list[int]) -> list[int]:
    """The same text in tokens so large that no more than two fit in a sort key."""
    return [token if token == SEPARATOR else MAX_TOKEN_ID - token for token in tokens]


def search(text: list[int], context: list[int], max_match_len: int) -> tuple[int, set[int]]:
    """Length and positions of the longest match, by looking at every position."""
    for length in range(min(max_match_len, len(context)), 0, -1):
        tail = context[-length:]
        found = {
            position
            for position in range(length, len(text))
            if text[position - length : position] == tail and SEPARATOR not in [*tail, text[position]]
        }
        if found:
            return length, found
    return 0, set()


@sorts
@given(texts | repetitive | (texts | repetitive).map(enlarged), st.data())
def test_matches_are_those_of_a_search_of_the_whole_text(sort, text, data):
    index = build(text, sort)
    start = data.draw(st.integers(0, len(text)))
    from_text = text[start : data.draw(st.integers(start, len(text)))]
    context = data.draw(contexts | st.just(from_text) | contexts.map(lambda start: start + from_text))
    max_match_len = data.draw(st.integers(1, INDEX_DEPTH))
    match_len, expected = search(text, context, max_match_len)
    matches = index.matches(context, max_match_len)
    assert (matches.match_len, matches.num_matches) == (match_len, len(expected))
    assert set(matches.positions) <= expected
    assert len(set(matches.positions)) == len(matches.positions) == min(len(expected), MAX_MATCHES)


@given(texts, st.data())
def test_what_follows_a_position_ends_with_the_document(text, data):
    index = build(text)
    assert index.num_tokens == len(text)
    position = data.draw(st.integers(0, len(text)))
    max_len = data.draw(st.integers(0, 50))
    end = [*text, SEPARATOR].index(SEPARATOR, position)
    assert index.following(position, max_len) == tuple(text[position:end][:max_len])


@sorts
def test_a_context_deeper_than_one_key_of_the_sort_is_told_from_one_that_differs_at_its_start(sort):
    common = [70_000 + number for number in range(INDEX_DEPTH - 1)]
    text = [token for number in range(40) for token in [number, *common, 100 + number, SEPARATOR]]
    index = build(text, sort)
    for number in range(40):
        matches = index.matches([number, *common], INDEX_DEPTH)
        assert matches.match_len == INDEX_DEPTH
        assert [index.following(position, 9) for position in matches.positions] == [(100 + number,)]
    assert index.matches([99, *common], INDEX_DEPTH)[::2] == (INDEX_DEPTH - 1, 40)


@sorts
def test_where_the_longest_match_ends_all_its_documents_the_next_shorter_one_counts(sort):
    index = build([1, 2, 3, SEPARATOR, 2, 3, 4, SEPARATOR, 1, 2, 3], sort)
    assert index.matches([1, 2, 3], 3) == (2, [6], 1)


@sorts
def test_matches_do_not_span_a_separator_even_where_the_context_has_one(sort):
    index = build([1, SEPARATOR, 2, 3], sort)
    assert index.matches([1, 2], 2) == (1, [3], 1)
    assert index.matches([1, SEPARATOR, 2], 3) == (1, [3], 1)
    assert index.matches([2, SEPARATOR], 2) == NO_MATCHES


@pytest.mark.parametrize("text", [[], [1], [SEPARATOR], [1, SEPARATOR, 1], [SEPARATOR, SEPARATOR]])
@sorts
def test_a_text_in_which_nothing_follows_anything_has_no_matches(sort, text):
    assert build(text, sort).matches([1], 4) == NO_MATCHES
    assert build(text, sort).matches([], 4) == NO_MATCHES


@sorts
def test_a_sample_of_many_matches_is_even_and_the_same_each_time(sort):
    num_documents = 10 * MAX_MATCHES
    text = [token for number in range(num_documents) for token in (number + 10, 7, 1, SEPARATOR)]
    matches = build(text, sort).matches([7], 4)
    assert matches.num_matches == num_documents
    documents = sorted(position // 4 for position in matches.positions)
    assert np.diff([0, *documents, num_documents - 1]).max() <= num_documents / MAX_MATCHES
    assert build(text, sort).matches([7], 4) == matches


class CountedReads(ContextIndex):
    """Counts how often the text is read."""

    def __init__(self, text, order):
        self.num_reads = 0
        counted = self

        class Text:
            def __len__(self):
                return len(text)

            def __getitem__(self, place):
                counted.num_reads += 1
                return text[place]

        super().__init__(Text(), order)


@pytest.mark.parametrize(
    "text",
    [[5] * 100_000, [5, 6, 7] * 33_333, [5, SEPARATOR] * 50_000, [5, 5, SEPARATOR] * 33_333, [*range(5, 10)] * 20_000],
    ids=["one symbol", "a period", "all before separators", "half before separators", "five symbols"],
)
@sorts
def test_however_often_a_context_occurs_few_places_are_looked_at(sort, text):
    if sort is naive_sort:
        text = text[:1000]
    index = CountedReads.build(np.array(text, np.int32), sort)
    for context in ([5] * INDEX_DEPTH, text[: INDEX_DEPTH - 1], [4, 5], [9, 9], [1]):
        index.num_reads = 0
        matches = index.matches(context, INDEX_DEPTH)
        assert len(matches.positions) <= MAX_MATCHES
        assert index.num_reads <= 6 * len(text).bit_length()


@pytest.mark.parametrize("largest", [1, 100, 2**14, 2**20, MAX_TOKEN_ID])
def test_numpy_sorts_as_deep_as_matches_go_whatever_the_size_of_the_tokens(largest):
    rng = np.random.default_rng(5)
    passages = [rng.choice([0, largest], 40).tolist() for _ in range(6)]
    text = [token for number in rng.integers(0, 6, 60) for token in (*passages[number], SEPARATOR)]
    index = build(text)
    for end in range(INDEX_DEPTH, len(text), 7):
        context = text[end - INDEX_DEPTH : end]
        match_len, expected = search(text, context, INDEX_DEPTH)
        assert index.matches(context, INDEX_DEPTH)[::2] == (match_len, len(expected))


@pytest.mark.parametrize("token_id", [SEPARATOR - 1, MAX_TOKEN_ID + 1])
def test_what_is_no_token_is_refused(token_id):
    with pytest.raises(InvalidParameter, match="tokens"):
        build([1, token_id])


@pytest.mark.parametrize("max_match_len", [0, INDEX_DEPTH + 1])
def test_a_match_longer_than_what_is_sorted_is_refused(max_match_len):
    with pytest.raises(InvalidParameter, match="max_match_len"):
        build([1, 2]).matches([1], max_match_len)


def test_the_text_is_copied():
    tokens = np.array([1, 2, 3], np.int32)
    index = ContextIndex.build(tokens)
    tokens[:] = 0
    assert index.matches([1, 2], 2) == (2, [2], 1)
    assert index.following(1, 5) == (2, 3)

"""The prior's table, against a tier that has learned the same documents, and against a search of the documents."""

from __future__ import annotations

import random
import struct
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter, Source
from outrider.core.retrieval.ngrams import MAX_FOLLOWERS, Continuation, NgramTier
from outrider.core.retrieval.prior import PriorTable

# Few different tokens, so that n-grams come again; the widest make the sort take several passes.
alphabets = st.sampled_from([(0, 1), (0, 1, 2), tuple(range(MAX_FOLLOWERS)), (0, 1, 2**18, 2**31 - 1)])
documents = alphabets.flatmap(lambda tokens: st.lists(st.lists(st.sampled_from(tokens), max_size=40), max_size=5))


def tier_of(documents: list[list[int]], max_match_len: int) -> NgramTier:
    tier = NgramTier(max_match_len)
    for document in documents:
        tier.learn(document)
    return tier


def followers_of(documents: list[list[int]], max_match_len: int) -> dict[tuple[int, ...], list[int]]:
    """All n-grams, and what followed them, in order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for document in documents:
        for end, token in enumerate(document):
            for n in range(1, min(end, max_match_len) + 1):
                found.setdefault(tuple(document[end - n : end]), []).append(token)
    return found


def ranked(tokens: list[int]) -> tuple[tuple[int, int], ...]:
    """(token, count): most frequent first, latest first among equals; as many as are kept."""
    counts, latest = Counter(tokens), {token: index for index, token in enumerate(tokens)}
    best_first = sorted(counts, key=lambda token: (-counts[token], -latest[token]))
    return tuple((token, counts[token]) for token in best_first[:MAX_FOLLOWERS])


def random_documents(seed: int, num_tokens: int) -> list[list[int]]:
    """Tokens of which a few are frequent, in documents of all lengths."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    while num_tokens > 0:
        length = min(rng.choice([0, 1, 2, 3, 10, 100, 1000]), num_tokens)
        found.append([int(rng.paretovariate(0.8)) % 3000 for _ in range(length)])
        num_tokens -= max(1, length)
    return found


@settings(max_examples=150)
@given(documents, st.integers(1, 6))
def test_the_table_knows_what_a_tier_knows_that_has_learned_the_same_documents(documents, max_match_len):
    table, tier = PriorTable.build(documents, max_match_len), tier_of(documents, max_match_len)
    assert table.num_ngrams == len(tier)
    assert table.num_tokens == sum(len(document) for document in documents if len(document) > 1)
    for ngram in followers_of(documents, max_match_len):
        assert table.followers(ngram) == tier.followers(ngram)
        assert table.longest(ngram)[0] == len(ngram)


@settings(max_examples=150)
@given(documents, st.integers(1, 6), st.integers(1, 12), st.data())
def test_the_table_walks_as_a_tier_does_that_has_learned_the_same_documents(documents, max_match_len, max_len, data):
    table, tier = PriorTable.build(documents, max_match_len), tier_of(documents, max_match_len)
    # Ends of documents, where nothing follows, their middles, and contexts that no document has.
    run = data.draw(st.sampled_from([[], *documents]))
    end = data.draw(st.integers(0, len(run)))
    tail = (*data.draw(st.lists(st.integers(0, 2), max_size=2)), *run[max(0, end - max_match_len) : end])
    match_len, node = table.longest(tail)
    found = tier.longest(tail)
    assert (match_len == 0) == (found is None)
    if found is not None:
        ngram, followers = found
        assert match_len == len(ngram)
        assert table.walk(match_len, node, max_len) == tier.walk(Source.PRIOR, ngram, followers, max_len)


def test_every_ngram_of_a_large_table_is_found_and_no_other():
    documents = random_documents(0, 20_000)
    table, known = PriorTable.build(documents, 4), followers_of(documents, 4)
    assert table.num_ngrams == len(known)
    assert all(table.followers(ngram) == ranked(tokens) for ngram, tokens in known.items())
    rng = random.Random(1)
    for _ in range(20_000):
        ngram = tuple(int(rng.paretovariate(0.8)) % 3000 for _ in range(rng.randint(1, 5)))
        assert bool(table.followers(ngram)) == (ngram in known)


@given(st.lists(st.integers(1, MAX_FOLLOWERS + 4), min_size=1, max_size=80))
def test_of_too_many_followers_the_most_counted_stay_and_then_the_latest(tokens):
    table = PriorTable.build([[0, token] for token in tokens], 1)
    assert table.followers((0,)) == ranked(tokens)


def test_a_table_remembers_counts_where_a_tier_would_have_dropped_the_follower():
    tokens = [1, 1, *range(2, MAX_FOLLOWERS + 1), 90, 91, 2, 92, 2]
    table = PriorTable.build([[0, token] for token in tokens], 1)
    assert table.followers((0,))[:2] == ((2, 3), (1, 2))


def test_documents_never_touch_each_other():
    table = PriorTable.build([[1, 2], [3, 4], [2, 5]], 3)
    assert table.followers((2,)) == ((5, 1),)
    assert table.followers((2, 3)) == table.followers((1, 2, 3)) == table.followers((4,)) == ()
    # The walk continues in another document that has the same token, never into the next one.
    assert table.walk(*table.longest((1,)), 8).chain() == (2, 5)


def test_the_walk_goes_on_with_a_shorter_ngram_where_a_document_ends():
    table = PriorTable.build([[1, 2, 3], [2, 3, 4], [9, 3, 4, 5]], 3)
    assert table.walk(*table.longest((1,)), 8) == Continuation(
        1, Source.PRIOR, (0, 1, 1, 1), (2, 3, 4, 5), (1, 1, 1, 1)
    )


def test_the_walk_ends_where_only_a_shorter_ngram_than_matched_at_first_goes_on():
    table = PriorTable.build([[1, 2, 3], [3, 4, 5]], 3)
    assert table.walk(*table.longest((1, 2)), 8).chain() == (3,)
    assert table.walk(*table.longest((9, 2)), 8).chain() == (3, 4, 5)


@given(documents, st.integers(1, 4))
def test_the_entries_are_the_tokens_and_followers_of_each_ngram_in_bytes(documents, max_match_len):
    table, tier = PriorTable.build(documents, max_match_len), tier_of(documents, max_match_len)
    entries = dict(table.entries())
    assert entries == {
        struct.pack(f"<{len(ngram)}i", *ngram): b"".join(struct.pack("<iI", *pair) for pair in tier.followers(ngram))
        for ngram in followers_of(documents, max_match_len)
    }
    assert len(list(table.entries())) == table.num_ngrams


@pytest.mark.parametrize("documents", [[], [[]], [[1], [2], []]])
def test_documents_of_fewer_than_two_tokens_add_nothing(documents):
    table = PriorTable.build(documents)
    assert (table.num_tokens, table.num_ngrams, list(table.entries())) == (0, 0, [])
    assert table.followers((1,)) == table.followers(()) == ()
    assert table.longest((1, 2)) == table.longest(()) == (0, -1)


def test_documents_may_be_shorter_than_the_longest_ngram():
    table = PriorTable.build([[1, 2]], 8)
    assert (table.num_tokens, table.num_ngrams) == (2, 1)
    assert table.followers((1,)) == ((2, 1),)


def test_documents_may_be_arrays():
    table = PriorTable.build([np.array([1, 2, 3], np.int32), range(2, 5)], 2)
    assert table.followers((2, 3)) == ((4, 1),)


def test_tokens_that_cannot_be_ids_are_unknown_in_a_lookup():
    table = PriorTable.build([[1, 2, 3]], 2)
    assert table.longest((-1,)) == table.longest((2**63,)) == (0, -1)
    assert table.longest((-1, 2))[0] == 1


@pytest.mark.parametrize("token_id", [-1, 2**31])
def test_token_ids_outside_their_range_are_refused(token_id):
    with pytest.raises(InvalidParameter, match=f"documents must be of token ids .*, got {token_id}"):
        PriorTable.build([[1, 2], [3, token_id]])


def test_a_table_of_no_length_is_refused():
    with pytest.raises(InvalidParameter, match="max_match_len"):
        PriorTable.build([[1, 2]], 0)


def test_a_table_takes_less_than_forty_bytes_an_ngram():
    table = PriorTable.build(random_documents(2, 20_000))
    assert table.num_bytes < 40 * table.num_ngrams

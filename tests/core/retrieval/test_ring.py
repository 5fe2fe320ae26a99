"""The ring, against a model that keeps the whole history and searches it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter, Source
from outrider.core.retrieval.ngrams import FANOUT, NOTHING, Continuation, continuation_of
from outrider.core.retrieval.ring import MAX_FRESH_TOKENS, MIN_FRESH_TOKENS, Snapshot, TokenRing
from outrider.core.retrieval.suffix_index import INDEX_DEPTH, MAX_MATCHES, MAX_TOKEN_ID, SEPARATOR, ContextIndex


class SearchedRing:
    """TokenRing's contract, implemented by searching everything that was ever appended."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.history: list[int] = []
        self.held = self.snapshot = self.indexed = range(0)

    def append(self, document: list[int]) -> None:
        self.history += [SEPARATOR, *document] if document else []
        self.held = range(max(len(self.history) - self.capacity, 0), len(self.history))

    def runs(self, tail: list[int], max_len: int) -> list[list[int]]:
        """What followed each occurrence, oldest first."""
        fresh = range(max(self.indexed.stop, self.held.start), len(self.history))
        return [
            list(itertools.takewhile(lambda token: token != SEPARATOR, self.history[position : part.stop][:max_len]))
            for part, searched in ((self.indexed, self.indexed), (self.held, fresh))
            for position in searched
            if position - len(tail) >= part.start
            and self.history[position - len(tail) : position] == tail
            and SEPARATOR not in self.history[position - len(tail) : position + 1]
        ]

    def lookup(self, context: list[int], max_match_len: int, max_len: int) -> Continuation:
        for match_len in range(min(max_match_len, len(context)), 0, -1):
            if runs := self.runs(context[-match_len:], max_len):
                return tree_of(match_len, runs)
        return NOTHING


def tree_of(match_len: int, runs: list[list[int]]) -> Continuation:
    chain: list[int] = []
    counts: list[int] = []
    alternatives: list[tuple[int, tuple[int, int]]] = []
    while following := [run[len(chain)] for run in runs if run[: len(chain)] == chain and len(run) > len(chain)]:
        latest = {token: place for place, token in enumerate(following)}
        ranked = sorted(latest, key=lambda token: (-following.count(token), -latest[token]))
        for token in ranked[1 : dict(enumerate(FANOUT)).get(len(chain), 1)]:
            alternatives.append((len(chain), (token, following.count(token))))
        counts.append(following.count(ranked[0]))
        chain.append(ranked[0])
    return continuation_of(match_len, Source.RING, chain, counts, alternatives)


def rebuild(ring: TokenRing, snapshot: Snapshot | None = None) -> None:
    snapshot = snapshot or ring.snapshot()
    ring.swap(snapshot, ContextIndex.build(snapshot.tokens))


def ring_of(*documents: list[int], capacity: int = 10_000, is_indexed: bool = False) -> TokenRing:
    ring = TokenRing(capacity)
    for document in documents:
        ring.append(document)
    if is_indexed:
        rebuild(ring)
    return ring


before_and_after_a_build = pytest.mark.parametrize("is_indexed", [False, True], ids=["fresh", "indexed"])

tokens = st.integers(0, 2) | st.integers(0, 1)
documents = st.lists(tokens, max_size=14) | st.lists(tokens, max_size=2 * MAX_MATCHES)
operations = st.lists(st.sampled_from(["snapshot", "swap"]) | documents, max_size=14)
# At these capacities every position of a token is looked at, so counts include all matches.
limits = st.tuples(st.integers(1, MAX_MATCHES), st.integers(1, INDEX_DEPTH))
contexts = st.lists(tokens, min_size=1, max_size=12) | st.lists(st.integers(SEPARATOR, 9), max_size=12)


@given(limits, operations, st.lists(contexts, max_size=3), st.data())
def test_lookups_answer_as_a_search_of_the_history_whatever_comes_when(limits, operations, contexts, data):
    capacity, max_match_len = limits
    ring, model = TokenRing(capacity, max_match_len), SearchedRing(capacity)
    snapshot = ring.snapshot()
    for operation in operations:
        if operation == "snapshot":
            snapshot = ring.snapshot()
            model.snapshot = model.held
            assert snapshot.tokens.tolist() == model.history[model.held.start :]
        elif operation == "swap":
            rebuild(ring, snapshot)
            model.indexed = model.snapshot
        else:
            ring.append(operation)
            model.append(operation)
        assert (ring.num_tokens, ring.num_indexed_tokens) == (len(model.held), len(model.indexed))
        start = data.draw(st.integers(0, len(model.history)))
        seen = [token for token in model.history[start : start + 12] if token != SEPARATOR]
        for context in [*contexts, seen]:
            longest, max_len = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 6))
            expected = model.lookup(context, min(longest, max_match_len), max_len)
            assert ring.lookup(context, longest, max_len) == expected


@before_and_after_a_build
def test_the_tree_has_the_most_frequent_path_first_and_its_alternatives_behind(is_indexed):
    ring = ring_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7], [1, 8], [1, 9], [1, 10], [1, 11], is_indexed=is_indexed)
    offsets, token_ids, counts = (0, 1, 1, 0, 0, 0, 6), (2, 3, 5, 11, 10, 9, 6), (3, 2, 1, 1, 1, 1, 1)
    assert ring.lookup([0, 1], 4, 3) == Continuation(1, Source.RING, offsets, token_ids, counts)


@before_and_after_a_build
def test_the_latest_wins_among_equals(is_indexed):
    ring = ring_of([1, 2, 3], [1, 2, 4], [1, 2, 5], is_indexed=is_indexed)
    assert ring.lookup([1, 2], 4, 4).token_ids == (5, 4, 3)


def test_a_fresh_occurrence_is_later_than_an_indexed_one():
    ring = ring_of([1, 2, 4], [1, 2, 3], is_indexed=True)
    ring.append([1, 2, 4, 9])
    ring.append([1, 2, 3, 8])
    assert ring.lookup([1, 2], 4, 4).token_ids == (3, 8, 4)
    assert ring.lookup([1, 2], 4, 1).counts == (2, 2)


def test_of_an_indexed_and_a_fresh_match_the_longer_one_counts_alone():
    ring = ring_of([1, 2, 3, 4], [2, 5], [2, 5], is_indexed=True)
    ring.append([3, 7])
    ring.append([9, 2, 6])
    assert ring.lookup([1, 2, 3], 4, 1) == Continuation(3, Source.RING, (0,), (4,), (1,))
    assert ring.lookup([9, 2], 4, 1) == Continuation(2, Source.RING, (0,), (6,), (1,))


@before_and_after_a_build
def test_a_continuation_ends_with_its_document(is_indexed):
    ring = ring_of([1, 2, 3], [4, 5, 6], is_indexed=is_indexed)
    assert ring.lookup([1], 4, 9).token_ids == (2, 3)
    assert ring.lookup([3], 4, 9) == NOTHING
    assert ring.lookup([3, 4], 4, 9).match_len == 1


def test_a_build_that_appends_overtook_loses_nothing():
    ring = ring_of([1, 2, 3])
    snapshot = ring.snapshot()
    ring.append([4, 5, 6])
    rebuild(ring, snapshot)
    ring.append([7, 8, 9])
    assert [ring.lookup([token], 4, 4).token_ids for token in (1, 4, 7)] == [(2, 3), (5, 6), (8, 9)]
    assert [ring.lookup([token], 4, 4).counts for token in (1, 4, 7)] == [(1, 1)] * 3


def test_what_was_overwritten_is_found_until_the_next_build_and_then_no_more():
    ring = ring_of([1, 2, 3], capacity=8, is_indexed=True)
    ring.append([4, 5, 6])
    ring.append([7, 8, 9])
    assert [ring.lookup([token], 4, 4).token_ids for token in (1, 4, 7)] == [(2, 3), (5, 6), (8, 9)]
    rebuild(ring)
    assert [ring.lookup([token], 4, 4).token_ids for token in (1, 4, 7)] == [(), (5, 6), (8, 9)]


@pytest.mark.parametrize("capacity", [1, 2, 7, 1000, 3000])
@before_and_after_a_build
def test_of_a_document_longer_than_the_ring_the_last_part_stays(capacity, is_indexed):
    ring = ring_of([5, 6, 7], list(range(3000)), capacity=capacity, is_indexed=is_indexed)
    assert ring.snapshot().tokens.tolist() == list(range(3000 - capacity, 3000))
    assert ring.num_tokens == capacity
    for token in range(3000 - capacity, 2999, 97):
        assert ring.lookup([token], 4, 1).token_ids == (token + 1,)
    assert ring.lookup([3000 - capacity - 1], 4, 1) == NOTHING
    assert ring.lookup([2999], 4, 1) == NOTHING


@before_and_after_a_build
def test_every_document_in_the_ring_is_found_by_a_context_of_its_own(is_indexed):
    rng = np.random.default_rng(3)
    documents = [rng.integers(0, 40, 199).tolist() for _ in range(100)]
    ring = ring_of(*documents, capacity=45 * 200, is_indexed=is_indexed)
    for document in documents[-45:]:
        for start in range(0, 187, 7):
            found = ring.lookup([40, *document[start : start + 8]], 10, 4)
            assert (found.match_len, found.chain()) == (8, tuple(document[start + 8 : start + 12]))


def test_a_fresh_passage_is_found_behind_any_number_of_later_ones_that_end_alike():
    ring = ring_of([1, 2, 3, 4, 5, 6, 7, 0, 9], *[[number % 50 + 10, 5, 6, 7, 0, 8] for number in range(1000)])
    assert ring.lookup([1, 2, 3, 4, 5, 6, 7, 0], 10, 1) == Continuation(8, Source.RING, (0,), (9,), (1,))
    assert ring.lookup([9, 6, 7, 0], 10, 1) == Continuation(3, Source.RING, (0,), (8,), (MAX_MATCHES,))


class CountedFollowing(ContextIndex):
    """Counts the matches that are looked at."""

    num_looked_at = 0

    def following(self, position, max_len):
        self.num_looked_at += 1
        return super().following(position, max_len)


def test_however_often_a_token_repeats_few_matches_are_looked_at():
    ring = ring_of([5] * 50_000, capacity=100_000)
    snapshot = ring.snapshot()
    index = CountedFollowing.build(snapshot.tokens)
    ring.swap(snapshot, index)
    found = ring.lookup([5] * 20, 10, 8)
    assert (found.match_len, found.chain(), found.counts[0]) == (10, (5,) * 8, MAX_MATCHES)
    assert index.num_looked_at == MAX_MATCHES
    ring.append([5] * 2 * MAX_MATCHES)
    found = ring.lookup([5] * 20, 10, 8)
    assert (found.match_len, found.chain(), found.counts[0]) == (10, (5,) * 8, 2 * MAX_MATCHES)
    assert index.num_looked_at == 2 * MAX_MATCHES


def test_a_build_is_wanted_for_an_eighth_of_what_is_indexed_and_not_for_less_than_a_minimum():
    ring = ring_of([1] * (MIN_FRESH_TOKENS - 1), capacity=200_000)
    assert not ring.wants_build
    ring.append([1])
    assert ring.wants_build
    rebuild(ring)
    assert not ring.wants_build
    ring.append([1] * 100_000)
    rebuild(ring)
    ring.append([1] * (ring.num_indexed_tokens // 8 - 1))
    assert not ring.wants_build
    ring.append([1])
    assert ring.wants_build


def test_a_build_is_wanted_before_fresh_tokens_are_out_of_reach():
    small = ring_of([1] * 60, capacity=100)
    assert not small.wants_build
    small.append([1] * 4)
    assert small.wants_build
    large = ring_of([1] * (MAX_FRESH_TOKENS * 5), capacity=MAX_FRESH_TOKENS * 5 + 1, is_indexed=True)
    large.append([1] * (MAX_FRESH_TOKENS // 2))
    assert large.wants_build


def test_a_document_longer_than_what_is_searched_without_an_index_is_found_by_its_last_part():
    document = np.arange(MAX_FRESH_TOKENS + 1000)
    ring = ring_of(document, capacity=2 * MAX_FRESH_TOKENS)
    assert ring.lookup([999], 4, 1) == NOTHING
    assert ring.lookup([1000], 4, 1).token_ids == (1001,)
    assert ring.lookup([MAX_FRESH_TOKENS], 4, 1).token_ids == (MAX_FRESH_TOKENS + 1,)


def test_a_snapshot_is_a_copy_that_cannot_be_changed():
    ring = ring_of([1, 2, 3], capacity=6)
    snapshot = ring.snapshot()
    ring.append([4, 5, 6])
    assert snapshot.tokens.tolist() == [SEPARATOR, 1, 2, 3]
    assert (snapshot.start, snapshot.end, ring.snapshot().start) == (0, 4, 2)
    with pytest.raises(ValueError, match="read-only"):
        snapshot.tokens[0] = 0


def test_an_index_of_another_text_or_ring_or_of_an_older_snapshot_is_refused():
    ring = ring_of([1, 2, 3])
    older = ring.snapshot()
    ring.append([4])
    newer = ring.snapshot()
    with pytest.raises(InvalidParameter, match="index"):
        ring.swap(newer, ContextIndex.build(older.tokens))
    rebuild(ring, newer)
    for target, snapshot in ((ring, older), (TokenRing(9), newer)):
        with pytest.raises(InvalidParameter, match="snapshot"):
            rebuild(target, snapshot)
    assert ring.num_indexed_tokens == 6


@before_and_after_a_build
def test_an_empty_ring_knows_nothing_and_an_empty_document_changes_nothing(is_indexed):
    ring = ring_of([], is_indexed=is_indexed)
    assert (ring.num_tokens, ring.wants_build) == (0, False)
    assert ring.lookup([1, 2], 10, 4) == NOTHING
    assert ring_of([1, 2], is_indexed=is_indexed).lookup([], 10, 4) == NOTHING


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("document", lambda: TokenRing(9).append([1, SEPARATOR])),
        ("document", lambda: TokenRing(9).append([1, MAX_TOKEN_ID + 1])),
        ("max_match_len", lambda: TokenRing(9).lookup([1], 0, 4)),
        ("max_continuation_len", lambda: TokenRing(9).lookup([1], 4, 0)),
        ("capacity", lambda: TokenRing(0)),
        ("max_match_len", lambda: TokenRing(9, 0)),
        ("max_match_len", lambda: TokenRing(9, INDEX_DEPTH + 1)),
    ],
)
def test_what_is_out_of_its_range_is_refused(field, call):
    with pytest.raises(InvalidParameter, match=field):
        call()


def test_what_follows_most_often_as_a_whole_may_be_another_than_token_by_token():
    ring = TokenRing(1000, 10)
    for run in ([1, 2, 3], [1, 2, 4], [1, 5, 6], [7, 8, 9], [7, 8, 9]):
        ring.append([50, 51, *run])
    assert ring.lookup([50, 51], 10, 3).chain()[:2] == (1, 2), "three of five begin so"
    assert ring.lookup([50, 51], 10, 3, whole_runs=True) == Continuation(
        2, Source.RING, (0, 1, 1), (7, 8, 9), (2, 2, 2)
    )
    assert ring.lookup([50, 51], 10, 2, whole_runs=True).chain() == (7, 8), "cut to two, two of each: the latest"


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8), st.integers(1, 5))
def test_the_whole_run_is_the_most_frequent_of_all_that_followed(runs, max_len):
    ring = TokenRing(1000, 10)
    for run in runs:
        ring.append([9, *run])
    followed = [tuple(run[:max_len]) for run in runs]
    found = ring.lookup([9], 1, max_len, whole_runs=True)
    assert followed.count(found.chain()) == max(map(followed.count, followed)) == found.counts[0]

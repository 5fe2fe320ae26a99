"""N-gram tiers and own text, against models that search instead of indexing."""

from __future__ import annotations

import random
import timeit

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.ngrams import FANOUT, MAX_FOLLOWERS, NOTHING, Continuation, NgramTier, NgramTiers, OwnText
from outrider.core.params import InvalidParameter, Source

# Few different tokens, so that n-grams come again; still more than MAX_FOLLOWERS, so that lists overflow.
tokens = st.lists(st.integers(0, 2), max_size=40) | st.lists(st.integers(0, MAX_FOLLOWERS + 3), max_size=60)
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


def search_followers(stream: list[int], ngram: tuple[int, ...]) -> list[tuple[int, int]]:
    """(token, count) of all that followed an n-gram: most often first, latest first among equals."""
    positions = [i for i in range(len(ngram), len(stream)) if tuple(stream[i - len(ngram) : i]) == ngram]
    followers = [stream[i] for i in positions]
    latest = {token: index for index, token in enumerate(followers)}
    ranked = sorted(latest, key=lambda token: (-followers.count(token), -latest[token]))
    return [(token, followers.count(token)) for token in ranked]


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


@given(st.lists(st.lists(st.integers(0, MAX_FOLLOWERS - 1), max_size=30), max_size=4), contexts)
def test_a_tier_counts_one_continuous_stream_however_it_is_cut(pieces, context):
    tier = NgramTier(max_match_len=3)
    for piece in pieces:
        tier.record(piece)
    stream = [token for piece in pieces for token in piece]
    ngram = tuple(context[-3:])
    assert [(f.token_id, f.count) for f in tier.followers(ngram)] == search_followers(stream, ngram)


def test_a_tier_learns_runs_apart_from_its_stream():
    tier = NgramTier(max_match_len=2)
    tier.record([1, 2])
    tier.learn([7, 8])
    tier.record([3])
    assert [f.token_id for f in tier.followers((2,))] == [3]
    assert tier.followers((8,)) == ()


def test_a_newcomer_takes_the_place_of_the_least_counted_follower():
    tier = NgramTier(max_match_len=1)
    for token in [*range(1, MAX_FOLLOWERS + 1), 1, 99]:
        tier.learn([0, token])
    assert [(f.token_id, f.count) for f in tier.followers((0,))][:2] == [(1, 2), (99, 1)]
    assert 2 not in [f.token_id for f in tier.followers((0,))]
    assert len(tier.followers((0,))) == MAX_FOLLOWERS


def test_the_longest_match_wins_over_the_order_of_the_tiers():
    tiers = NgramTiers(3)
    tiers.prior.learn([2, 50])
    tiers.record([1, 2, 60])
    assert tiers.lookup([1, 2], 3, 1) == Continuation(2, Source.DYNAMIC, (0,), (60,), (1,))


def test_at_equal_length_the_order_is_prior_dynamic_rejected():
    tiers = NgramTiers(3)
    tiers.reject([1, 2], [70], [71])
    assert tiers.lookup([1, 2], 3, 1).tier is Source.REJECTED
    tiers.record([1, 2, 60])
    assert tiers.lookup([1, 2], 3, 1).tier is Source.DYNAMIC
    tiers.prior.learn([1, 2, 50])
    assert tiers.lookup([1, 2], 3, 1).tier is Source.PRIOR


def test_what_the_target_refused_is_not_taken_from_the_prior_again():
    tiers = NgramTiers(2)
    tiers.prior.learn([1, 2, 50])
    tiers.reject([1, 2], [50], [60, 61])
    assert tiers.lookup([1, 2], 2, 4) == Continuation(2, Source.REJECTED, (0, 1), (60, 61), (1, 1))
    # After other tokens the prior is as good as before.
    assert tiers.lookup([3, 2], 2, 1).token_ids == (50,)


def test_a_rejection_of_one_token_is_found_again():
    """A tier that only answers with full-length continuations never hits: a rejection is shorter than that."""
    tiers = NgramTiers(3)
    tiers.reject([5, 6, 7], [8], [9])
    assert tiers.lookup([5, 6, 7], 3, 10).token_ids == (9,)


def test_a_continuation_is_a_chain_with_the_alternatives_of_its_first_positions():
    tiers = NgramTiers(2)
    for run in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6, 7]):
        tiers.prior.learn(run)
    found = tiers.lookup([1], 2, 8)
    assert found == Continuation(1, Source.PRIOR, (0, 1, 1, 0, 4), (2, 3, 4, 6, 5), (3, 2, 2, 1, 1))
    assert found.chain() == (2, 3, 4)


def test_nothing_is_found_for_an_unknown_context():
    assert NgramTiers(3).lookup([1, 2, 3], 3, 8) == NOTHING
    assert NOTHING.chain() == ()


@settings(max_examples=200)
@given(tokens, tokens, contexts, st.integers(1, 4), st.integers(1, 8))
def test_every_continuation_is_a_tree_of_known_followers(prior, accepted, context, max_match_len, max_len):
    tiers = NgramTiers(4)
    tiers.prior.learn(prior)
    tiers.record(accepted)
    found = tiers.lookup(context, max_match_len, max_len)
    assert found.match_len <= min(max_match_len, len(context))
    assert len(found.chain()) <= max_len
    assert len(found.token_ids) <= max_len + sum(FANOUT) - len(FANOUT)
    assert (found.match_len == 0) == (not found.token_ids)
    stream = prior if found.tier is Source.PRIOR else accepted
    for path in paths(found):
        # Each token followed at least as many tokens as matched at first.
        run = [*context, *path][-found.match_len - 1 :]
        assert any(stream[i : i + len(run)] == run for i in range(len(stream)))


def paths(found: Continuation) -> list[list[int]]:
    """The tokens from the context to each node, the node included."""
    known: list[list[int]] = [[]]
    for number, (offset, token) in enumerate(zip(found.parent_offsets, found.token_ids, strict=True), 1):
        known.append([*known[number - offset if offset else 0], token])
    return known[1:]

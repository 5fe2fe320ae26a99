"""One tier of n-grams, against models that search instead of indexing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter, Source
from outrider.core.retrieval.ngrams import FANOUT, MAX_FOLLOWERS, NOTHING, Continuation, NgramTier

contexts = st.lists(st.integers(0, 3), min_size=1, max_size=6)
# Few enough tokens that no list of followers overflows.
pieces = st.lists(st.lists(st.integers(0, MAX_FOLLOWERS - 1), max_size=30) | st.lists(st.integers(0, 1)), max_size=4)


def ranked(followers: list[int]) -> list[tuple[int, int]]:
    """(token, count) of tokens in the order of their arrival: most frequent first, latest first among equals."""
    latest = {token: index for index, token in enumerate(followers)}
    best_first = sorted(latest, key=lambda token: (-followers.count(token), -latest[token]))
    return [(token, followers.count(token)) for token in best_first]


def search_followers(stream: list[int], ngram: tuple[int, ...]) -> list[tuple[int, int]]:
    """(token, count) of all that followed an n-gram."""
    positions = [i for i in range(len(ngram), len(stream)) if tuple(stream[i - len(ngram) : i]) == ngram]
    return ranked([stream[i] for i in positions])


def known_continuation(tier: NgramTier, ngram: tuple[int, ...], max_len: int) -> Continuation:
    return tier.walk(Source.DYNAMIC, ngram, tier.followers(ngram), max_len)


@given(pieces, contexts)
def test_a_tier_counts_one_continuous_stream_however_it_is_cut(pieces, context):
    tier = NgramTier(max_match_len=3)
    for piece in pieces:
        tier.record(piece)
    stream = [token for piece in pieces for token in piece]
    ngram = tuple(context[-3:])
    assert list(tier.followers(ngram)) == search_followers(stream, ngram)


@given(pieces)
def test_a_tier_knows_every_ngram_that_a_token_followed(pieces):
    tier = NgramTier(max_match_len=3)
    for piece in pieces:
        tier.learn(piece)
    known = {
        tuple(piece[end - n : end]) for piece in pieces for end in range(len(piece)) for n in (1, 2, 3) if n <= end
    }
    assert len(tier) == len(known)
    assert all(tier.followers(ngram) for ngram in known)


def test_a_tier_learns_runs_apart_from_its_stream():
    tier = NgramTier(max_match_len=2)
    tier.record([1, 2])
    tier.learn([7, 8])
    tier.record([3])
    assert tier.followers((2,)) == ((3, 1),)
    assert tier.followers((8,)) == ()


def test_tokens_before_the_start_are_only_context():
    tier = NgramTier(max_match_len=2)
    tier.learn([1, 2, 3], 2)
    assert len(tier) == 2
    assert tier.followers((1, 2)) == tier.followers((2,)) == ((3, 1),)


def test_a_newcomer_takes_the_place_of_the_least_counted_follower():
    tier = NgramTier(max_match_len=1)
    for token in [*range(1, MAX_FOLLOWERS + 1), 1, 99]:
        tier.learn([0, token])
    assert tier.followers((0,))[:2] == ((1, 2), (99, 1))
    assert 2 not in [token for token, _ in tier.followers((0,))]
    assert len(tier.followers((0,))) == MAX_FOLLOWERS


def test_followers_that_were_read_once_never_change():
    """Another thread may be reading them."""
    tier = NgramTier(max_match_len=1)
    tier.learn([0, 1, 0, 2])
    read = tier.followers((0,))
    tier.learn([0, 1, 0, 1])
    assert read == ((2, 1), (1, 1))
    assert tier.followers((0,)) == ((1, 3), (2, 1))


@given(pieces, st.integers(1, 12))
def test_ngrams_beyond_the_limit_are_dropped_by_the_age_of_their_first_occurrence(pieces, max_ngrams):
    tier = NgramTier(3, max_ngrams)
    kept: dict[tuple[int, ...], list[int]] = {}
    for piece in pieces:
        tier.learn(piece)
        assert len(tier) <= max_ngrams
        for end, token in enumerate(piece):
            for n in range(1, min(end, 3) + 1):
                kept.setdefault(tuple(piece[end - n : end]), []).append(token)
                if len(kept) > max_ngrams:
                    del kept[next(iter(kept))]
    assert len(tier) == len(kept)
    for ngram, followers in kept.items():
        assert list(tier.followers(ngram)) == ranked(followers)


def test_a_walk_looks_at_more_tokens_than_matched_at_first():
    tier = NgramTier(max_match_len=3)
    for run in ([1, 2, 3, 4], [2, 3, 5], [2, 3, 5], [3, 6], [3, 6], [3, 6], [3, 6]):
        tier.learn(run)
    assert known_continuation(tier, (1,), 3).chain() == (2, 3, 4)
    assert known_continuation(tier, (2,), 2).chain() == (3, 5)
    assert known_continuation(tier, (3,), 1).chain() == (6,)


def test_a_walk_never_looks_at_fewer_tokens_than_matched_at_first():
    tier = NgramTier(max_match_len=2)
    tier.learn([1, 2, 3])
    tier.learn([3, 4])
    assert known_continuation(tier, (1, 2), 3).chain() == (3,)
    assert known_continuation(tier, (2,), 3).chain() == (3, 4)


def test_a_continuation_is_a_chain_with_the_alternatives_of_its_first_positions():
    tier = NgramTier(max_match_len=2)
    for run in ([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 6, 7], [3, 4, 8], [3, 4, 9]):
        tier.learn(run)
    found = known_continuation(tier, (1,), 8)
    # 9 and 8 followed equally often, but the fourth position gets no alternatives.
    assert found == Continuation(1, Source.DYNAMIC, (0, 1, 1, 1, 0, 5), (2, 3, 4, 9, 6, 5), (3, 2, 2, 1, 1, 1))
    assert found.chain() == (2, 3, 4, 9)


def test_a_continuation_has_no_more_alternatives_than_the_fanout():
    tier = NgramTier(max_match_len=1)
    for token in range(1, MAX_FOLLOWERS):
        tier.learn([0, 9, token])
        tier.learn([0, token])
    found = known_continuation(tier, (0,), 2)
    assert found.parent_offsets == (0, 1, *[0] * (FANOUT[0] - 1), *[FANOUT[0] + 1] * (FANOUT[1] - 1))


def test_nothing_has_an_empty_chain():
    assert NOTHING.chain() == ()


@pytest.mark.parametrize(("max_match_len", "max_ngrams", "field"), [(0, None, "max_match_len"), (1, 0, "max_ngrams")])
def test_a_tier_refuses_limits_that_leave_no_room(max_match_len, max_ngrams, field):
    with pytest.raises(InvalidParameter, match=field):
        NgramTier(max_match_len, max_ngrams)

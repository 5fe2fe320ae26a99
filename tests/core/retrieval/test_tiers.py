"""A session's tiers in order, against a model that searches everything that it was told."""

from __future__ import annotations

import random
import timeit
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.params import Source
from outrider.core.retrieval.ngrams import FANOUT, NOTHING, Continuation, NgramTier
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.tiers import MAX_REJECTED_NGRAMS, LocalTiers

N = 3
"""max_match_len of the tiers in the property tests."""

# Few different tokens, so that n-grams come again.
runs = st.lists(st.integers(0, 2), max_size=25)
contexts = st.lists(st.integers(0, 2), min_size=1, max_size=5)
rejections = st.lists(st.tuples(contexts, contexts), max_size=5)


@dataclass
class Searched:
    """What each tier was told, as (tokens, first position that counts)."""

    tiers: dict[Source, list[tuple[list[int], int]]] = field(default_factory=dict)

    def followers(self, tier: Source, ngram: list[int]) -> list[tuple[int, int]]:
        seen = [
            tokens[end]
            for tokens, start in self.tiers.get(tier, [])
            for end in range(max(start, len(ngram)), len(tokens))
            if tokens[end - len(ngram) : end] == ngram
        ]
        latest = {token: index for index, token in enumerate(seen)}
        ranked = sorted(latest, key=lambda token: (-seen.count(token), -latest[token]))
        return [(token, seen.count(token)) for token in ranked]

    def lookup(self, context: list[int], max_match_len: int, max_len: int) -> Continuation:
        tail = context[-max_match_len:]
        for match_len in range(len(tail), 0, -1):
            for tier in (Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED):
                followers = self.followers(tier, tail[-match_len:])
                if followers:
                    return self.walk(tier, tail[-match_len:], followers, max_len)
        return NOTHING

    def walk(self, tier: Source, ngram: list[int], followers: list[tuple[int, int]], max_len: int) -> Continuation:
        path, others = [], []
        known = list(ngram)
        while followers and len(path) < max_len:
            fanout = FANOUT[len(path)] if len(path) < len(FANOUT) else 1
            others += [(len(path), follower) for follower in followers[1:fanout]]
            path.append(followers[0])
            known.append(followers[0][0])
            suffixes = [known[-n:] for n in range(min(N, len(known)), len(ngram) - 1, -1)]
            followers = next((found for suffix in suffixes if (found := self.followers(tier, suffix))), [])
        parents = [*range(len(path)), *(place for place, _ in others)]  # numbered from 1; 0 = the context
        nodes = path + [follower for _, follower in others]
        offsets = tuple(number - parent if parent else 0 for number, parent in enumerate(parents, 1))
        return Continuation(len(ngram), tier, offsets, tuple(t for t, _ in nodes), tuple(c for _, c in nodes))


@settings(max_examples=250)
@given(
    st.none() | st.lists(runs, max_size=3), runs, st.none() | st.lists(runs, max_size=2), rejections, contexts,
    st.integers(1, N), st.integers(1, 8),
)  # fmt: skip
def test_a_lookup_answers_as_a_search_of_all_that_the_tiers_were_told(
    prior, accepted, shared, rejections, context, max_match_len, max_len
):
    tiers, model = LocalTiers(N), Searched()
    if prior is not None:
        tiers.prior = PriorTable.build(prior, N)
        model.tiers[Source.PRIOR] = [(run, 0) for run in prior]
    if shared is not None:
        tiers.shared = NgramTier(N)
        for run in shared:
            tiers.shared.learn(run)
        model.tiers[Source.SHARED] = [(run, 0) for run in shared]
    for cut in range(0, len(accepted), 4):
        tiers.record(accepted[cut : cut + 4])
    model.tiers[Source.DYNAMIC] = [(accepted, 0)]
    model.tiers[Source.REJECTED] = []
    for after, refused in rejections:
        tiers.reject(after, refused)
        tail = after[-N:]
        model.tiers[Source.REJECTED].append((tail + refused, len(tail)))
    assert tiers.lookup(context, max_match_len, max_len) == model.lookup(context, max_match_len, max_len)


def test_the_longest_match_wins_over_the_order_of_the_tiers():
    tiers = LocalTiers(3, PriorTable.build([[2, 50]]))
    tiers.record([1, 2, 60])
    assert tiers.lookup([1, 2], 3, 1) == Continuation(2, Source.DYNAMIC, (0,), (60,), (1,))


@given(st.permutations([Source.PRIOR, Source.DYNAMIC, Source.SHARED, Source.REJECTED]), st.integers(1, 4))
def test_at_equal_length_the_first_of_the_given_order_counts_and_those_left_out_never(order: list[Source], count: int):
    tiers = LocalTiers(3, PriorTable.build([[1, 2, 50]]), NgramTier(3), order[:count])
    assert tiers.shared is not None
    tiers.shared.learn([1, 2, 80])
    tiers.record([1, 2, 60])
    tiers.reject([1, 2], [70])
    assert tiers.lookup([1, 2], 3, 1).tier is order[0]
    followers = tiers.followers([1, 2], 0)
    assert followers is not None
    assert (followers.source, followers.match_len) == (order[0], 2)
    tiers.shared.learn([9, 1, 2, 81])
    longest = tiers.lookup([9, 1, 2], 3, 1)
    assert (longest.tier is Source.SHARED) == (Source.SHARED in order[:count]), "a longer match comes first"


def test_the_prior_and_the_shared_tier_may_be_taken_away_again():
    shared = NgramTier(3)
    shared.learn([1, 2, 3])
    tiers = LocalTiers(3, PriorTable.build([[1, 2]]), shared)
    tiers.prior = tiers.shared = None
    assert tiers.lookup([1], 3, 1) is NOTHING


def test_a_rejection_of_one_token_is_found_again():
    """A tier that answers only with full-length continuations never hits, because a rejection is shorter."""
    tiers = LocalTiers(3)
    tiers.reject([5, 6, 7], [8])
    assert tiers.lookup([5, 6, 7], 3, 10) == Continuation(3, Source.REJECTED, (0,), (8,), (1,))


def test_what_was_refused_twice_comes_before_what_was_refused_later():
    tiers = LocalTiers(1)
    for token in (10, 11, 10, 12):
        tiers.reject([1], [token])
    assert tiers.lookup([1], 1, 1).token_ids == (10, 12, 11)


def test_the_rejected_tier_is_bounded():
    tiers = LocalTiers(2)
    for number in range(MAX_REJECTED_NGRAMS):
        tiers.reject([number], [number + 1, 0])
    assert len(tiers.rejected) == MAX_REJECTED_NGRAMS
    assert tiers.lookup([0], 2, 1) is NOTHING


def test_a_short_match_limits_the_first_step_only():
    tiers = LocalTiers(3, PriorTable.build([[1, 2, 3, 4], [2, 3, 5], [2, 3, 5], [3, 6], [3, 6], [3, 6], [3, 6]]))
    assert tiers.lookup([9, 1], 1, 3).chain() == (2, 3, 4)
    assert tiers.lookup([1, 2], 2, 2).chain() == (3, 4)
    assert tiers.lookup([1, 2], 1, 2).chain() == (3, 5)


def test_nothing_is_found_for_an_unknown_context_or_where_nothing_is_asked_for():
    tiers = LocalTiers(3, PriorTable.build([[1, 2, 3]]))
    assert tiers.lookup([7, 8, 9], 3, 8) is NOTHING
    assert tiers.lookup([], 3, 8) is NOTHING
    assert tiers.lookup([1, 2], 3, 0) is NOTHING
    assert tiers.lookup([1, 2], 0, 8) is NOTHING
    assert LocalTiers(3).lookup([1], 3, 8) is NOTHING


def test_a_lookup_takes_microseconds_however_large_the_prior_is():
    rng = random.Random(0)
    text = [int(rng.paretovariate(1)) % 1000 for _ in range(100_000)]
    tiers = LocalTiers(4, PriorTable.build([text[:50_000], text[50_000:]]))
    tiers.record(text[:1000])
    contexts = [text[end - 16 : end] for end in range(16, 1600, 16)]
    times = timeit.repeat(lambda: [tiers.lookup(context, 4, 10) for context in contexts], number=1, repeat=20)
    # The best of many runs reflects the machine's speed, not its load.
    assert min(times) / len(contexts) < 60e-6

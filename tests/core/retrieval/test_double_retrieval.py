"""What DOUBLE retrieves: the cases that its published code misses, and its parameters and ablations."""

from __future__ import annotations

import pytest

from outrider.core.params import TIERS, SamplingParams, Source
from outrider.core.retrieval.ngrams import NgramTier
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.prior import PriorTable
from outrider.core.tree import DraftTree
from tests.core.retrievers import Tiers, path_of, prior_of, retriever


def without(*tiers: Source) -> RetrievalPlan:
    """DOUBLE's ablation: all tiers but these."""
    return RetrievalPlan(tiers=tuple(tier for tier in TIERS if tier not in tiers))


# DOUBLE's published code cannot find much of what it stores (D1, D2, D5). These are the cases.


def test_a_continuation_may_be_shorter_than_a_phrase() -> None:
    assert path_of(retriever([1, 2, 3, 9, 1, 2]).guess((), 10)) == [3, 9, 1, 2, 3, 9, 1, 2, 3, 9]
    shared = NgramTier(4)
    shared.learn([7, 8, 1])
    assert path_of(retriever([7, 8], tiers=Tiers(shared=shared)).guess((), 10)) == [1], "one token is all there is"


def test_the_rejected_tier_finds_what_the_target_said_instead() -> None:
    session = retriever([5, 6, 7, 8], plan=without(Source.DYNAMIC))
    session.commit([2], 1)
    session.commit([5, 6, 7, 8], None)
    guess = session.guess((), 10)
    assert path_of(guess) == [2], "one token of a refused draft was known when it was stored"
    assert guess is not None
    assert guess.keys[0][0] is Source.REJECTED


def test_tokens_that_come_in_pieces_are_one_stream() -> None:
    session = retriever([4])
    for piece in ([5, 6], [7], [8, 9, 4], [5]):
        session.commit(piece, None)
    guess = session.guess((), 3)
    assert path_of(guess) == [6, 7, 8]
    assert guess is not None
    assert guess.match_len == 2, "the n-gram lies across three pieces"


def test_what_followed_often_stands_before_what_followed_once_and_lately_before_long_ago() -> None:
    assert path_of(retriever([1, 2, 3, 1, 2, 4, 1, 2, 3, 1, 2, 5, 1, 2]).guess((), 1)) == [3]
    assert path_of(retriever([1, 2, 3, 1, 2, 4, 1, 2]).guess((), 1)) == [4]


# Its parameters.


@pytest.mark.parametrize("length", [1, 2, 6, 10])
def test_contexts_are_as_long_as_the_plan_says(length: int) -> None:
    text = [*range(1, 11), 77, 0, *range(2, 11)]
    guess = retriever(text, plan=RetrievalPlan(length, length)).guess((), 1)
    assert guess is not None
    assert guess.match_len == min(length, 9)
    tree = DraftTree(text, 100)
    assert retriever(text, plan=RetrievalPlan(length, length)).phrase(tree.root, 1, 0.01)[0] == [77]


def test_longer_contexts_tell_apart_what_shorter_ones_do_not() -> None:
    committed = [9, 1, 2, 3, 4, 5, 70, 8, 1, 2, 3, 4, 5, 80, 8, 1, 2, 3, 4, 5, 80, 9, 1, 2, 3, 4, 5]
    assert path_of(retriever(committed, plan=RetrievalPlan(4)).guess((), 1)) == [80]
    assert path_of(retriever(committed, plan=RetrievalPlan(6)).guess((), 1)) == [70]


def test_a_tier_that_is_switched_off_is_neither_asked_nor_fed() -> None:
    shared = NgramTier(4)
    shared.learn([7, 8, 3])
    tiers = Tiers(PriorTable.build([[7, 8, 1]], 4), shared)
    text = [7, 8, 2, 7, 8]
    assert path_of(retriever(text, tiers=tiers).guess((), 1)) == [1]
    assert path_of(retriever(text, tiers=tiers, plan=without(Source.PRIOR)).guess((), 1)) == [2]
    assert path_of(retriever(text, tiers=tiers, plan=without(Source.PRIOR, Source.DYNAMIC)).guess((), 1)) == [3]
    local = (Source.PRIOR, Source.DYNAMIC, Source.SHARED)
    assert retriever(text, tiers=tiers, plan=without(*local)).guess((), 1) is None


def test_without_the_rejected_tier_the_prior_is_believed_against_the_evidence() -> None:
    session = retriever([5, 6, 7, 8], tiers=prior_of([5, 6, 7, 8, 1]), plan=without(Source.REJECTED))
    session.commit([2], 1)
    session.commit([5, 6, 7, 8], None)
    assert path_of(session.guess((), 1)) == [1]


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_without_noise_ranks_by_counts(seed: int) -> None:
    tiers = prior_of([5, 7, 8, 1], [5, 7, 8, 1], [5, 7, 8, 2])
    sampling = SamplingParams(seed=seed, temperature=1.0)
    plan = RetrievalPlan(is_ranked_by_noise=False)
    assert path_of(retriever([5, 7, 8], sampling=sampling, tiers=tiers, plan=plan).guess((), 1)) == [1]

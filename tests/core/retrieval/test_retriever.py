"""Retrieval in process: what is guessed, its claimed probability, and what is learned from the verdicts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from outrider.core.calibration import LEAST_RATE, RetrievalCalibration
from outrider.core.noise import gumbel
from outrider.core.params import TIERS, SamplingParams, Source
from outrider.core.retrieval.ngrams import NOTHING, Continuation, NgramTier
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.retriever import Retriever
from outrider.core.tree import DraftTree, Node
from tests.core.retrieval.retrievers import Tiers, path_of, prior_of, retriever


def test_what_the_session_has_said_before_is_guessed_again() -> None:
    guess = retriever([1, 2, 3, 4, 5, 9, 1, 2, 3]).guess((), 3)
    assert path_of(guess) == [4, 5, 9]
    assert guess is not None
    assert guess.match_len == 3
    assert {key[0] for key in guess.keys} == {Source.DYNAMIC}


def test_the_tokens_behind_the_committed_ones_belong_to_the_context() -> None:
    assert path_of(retriever([1, 2, 3, 4, 5, 9, 1]).guess([2, 3], 2)) == [4, 5]


def test_the_prior_is_found_as_soon_as_it_has_come() -> None:
    tiers = Tiers()
    session = retriever([7, 8], tiers=tiers)
    assert session.guess((), 4) is None
    tiers.prior = PriorTable.build([[7, 8, 1, 2]], 4)
    guess = session.guess((), 4)
    assert path_of(guess) == [1, 2]
    assert guess is not None
    assert guess.keys[0][0] is Source.PRIOR


def test_the_shared_tier_is_asked_as_well() -> None:
    shared = NgramTier(4)
    shared.learn([7, 8, 1])
    guess = retriever([7, 8], tiers=Tiers(shared=shared)).guess((), 4)
    assert guess is not None
    assert [key[0] for key in guess.keys] == [Source.SHARED]


def test_tokens_that_were_refused_in_the_middle_of_a_commit_stand_behind_what_came_before_them() -> None:
    in_one = retriever([1, 2, 3])
    in_one.commit([4, 6, 7, 9, 4, 5], [5, 8], 1)
    in_two = retriever([1, 2, 3])
    in_two.commit([4, 6], [5, 8])
    in_two.commit([7, 9, 4, 5])
    for session in (in_one, in_two):
        guess = session.guess((), 4)
        assert guess is not None
        assert (path_of(guess), guess.match_len, guess.keys[0][0]) == ([8], 2, Source.REJECTED)


def test_nothing_is_known_of_an_unseen_context() -> None:
    assert retriever([1, 2, 3]).guess((), 5) is None


@pytest.mark.parametrize("seed", range(5))
def test_above_temperature_0_the_noise_decides_between_tokens_that_followed(seed: int) -> None:
    documents = [[5, 7, 8, token, 50 + token] for token in (1, 2, 3)]
    sampling = SamplingParams(seed=seed, temperature=1.0)
    guess = retriever([5, 7, 8], sampling=sampling, tiers=prior_of(*documents)).guess((), 2)
    noise = gumbel(seed, 0, np.array([1, 2, 3]))
    best = 1 + int(np.argmax(noise))
    assert path_of(guess) == [best, 50 + best], "and what follows the preferred one is known, too"


def test_a_frequent_token_needs_less_noise() -> None:
    documents = [[5, 7, 8, 1]] * 9 + [[5, 7, 8, 2]]
    tiers = prior_of(*documents)
    firsts = [
        path_of(retriever([5, 7, 8], sampling=SamplingParams(seed=seed), tiers=tiers).guess((), 1))[0]
        for seed in range(300)
    ]
    assert 0.8 < firsts.count(1) / 300 < 0.97


def planted(session: Retriever, committed: list[int], max_len: int = 4) -> tuple[DraftTree, list[Node]]:
    tree = DraftTree(committed, 100)
    session.grow(tree, tree.root, (), max_len)
    return tree, tree.best_chain(max_len)


def test_guesses_become_nodes_of_their_tier_with_calibrated_probabilities() -> None:
    calibration = RetrievalCalibration()
    committed = [1, 2, 3, 4, 9, 1, 2, 3]
    _, chain = planted(retriever(committed, calibration=calibration), committed)
    assert [node.token_id for node in chain] == [4, 9, 1, 2]
    assert {node.source for node in chain} == {Source.DYNAMIC}
    assert chain[0].logprob == pytest.approx(math.log(calibration.rate(calibration.key(Source.DYNAMIC, 3, 1.0))))


def test_what_the_target_accepts_becomes_more_probable_and_what_it_refuses_less() -> None:
    calibration = RetrievalCalibration()
    committed = [1, 2, 3, 4, 9, 1, 2, 3]
    session = retriever(committed, calibration=calibration)
    _, chain = planted(session, committed)
    keys = [calibration.key(Source.DYNAMIC, 3 + depth, 1.0) for depth in range(3)]
    before = [calibration.rate(key) for key in keys]
    session.judge(chain, 1)
    after = [calibration.rate(key) for key in keys]
    assert after[0] > before[0]
    assert after[1] < before[1]
    assert after[2] == before[2], "the target never judged what stood behind the refused one"


def test_a_node_that_the_draft_model_has_taken_over_is_not_counted_as_retrieved() -> None:
    calibration = RetrievalCalibration()
    committed = [1, 2, 3, 4, 9, 1, 2, 3]
    session = retriever(committed, calibration=calibration)
    tree, chain = planted(session, committed)
    tree.add(tree.root, chain[0].token_id, -0.1, Source.DRAFT)
    key = calibration.key(Source.DYNAMIC, 3, 1.0)
    before = calibration.rate(key)
    session.judge(chain, 1)
    assert calibration.rate(key) == before


def test_rates_never_become_certain() -> None:
    calibration = RetrievalCalibration(weight=0.5)
    key = calibration.key(Source.PRIOR, 3, 0.95)
    for agreed, bound in ((True, 1 - LEAST_RATE), (False, LEAST_RATE)):
        for _ in range(100):
            calibration.add(key, agreed)
        assert calibration.rate(key) == bound


def test_a_phrase_ends_where_its_path_gets_improbable_and_learns_from_the_draft_model() -> None:
    calibration = RetrievalCalibration(weight=1.0)
    committed = [1, 2, 3, 4, 9, 1, 2, 3]
    session, root = retriever(committed, calibration=calibration), DraftTree(committed, 100).root
    token_ids, keys = session.phrase(root, 4, 0.45)
    assert token_ids == [4, 9, 1]
    session.judge_phrase(keys, 0)
    assert session.phrase(root, 4, 0.45) == ([], [])


def test_a_phrase_behind_a_chain_has_the_chain_in_its_context() -> None:
    committed = [1, 2, 3, 4, 9, 8, 1]
    tree = DraftTree(committed, 100)
    tip = tree.root
    for token_id in (2, 3):
        child = tree.add(tip, token_id, -0.1, Source.DRAFT)
        assert child is not None
        tip = child
    assert retriever(committed).phrase(tip, 3, 0.01)[0] == [4, 9, 8]


def test_a_datastore_s_answer_is_a_guess_like_any_other() -> None:
    session = retriever([1, 2])
    found = Continuation(6, Source.RING, (0, 1, 2), (7, 8, 5), (9, 4, 1))
    guess = session.from_datastore(found, 2)
    assert guess is not None
    tree = DraftTree([1, 2], 100)
    session.plant(tree, tree.root, guess)
    assert [node.token_id for node in tree.best_chain(3)] == [7, 8]
    assert sorted(node.token_id for node in tree.live_nodes()) == [5, 7, 8]
    assert session.from_datastore(NOTHING, 2) is None


def test_a_guess_that_nobody_verified_is_right_or_wrong_all_the_same() -> None:
    calibration = RetrievalCalibration()
    committed = [1, 2, 3, 4, 9, 1, 2, 3]
    key = calibration.key(Source.DYNAMIC, 3, 1.0)
    session = retriever(committed, calibration=calibration)
    tree, _ = planted(session, committed)
    before = calibration.rate(key)
    session.observe(len(committed), 4)
    assert calibration.rate(key) > before
    before = calibration.rate(key)
    session.observe(len(committed), 5)
    assert calibration.rate(key) < before
    before = calibration.rate(key)
    session.observe(len(committed) + 20, 4)
    assert calibration.rate(key) == before, "nothing was guessed there"
    assert tree.num_nodes == 4


def without(*tiers: Source) -> RetrievalPlan:
    """DOUBLE's ablation: all tiers but these."""
    return RetrievalPlan(sources=tuple(tier for tier in TIERS if tier not in tiers))


# REST: all that the prior knows, as a tree.


def test_the_prior_s_continuations_are_a_tree_whose_nodes_weigh_by_their_counts() -> None:
    documents = [[5, 7, 8, 1, 4], [5, 7, 8, 1, 4], [5, 7, 8, 1, 3], [5, 7, 8, 2, 9], [7, 8, 2, 9]]
    session = retriever([5, 7, 8], tiers=prior_of(*documents), plan=RetrievalPlan(sources=(Source.PRIOR,)))
    guess = session.tree(2)
    assert guess is not None
    tree = DraftTree([5, 7, 8], 100)
    session.plant(tree, tree.root, guess)
    first = tree.root.children
    assert guess.match_len == 3
    assert {token_id: sorted(node.children) for token_id, node in first.items()} == {1: [3, 4], 2: [9]}
    assert first[1].logprob > first[2].logprob, "three of four documents"
    assert first[1].children[4].logprob > first[1].children[3].logprob
    assert {node.source for node in tree.live_nodes()} == {Source.PRIOR}
    assert [node.token_id for node in tree.best_subtree(2, 2)] == [1, 4]


def test_each_source_takes_part_in_a_tree_and_the_tiers_count_by_their_longest_match() -> None:
    sources = (Source.POOL, Source.DYNAMIC, Source.PRIOR)
    session = retriever([1, 2, 3, 4, 5, 6, 1, 2], tiers=prior_of([2, 9]), plan=RetrievalPlan(sources=sources))
    guess = session.tree(1)
    assert guess is not None
    assert guess.match_len == 2
    assert guess.token_ids == [3], "pool and session say the same, and the prior's match is shorter"
    assert guess.keys[0][0] is Source.DYNAMIC, "surer, as two tokens have matched"


# DOUBLE's published code cannot find much of what it stores (D1, D2, D5). These are the cases.


def test_a_continuation_may_be_shorter_than_a_phrase() -> None:
    assert path_of(retriever([1, 2, 3, 9, 1, 2]).guess((), 10)) == [3, 9, 1, 2, 3, 9, 1, 2, 3, 9]
    shared = NgramTier(4)
    shared.learn([7, 8, 1])
    assert path_of(retriever([7, 8], tiers=Tiers(shared=shared)).guess((), 10)) == [1], "one token is all there is"


def test_a_refused_draft_is_offered_again_where_the_text_comes_to_its_tokens() -> None:
    session = retriever([5, 6, 7, 8])
    session.commit([2], [1, 3, 4])
    session.commit([7, 8, 1])
    guess = session.guess((), 10)
    assert guess is not None
    assert path_of(guess) == [3, 4]
    assert guess.keys[0][0] is Source.REJECTED
    assert session.guess((), 10) is not None, "and again"
    assert path_of(retriever([5, 6, 7, 8, 2, 7, 8]).guess((), 1)) == [2]


def test_without_the_rejected_tier_refused_drafts_are_forgotten() -> None:
    session = retriever([5, 6, 7, 8], plan=without(Source.REJECTED))
    session.commit([2], [1, 3, 4])
    session.commit([7, 8, 1])
    assert session.guess((), 10) is None


def test_tokens_that_come_in_pieces_are_one_stream() -> None:
    session = retriever([4])
    for piece in ([5, 6], [7], [8, 9, 4], [5]):
        session.commit(piece)
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


@pytest.mark.parametrize("seed", range(3))
def test_a_plan_without_noise_ranks_by_counts(seed: int) -> None:
    tiers = prior_of([5, 7, 8, 1], [5, 7, 8, 1], [5, 7, 8, 2])
    sampling = SamplingParams(seed=seed, temperature=1.0)
    plan = RetrievalPlan(is_ranked_by_noise=False)
    assert path_of(retriever([5, 7, 8], sampling=sampling, tiers=tiers, plan=plan).guess((), 1)) == [1]

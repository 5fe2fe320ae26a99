"""The pool of n-grams: what it keeps, how it branches, and which parts of a refused draft it learns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.params import InvalidParameter, Source
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.pool import MAX_PER_KEY, NGRAM_LEN, NgramPool, agreed_phrases
from outrider.core.tree import DraftTree, Node
from tests.core.retrieval.retrievers import retriever

PLAN = RetrievalPlan(sources=(Source.POOL,))
texts = st.lists(st.integers(0, 3), max_size=40)


@given(texts, st.integers(2, 5), st.integers(1, 4))
def test_the_latest_different_ngrams_of_each_token_are_kept_the_newest_first(
    text: list[int], ngram_len: int, max_per_key: int
) -> None:
    pool = NgramPool(ngram_len, max_per_key)
    pool.record(text)
    newest: dict[int, list[tuple[int, ...]]] = {}
    for start in reversed(range(len(text) - ngram_len + 1)):
        of_key = newest.setdefault(text[start], [])
        tail = tuple(text[start + 1 : start + ngram_len])
        if tail not in of_key:
            of_key.append(tail)
    for key in range(4):
        assert list(pool.ngrams(key)) == newest.get(key, [])[:max_per_key]


@given(st.lists(texts, max_size=6))
def test_tokens_that_come_in_pieces_are_one_stream(pieces: list[list[int]]) -> None:
    whole, pool = NgramPool(), NgramPool()
    whole.record([token_id for piece in pieces for token_id in piece])
    for piece in pieces:
        pool.record(piece)
    assert all(pool.ngrams(key) == whole.ngrams(key) for key in range(4))


@given(st.lists(texts, max_size=8))
def test_no_ngram_is_the_beginning_of_another_and_none_is_too_long(phrases: list[list[int]]) -> None:
    pool = NgramPool()
    for phrase in phrases:
        pool.learn(phrase)
    for key in range(4):
        known = pool.ngrams(key)
        assert len(known) <= MAX_PER_KEY
        assert all(1 <= len(ngram) < NGRAM_LEN for ngram in known)
        assert not any(a != b and a[: len(b)] == b for a in known for b in known)


def test_a_shorter_phrase_makes_a_longer_one_of_the_same_beginning_the_newest() -> None:
    pool = NgramPool()
    pool.learn([1, 2, 3, 4])
    pool.learn([1, 7, 8])
    assert pool.ngrams(1) == ((7, 8), (2, 3, 4))
    pool.learn([1, 2, 3])
    assert pool.ngrams(1) == ((2, 3, 4), (7, 8))
    pool.learn([5])
    assert pool.ngrams(5) == ()


@pytest.mark.parametrize(("sizes", "field"), [((1, 4), "ngram_len"), ((4, 0), "max_per_key")])
def test_a_pool_without_room_is_refused(sizes: tuple[int, int], field: str) -> None:
    with pytest.raises(InvalidParameter, match=f"{field} must be >= "):
        NgramPool(*sizes)


def test_candidates_are_branches_at_the_root_and_the_newest_comes_first() -> None:
    committed = [1, 2, 3, 4, 5, 6, 1, 2, 9, 9, 9, 9, 1, 7, 7, 7, 7, 7, 1]
    session = retriever(committed, plan=PLAN)
    guess = session.tree(10)
    assert guess is not None
    tree = DraftTree(committed, 100)
    session.plant(tree, tree.root, guess)
    assert set(tree.root.children) == {2, 7}
    assert set(tree.root.children[2].children) == {3, 9}
    assert {node.source for node in tree.live_nodes()} == {Source.POOL}
    assert tree.num_nodes == 5 + 1 + 4 + 4
    assert guess.token_ids[0] == 2, "two of three n-grams begin with it"
    newest = retriever([*committed[:6], *committed[12:]], plan=PLAN).tree(10)
    assert newest is not None
    assert newest.token_ids[0] == 7, "one of each: the newer one"


def test_the_tokens_behind_the_committed_ones_are_a_key_too() -> None:
    session = retriever([1, 2, 3, 4, 5, 6, 7, 8], plan=PLAN)
    guess = session.guess([1], 10)
    assert guess is not None
    assert guess.token_ids == [2, 3, 4, 5, 6]
    assert session.guess([99], 10) is None


def planted(*paths: list[int]) -> tuple[DraftTree, list[Node]]:
    """A tree with paths below its root, and its nodes, parents before children."""
    tree = DraftTree([0], 100)
    for path in paths:
        tip = tree.root
        for token_id in path:
            node = tree.add(tip, token_id, -0.1, Source.POOL)
            assert node is not None
            tip = node
    return tree, list(tree.live_nodes())


def test_the_part_of_a_refused_chain_that_the_target_agrees_with_is_a_phrase() -> None:
    tree, nodes = planted([1, 2, 3, 4, 5])
    # 1 is accepted, 2 is refused for 9. After 2 the target agrees with the drafted 3, after 3 it disagrees with 4.
    assert agreed_phrases(tree.root, nodes, [1, 9, 3, 8, 5, 6]) == [[2, 3, 8], [4, 5, 6]]


def test_what_was_accepted_or_disagreed_with_is_no_phrase() -> None:
    tree, nodes = planted([1, 2, 3])
    assert agreed_phrases(tree.root, nodes, [1, 2, 3, 4]) == []
    assert agreed_phrases(tree.root, nodes, [9, 9, 9, 9]) == []


def test_every_refused_branch_may_have_a_phrase() -> None:
    tree, nodes = planted([1, 2], [3, 4], [5, 6])
    assert [node.token_id for node in nodes] == [1, 3, 5, 2, 4, 6]
    # The root's draw is 3, so that path is accepted as far as the target agrees, and is no phrase.
    assert agreed_phrases(tree.root, nodes, [3, 2, 4, 6, 7, 8, 9]) == [[1, 2, 7], [5, 6, 9]]


def test_under_the_ratio_rule_rows_behind_a_refusal_have_no_draws() -> None:
    tree, nodes = planted([1, 2, 3])
    assert agreed_phrases(tree.root, nodes, [1, 9]) == []

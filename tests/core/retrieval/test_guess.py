"""Trees of guesses: how far they grow, how several are merged, and which of equal guesses counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.calibration import RetrievalCalibration
from outrider.core.params import Source
from outrider.core.retrieval.guess import Followers, Guess, grown, merged
from outrider.core.retrieval.ngrams import Follower

CALIBRATION = RetrievalCalibration()


class Everywhere:
    """Gives the same answer after every path, and remembers the paths that it was asked about."""

    def __init__(self, *followers: Follower, max_num_nodes: int = 40, width: int = 8) -> None:
        self.max_num_nodes, self._followers, self._width = max_num_nodes, followers, width
        self.asked: list[tuple[int, ...]] = []

    def followers(self, path: Sequence[int], depth: int) -> Followers | None:
        self.asked.append(tuple(path[len(path) - depth :]))
        return Followers(Source.PRIOR, 2, self._followers)

    def num_children(self, depth: int, rank: int) -> int:
        return max(0, self._width - rank)


def by_weight(followers: Sequence[Follower], position: int) -> list[tuple[int, float]]:
    total = sum(weight for _, weight in followers)
    return [(index, weight / total) for index, (_, weight) in enumerate(followers)]


def grow(branches: Everywhere, max_depth: int = 5, *, is_wide: bool = True) -> Guess:
    return grown(branches, [1, 2], 2, by_weight, CALIBRATION, max_depth=max_depth, is_wide=is_wide)


def depths_of(guess: Guess) -> list[int]:
    depths: list[int] = []
    for parent in guess.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


@given(st.integers(1, 30), st.integers(1, 5), st.integers(1, 4))
def test_a_tree_keeps_its_bounds_and_parents_come_first(max_num_nodes: int, max_depth: int, width: int) -> None:
    guess = grow(Everywhere((7, 5), (8, 3), (9, 1), max_num_nodes=max_num_nodes, width=width), max_depth)
    assert 1 <= len(guess.token_ids) <= max_num_nodes
    assert max(depths_of(guess)) <= max_depth
    assert all(parent < index for index, parent in enumerate(guess.parents))
    assert len(set(zip(guess.parents, guess.token_ids, strict=True))) == len(guess.token_ids)


def test_the_most_probable_paths_are_expanded_first() -> None:
    branches = Everywhere((7, 95), (8, 5), max_num_nodes=6)
    grow(branches)
    assert branches.asked == [(), (7,), (7, 7)]


def test_a_path_has_one_token_at_each_place() -> None:
    guess = grow(Everywhere((7, 3), (8, 2)), 4, is_wide=False)
    assert (guess.token_ids, guess.parents, guess.match_len) == ([7, 7, 7, 7], [-1, 0, 1, 2], 2)


def test_the_rank_of_a_node_is_that_of_its_whole_path() -> None:
    guess = grow(Everywhere((7, 4), (8, 3), (9, 2), width=3), 3)
    ranks = {-1: 0}
    for index, (parent, token_id) in enumerate(zip(guess.parents, guess.token_ids, strict=True)):
        ranks[index] = ranks[parent] + (token_id - 7)
    above = [-1, *(index for index, depth in enumerate(depths_of(guess)) if depth < 3)]
    assert [guess.parents.count(index) for index in above] == [max(0, 3 - ranks[index]) for index in above]
    assert len(guess.token_ids) == 3 + 6 + 10


def guess_of(source: Source, match_len: int, *tokens: int) -> Guess:
    """A path of tokens that all have the same key."""
    guess = Guess(match_len, [], [], [])
    for index, token_id in enumerate(tokens):
        guess.add(index - 1, token_id, (source, match_len, 2))
    return guess


def test_several_guesses_become_one_tree_in_which_each_path_stands_once() -> None:
    whole = merged(
        [guess_of(Source.POOL, 1, 5, 6), guess_of(Source.RECYCLED, 1, 5, 7), Guess(0, [], [], [])], CALIBRATION
    )
    assert whole is not None
    assert (whole.token_ids, whole.parents) == ([5, 6, 7], [-1, 0, 0])
    assert [key[0] for key in whole.keys] == [Source.POOL, Source.POOL, Source.RECYCLED]
    assert merged([Guess(0, [], [], [])], CALIBRATION) is None


@pytest.mark.parametrize("order", [(Source.POOL, Source.RECYCLED), (Source.RECYCLED, Source.POOL)])
def test_of_equals_the_preferred_source_counts_and_of_others_the_surer_one(order: tuple[Source, Source]) -> None:
    first, second = order
    equal = merged([guess_of(first, 1, 5), guess_of(second, 1, 5), guess_of(second, 1, 4)], CALIBRATION)
    assert equal is not None
    assert equal.keys[0][0] is first
    scores = equal.logprobs(CALIBRATION)
    assert scores[0] > scores[1], "another token of a later source is worth less, by next to nothing"
    assert scores[0] - scores[1] < 1e-5
    surer = merged([guess_of(first, 1, 5), guess_of(second, 4, 5)], CALIBRATION)
    assert surer is not None
    assert (surer.keys[0][0], surer.match_len) == (second, 4)

"""Guessed continuations: small trees of tokens with the calibration key of each, and their growth from the followers of
paths.

A source of trees says which tokens may follow a path (`Branches`). The rest of the growth is here: the caller ranks
siblings, the calibration says how probable a path is, and the most probable path is expanded first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Protocol

from outrider.core.calibration import RetrievalCalibration, RetrievalKey
from outrider.core.params import Source
from outrider.core.retrieval.ngrams import Follower
from outrider.core.tree import TokenId

PREFERENCE = 1e-6
"""Nats between the scores of two guesses of equal worth from different sources. Far less than a single verdict
changes."""

Ranking = Callable[[Sequence[Follower], int], list[tuple[int, float]]]
"""Ranks the followers of one n-gram for a position: returns their indices and shares, the best first."""


@dataclass(frozen=True, slots=True)
class Followers:
    """Tokens that may follow a path, with their weights: one at least, the heaviest first."""

    source: Source
    match_len: int
    """Length of the path's end that they depend on, as calibration counts it."""
    tokens: Sequence[Follower]


class Branches(Protocol):
    """Knows the possible followers of a path of tokens: a source that trees grow from."""

    max_num_nodes: int
    """Most nodes of a tree."""

    def followers(self, path: Sequence[TokenId], depth: int) -> Followers | None:
        """Returns the possible followers of a path; None if none are known. The path's last `depth` tokens are
        guessed."""

    def num_children(self, depth: int, rank: int) -> int:
        """Returns the most children of a node `depth` tokens below the committed ones. The node's rank is the sum of
        the ranks of the tokens on its path, each among its siblings, from 0."""


@dataclass(slots=True)
class Guess:
    """A guessed path, with alternatives. The lists run in parallel. Parents come before children, and more probable
    siblings before less probable ones."""

    match_len: int
    parents: list[int]
    """Index of the parent in these lists. -1 means the end of the context."""
    token_ids: list[TokenId]
    keys: list[RetrievalKey]
    """Calibration key of each token."""
    preferences: list[int] = field(default_factory=list)
    """Place of each token's source in the order of preference; empty means that all have the same."""

    def add(self, parent: int, token_id: TokenId, key: RetrievalKey) -> int:
        """Adds a token. Returns its index."""
        self.parents.append(parent)
        self.token_ids.append(token_id)
        self.keys.append(key)
        return len(self.token_ids) - 1

    def logprobs(self, calibration: RetrievalCalibration) -> list[float]:
        """Returns the log-probability of each token after its parent; among equals, slightly more for the preferred
        source."""
        preferences = self.preferences or [0] * len(self.keys)
        return [
            math.log(calibration.rate(key)) - PREFERENCE * preference
            for key, preference in zip(self.keys, preferences, strict=True)
        ]

    def path(self) -> list[TokenId]:
        """Returns the most probable tokens in a row."""
        return [self.token_ids[index] for index in self.path_indices()]

    def path_indices(self) -> list[int]:
        """Returns the places of these tokens in the lists."""
        indices: list[int] = []
        tip = -1
        for index, parent in enumerate(self.parents):
            if parent == tip:
                indices.append(index)
                tip = index
        return indices


def grown(
    branches: Branches,
    context: Sequence[TokenId],
    position: int,
    rank: Ranking,
    calibration: RetrievalCalibration,
    *,
    max_depth: int,
    is_wide: bool,
) -> Guess:
    """Grows a guess after a context, the most probable paths first.

    Args:
        branches: Gives the followers of paths.
        context: The last tokens before the guess.
        position: Index of the first guessed token among all tokens of the text.
        rank: Ranks siblings.
        calibration: Says how probable a token is.
        max_depth: Most tokens in a row.
        is_wide: True for a tree; False for only the best token after each, so one path.

    Returns:
        A guess that may be empty.
    """
    guess = Guess(0, [], [], [])
    paths: dict[int, tuple[TokenId, ...]] = {-1: ()}
    ranks = {-1: 0}
    # The index breaks ties: a node that was found earlier is expanded earlier.
    heap: list[tuple[float, int]] = [(0.0, -1)]
    while heap and len(guess.token_ids) < branches.max_num_nodes:
        cost, parent = heappop(heap)
        path = paths[parent]
        depth = len(path)
        found = branches.followers((*context, *path), depth) if depth < max_depth else None
        if found is None:
            continue
        if parent < 0:
            guess.match_len = found.match_len
        ranked = rank(found.tokens, position + depth)
        width = branches.num_children(depth, ranks[parent]) if is_wide else 1
        room = branches.max_num_nodes - len(guess.token_ids)
        for place, (index, share) in enumerate(ranked[: min(width, room)]):
            token_id = found.tokens[index][0]
            key = calibration.key(found.source, found.match_len, share, is_fine=True)
            child = guess.add(parent, token_id, key)
            paths[child], ranks[child] = (*path, token_id), ranks[parent] + place
            heappush(heap, (cost - math.log(calibration.rate(key)), child))
    return guess


def merged(guesses: Sequence[Guess], calibration: RetrievalCalibration) -> Guess | None:
    """Returns one guess with all paths of several, the preferred one first; None if all are empty.

    A token in two guesses has the key of the guess that is surer of it; among equals, that of the preferred guess.
    """
    whole = Guess(0, [], [], [])
    places: dict[tuple[int, TokenId], int] = {}
    for preference, guess in enumerate(guesses):
        whole.match_len = max(whole.match_len, guess.match_len)
        moved = {-1: -1}
        for index, (parent, token_id, key) in enumerate(zip(guess.parents, guess.token_ids, guess.keys, strict=True)):
            above = moved[parent]
            place = places.get((above, token_id))
            if place is None:
                place = places[above, token_id] = whole.add(above, token_id, key)
                whole.preferences.append(preference)
            elif calibration.rate(key) > calibration.rate(whole.keys[place]):
                whole.keys[place], whole.preferences[place] = key, preference
            moved[index] = place
    return whole if whole.token_ids else None

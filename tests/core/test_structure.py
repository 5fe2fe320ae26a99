"""Structured output under speculation: the text of a target that draws only from the allowed tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.methods import BEST_FIRST
from outrider.core.noise import gumbel
from outrider.core.params import SamplingParams, Source
from outrider.core.session import FinishReason, Session, SessionSpec
from outrider.core.speculation import SpeculationParams
from outrider.core.structure import Matcher, StructuredText
from outrider.core.tree import DraftTree, path_to
from tests.support.trees import add_path, output_of

VOCAB_SIZE = 6
EOS = 5
PROMPT = (0, 1)
SEED = 7

languages = st.sets(st.lists(st.integers(0, EOS - 1), min_size=1, max_size=6).map(tuple), min_size=1, max_size=8)
"""Allowed texts: each language consists of a few."""


class TrieMatcher:
    """Allows a few texts, token by token, and the end after each of them."""

    def __init__(self, texts: set[tuple[int, ...]]) -> None:
        self._texts = texts
        self._consumed: list[int] = []

    def allowed(self) -> set[int]:
        length, begun = len(self._consumed), tuple(self._consumed)
        following = {text[length] for text in self._texts if text[:length] == begun and len(text) > length}
        return following | ({EOS} if begun in self._texts else set())

    def consume(self, token_id: int) -> bool:
        if self._consumed[-1:] == [EOS] or token_id not in self.allowed():
            return False
        self._consumed.append(token_id)
        return True

    def rollback(self, num_tokens: int) -> None:
        assert num_tokens <= len(self._consumed)
        del self._consumed[len(self._consumed) - num_tokens :]

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        count = next((i for i, token_id in enumerate(token_ids) if not self.consume(token_id)), len(token_ids))
        self.rollback(count)
        return count

    def forced(self) -> list[int]:
        return []

    @property
    def is_over(self) -> bool:
        return self._consumed[-1:] == [EOS] or self.allowed() == {EOS}


def scores(path: Sequence[int]) -> npt.NDArray[np.float64]:
    """The perturbed logits of the token after a text: those of a model, with the noise of the token's index."""
    logits = np.random.default_rng([*path, 1]).normal(0, 1.5, VOCAB_SIZE)
    return logits + gumbel(SEED, len(path) - len(PROMPT), np.arange(VOCAB_SIZE))


def best(path: Sequence[int], allowed: set[int]) -> int:
    return max(allowed, key=lambda token_id: float(scores(path)[token_id]))


def expected_text(texts: set[tuple[int, ...]]) -> list[int]:
    """The definition: each token is the best of the allowed ones."""
    matcher, output = TrieMatcher(texts), list[int]()
    while not matcher.is_over:
        token_id = best([*PROMPT, *output], matcher.allowed())
        if token_id == EOS:
            break
        assert matcher.consume(token_id)
        output.append(token_id)
    return output


def session_of(texts: set[tuple[int, ...]]) -> Session:
    spec = SessionSpec(
        "s",
        PROMPT,
        SamplingParams(seed=SEED),
        SpeculationParams(BEST_FIRST, 6),
        VOCAB_SIZE,
        max_tokens=20,
        stop_token_ids=frozenset({EOS}),
        matcher=TrieMatcher(texts),
    )
    return Session(spec)


def run(session: Session, drafts: random.Random, *, redraws_all: bool) -> list[int]:
    """Runs rounds with random drafts and arbitrary sub-trees, until the end."""
    structured = session.structured
    assert structured is not None
    while session.finish_reason is None:
        for _ in range(drafts.randrange(4)):
            path = [drafts.randrange(VOCAB_SIZE) for _ in range(drafts.randrange(1, 6))]
            add_path(session.tree, len(session.committed), path, -1.0, Source.DRAFT)
        nodes = session.next_subtree(12)
        while structured.prune(nodes):
            nodes = session.next_subtree(12)
        paths = [[*session.committed], *([*session.committed, *path_to(node, session.tree.root)] for node in nodes)]
        draws = [best(path, set(range(VOCAB_SIZE))) for path in paths]

        def redraw(row: int, matcher: Matcher, paths: list[list[int]] = paths) -> int:
            assert isinstance(matcher, TrieMatcher)
            return best(paths[row], matcher.allowed())

        session.apply(nodes, structured.settled(nodes, draws, redraw, redraws_all=redraws_all))
    return output_of(session)


@given(texts=languages, seed=st.integers(0, 1000), redraws_all=st.booleans())
def test_the_text_is_drawn_from_the_allowed_tokens_whatever_was_drafted(
    texts: set[tuple[int, ...]], seed: int, redraws_all: bool
) -> None:
    session = session_of(texts)
    output = run(session, random.Random(seed), redraws_all=redraws_all)
    assert tuple(output) in texts
    assert output == expected_text(texts)
    assert session.finish_reason is FinishReason.STOP


@given(texts=languages, path=st.lists(st.integers(0, EOS), min_size=1, max_size=6))
def test_what_is_forbidden_is_removed_and_nobody_brings_it_back(texts: set[tuple[int, ...]], path: list[int]) -> None:
    tree = DraftTree(PROMPT, VOCAB_SIZE)
    structured = StructuredText(TrieMatcher(texts), tree)
    for _ in range(2):
        add_path(tree, len(PROMPT), path, -1.0, Source.DRAFT)
        structured.prune(list(tree.live_nodes()))
        assert [node.token_id for node in tree.live_nodes()] == path[: TrieMatcher(texts).num_allowed(path)]


def test_a_path_is_asked_about_once_and_not_for_each_of_its_nodes() -> None:
    asked: list[list[int]] = []

    class Asked(TrieMatcher):
        def num_allowed(self, token_ids: Sequence[int]) -> int:
            asked.append(list(token_ids))
            return super().num_allowed(token_ids)

    tree = DraftTree(PROMPT, VOCAB_SIZE)
    structured = StructuredText(Asked({(1, 2, 3, 4, 0)}), tree)
    for path in ([1, 2, 3, 4], [1, 2, 4], [4, 4, 4]):
        add_path(tree, len(PROMPT), path, -1.0, Source.DRAFT)
    assert structured.prune(list(tree.live_nodes()))
    assert sorted(asked) == [[1, 2, 3, 4], [1, 2, 4], [4, 4, 4]]
    assert [path_to(node, tree.root) for node in tree.live_nodes()] == [[1], [1, 2], [1, 2, 3], [1, 2, 3, 4]]


def test_a_matcher_that_was_moved_behind_a_path_comes_back() -> None:
    tree = DraftTree(PROMPT, VOCAB_SIZE)
    matcher = TrieMatcher({(1, 2, 3)})
    structured = StructuredText(matcher, tree)
    assert structured.behind([1, 2]) is matcher
    matcher.rollback(2)
    assert structured.behind([1, 4]) is None
    assert matcher.allowed() == {1}

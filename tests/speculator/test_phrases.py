"""Phrases after a draft chain: how long they are, when there are none, and what they learn."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from outrider.core.calibration import RetrievalCalibration, RetrievalKey
from outrider.core.params import SamplingParams, Source
from outrider.core.retrieval.ngrams import NgramTier
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.prior import PriorTable
from outrider.core.tree import DraftTree
from outrider.speculator.phrases import MAX_SKIPPED, Phrases

TEXT = [1, 2, 3, *range(10, 40)]
PLAN = RetrievalPlan()


@dataclass
class Copies:
    prior: PriorTable | None
    shared: NgramTier | None = None


class Untaught(RetrievalCalibration):
    """Learns nothing from guesses that were wrong."""

    def add(self, key: RetrievalKey, agreed: bool) -> None:
        pass


def phrases_of(
    plan: RetrievalPlan | None = PLAN,
    committed: tuple[int, ...] = (5, 1, 2, 3),
    calibration: RetrievalCalibration | None = None,
) -> tuple[Phrases, DraftTree]:
    tree = DraftTree(committed, 100)
    greedy = SamplingParams(temperature=0.0)
    tiers = Copies(PriorTable.build([TEXT], 4))
    phrases = Phrases(tree, len(committed), greedy, calibration or RetrievalCalibration(), tiers)
    phrases.use(plan)
    return phrases, tree


def certain(phrases: Phrases, tree: DraftTree) -> None:
    """Teaches that phrases are always right."""
    for _ in range(100):
        phrases.judge(len(phrases.behind(tree.root, 10)))


@pytest.mark.parametrize("length", [1, 3, 16])
def test_a_phrase_is_at_most_as_long_as_was_asked_for(length: int) -> None:
    phrases, tree = phrases_of(replace(PLAN, max_phrase_len=length))
    certain(phrases, tree)
    assert phrases.behind(tree.root, 100) == tuple(TEXT[3 : 3 + length])
    assert phrases.behind(tree.root, 2) == tuple(TEXT[3 : 3 + min(length, 2)]), "nor longer than there is room for"
    assert phrases.behind(tree.root, 0) == ()


def test_without_calibration_every_phrase_is_as_long_as_it_may_be_and_none_is_left_out() -> None:
    phrases, tree = phrases_of(replace(PLAN, max_phrase_len=10, is_calibrated=False))
    for _ in range(2 * MAX_SKIPPED):
        assert phrases.behind(tree.root, 100) == tuple(TEXT[3:13])
        phrases.judge(0)


def test_phrases_get_longer_as_they_are_accepted() -> None:
    phrases, tree = phrases_of(replace(PLAN, max_phrase_len=16))
    first = phrases.behind(tree.root, 100)
    certain(phrases, tree)
    assert len(phrases.behind(tree.root, 100)) > len(first) > 0


def test_after_each_phrase_that_was_refused_one_more_forward_goes_without() -> None:
    phrases, tree = phrases_of(calibration=Untaught())
    pauses = []
    for _ in range(MAX_SKIPPED + 2):
        assert phrases.behind(tree.root, 10)
        phrases.judge(0)
        pause = 0
        while not phrases.behind(tree.root, 10):
            pause += 1
        pauses.append(pause)
    assert pauses == [*range(1, MAX_SKIPPED + 1), MAX_SKIPPED, MAX_SKIPPED]


def test_a_tier_that_is_switched_off_gives_no_phrase() -> None:
    phrases, tree = phrases_of(replace(PLAN, sources=(Source.DYNAMIC,)))
    assert phrases.behind(tree.root, 10) == ()


def test_without_a_plan_there_are_no_phrases_but_what_is_said_is_learned() -> None:
    phrases, tree = phrases_of()
    phrases.use(None)
    assert phrases.behind(tree.root, 10) == ()
    for token_id in (77, 78, 79, 77):
        phrases.commit([token_id])
        tree.commit([token_id])
    phrases.use(PLAN)
    assert phrases.behind(tree.root, 1) == (78,)


def test_whoever_begins_to_retrieve_later_knows_all_that_was_said_before() -> None:
    phrases, tree = phrases_of(None)
    phrases.commit([77, 78, 79, 77])
    tree.commit([77, 78, 79, 77])
    assert phrases.behind(tree.root, 2) == ()
    phrases.use(PLAN)
    assert phrases.behind(tree.root, 1) == (78,)


def test_another_plan_looks_up_longer_contexts() -> None:
    committed = (9, 1, 2, 3, 4, 5, 70, 8, 1, 2, 3, 4, 5, 80, 8, 1, 2, 3, 4, 5, 80, 9, 1, 2, 3, 4, 5)
    phrases, tree = phrases_of(PLAN, committed)
    assert phrases.behind(tree.root, 1) == (80,)
    phrases.use(replace(PLAN, max_match_len=6))
    assert phrases.behind(tree.root, 1) == (70,)

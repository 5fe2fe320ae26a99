"""Retrievers over tiers that a test has filled."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.core.calibration import RetrievalCalibration
from outrider.core.params import SamplingParams
from outrider.core.retrieval.ngrams import NgramTier
from outrider.core.retrieval.plan import RetrievalPlan
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.retriever import EVERYTHING, Guess, Retriever

GREEDY = SamplingParams(temperature=0)


@dataclass
class Tiers:
    """Copies of a datastore's tiers."""

    prior: PriorTable | None = None
    shared: NgramTier | None = None


def retriever(
    committed: list[int],
    *,
    sampling: SamplingParams = GREEDY,
    calibration: RetrievalCalibration | None = None,
    tiers: Tiers | None = None,
    plan: RetrievalPlan = EVERYTHING,
) -> Retriever:
    return Retriever(committed, len(committed), sampling, calibration or RetrievalCalibration(), tiers, plan)


def prior_of(*documents: list[int]) -> Tiers:
    return Tiers(PriorTable.build(documents, 4))


def path_of(guess: Guess | None) -> list[int]:
    """The tokens of the most probable path."""
    assert guess is not None
    return guess.path()

"""Drafts have the distribution that their rows claim, and rounds of a forward keep their own tokens."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
import torch

from outrider.core.acceptance import TOTAL_WEIGHT, sparse_row
from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.structure import StructuredText
from outrider.core.tree import SparseRow
from outrider.models.acceptance import DraftDraw, Round, begin_rounds, candidates, draft_candidates, emitted, judge
from outrider.models.chains import Chain
from outrider.models.sampling import Sampler
from tests.support.ratio_cases import FILTERS, assert_drawn_from, distribution, logits_of, words

VOCAB_SIZE = 12
NUM_DRAWS = 6000


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_drafts_have_the_distribution_of_their_row_which_is_that_of_the_sampler(filters: dict[str, Any]) -> None:
    logits = logits_of(1)
    expected = distribution(logits[0], **filters)
    draws = [DraftDraw(SamplingParams(**filters), word, VOCAB_SIZE) for word in words(NUM_DRAWS)]
    found = [row[0] for row in draft_candidates(logits.expand(NUM_DRAWS, -1), draws, 1)]
    q = found[0].q
    assert q is not None
    assert all(candidate.q == q for candidate in found)
    assert [q.probability(token) for token in range(VOCAB_SIZE)] == pytest.approx(
        expected.tolist(), abs=1 / TOTAL_WEIGHT
    )
    assert (expected[list(q.token_ids)] > 0).all()
    assert_drawn_from(expected, [candidate.token_id for candidate in found])


def test_a_row_is_cut_after_its_best_64_tokens() -> None:
    logits = logits_of(2, vocab_size=500)
    (row,) = draft_candidates(logits, [DraftDraw(SamplingParams(), 2**63, 500)], 3)
    q = row[0].q
    assert q is not None
    best = logits[0].topk(64)
    assert list(q.token_ids) == best.indices.tolist()
    expected = best.values.double().softmax(-1)
    assert [weight / q.total for weight in q.weights] == pytest.approx(expected.tolist(), abs=1 / TOTAL_WEIGHT)
    picks = [token for token in q.token_ids if token != row[0].token_id][:2]
    assert [(c.token_id, c.q) for c in row[1:]] == [(token, None) for token in picks]
    assert [c.logprob for c in row[1:]] == pytest.approx([math.log(expected[q.token_ids.index(t)]) for t in picks])


def test_sessions_with_different_parameters_draw_as_if_alone() -> None:
    logits = logits_of(3, rows=len(FILTERS), vocab_size=200)
    draws = [
        DraftDraw(SamplingParams(**filters), word, 200, bias, 3)
        for filters, word, bias in zip(FILTERS, words(len(FILTERS)), (1.0, 0.5, 0.0, 1.0, 0.2, 0.0), strict=True)
    ]
    alone = [draft_candidates(logits[row : row + 1], [draw], 4)[0] for row, draw in enumerate(draws)]
    assert draft_candidates(logits, draws, 4) == alone


def test_the_bias_is_in_the_row() -> None:
    logits = logits_of(4)
    (row,) = draft_candidates(logits, [DraftDraw(SamplingParams(), 5, VOCAB_SIZE, 0.25, 2)], 1)
    ranked = logits[0].double().softmax(-1).sort(descending=True)
    assert row[0].q == sparse_row(ranked.indices.tolist(), ranked.values.tolist(), 0.25, 2)


def test_where_a_low_temperature_leaves_only_the_biased_tokens_the_draft_is_drawn_as_without_a_bias() -> None:
    logits = torch.tensor([[3.0, 30.0, 2.0, 1.0]])
    params = SamplingParams(temperature=0.01)
    biased = draft_candidates(logits, [DraftDraw(params, 5, 4, 0.0, 1)], 2)
    assert biased == draft_candidates(logits, [DraftDraw(params, 5, 4)], 2)
    assert biased[0][0] == Candidate(1, 0.0, SparseRow([1], [TOTAL_WEIGHT]))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_a_filter_is_of_the_vocabulary_of_the_session(filters: dict[str, Any]) -> None:
    logits = logits_of(11)
    logits[0, 7:] = 20.0
    padded = draft_candidates(logits, [DraftDraw(SamplingParams(**filters), 5, 7)], 3)
    assert padded == draft_candidates(logits[:, :7], [DraftDraw(SamplingParams(**filters), 5, 7)], 3)


def test_no_draft_is_beyond_the_vocabulary_of_the_session() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 9:] = 20.0
    draws = [DraftDraw(SamplingParams(), word, 9) for word in words(50)]
    for row in draft_candidates(logits.expand(50, -1), draws, VOCAB_SIZE):
        assert max(candidate.token_id for candidate in row) < 9


def test_rows_are_drawn_or_ranked_as_their_sessions_want() -> None:
    logits = logits_of(5, rows=4)
    params = [SamplingParams(seed=seed, temperature=0.8) for seed in range(4)]
    draws = [DraftDraw(params[row], word, VOCAB_SIZE) if row % 2 else None for row, word in enumerate(words(4))]
    sampler = Sampler()
    ranked = sampler.candidates(logits, params, [3, 4, 5, 6], 3)
    drawn = draft_candidates(logits[1::2], [draw for draw in draws if draw], 3)
    assert candidates(sampler, logits, params, [3, 4, 5, 6], draws, 3) == [ranked[0], drawn[0], ranked[2], drawn[1]]
    assert candidates(sampler, logits, params, [3, 4, 5, 6], [None] * 4, 3) == ranked
    assert candidates(sampler, logits[:0], [], [], [], 3) == []


def test_rounds_under_both_rules_share_a_forward_and_keep_their_own_tokens() -> None:
    logits = logits_of(10, rows=9)
    sampler = Sampler()
    params = [SamplingParams(seed=seed, temperature=0.9) for seed in range(4)]
    chain = [Candidate(1, -1.0), Candidate(2, -1.0)]
    rounds = [
        Round(params[0], [5, 6, 7], chain),
        Round(params[1], [0, 1]),
        Round(params[2], [3], []),
        Round(params[3], [8, 9, 9]),
    ]
    expected = [
        *judge(sampler, logits, [Chain(chain, 0, params[0], 5)]),
        sampler.draw(logits[3:5], [params[1]] * 2, [0, 1]),
        *judge(sampler, logits, [Chain([], 5, params[2], 3)]),
        sampler.draw(logits[6:], [params[3]] * 3, [8, 9, 9]),
    ]
    assert emitted(sampler, logits, rounds) == expected
    assert emitted(sampler, logits[3:5], rounds[1:2]) == expected[1:2]
    assert emitted(sampler, logits[:0], []) == []


def test_only_draws_that_are_all_that_rounds_emit_may_be_gone_on_from_before_they_are_known() -> None:
    drawn, logits = Round(SamplingParams(seed=3), [4, 5]), logits_of(1, rows=2)
    for params in (drawn.sampling, SamplingParams(temperature=0.0)):
        pending = begin_rounds(Sampler(), logits, [drawn._replace(sampling=params)])
        assert pending.drawn is not None
        assert [pending.drawn.on_device.tolist()] == pending.wait()
    for decided in (
        drawn._replace(chain=[Candidate(1, -1.0)]),
        drawn._replace(adjustments=[None, None]),
        drawn._replace(structured=cast(StructuredText, object())),
    ):
        assert begin_rounds(Sampler(), logits, [decided]).drawn is None
        assert begin_rounds(Sampler(), logits[[0, 1, 0, 1]], [drawn, decided]).drawn is None

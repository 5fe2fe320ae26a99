"""The ratio rule with tensors: its draws and judgements are exact, and those of the rule on numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.core.acceptance import TOTAL_WEIGHT, sparse_row
from outrider.core.drafting.policy import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models.ratio import DraftDraw, Round, candidates, draft_candidates, emitted, judge
from outrider.models.sampling import Sampler, tempered_and_filtered
from tests.support import ratio_rule

VOCAB_SIZE = 12
NUM_DRAWS = 6000
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


def logits_of(seed: int, rows: int = 1, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 1.5


def distribution(logits: Tensor, **filters: Any) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """What the target draws from (`test_sampler` compares that with the definition)."""
    exact: np.ndarray[tuple[int], np.dtype[np.float64]] = (
        tempered_and_filtered(logits[None], [SamplingParams(**filters)])[0].double().softmax(-1).numpy()
    )
    return exact


def words(count: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64).tolist()
    return drawn


def assert_drawn_from(expected: np.ndarray[Any, Any], tokens: list[int]) -> None:
    counts = np.bincount(tokens, minlength=len(expected))
    assert not counts[expected == 0].any()
    possible = expected > 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], len(tokens) * expected[possible]).pvalue > 1e-4


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


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "picked"])
def test_a_judged_token_has_the_targets_distribution(filters: dict[str, Any], is_drawn: bool) -> None:
    """Whatever the draft was drawn from; here with other filters than the target's, as after a truncation."""
    target, draft = logits_of(6, rows=2), logits_of(6) * 0.6 + logits_of(7)
    draws = [DraftDraw(SamplingParams(top_k=9), word, VOCAB_SIZE) for word in words(NUM_DRAWS)]
    drafted = [row[0] for row in draft_candidates(draft.expand(NUM_DRAWS, -1), draws, 1)]
    if not is_drawn:
        drafted = [Candidate(candidate.token_id, candidate.logprob) for candidate in drafted]
    sampler = Sampler()
    found = [
        judge(sampler, target, SamplingParams(seed=seed, **filters), seed % 7, [candidate])
        for seed, candidate in enumerate(drafted)
    ]
    p = distribution(target[0], **filters)
    assert_drawn_from(p, [tokens[0] for tokens in found])
    assert_drawn_from(distribution(target[1], **filters), [tokens[1] for tokens in found if len(tokens) == 2])
    row = drafted[0].q
    if row is not None:
        overlap = sum(min(p[token], row.probability(token)) for token in range(VOCAB_SIZE))
        assert np.mean([len(tokens) == 2 for tokens in found]) == pytest.approx(overlap, abs=0.025)


@st.composite
def chains(draw: st.DrawFn) -> list[Candidate]:
    """What any drafter may say, true or not."""
    chain = []
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.lists(st.integers(-3, VOCAB_SIZE + 5), min_size=1, max_size=6, unique=True))
        row = SparseRow(ids, [draw(st.integers(1, 2**32 - 1)) for _ in ids])
        token_id = draw(st.integers(0, VOCAB_SIZE - 1))
        chain.append(Candidate(token_id, -1.0, row if draw(st.booleans()) else None))
    return chain


@settings(deadline=None)
@given(chains(), st.integers(0, 2**64 - 1), st.integers(0, 99), st.sampled_from(FILTERS))
def test_tensors_and_numbers_judge_alike(
    chain: list[Candidate], seed: int, first: int, filters: dict[str, Any]
) -> None:
    logits = logits_of(seed % 1000, rows=len(chain) + 1)
    params = SamplingParams(seed=seed, **filters)
    tokens = judge(Sampler(), logits, params, first, chain)
    rows = [distribution(row, **filters).tolist() for row in logits]
    assert tokens == ratio_rule.judge(rows, chain, seed, first)
    assert all(row[token] > 0 for row, token in zip(rows, tokens, strict=False))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_without_a_chain_and_after_all_of_it_comes_the_samplers_own_draw(filters: dict[str, Any]) -> None:
    sampler = Sampler()
    for seed in range(50):
        logits = logits_of(seed, rows=3)
        params = SamplingParams(seed=seed, **filters)
        assert judge(sampler, logits[:1], params, 4, []) == sampler.draw(logits[:1], [params], [4])
        best = [Candidate(int(row.argmax()), 0.0, None) for row in logits[:2]]
        tokens = judge(sampler, logits, params, 4, best)
        if len(tokens) == 3:
            assert tokens[2:] == sampler.draw(logits[2:], [params], [6])


def test_a_token_that_is_alone_possible_is_always_kept() -> None:
    logits = logits_of(8, rows=2)
    best = Candidate(int(logits[0].argmax()), 0.0)
    for seed in range(200):
        assert len(judge(Sampler(), logits, SamplingParams(seed=seed, top_k=1), 0, [best])) == 2


def test_the_logits_are_left_as_they_are() -> None:
    logits = logits_of(9, rows=2)
    before = logits.clone()
    draft_candidates(logits, [DraftDraw(SamplingParams(top_k=3), word, 4) for word in words(2)], 2)
    judge(Sampler(), logits, SamplingParams(top_k=3), 0, [Candidate(2, 0.0)])
    assert (logits == before).all()


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
        judge(sampler, logits[:3], params[0], 5, chain),
        sampler.draw(logits[3:5], [params[1]] * 2, [0, 1]),
        judge(sampler, logits[5:6], params[2], 3, []),
        sampler.draw(logits[6:], [params[3]] * 3, [8, 9, 9]),
    ]
    assert emitted(sampler, logits, rounds) == expected
    assert emitted(sampler, logits[3:5], rounds[1:2]) == expected[1:2]
    assert emitted(sampler, logits[:0], []) == []

"""Chains judged by the ratio rule follow its law, agree with its reference, and are judged alike together and alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outrider.core.growth import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models import acceptance
from outrider.models.acceptance import DraftDraw, begin_judging, draft_candidates, judge
from outrider.models.chains import Chain
from outrider.models.cpu.draws import CpuDraws
from outrider.models.sampling import Sampler
from tests.support import ratio_rule
from tests.support.ratio_cases import (
    FILTERS,
    assert_drawn_from,
    distribution,
    logits_of,
    num_whole,
    random_round,
    words,
)

VOCAB_SIZE = 12
NUM_DRAWS = 6000


def judged(
    logits: Tensor,
    params: SamplingParams,
    first_output_index: int,
    drafted: list[Candidate],
) -> list[int]:
    (tokens,) = judge(Sampler(), logits, [Chain(drafted, 0, params, first_output_index)])
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("is_drawn", [True, False], ids=["drawn", "picked"])
def test_a_judged_token_has_the_targets_distribution(filters: dict[str, Any], is_drawn: bool) -> None:
    """The filters of the draft do not matter; here they differ from the target's, as after a truncation."""
    target, draft = logits_of(6, rows=2), logits_of(6) * 0.6 + logits_of(7)
    draws = [DraftDraw(SamplingParams(top_k=9), word, VOCAB_SIZE) for word in words(NUM_DRAWS)]
    drafted = [row[0] for row in draft_candidates(draft.expand(NUM_DRAWS, -1), draws, 1)]
    if not is_drawn:
        drafted = [Candidate(candidate.token_id, candidate.logprob) for candidate in drafted]
    params = [SamplingParams(seed=seed, **filters) for seed in range(NUM_DRAWS)]
    chains = [Chain([candidate], 0, params[seed], seed % 7) for seed, candidate in enumerate(drafted)]
    found = judge(Sampler(), target, chains)
    p = distribution(target[0], **filters)
    assert_drawn_from(p, [tokens[0] for tokens in found])
    assert_drawn_from(distribution(target[1], **filters), [tokens[1] for tokens in found if len(tokens) == 2])
    row = drafted[0].q
    if row is not None:
        overlap = sum(min(p[token], row.probability(token)) for token in range(VOCAB_SIZE))
        assert np.mean([len(tokens) == 2 for tokens in found]) == pytest.approx(overlap, abs=0.025)


@st.composite
def any_chains(draw: st.DrawFn) -> list[Candidate]:
    """What any drafter may claim, true or not."""
    chain = []
    for _ in range(draw(st.integers(0, 5))):
        ids = draw(st.lists(st.integers(-3, VOCAB_SIZE + 5), min_size=1, max_size=6, unique=True))
        row = SparseRow(ids, [draw(st.integers(1, 2**32 - 1)) for _ in ids])
        token_id = draw(st.integers(0, VOCAB_SIZE - 1))
        chain.append(Candidate(token_id, -1.0, row if draw(st.booleans()) else None))
    return chain


@settings(deadline=None)
@given(any_chains(), st.integers(0, 2**64 - 1), st.integers(0, 99), st.sampled_from(FILTERS))
def test_tensors_and_numbers_judge_alike(
    chain: list[Candidate], seed: int, first: int, filters: dict[str, Any]
) -> None:
    logits = logits_of(seed % 1000, rows=len(chain) + 1)
    params = SamplingParams(seed=seed, **filters)
    tokens = judged(logits, params, first, chain)
    rows = [distribution(row, **filters).tolist() for row in logits]
    assert tokens == ratio_rule.judge(rows, chain, seed, first)
    assert all(row[token] > 0 for row, token in zip(rows, tokens, strict=False))


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_without_a_chain_and_after_all_of_it_comes_the_samplers_own_draw(filters: dict[str, Any]) -> None:
    sampler = Sampler()
    for seed in range(50):
        logits = logits_of(seed, rows=3)
        params = SamplingParams(seed=seed, **filters)
        assert judged(logits[:1], params, 4, []) == sampler.draw(logits[:1], [params], [4])
        best = [Candidate(int(row.argmax()), 0.0, None) for row in logits[:2]]
        tokens = judged(logits, params, 4, best)
        if len(tokens) == 3:
            assert tokens[2:] == sampler.draw(logits[2:], [params], [6])


def test_a_token_that_is_alone_possible_is_always_kept() -> None:
    logits = logits_of(8, rows=2)
    best = Candidate(int(logits[0].argmax()), 0.0)
    for seed in range(200):
        assert len(judged(logits, SamplingParams(seed=seed, top_k=1), 0, [best])) == 2


def test_the_logits_are_left_as_they_are() -> None:
    logits = logits_of(9, rows=2)
    before = logits.clone()
    draft_candidates(logits, [DraftDraw(SamplingParams(top_k=3), word, 4) for word in words(2)], 2)
    judged(logits, SamplingParams(top_k=3), 0, [Candidate(2, 0.0)])
    assert (logits == before).all()


@pytest.mark.slow
@pytest.mark.parametrize("most", [acceptance.MAX_ENTRIES, 200], ids=["at-once", "in-groups"])
def test_sessions_judged_together_keep_and_draw_what_they_would_alone(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(acceptance, "MAX_ENTRIES", most)
    whole = refused = 0
    for seed in range(40):
        logits, of_round = random_round(seed, FILTERS, vocab_size=40)
        alone = [judge(Sampler(), logits, [chain])[0] for chain in of_round]
        whole += num_whole(of_round, alone)
        refused += len(of_round) - num_whole(of_round, alone)
        assert judge(Sampler(), logits, of_round) == alone
    assert whole > 50, "nothing is refused of some"
    assert refused > 80, "something is refused of others"


def test_large_vocabularies_are_judged_by_the_same_rule() -> None:
    logits = logits_of(3, 3, 40_000)
    logits[:, 7:10] += 12
    for seed in range(6):
        params = SamplingParams(seed=seed, **FILTERS[seed])
        drafted = [Candidate(7 + seed % 3, -1.0, SparseRow([7, 8, 9], [2, 1, 1])), Candidate(5, -1.0)]
        rows = [distribution(row, **FILTERS[seed]).tolist() for row in logits]
        assert judged(logits, params, 3, drafted) == ratio_rule.judge(rows, drafted, seed, 3)


def test_where_rounding_leaves_nothing_p_itself_is_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((2, VOCAB_SIZE), -1e4)
    logits[:, 3] = 0.0
    params = SamplingParams(seed=1)
    assert [judged(logits, params, 0, [Candidate(token_id, -1.0)]) for token_id in (3, 4)] == [[3, 3], [3]]
    monkeypatch.setattr(acceptance, "first_refused", lambda *_: 0)
    assert [judged(logits, params, 0, [Candidate(token_id, -1.0)]) for token_id in (3, 4)] == [[3], [3]]
    # A remainder is left here, however small.
    logits[:, 5] = -40.0
    assert judged(logits, params, 0, [Candidate(3, -1.0)]) == [5]


def test_no_chain_has_no_tokens() -> None:
    assert judge(Sampler(), logits_of(1), []) == []


def test_chains_that_kernels_do_not_settle_are_judged_by_torch() -> None:
    logits, of_round = random_round(1, FILTERS, vocab_size=40)
    expected = judge(Sampler(), logits, of_round)
    told: list[Sequence[Chain]] = []

    class SomeDraws(CpuDraws):
        def judge(self, logits: Tensor, chains: Sequence[Chain]) -> Callable[[], list[list[int] | None]]:
            told.append(chains)
            return lambda: [None if number % 2 else [number] for number in range(len(chains))]

    wait = begin_judging(Sampler(SomeDraws()), logits, of_round)
    assert told == [of_round], "all chains are launched before anybody waits"
    assert wait() == [own if number % 2 else [number] for number, own in enumerate(expected)]
    assert judge(Sampler(), logits, []) == []

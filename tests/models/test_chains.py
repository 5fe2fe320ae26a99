"""Chains that are judged together have the tokens of those judged alone, and by the same law."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.core.drafting.policy import Candidate
from outrider.core.params import SamplingParams
from outrider.core.tree import SparseRow
from outrider.models import ratio
from outrider.models.chains import Chain, judge_together
from outrider.models.ratio import DraftDraw, Round, draft_candidates, emitted, judge
from outrider.models.sampling import Sampler, tempered_and_filtered

VOCAB_SIZE = 40
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
]


def logits_of(seed: int, rows: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5


def random_chain(random: np.random.Generator, logits: Tensor, sampling: SamplingParams) -> list[Candidate]:
    """Tokens drawn from rows like the target's, picked ones, and ones whose row is strange."""
    chain = []
    for row in logits:
        noisy = (row + torch.from_numpy(random.normal(0, 0.7, VOCAB_SIZE)).float())[None]
        draw = DraftDraw(sampling, int(random.integers(0, 2**64, dtype=np.uint64)), VOCAB_SIZE)
        drawn = draft_candidates(noisy, [draw], 1)[0][0]
        kind = random.integers(8)
        if kind == 0:
            drawn = Candidate(drawn.token_id, -1.0)
        elif kind == 1:
            drawn = Candidate(drawn.token_id, -1.0, SparseRow([drawn.token_id, VOCAB_SIZE + 5], [3, 1]))
        elif kind == 2:
            drawn = Candidate(drawn.token_id, -1.0, SparseRow([(drawn.token_id + 1) % VOCAB_SIZE], [1]))
        chain.append(drawn)
    return chain


@pytest.mark.slow
def test_sessions_judged_together_keep_and_draw_what_they_would_alone() -> None:
    random = np.random.default_rng(5)
    num_whole = num_refused = 0
    for attempt in range(40):
        lengths = random.integers(1, 5, 6).tolist()
        logits = logits_of(attempt, sum(lengths) + len(lengths))
        chains, expected, first_row = [], [], 0
        for number, length in enumerate(lengths):
            sampling = SamplingParams(seed=97 * attempt + number, **FILTERS[number])
            rows = logits[first_row : first_row + length + 1]
            chain = Chain(random_chain(random, rows[:-1], sampling), first_row, sampling, 3 * number)
            expected.append(judge(Sampler(), rows, sampling, chain.first_output_index, chain.drafted))
            num_whole += len(expected[-1]) == length + 1
            num_refused += len(expected[-1]) <= length
            chains.append(chain)
            first_row += length + 1
        assert judge_together(Sampler(), logits, chains) == expected
    assert num_whole > 30, "nothing is refused of some"
    assert num_refused > 100, "something is refused of others"


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_first_token_has_the_targets_distribution(filters: dict[str, Any]) -> None:
    num_chains = 4000
    logits = logits_of(1, 2)
    words = np.random.default_rng(0).integers(0, 2**64, num_chains, dtype=np.uint64).tolist()
    draws = [DraftDraw(SamplingParams(**filters), word, VOCAB_SIZE) for word in words]
    drafts = draft_candidates(logits_of(2, 1).expand(num_chains, -1), draws, 1)
    chains = [Chain(drafted, 0, SamplingParams(seed=seed, **filters), 0) for seed, drafted in enumerate(drafts)]
    tokens = [judged[0] for judged in judge_together(Sampler(), logits, chains) if judged]
    assert len(tokens) == num_chains
    law = tempered_and_filtered(logits[:1], [SamplingParams(**filters)])[0].double().softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=VOCAB_SIZE)
    assert not counts[law == 0].any()
    # Tokens that are expected less than five times count as one.
    is_rare = num_chains * law < 5
    expected, found = [num_chains * law[~is_rare]], [counts[~is_rare]]
    if law[is_rare].sum() > 0:
        expected.append(num_chains * law[is_rare].sum(keepdims=True))
        found.append(counts[is_rare].sum(keepdims=True))
    assert stats.chisquare(np.concatenate(found), np.concatenate(expected)).pvalue > 1e-3


def test_where_rounding_leaves_nothing_a_chain_is_to_be_judged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.full((2, VOCAB_SIZE), -1e4)
    logits[:, 3] = 0.0
    sure, wrong = Candidate(3, -1.0), Candidate(4, -1.0)
    chains = [Chain([drafted], 0, SamplingParams(seed=1), 0) for drafted in (sure, wrong)]
    assert judge_together(Sampler(), logits, chains) == [[3, 3], [3]]
    monkeypatch.setattr("outrider.models.chains.first_refused", lambda *_: 0)
    assert judge_together(Sampler(), logits, chains) == [None, [3]]


def test_rounds_with_a_chain_are_judged_together_where_a_device_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = logits_of(10, 9)
    params = [SamplingParams(seed=seed, temperature=0.9) for seed in range(4)]
    chain = [Candidate(1, -1.0), Candidate(2, -1.0)]
    rounds = [
        Round(params[0], [5, 6, 7], chain),
        Round(params[1], [0, 1]),
        Round(params[2], [3], []),
        Round(params[3], [8, 9, 10], chain),
    ]
    expected = emitted(Sampler(), logits, rounds)
    asked = []

    def together(sampler: Sampler, logits: Tensor, chains: list[Chain]) -> list[list[int] | None]:
        asked.append([each.first_row for each in chains])
        first, second = judge_together(sampler, logits, chains)
        assert second is not None
        return [first, None]

    monkeypatch.setattr(ratio, "judge_together", together)
    spans = [(0, 3), (3, 5), (5, 6), (6, 9)]
    assert ratio._judged_together(Sampler(), logits, rounds, spans) == {0: expected[0]}
    assert asked == [[0, 6]]

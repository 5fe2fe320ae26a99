"""Adjusted logits equal those of transformers' own processors, and are drawn from as their distribution says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core.adjustments import TextAdjustments
from outrider.core.params import SamplingParams
from outrider.core.tree import DraftTree
from outrider.models.acceptance import Round, emitted
from outrider.models.adjustments import adjusted
from outrider.models.sampling import Sampler

VOCAB_SIZE = 40
PROMPT, OUTPUT = [3, 5, 7, 5], [7, 8, 8, 9]
PARAMS = SamplingParams(
    seed=1,
    temperature=0.8,
    top_p=0.9,
    repetition_penalty=1.4,
    presence_penalty=0.5,
    frequency_penalty=0.3,
    logit_bias=((2, 1.5), (8, 3.0), (11, -2.0)),
    min_tokens=6,
    stop_token_ids=(20, 21),
    bad_words_token_ids=((8, 9, 12), (13,), (5, 14)),
)
NUM_DRAWS, NUM_ROWS = 20_000, 500


def logits_of(num_rows: int) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 2


def processed_by_transformers(logits: Tensor, params: SamplingParams) -> Tensor:
    """The library's own processors, and the two penalties that it lacks."""
    text = torch.tensor([[*PROMPT, *OUTPUT]])
    first = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token_id,): bias for token_id, bias in params.logit_bias}),
            RepetitionPenaltyLogitsProcessor(params.repetition_penalty),
        ]
    )
    scores = first(text, logits.clone())
    for token_id in set(OUTPUT):
        scores[:, token_id] -= params.frequency_penalty * OUTPUT.count(token_id) + params.presence_penalty
    last = LogitsProcessorList(
        [
            NoBadWordsLogitsProcessor([list(word) for word in params.bad_words_token_ids], eos_token_id=-1),
            MinNewTokensLengthLogitsProcessor(len(PROMPT), params.min_tokens, list(params.stop_token_ids)),
        ]
    )
    return last(text, scores)


def text_adjustments(params: SamplingParams) -> tuple[TextAdjustments, DraftTree]:
    tree = DraftTree([*PROMPT, *OUTPUT], VOCAB_SIZE)
    return TextAdjustments(params, tree, len(PROMPT)), tree


def test_adjusted_logits_are_those_of_transformers_and_are_given_back_as_they_were() -> None:
    adjustments, tree = text_adjustments(PARAMS)
    logits = logits_of(3)
    before = logits.clone()
    with adjusted(logits, [None, adjustments.behind(tree.root), None]):
        torch.testing.assert_close(logits[1:2], processed_by_transformers(before[1:2], PARAMS))
        assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert torch.equal(logits, before)


def test_parameters_that_change_nothing_any_more_leave_all_logits_alone() -> None:
    params = SamplingParams(min_tokens=len(OUTPUT), stop_token_ids=(3,))  # as many tokens as there are
    adjustments, tree = text_adjustments(params)
    logits = logits_of(2)
    before = logits.clone()
    with adjusted(logits, [adjustments.behind(tree.root), None]):
        assert torch.equal(logits, before)


def test_logits_are_given_back_even_if_the_body_fails() -> None:
    adjustments, tree = text_adjustments(PARAMS)
    logits = logits_of(1)
    before = logits.clone()
    with pytest.raises(RuntimeError), adjusted(logits, [adjustments.behind(tree.root)]):
        raise RuntimeError
    assert torch.equal(logits, before)


def test_draws_have_the_distribution_of_transformers_processors() -> None:
    adjustments, tree = text_adjustments(PARAMS)
    adjustment, logits, sampler = adjustments.behind(tree.root), logits_of(1), Sampler()
    warped = LogitsProcessorList([TemperatureLogitsWarper(PARAMS.temperature), TopPLogitsWarper(PARAMS.top_p)])
    expected = warped(torch.tensor([[0]]), processed_by_transformers(logits, PARAMS)).softmax(-1)[0].double().numpy()
    counts = np.zeros(VOCAB_SIZE)
    rows = logits.repeat(NUM_ROWS, 1)
    for first in range(0, NUM_DRAWS, NUM_ROWS):
        rounds = [Round(PARAMS, [first + row], None, [adjustment]) for row in range(NUM_ROWS)]
        for (token_id,) in emitted(sampler, rows, rounds):
            counts[token_id] += 1
    drawn = expected > 0
    assert counts[~drawn].sum() == 0
    assert stats.chisquare(counts[drawn], NUM_DRAWS * expected[drawn] / expected.sum()).pvalue > 1e-3

"""Log-probabilities of tokens that a device draws, requested together with the draws."""

from __future__ import annotations

import pytest
import torch

from outrider.core.reports import LogprobsMode, ReportParams, TokenLogprobs
from outrider.models.draws import DrawnTokens
from outrider.models.logprobs import begin_drawn_logprobs, token_logprobs

LOGITS = torch.randn(5, 40, generator=torch.Generator().manual_seed(3))
DRAWN = [7, 0, 39, 12, 12]


def test_they_are_those_of_each_token_alone() -> None:
    asked = [(2, LogprobsMode.RAW_LOGPROBS), (0, LogprobsMode.RAW_LOGITS), None, (5, LogprobsMode.RAW_LOGPROBS)]
    asked.append((3, LogprobsMode.RAW_LOGITS))
    reports = [ReportParams() if each is None else ReportParams(each[0], logprobs_mode=each[1]) for each in asked]
    found = begin_drawn_logprobs(LOGITS, DrawnTokens(torch.tensor(DRAWN, dtype=torch.int32)), reports)()
    expected = [
        None if each is None else token_logprobs(LOGITS[row : row + 1], DRAWN[row : row + 1], *each)[0]
        for row, each in enumerate(asked)
    ]
    assert found == expected


def test_numbers_that_need_the_parameters_of_a_text_are_left_to_the_verdict() -> None:
    processed = ReportParams(1, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS)
    found = begin_drawn_logprobs(LOGITS[:2], DrawnTokens(torch.tensor(DRAWN[:2])), [processed, ReportParams(1)])()
    assert found[0] is None
    assert found[1] is not None


def test_a_token_that_the_host_has_drawn_has_none_yet() -> None:
    drawn = DrawnTokens(torch.tensor([7, -1, 39]), lambda rows: [4 for _ in rows])
    wait = begin_drawn_logprobs(LOGITS[:3], drawn, [ReportParams(1)] * 3)
    assert drawn.wait() == [7, 4, 39]
    assert [each is None for each in wait()] == [False, True, False]


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_rank_is_the_place_among_all_and_the_best_come_first(num_top: int) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]])
    (found,) = token_logprobs(logits, [2], num_top, LogprobsMode.RAW_LOGITS)
    # The lower id comes first among equals.
    assert found == TokenLogprobs(1.0, 3, ((1, 2.0), (3, 2.0), (2, 1.0))[:num_top])


def test_no_token_has_no_number() -> None:
    assert token_logprobs(LOGITS[:0], [], 3, LogprobsMode.RAW_LOGPROBS) == []

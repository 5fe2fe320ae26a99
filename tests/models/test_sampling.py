"""Draws have exactly the target's distribution, and do not depend on the batch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

from outrider.core.noise import gumbel
from outrider.core.params import SamplingParams
from outrider.models.acceptance import DraftDraw, draft_candidates
from outrider.models.sampling import GREEDY_SHARPNESS, SAMPLED_SHARPNESS, Sampler, most_probable, ranked

NUM_DRAWS = 100_000
COMBINATIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.8},
    {"top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 12, "top_p": 0.85, "min_p": 0.08},
]


def toy_logits() -> npt.NDArray[np.float64]:
    """Fifty logits, with ties among the likely and the unlikely ones."""
    logits = np.random.default_rng(0).normal(0, 1.5, 50).round(1)
    return logits.astype(np.float64)


def exact_distribution(
    logits: npt.NDArray[np.float64], temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> npt.NDArray[np.float64]:
    """The definition, token by token, in float64."""
    tempered = np.exp(logits / temperature)
    tempered /= tempered.sum()
    ranking = sorted(range(len(logits)), key=lambda t: (-logits[t], t))
    kept = ranking[:top_k] if top_k else ranking
    total, before, nucleus = sum(tempered[t] for t in kept), 0.0, []
    for token in kept:
        if top_p == 1.0 or before < top_p * total or not nucleus:
            nucleus.append(token)
        before += tempered[token]
    final = [t for t in nucleus if tempered[t] >= min_p * tempered.max() * (1 - 1e-6)]
    result = np.zeros(len(logits))
    result[final] = tempered[final] / tempered[final].sum()
    return result


EXTREMES: list[dict[str, Any]] = [
    {"temperature": temperature, **filters}
    for temperature in (5e-324, 1e-300, 1e-45, 1e-38, 1e-9, 3.5e38, 1.7e308)
    for filters in (
        {},
        {"top_p": 0.5},
        {"top_p": 5e-324},
        {"top_k": 40, "top_p": 0.9},
        {"min_p": 5e-324},
        {"min_p": 1.0},
    )
]


@pytest.mark.parametrize("extreme", EXTREMES, ids=str)
def test_every_valid_temperature_has_a_draw_and_candidates(extreme: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 30 * torch.randn(2, 2048, generator=generator)
    params = [SamplingParams(seed=4, **extreme), SamplingParams(seed=5, temperature=0.7)]
    sampler = Sampler()
    drawn, other = sampler.draw(logits, params, [0, 1])
    assert other == sampler.draw(logits[1:], params[1:], [1])[0], "nobody else's draw is another one"
    if extreme["temperature"] < 1:
        assert drawn == int(logits[0].argmax()), "what is almost greedy says the same as what is"
    picked = sampler.candidates(logits, params, [0, 1], 8)[0]
    assert picked[0].token_id == drawn
    sampled = draft_candidates(logits[:1], [DraftDraw(params[0], 7 << 60, 2048)], 8)[0]
    for candidate in (*picked, *sampled):
        assert -math.inf < candidate.logprob <= 0


@pytest.mark.slow
@pytest.mark.parametrize("filters", COMBINATIONS, ids=str)
def test_draws_follow_the_exact_distribution(filters: dict[str, Any]) -> None:
    logits = toy_logits()
    expected = exact_distribution(logits, **filters)
    sampler, batch = Sampler(), 1000
    rows = torch.from_numpy(logits).float().expand(batch, -1)
    counts = np.zeros(50, dtype=np.int64)
    for seed in range(NUM_DRAWS // batch):
        params = [SamplingParams(seed=seed, **filters)] * batch
        counts += np.bincount(sampler.draw(rows, params, range(batch)), minlength=50)
    assert not counts[expected == 0].any()
    assert stats.chisquare(counts[expected > 0], NUM_DRAWS * expected[expected > 0]).pvalue > 1e-3


def allowed_tokens(logits: list[float], **filters: Any) -> set[int]:
    """The distinct tokens of many draws."""
    params = [SamplingParams(seed=seed, **filters) for seed in range(3000)]
    return set(Sampler().draw(torch.tensor([logits] * 3000), params, [0] * 3000))


@pytest.mark.parametrize("is_greedy", [True, False])
def test_the_best_candidate_is_the_same_however_many_are_wanted(*, is_greedy: bool) -> None:
    scores = [2.0, 2.0, 2.0, 1.0, 0.5, 0.0, -1.0, -math.inf]
    for best, token_id in (
        (([9, 3, 12, 5, 6, 7, 8, 1], scores), 3),
        (([9, 3, 12, 5, 6, 7, 8, 1], [2.5, *scores[1:]]), 9),
    ):
        candidates = ranked(best, 8, is_greedy=is_greedy)
        assert len(candidates) == 7, "what a filter forbids is none"
        assert ranked(best, 1, is_greedy=is_greedy) == candidates[:1]
        assert candidates[0].token_id == token_id


@pytest.mark.parametrize("least", [-math.inf, -3.0, -1.5, -0.1, 0.0])
def test_candidates_that_are_too_improbable_are_left_out_but_for_the_best(least: float) -> None:
    for scores in ([2.0, 1.9, 1.9, 1.0, 0.5, 0.0, -1.0, -math.inf], [2.0, 2.0, 1.9, 1.0, 0.5, 0.0, -1.0, -2.0]):
        best = [9, 3, 12, 5, 6, 7, 8, 1], scores
        candidates = ranked(best, 8, is_greedy=False)
        expected = [each for each in candidates if each.logprob >= least or each.logprob == candidates[0].logprob]
        assert ranked(best, 8, is_greedy=False, least_logprob=least) == expected
        assert ranked(best, 2, is_greedy=False, least_logprob=least) == expected[:2]


@pytest.mark.parametrize("k", [1, 2, 8])
def test_a_token_that_is_the_only_one_is_the_only_candidate(k: int) -> None:
    for least in (-math.inf, -1.0):
        (candidate,) = ranked(([9], [2.0]), k, is_greedy=False, least_logprob=least)
        assert (candidate.token_id, candidate.logprob) == (9, 0.0)


@pytest.mark.parametrize("score", [math.nan, -math.inf, math.inf])
def test_a_row_that_is_no_numbers_has_candidates(score: float) -> None:
    for scores in ([score] * 8, [score, *[1.0] * 7]):
        for least in (-math.inf, -1.0):
            assert ranked(([9, 3, 12, 5, 6, 7, 8, 1], scores), 4, is_greedy=False, least_logprob=least)


def test_top_k_breaks_ties_by_the_lower_id() -> None:
    assert allowed_tokens([1.0, 2.0, 1.0, 1.0], top_k=2) == {0, 1}


def test_top_p_breaks_ties_by_the_lower_id() -> None:
    assert allowed_tokens([0.0, 0.0, 0.0, 0.0], top_p=0.5) == {0, 1}
    assert allowed_tokens([0.0, 0.0, 0.0, 0.0], top_p=0.51) == {0, 1, 2}


def test_top_p_renormalises_what_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert allowed_tokens(logits, top_p=0.6) == {0, 1}
    assert allowed_tokens(logits, top_k=2, top_p=0.55) == {0}


def test_min_p_is_relative_to_the_most_probable_token() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05]).tolist()
    assert allowed_tokens(logits, min_p=0.29) == {0, 1, 2}
    assert allowed_tokens(logits, temperature=0.5, min_p=0.29) == {0, 1}


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}], ids=str)
def test_the_most_probable_token_always_stays(filters: dict[str, Any]) -> None:
    assert allowed_tokens([0.0, 0.3, 0.1], **filters) == {1}


@pytest.mark.parametrize("filters", [{"top_p": 0.9}, {"top_k": 5, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_a_row_that_is_no_number_gets_some_token(filters: dict[str, Any]) -> None:
    params = [SamplingParams(seed=1, **filters)] * 2
    drawn, other = Sampler().draw(torch.tensor([[math.nan] * 300, [0.0] + [-50.0] * 299]), params, [0, 0])
    assert 0 <= drawn < 300
    assert other == 0


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    assert allowed_tokens([0.0, 0.0, 0.0], top_k=99) == {0, 1, 2}


def test_a_nucleus_wider_than_the_first_look_is_sorted_completely() -> None:
    logits = torch.zeros(1, 2048)
    logits[0, 2000] = -0.5
    tokens = {Sampler().draw(logits, [SamplingParams(seed=s, top_p=0.5)], [0])[0] for s in range(200)}
    assert max(tokens) < 1024
    assert max(tokens) > 512


def random_rows(num_rows: int, vocab_size: int = 2048) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(4)) * 3


def test_a_draw_does_not_depend_on_the_rows_beside_it() -> None:
    params = [SamplingParams(seed=10 * i, **filters) for i, filters in enumerate(COMBINATIONS)]
    params += [SamplingParams(temperature=0), SamplingParams(seed=1, temperature=0.7)]
    logits = random_rows(len(params))
    indices = [7 * i for i in range(len(params))]
    together = Sampler().draw(logits, params, indices)
    alone = [Sampler().draw(logits[i : i + 1], [p], [indices[i]])[0] for i, p in enumerate(params)]
    assert together == alone


def test_a_draw_is_repeatable_and_depends_on_seed_and_output_index() -> None:
    logits = torch.zeros(64, 2048)
    draw = Sampler().draw(logits, [SamplingParams(seed=1)] * 64, range(64))
    assert Sampler().draw(logits, [SamplingParams(seed=1)] * 64, range(64)) == draw
    assert Sampler().draw(logits, [SamplingParams(seed=2)] * 64, range(64)) != draw
    assert len(set(draw)) > 50


def test_a_draw_is_the_best_of_tempered_logits_plus_noise() -> None:
    logits = random_rows(1)
    noise = gumbel(5, 77, np.arange(2048))
    expected = int(np.argmax(logits[0].numpy() / np.float32(0.7) + noise))
    assert Sampler().draw(logits, [SamplingParams(seed=5, temperature=0.7)], [77]) == [expected]


def test_greedy_ties_go_to_the_lowest_id() -> None:
    logits = torch.zeros(3, 1000)
    logits[:, [900, 400, 401]] = 1.0
    greedy = SamplingParams(temperature=0)
    assert Sampler().draw(logits, [greedy] * 3, [0, 1, 2]) == [400] * 3
    assert Sampler().draw(logits, [greedy, SamplingParams(seed=1), greedy], [0, 1, 2])[::2] == [400, 400]


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_rows(2)
    before = logits.clone()
    Sampler().draw(logits, [SamplingParams(top_k=3), SamplingParams(temperature=0)], [0, 1])
    assert (logits == before).all()


@pytest.mark.parametrize("filters", [*COMBINATIONS, {"temperature": 0}], ids=str)
def test_the_first_candidate_is_the_draw(filters: dict[str, Any]) -> None:
    logits = random_rows(20)
    params = [SamplingParams(seed=i, **filters) for i in range(20)]
    sampler = Sampler()
    candidates = sampler.candidates(logits, params, range(20), 4)
    assert [row[0][0] for row in candidates] == sampler.draw(logits, params, range(20))
    assert all(row == sorted(row, key=lambda c: -c[1]) for row in candidates)


def test_candidates_carry_the_log_softmax_of_the_best_eight_sharpened_scores() -> None:
    logits = random_rows(1)
    scores = logits[0].double().numpy() / 0.7 + gumbel(5, 3, np.arange(2048))
    best = np.sort(scores)[::-1][:8] * SAMPLED_SHARPNESS
    expected = best[:3] - np.log(np.exp(best).sum())
    row = Sampler().candidates(logits, [SamplingParams(seed=5, temperature=0.7)], [3], 3)[0]
    assert [c.logprob for c in row] == pytest.approx(expected.tolist(), abs=1e-4)


def test_greedy_candidates_are_sharpened_logits_beside_sampled_ones() -> None:
    logits = random_rows(2)
    greedy, sampled = SamplingParams(temperature=0), SamplingParams(seed=1)
    rows = Sampler().candidates(logits, [greedy, sampled], [0, 0], 8)
    best = logits[0].topk(8)
    assert [c.token_id for c in rows[0]] == best.indices.tolist()
    expected = (best.values * GREEDY_SHARPNESS).log_softmax(-1).tolist()
    assert [c.logprob for c in rows[0]] == pytest.approx(expected, abs=1e-4)
    assert [sum(math.exp(c.logprob) for c in row) for row in rows] == pytest.approx([1, 1])


def test_raw_candidates_are_ranked_alike_and_carry_the_models_own_probabilities() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(4))
    params = [SamplingParams(seed=1, temperature=0.7), SamplingParams(temperature=0.0), SamplingParams(seed=2)]
    arguments = logits, params, [0, 3, 5], 50
    usual, raw = Sampler().candidates(*arguments), Sampler().candidates(*arguments, [True, True, False])
    own = logits.log_softmax(-1)
    for row in range(3):
        assert [each.token_id for each in raw[row]] == [each.token_id for each in usual[row]]
    for row in range(2):
        assert [each.logprob for each in raw[row]] == pytest.approx([float(own[row, c.token_id]) for c in raw[row]])
    assert raw[2] == usual[2]


def test_candidates_are_only_tokens_that_can_be_drawn() -> None:
    row = Sampler().candidates(random_rows(1), [SamplingParams(top_k=2)], [0], 5)[0]
    assert len(row) == 2


@pytest.mark.parametrize("vocab_size", [50, 40_000])
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
def test_the_most_probable_tokens_of_each_row_have_weights_by_their_probability(
    vocab_size: int, temperature: float
) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(0, 3, (3, vocab_size)).astype(np.float32))
    before = logits.clone()
    found = most_probable(logits, [temperature] * 3, 8)
    assert most_probable(logits, [None, temperature, None], 8) == [[], found[1], []]
    assert torch.equal(logits, before), "the draws are of the same logits"
    for row, of_row in zip(logits.double().numpy(), found, strict=True):
        best = np.argsort(-row)[:8]
        shares = np.exp(row[best] / (temperature or 1.0))
        weights = np.maximum(1, np.round(1000 * shares / shares.sum()))
        assert of_row == [(int(token), int(weight)) for token, weight in zip(best, weights, strict=True)]


def test_a_device_looks_at_all_rows_and_those_that_are_wanted_are_told() -> None:
    logits = random_rows(4)
    wanted = [None, 0.7, None, 0.0]
    on_device = SimpleNamespace(device=SimpleNamespace(type="cuda"), shape=logits.shape, topk=logits.topk)
    assert most_probable(cast(torch.Tensor, on_device), wanted, 8) == most_probable(logits, wanted, 8)


def test_the_most_probable_tokens_of_rows_that_are_no_numbers_or_short_are_some_tokens() -> None:
    logits = torch.full((1, 5), math.nan)
    (found,) = most_probable(logits, [1.0], 8)
    assert len(found) == 5
    assert {weight for _, weight in found} == {1}

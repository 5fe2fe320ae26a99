"""The ratio rule on numbers: what is drawn from, what is kept, what replaces a refused token."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy import stats

from outrider.core import acceptance
from outrider.core.acceptance import (
    MAX_ROW_LEN,
    TOTAL_WEIGHT,
    DraftNoise,
    claimed_probability,
    decides_by_ratio,
    drawn_from,
    first_refused,
    sampled_candidates,
    sparse_row,
)
from outrider.core.growth import Candidate, Expansion
from outrider.core.methods import PEARL
from outrider.core.params import AcceptanceRule, SamplingParams, Source
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node, SparseRow
from outrider.v1 import types_pb2
from tests.support.ratio_rule import judge, residual
from tests.support.trees import add_path

WORDS = st.integers(0, 2**64 - 1)
PROBABILITIES = st.lists(st.floats(1e-6, 1), min_size=1, max_size=100).map(
    lambda values: sorted((value / sum(values) for value in values), reverse=True)
)


def drawn(token_id: int, *weights: int) -> Candidate:
    """A token that was drawn from weights of the tokens 0, 1, ..."""
    return Candidate(token_id, -1.0, SparseRow(range(len(weights)), weights))


def picked(token_id: int) -> Candidate:
    return Candidate(token_id, -1.0)


@pytest.mark.parametrize(
    ("rule", "temperature", "decides"),
    [(AcceptanceRule.RATIO, 0.5, True), (AcceptanceRule.RATIO, 0.0, False), (AcceptanceRule.MATCH, 0.5, False)],
)
def test_the_ratio_rule_decides_where_it_was_asked_for_and_something_is_drawn(
    rule: AcceptanceRule, temperature: float, decides: bool
) -> None:
    params = SpeculationParams(PEARL, acceptance_rule=rule)
    assert decides_by_ratio(SamplingParams(temperature=temperature), params) == decides


@given(PROBABILITIES)
def test_a_row_has_the_most_probable_tokens_in_proportion(probabilities: list[float]) -> None:
    row = sparse_row(range(100, 100 + len(probabilities)), probabilities)
    kept = probabilities[:MAX_ROW_LEN]
    weights = dict(zip(row.token_ids, row.weights, strict=True))
    assert min(row.weights) >= 1
    assert weights.keys() <= set(range(100, 100 + len(kept)))
    for token_id, probability in enumerate(kept, start=100):
        # At most half a weight off; less probable tokens are never drawn.
        assert abs(weights.get(token_id, 0) - TOTAL_WEIGHT * probability / sum(kept)) <= 0.5 + 1e-6


def test_a_row_takes_few_bytes_on_the_wire() -> None:
    probabilities = [0.97**rank for rank in range(MAX_ROW_LEN)]
    row = sparse_row(range(2000, 2000 + MAX_ROW_LEN), probabilities)
    assert len(types_pb2.SparseRow(token_ids=row.token_ids, weights=row.weights).SerializeToString()) <= 260


def test_the_bias_scales_the_most_probable_tokens_alone() -> None:
    row = sparse_row([7, 3, 5, 1], [0.4, 0.3, 0.2, 0.1], bias=0.5, num_biased=2)
    expected = np.array([0.2, 0.15, 0.2, 0.1]) / 0.65
    assert [row.probability(token_id) for token_id in (7, 3, 5, 1)] == pytest.approx(expected.tolist(), abs=1e-3)


def test_a_bias_of_zero_leaves_the_others() -> None:
    assert list(sparse_row([7, 3, 5, 1], [0.4, 0.3, 0.2, 0.1], 0.0, 3).token_ids) == [1]


@pytest.mark.parametrize("num_biased", [2, 64])
def test_a_bias_of_zero_on_all_there_is_changes_nothing(num_biased: int) -> None:
    assert sparse_row([7, 3], [0.6, 0.4], 0.0, num_biased) == sparse_row([7, 3], [0.6, 0.4])


@pytest.mark.parametrize("rest", [0.0, 5e-324, 1e-320])
def test_a_bias_of_zero_changes_nothing_where_all_behind_the_biased_tokens_underflows(rest: float) -> None:
    assert sparse_row([7, 3, 5], [1.0, rest, rest], 0.0, 1) == sparse_row([7, 3, 5], [1.0, rest, rest])


@given(
    st.lists(st.floats(0, 1), max_size=100).map(lambda values: [1.0, *sorted(values, reverse=True)]),
    st.floats(0, 1),
    st.integers(0, MAX_ROW_LEN),
)
def test_whatever_the_bias_leaves_something_can_be_drawn(
    probabilities: list[float], bias: float, num_biased: int
) -> None:
    row = sparse_row(range(len(probabilities)), probabilities, bias, num_biased)
    # Rounding may add or remove half a weight for each token.
    assert abs(row.total - TOTAL_WEIGHT) <= MAX_ROW_LEN / 2
    assert all(
        weight > 0 and probabilities[token_id] > 0 for token_id, weight in zip(row.token_ids, row.weights, strict=True)
    )


def test_a_token_is_drawn_by_its_weight_exactly() -> None:
    row = SparseRow([9, 4, 6], [1, 2, 5])
    found = [drawn_from(row, (2 * eighth + 1) * 2**60) for eighth in range(8)]
    assert found == [(9, 1), (4, 2), (4, 2), (6, 5), (6, 5), (6, 5), (6, 5), (6, 5)]
    assert [drawn_from(row, word) for word in (0, 2**61 - 1, 2**61, 2**64 - 1)] == [(9, 1), (9, 1), (4, 2), (6, 5)]


@given(PROBABILITIES, WORDS, st.integers(1, 8))
def test_candidates_are_the_drawn_token_and_the_best_of_the_others(
    probabilities: list[float], word: int, k: int
) -> None:
    kept = probabilities[:MAX_ROW_LEN]
    token_ids, logprobs = list(range(len(kept))), [math.log(p) for p in kept]
    row = sparse_row(token_ids, kept)
    first, *others = sampled_candidates(row, token_ids, logprobs, word, k)
    assert first.token_id == drawn_from(row, word)[0]
    assert first.q is row
    assert first.logprob == pytest.approx(math.log(row.probability(first.token_id)))
    expected = [token_id for token_id in token_ids if token_id != first.token_id][: k - 1]
    assert [(c.token_id, c.logprob, c.q) for c in others] == [(t, logprobs[t], None) for t in expected]


def test_what_is_drawn_carries_the_biased_probability_and_what_is_picked_the_models_own() -> None:
    row = sparse_row([0, 1, 2], [0.8, 0.1, 0.1], bias=0.5, num_biased=1)
    first, second, third = sampled_candidates(row, [0, 1, 2], [math.log(0.8), math.log(0.1), math.log(0.1)], 0, 3)
    assert math.exp(first.logprob) == pytest.approx(0.4 / 0.6, abs=1e-3)
    assert [math.exp(c.logprob) for c in (second, third)] == pytest.approx([0.1, 0.1])


def trade(p: Sequence[float], q: Sequence[float], bias: float, num_biased: int) -> tuple[float, float]:
    """SAGUARO sampling over all outcomes. Returns the probability that a draft is kept, and that of a hit after a
    refusal: the next token is one of the draft model's F best. `q` begins with the most probable token."""
    row = sparse_row(range(len(q)), q, bias, num_biased)
    claimed = [row.probability(token_id) for token_id in range(len(q))]
    left = [max(0.0, target - draft) for target, draft in zip(p, claimed, strict=True)]
    return 1 - sum(left), sum(left[:num_biased]) / sum(left) if sum(left) else 1.0


BIASES = (1.0, 0.75, 0.5, 0.25, 0.0)


def test_a_smaller_bias_trades_acceptance_for_hits() -> None:
    # C = .5 and F = 2: of .5, .3, .15 and .05 the best two are halved, and the sum is .6.
    p = q = [0.5, 0.3, 0.15, 0.05]
    kept, hits = trade(p, q, 0.5, 2)
    assert kept == pytest.approx((0.25 + 0.15) / 0.6 + 0.15 + 0.05, abs=1e-3)
    assert hits == 1, "nothing but the best two is left"
    # This draft is not the target: without a bias the residual is .1, all of it of the last token.
    p = [0.5, 0.3, 0.05, 0.15]
    found = [trade(p, q, bias, 2) for bias in BIASES]
    acceptances, rates = zip(*found, strict=True)
    assert list(acceptances) == sorted(acceptances, reverse=True)
    assert list(rates) == sorted(rates)
    assert acceptances == pytest.approx((0.9, 0.8625, 0.8, 0.675, 0.2), abs=2e-3)
    assert rates == pytest.approx((0, 0.364, 0.667, 0.923, 1), abs=1e-2)


@given(st.data(), st.integers(2, 40), st.integers(1, 8))
def test_hits_rise_with_every_smaller_bias_and_a_draft_like_the_target_is_kept_less(
    data: st.DataObject, size: int, num_biased: int
) -> None:
    weights = st.lists(st.floats(0.01, 1), min_size=size, max_size=size)
    p, q = ([each / sum(values) for each in values] for values in (data.draw(weights), data.draw(weights)))
    q.sort(reverse=True)
    num_biased = min(num_biased, size - 1)
    rates = [trade(p, q, bias, num_biased)[1] for bias in BIASES]
    # A row has integer weights: each probability is off by half a weight at most.
    rounding = size / TOTAL_WEIGHT
    lefts = [1 - trade(p, q, bias, num_biased)[0] for bias in BIASES]
    for earlier, later, left in zip(rates, rates[1:], lefts, strict=False):
        assert later >= earlier - rounding / max(left, rounding)
    kept = [trade(q, q, bias, num_biased)[0] for bias in BIASES]
    assert all(later <= earlier + rounding for earlier, later in itertools.pairwise(kept))
    assert kept[-1] < kept[0]


def with_uniforms(monkeypatch: pytest.MonkeyPatch, uniforms: Sequence[float]) -> None:
    monkeypatch.setattr(acceptance, "acceptance_uniform", lambda seed, index: uniforms[index])


@pytest.mark.parametrize(
    ("uniform", "p", "candidate", "is_kept"),
    [
        (0.49, 0.25, drawn(0, 1, 1), True),
        (0.51, 0.25, drawn(0, 1, 1), False),
        (0.999, 0.5, drawn(0, 1, 1), True),
        (0.999, 0.6, drawn(0, 1, 1), True),
        (0.0, 0.0, drawn(0, 1, 1), False),
        (0.29, 0.3, picked(0), True),
        (0.31, 0.3, picked(0), False),
        (0.999, 1.0, picked(0), True),
        (0.0, 0.0, picked(0), False),
    ],
)
def test_a_token_is_kept_while_the_uniform_is_below_the_ratio(
    monkeypatch: pytest.MonkeyPatch, uniform: float, p: float, candidate: Candidate, is_kept: bool
) -> None:
    with_uniforms(monkeypatch, [uniform])
    assert first_refused([p], [candidate], 0, 0) == is_kept


def test_a_token_that_its_row_does_not_have_counts_as_picked() -> None:
    lie = drawn(3, 1, 1)
    assert claimed_probability(lie) == 1.0
    assert residual([0.1, 0.2, 0.3, 0.4], lie) == [0.1, 0.2, 0.3, 0.0]


def test_the_residual_is_what_p_has_more_than_q() -> None:
    assert residual([0.5, 0.3, 0.2], drawn(0, 7, 2, 1)) == pytest.approx([0.0, 0.1, 0.1])
    assert residual([0.5, 0.3, 0.2], picked(1)) == [0.5, 0.0, 0.2]


def test_the_residual_ignores_tokens_that_the_target_does_not_have() -> None:
    refused = Candidate(0, -1.0, SparseRow([0, 9, -1], [2, 1, 1]))
    assert residual([0.4, 0.6], refused) == [0.0, 0.6]


def test_where_rounding_leaves_no_residual_it_is_p() -> None:
    assert residual([0.5, 0.5], drawn(0, 1, 1)) == [0.5, 0.5]


def test_a_token_that_alone_is_possible_is_put_out_even_if_rounding_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_uniforms(monkeypatch, [0.9999999999, 0.5])
    probabilities = [[0.999999999, 0.0], [0.0, 1.0]]
    assert judge(probabilities, [picked(0)], 1, 0) == [0]


@st.composite
def rounds(draw: st.DrawFn) -> tuple[list[list[float]], list[Candidate]]:
    """A chain whose drafter claims anything, and the target's rows, in which some tokens are impossible."""
    vocab_size, chain_len = draw(st.integers(2, 5)), draw(st.integers(0, 4))
    tokens = st.integers(0, vocab_size - 1)
    rows = []
    for _ in range(chain_len + 1):
        weights = draw(st.lists(st.integers(0, 5), min_size=vocab_size, max_size=vocab_size))
        assume(any(weights))
        rows.append([weight / sum(weights) for weight in weights])
    chain = []
    for _ in range(chain_len):
        ids = draw(st.lists(st.integers(-2, vocab_size + 2), min_size=1, max_size=4, unique=True))
        row = SparseRow(ids, [draw(st.integers(1, 9)) for _ in ids])
        chain.append(Candidate(draw(tokens), -1.0, row if draw(st.booleans()) else None))
    return rows, chain


@given(rounds(), st.integers(0, 2**64 - 1), st.integers(0, 1000))
def test_whatever_a_drafter_says_only_possible_tokens_are_emitted(
    case: tuple[list[list[float]], list[Candidate]], seed: int, first: int
) -> None:
    rows, chain = case
    tokens = judge(rows, chain, seed, first)
    assert 1 <= len(tokens) <= 1 + len(chain)
    assert tokens[:-1] == [candidate.token_id for candidate in chain[: len(tokens) - 1]]
    if len(tokens) <= len(chain):
        assert tokens[-1] != chain[len(tokens) - 1].token_id
    assert all(row[token_id] > 0 for row, token_id in zip(rows, tokens, strict=False))


@pytest.mark.parametrize("q", [(7, 2, 1), (1, 2, 7), (1, 1), None])
def test_the_first_token_has_the_targets_distribution(q: tuple[int, ...] | None) -> None:
    """Also, a drawn token is kept with the sum of min(p, q)."""
    p, num = [0.5, 0.3, 0.2], 20_000
    words = np.random.default_rng(1).integers(0, 2**64, num, dtype=np.uint64).tolist()
    counts, num_kept = np.zeros(3), 0
    for seed, word in enumerate(words):
        row = SparseRow(range(len(q)), q) if q else None
        candidate = Candidate(drawn_from(row, word)[0] if row else 1, -1.0, row)
        tokens = judge([p, p], [candidate], seed, 3)
        counts[tokens[0]] += 1
        num_kept += len(tokens) - 1
    assert stats.chisquare(counts, [num * value for value in p]).pvalue > 1e-3
    row = SparseRow(range(len(q)), q) if q else None
    expected = sum(min(p[t], row.probability(t)) for t in range(3)) if row else p[1]
    assert num_kept / num == pytest.approx(expected, abs=0.015)


TOKENS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def word_after(committed: list[int], path: list[int], seed: int = 1) -> int:
    tree = DraftTree(committed, 10)
    tip = add_path(tree, len(committed), path, -1.0, Source.DRAFT)
    assert tip is not None
    (word,) = DraftNoise(seed).words(tree, Expansion((tip if path else tree.root,), 1))
    return word


def test_the_noise_never_changes() -> None:
    """A drafter that comes back draws what it drew before."""
    assert word_after([1, 2], [3]) == 11675368875427982937


@given(TOKENS, st.integers(0, 6))
def test_the_same_context_has_the_same_noise_whatever_of_it_is_committed(context: list[int], num_drafted: int) -> None:
    split = max(1, len(context) - num_drafted)
    assert word_after(context[:split], context[split:]) == word_after(context, [])


@given(TOKENS, TOKENS, st.integers(0, 5), st.integers(0, 5))
def test_different_contexts_and_seeds_have_different_noise(
    one: list[int], other: list[int], seed: int, other_seed: int
) -> None:
    is_same = (one, seed) == (other, other_seed)
    assert (word_after(one, [], seed) == word_after(other, [], other_seed)) == is_same


@given(st.data())
def test_commits_leave_the_noise_as_it_is(data: st.DataObject) -> None:
    tree, noise, seen = DraftTree([0], 3), DraftNoise(2), dict[tuple[int, ...], int]()
    nodes: list[Node] = []
    for _ in range(data.draw(st.integers(1, 5))):
        nodes = [tree.root, *tree.live_nodes()]
        for node in data.draw(st.lists(st.sampled_from(nodes), max_size=3)):
            tree.add(node, data.draw(st.integers(0, 2)), -1.0, Source.DRAFT)
        nodes = [tree.root, *tree.live_nodes()]
        for node, word in zip(nodes, noise.words(tree, Expansion(tuple(nodes), 1)), strict=True):
            path, above = [], node
            while above is not tree.root and above.parent is not None:
                path.append(above.token_id)
                above = above.parent
            assert seen.setdefault((*tree.committed, *reversed(path)), word) == word
        tree.commit(data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=2)))


def test_a_phrase_has_the_noise_of_the_path_that_it_is() -> None:
    tree = DraftTree([5], 10)
    tip = add_path(tree, 1, [6], -1.0, Source.DRAFT)
    assert tip is not None
    words = DraftNoise(1).words(tree, Expansion((tip,), 1, 4, (7, 8)))
    assert words == [word_after([5], [6]), word_after([5], [6, 7]), word_after([5], [6, 7, 8])]


def test_the_noise_is_uniform() -> None:
    words = [
        word_after([number % 10, number // 10 % 10], [number // 100 % 10], number // 1000) for number in range(5000)
    ]
    assert stats.kstest(np.array(words) / 2.0**64, "uniform").pvalue > 1e-3


def traded(p: np.ndarray, q: np.ndarray, bias: float, num_biased: int) -> tuple[float, float]:
    """Probability that a drafted token is kept, and that the one after a refusal is among the draft's most probable."""
    best = np.argsort(-q)
    row = sparse_row(best.tolist(), q[best].tolist(), bias, num_biased)
    drawn = np.array([row.probability(token_id) for token_id in range(len(q))])
    residual = np.maximum(p - drawn, 0)
    return float(np.minimum(p, drawn).sum()), float(residual[best[:num_biased]].sum() / residual.sum())


@pytest.mark.parametrize("num_biased", [1, 4])
def test_a_lower_bias_trades_acceptance_for_hits_after_a_refusal(num_biased: int) -> None:
    # SAGUARO, section 4.2: a draft model that is close to its target, over all pairs of a fixed set.
    rng = np.random.default_rng(2)
    pairs = []
    for _ in range(50):
        p = rng.dirichlet([0.3] * 16)
        pairs.append((p, 0.8 * p + 0.2 * rng.dirichlet([0.3] * 16)))
    found = [
        np.mean([traded(p, q, bias, num_biased) for p, q in pairs], axis=0) for bias in (1.0, 0.75, 0.5, 0.25, 0.0)
    ]
    acceptances, hits = zip(*found, strict=True)
    assert list(acceptances) == sorted(acceptances, reverse=True)
    assert list(hits) == sorted(hits)
    assert acceptances[0] > 1.3 * acceptances[-1]
    assert hits[-1] > 1.2 * hits[0]

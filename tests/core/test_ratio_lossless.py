"""The ratio rule keeps the target's distribution under every sampled method, and no known wrong rule does.

A chi-square test that a wrong rule passes would be worthless, so every wrong rule must fail it, with fewer texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from outrider.core import acceptance
from outrider.core.acceptance import first_refused
from outrider.core.growth import Candidate, Expansion
from outrider.core.methods import DOUBLE, PEARL, SAGUARO, SPECULATIVE
from outrider.core.methods.chain import ChainGrowth, SampledChainGrowth
from outrider.core.noise import gumbel_of
from outrider.core.params import OWN_SOURCES, Source
from outrider.core.speculation import SpeculationParams
from outrider.core.tree import DraftTree, Node, SparseRow
from tests.core.toy_generation import (
    DRAFT,
    PROMPT,
    TARGET,
    VOCAB_SIZE,
    Context,
    Rules,
    ToyGeneration,
    draft_row,
    p_value,
    params_of,
    sampled,
    texts,
)
from tests.support.ratio_rule import draw

NUM_TEXTS, NUM_FULL_TEXTS = 6_000, 100_000
NUM_WRONG_TEXTS = 8_000
NUM_TEXTS_OF_SOURCES = 4_000
"""Enough for a wrong rule to fail."""
CHAIN = params_of(SPECULATIVE)
MIN_PROBABILITY = 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        params_of(SPECULATIVE, MIN_PROBABILITY),
        params_of(PEARL, MIN_PROBABILITY),
        params_of(DOUBLE),
        # Chains of one token: more tokens are drafted after them, where the tail begins.
        replace(params_of(DOUBLE), num_speculative_tokens=1),
        params_of(SAGUARO, MIN_PROBABILITY, bias=0.5, num_biased=2),
    ],
    ids=lambda params: f"{params.method.name} {params.num_speculative_tokens}",
)
def test_texts_have_the_targets_distribution(params: SpeculationParams, full: bool) -> None:
    assert p_value(texts(Rules(params), NUM_FULL_TEXTS if full else NUM_TEXTS)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("source", OWN_SOURCES, ids=lambda source: source.name.lower())
def test_texts_keep_the_distribution_with_a_source_that_learns_from_rows(source: Source, full: bool) -> None:
    rules = Rules(params_of(PEARL, MIN_PROBABILITY), sources=(source,), max_patience=1)
    assert p_value(texts(rules, NUM_FULL_TEXTS if full else NUM_TEXTS_OF_SOURCES)) > 1e-4


@pytest.mark.slow
def test_a_source_that_knows_the_targets_noise_bends_the_distribution() -> None:
    rules = Rules(params_of(PEARL), sources=(Source.RECYCLED,), is_ranked_by_noise=True, max_patience=0)
    assert p_value(texts(rules, NUM_TEXTS_OF_SOURCES)) < 1e-6


def accepted_in_theory(context: Context, chain_len: int) -> float:
    """Expected accepted tokens of a chain: each token is kept, after those before it, with the sum of min(p, q)."""
    if chain_len == 0:
        return 0.0
    p, q = TARGET[context], draft_row(context).q
    return sum(
        min(p[token], q.probability(token)) * (1 + accepted_in_theory((context[1], token), chain_len - 1))
        for token in range(VOCAB_SIZE)
    )


def test_as_many_tokens_are_accepted_as_the_theory_says() -> None:
    rules = Rules(CHAIN, max_patience=99)
    accepted = []
    for seed in range(4000):
        generation = ToyGeneration(rules, seed)
        generation.round()
        if generation.verdicts[0].num_drafted:  # the target's patience happened to be long enough
            accepted.append(generation.verdicts[0].num_accepted)
    error = np.std(accepted) / math.sqrt(len(accepted))
    assert abs(np.mean(accepted) - accepted_in_theory(PROMPT, 3)) < 3.5 * error
    assert error < 0.025


def assert_bends(rules: Rules) -> None:
    assert p_value(texts(rules, NUM_WRONG_TEXTS)) < 1e-6


Rows = Sequence[Sequence[float]]


def redrawn(probabilities: Rows, chain: Sequence[Node], seed: int, first: int) -> list[int]:
    """After a refusal a draw from p instead of the residual."""
    at_chain = [row[node.token_id] for row, node in zip(probabilities, chain, strict=False)]
    count = first_refused(at_chain, chain, seed, first)
    return [*(node.token_id for node in chain[:count]), draw(probabilities[count], seed, first + count)]


def greedily_accepted(probabilities: Rows, chain: Sequence[Node], seed: int, first: int) -> list[int]:
    """A token is kept while it is the target's most probable one; otherwise it is drawn again."""
    count = 0
    while count < len(chain) and chain[count].token_id == max(range(VOCAB_SIZE), key=probabilities[count].__getitem__):
        count += 1
    return [*(node.token_id for node in chain[:count]), draw(probabilities[count], seed, first + count)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [redrawn, greedily_accepted])
def test_a_wrong_judgement_bends_the_distribution(wrong: object) -> None:
    assert_bends(Rules(CHAIN, judge=wrong))  # type: ignore[arg-type]


def picked_as_drawn(context: Context, word: int, bias: float, k: int) -> list[Candidate]:
    """The most probable token, claimed to be a sample."""
    row = draft_row(context)
    return [Candidate(row.token_ids[0], row.logprobs[0], row.q)]


def drawn_from_less(context: Context, word: int, bias: float, k: int) -> list[Candidate]:
    """Drawn from a truncated row, claimed to be drawn from the whole softmax."""
    (drawn,) = sampled(context, word, bias, 1)
    whole = SparseRow(range(VOCAB_SIZE), [max(1, round(2**16 * p)) for p in DRAFT[context]])
    return [Candidate(drawn.token_id, drawn.logprob, whole)]


def drawn_with_bias(context: Context, word: int, bias: float, k: int) -> list[Candidate]:
    """Drawn with SAGUARO's bias, which the row does not have."""
    (drawn,) = sampled(context, word, 0.5, 1)
    return [Candidate(drawn.token_id, drawn.logprob, draft_row(context).q)]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [picked_as_drawn, drawn_from_less, drawn_with_bias])
def test_a_mis_stated_q_bends_the_distribution(wrong: object) -> None:
    assert_bends(Rules(CHAIN, find=wrong))  # type: ignore[arg-type]


@pytest.mark.slow
def test_one_uniform_for_two_positions_bends_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    uniform = acceptance.acceptance_uniform
    monkeypatch.setattr(acceptance, "acceptance_uniform", lambda seed, index: uniform(seed, index // 2))
    assert_bends(Rules(CHAIN))


class TargetNoise:
    """The seed and the output index of each draw, so that it can be made with the target's own noise."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def words(self, tree: DraftTree, expansion: Expansion) -> list[int]:
        return [self._seed * 64 + node.position + 1 - len(PROMPT) for node in expansion.nodes]


def picked_with_noise(context: Context, word: int, bias: float, k: int) -> list[Candidate]:
    """The token that the target will probably draw: right under the match rule only."""
    row, (seed, output_index) = draft_row(context), divmod(word, 64)
    noise = gumbel_of(seed, output_index, row.token_ids)
    best = max(range(len(noise)), key=lambda index: row.logprobs[index] + noise[index])
    return [Candidate(row.token_ids[best], row.logprobs[best])]


@pytest.mark.slow
def test_picking_with_the_targets_noise_bends_the_distribution() -> None:
    assert_bends(Rules(CHAIN, find=picked_with_noise, make_noise=TargetNoise))


@pytest.mark.slow
def test_a_chain_that_ends_before_an_improbable_token_bends_the_distribution() -> None:
    rules = Rules(params_of(SPECULATIVE, MIN_PROBABILITY), cuts_by_own_value=True)
    assert_bends(rules)


def early(params: SpeculationParams) -> ChainGrowth:
    """The match rule's policy: growth ends, and a message is sent, when the path has become improbable."""
    least = math.log(params.min_path_probability)
    return ChainGrowth(params.num_speculative_tokens, least, params.num_speculative_tokens, least)


@pytest.mark.slow
def test_a_message_that_is_sent_early_because_its_tokens_are_improbable_bends_the_distribution() -> None:
    assert_bends(Rules(params_of(SPECULATIVE, MIN_PROBABILITY), make_policy=early, max_patience=2))


def in_blocks(params: SpeculationParams) -> SampledChainGrowth:
    """The policy for a chain without phrases: three nodes a message."""
    return SampledChainGrowth(6, 3, 0.0, grows_ahead=True)


@pytest.mark.slow
def test_a_message_that_comes_sooner_where_phrases_agree_bends_the_distribution() -> None:
    assert_bends(Rules(params_of(DOUBLE), make_policy=in_blocks, max_patience=2))

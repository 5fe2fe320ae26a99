"""Sessions under the ratio rule: tokens are drawn from exactly the rows that are sent with them."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from outrider.core.acceptance import DraftNoise
from outrider.core.growth import Candidate, Expansion
from outrider.core.methods import DOUBLE, PEARL, SAGUARO, SPECULATIVE
from outrider.core.methods.saguaro import SaguaroParams
from outrider.core.params import AcceptanceRule, SamplingParams
from outrider.core.speculation import Method, SpeculationParams
from outrider.core.tree import Draft, DraftTree
from outrider.models.acceptance import DraftDraw, draft_candidates
from outrider.models.runner import Segment
from outrider.speculator.engine import Engine
from outrider.speculator.session import DraftSession, DraftSessionSpec
from tests.speculator.draft_sessions import PROMPT, Collector, expected_chain
from tests.speculator.draft_sessions import spec as match_spec
from tests.support.services import draft_model

SAMPLING = SamplingParams(seed=9, temperature=0.9, top_p=0.95)
SPECULATION = SpeculationParams(SPECULATIVE, 3, 3, acceptance_rule=AcceptanceRule.RATIO, shared_noise=False)


@pytest.fixture
def engine() -> Iterator[Engine]:
    running = Engine(draft_model(), prefill_chunk=16)
    yield running
    running.stop()


def spec(session_id: str, speculation: SpeculationParams = SPECULATION, seed: int = 9) -> DraftSessionSpec:
    sampling = replace(SAMPLING, seed=seed)
    return DraftSessionSpec(session_id, PROMPT, len(PROMPT), sampling, speculation, draft_model().vocab_size)


def drawn_chain(
    committed: tuple[int, ...], seed: int = 9, bias: float = 1.0, num_biased: Sequence[int] = (0, 0, 0)
) -> list[Candidate]:
    """Three drawn tokens, each from a fresh forward over everything before it."""
    model, tokens, chain = draft_model(), list(committed), []
    for count in num_biased:
        logits = model.runner.forward([Segment(model.runner.new_cache(), tokens, 1)])
        tree = DraftTree(tokens, model.vocab_size)
        (word,) = DraftNoise(seed).words(tree, Expansion((tree.root,), 1))
        draw = DraftDraw(SAMPLING, word, model.vocab_size, bias, count)
        chain.append(draft_candidates(logits, [draw], 1)[0][0])
        tokens.append(chain[-1].token_id)
    return chain


def assert_is(draft: Draft, chain: list[Candidate]) -> None:
    """Its first nodes; nodes of other outcomes may follow."""
    assert list(draft.token_ids)[: len(chain)] == [candidate.token_id for candidate in chain]
    assert not any(draft.q_rows[len(chain) :])
    for row, candidate in zip(draft.q_rows, chain, strict=False):
        assert row is not None
        assert candidate.q is not None
        # Rows of different forwards differ in their last bits, and so may a weight whose fraction is near a half.
        expected = candidate.q.probability
        assert [row.probability(t) for t in row.token_ids] == pytest.approx(
            [expected(t) for t in row.token_ids], abs=1e-4
        )


def test_each_commit_is_answered_with_a_drawn_chain_and_its_rows(engine: Engine) -> None:
    sink = Collector()
    engine.open(spec("s"), sink)
    assert_is(sink.drafts.get(timeout=30), drawn_chain(PROMPT))
    engine.commit("s", (7, 8))
    assert_is(sink.drafts.get(timeout=30), drawn_chain((*PROMPT, 7, 8)))


def test_sessions_under_both_rules_share_forwards(engine: Engine) -> None:
    sinks = {name: Collector() for name in ("match", "ratio 9", "ratio 10")}
    engine.open(match_spec("match"), sinks["match"])
    for seed in (9, 10):
        engine.open(spec(f"ratio {seed}", seed=seed), sinks[f"ratio {seed}"])
    draft = sinks["match"].drafts.get(timeout=30)
    assert list(draft.token_ids) == expected_chain(PROMPT)
    assert not any(draft.q_rows)
    for seed in (9, 10):
        assert_is(sinks[f"ratio {seed}"].drafts.get(timeout=30), drawn_chain(PROMPT, seed))


@pytest.mark.parametrize(
    ("num_biased", "expected"), [(2, (2, 2, 2)), (0, (5, 4, 4))], ids=["as given", "as many as outcomes"]
)
def test_saguaros_bias_is_in_the_rows(engine: Engine, num_biased: int, expected: Sequence[int]) -> None:
    saguaro = SaguaroParams(budget=18, bias=0.25, num_biased=num_biased)
    sink = Collector()
    engine.open(spec("s", replace(SPECULATION, method=SAGUARO, own=(saguaro,))), sink)
    assert_is(sink.drafts.get(timeout=30), drawn_chain(PROMPT, bias=0.25, num_biased=expected))


def test_at_temperature_zero_nothing_is_drawn(engine: Engine) -> None:
    sink = Collector()
    engine.open(replace(spec("s"), sampling=SamplingParams(temperature=0)), sink)
    draft = sink.drafts.get(timeout=30)
    assert not any(draft.q_rows)
    with pytest.raises(queue.Empty):
        sink.drafts.get_nowait()


@pytest.mark.parametrize("shared_noise", [False, True])
def test_nothing_is_ranked_with_the_targets_noise(shared_noise: bool) -> None:
    """The target draws its next token with that noise, so neither the draft model nor retrieval may rank with it."""
    speculation = replace(SPECULATION, shared_noise=shared_noise, retrieval=True)
    drafting = DraftSession(spec("s", speculation), draft_model().runner.new_cache(), 512)
    assert drafting.ranking.is_greedy


@pytest.mark.parametrize(("method", "has_phrase"), [(SPECULATIVE, False), (PEARL, False), (DOUBLE, True)])
def test_phrases_speed_up_only_those_whose_every_forward_is_a_message(method: Method, has_phrase: bool) -> None:
    """Otherwise samples that agree with a phrase would be sent sooner than others."""
    repeated = replace(
        spec("s", replace(SPECULATION, method=method, retrieval=True, lookahead=8)),
        committed_token_ids=(*PROMPT, 5, 6, 7, 8, 9, 5, 6, 7),
    )
    drafting = DraftSession(repeated, draft_model().runner.new_cache(), 512)
    expansion = drafting.next_expansion()
    assert expansion is not None
    assert bool(drafting.with_phrase(expansion).phrase) == has_phrase

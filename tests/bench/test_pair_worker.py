"""The worker that watches a pair and replays it: with the real demo pair."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.methods import BEST_FIRST
from outrider.core.params import Rows
from outrider.models.runner import Segment
from outrider_bench.workers.pair import Pair, Replay, difference_of, resolved
from tests.support.services import draft_model, target_model

pytestmark = pytest.mark.slow

NUM_TOKENS = 40
COSTS = {
    "target_ms": {"1": 20.0, "32": 40.0},
    "draft_ms": 1.0,
    "draft_row_ms": 0.05,
    "one_way_ms": 0.5,
    "overhead_ms": 1.0,
}

ANY_POLICY = 1e9
"""No policy takes longer than this, so forwards cost exactly what the costs say."""


@cache
def watched(temperature: float) -> dict[str, Any]:
    pair = Pair(target_model(), draft_model())
    request = {"prompt": "def read(path):\n", "temperature": temperature, "seed": 3, "max_tokens": NUM_TOKENS}
    return pair.watch(request) | {"seed": 3}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_text_has_a_verdict_for_each_of_its_tokens_under_each_rule(temperature: float) -> None:
    text = watched(temperature)
    for name in ("token_ids", "shared_noise", "own_choice", "kept", "overlap"):
        assert len(text[name]) == NUM_TOKENS
    if temperature == 0:
        assert text["shared_noise"] == text["own_choice"] == text["kept"] == text["overlap"]
    else:
        assert sum(text["shared_noise"]) > sum(text["own_choice"])
        assert all(0 <= value <= 1 for value in text["kept"] + text["overlap"])


@torch.inference_mode()
def test_the_ratio_rules_verdicts_are_those_of_the_two_distributions() -> None:
    text, place = watched(0.7), 17
    rows = text["prompt_token_ids"] + text["token_ids"][:place]
    p, q = (
        (model.runner.forward([Segment(model.runner.new_cache(), rows, 1)])[0, : model.vocab_size] / 0.7).softmax(-1)
        for model in (target_model(), draft_model())
    )
    token_id = text["token_ids"][place]
    assert text["overlap"][place] == pytest.approx(1 - float((p - q).abs().sum()) / 2, abs=1e-4)
    assert text["kept"][place] == pytest.approx(min(1.0, float(q[token_id] / p[token_id])), abs=1e-3)


def test_draft_then_verify_is_replayed_as_its_verdicts_say() -> None:
    text = watched(0.7)
    options = {"method": "speculative", "num_speculative_tokens": 4, "min_path_probability": 0.0, "calibration": False}
    found = Replay(draft_model()).replay([text], 0.7, 32, options, COSTS, ANY_POLICY)
    num_rounds = place = 0
    while place < 32:
        run = next((i for i, one in enumerate(text["shared_noise"][place : place + 4]) if not one), 4)
        place, num_rounds = place + run + 1, num_rounds + 1
    assert found["tokens_per_round"] == pytest.approx(32 / num_rounds)
    # Each round: a forward of five rows, four of the draft, a message each way; not all wait for a whole chain.
    assert sum(found["text_ms"]) / num_rounds == pytest.approx(20.0 + 20 * 4 / 31 + 1.0 + 4 * 1.05 + 2 * 0.5, rel=0.15)


def test_a_policy_that_takes_long_for_its_tree_makes_each_forward_longer() -> None:
    text = watched(0.7)
    options = {"method": "card", "num_speculative_tokens": 4, "card": {"beam_width": 64}}
    # The target is so fast that it waits for drafts.
    costs = COSTS | {"target_ms": {"1": 5.0, "32": 10.0}}
    replays = (Replay(draft_model()).replay([text], 0.7, 24, options, costs, ms) for ms in (1e9, 0.0))
    [free], [real] = (found["text_ms"] for found in replays)
    assert real > 1.05 * free


def test_phrases_behind_a_chain_never_reach_beyond_the_end_of_the_text() -> None:
    # double finds whole phrases in a text that repeats one token.
    endless = watched(0.0) | {"token_ids": [200] * NUM_TOKENS}
    options = {"method": "double", "num_speculative_tokens": 4}
    found = Replay(draft_model()).replay([endless], 0.0, NUM_TOKENS - 5, options, COSTS, ANY_POLICY)
    assert found["tokens_per_round"] > 5


def test_a_request_is_replayed_with_a_verifiers_own_defaults() -> None:
    tree, chain = (resolved({"method": name, "num_speculative_tokens": 5}) for name in ("best-first", "saguaro"))
    assert (tree.method, tree.rows, tree.num_speculative_tokens) == (BEST_FIRST, Rows.TREE, 5)
    assert (chain.rows, chain.lookahead, chain.min_path_probability) == (Rows.CHAIN, 64, 0.2)


def model_of(*tokens: str, split: str = "") -> Any:
    """Stands in for a loaded model: its tokenizer, and the tokenizer's hash."""
    tokenizer = SimpleNamespace(convert_ids_to_tokens=lambda token_id: tokens[token_id])
    return SimpleNamespace(tokenizer=tokenizer, tokenizer_hash=repr((tokens, split)), vocab_size=len(tokens))


def test_tokenizers_that_differ_are_told_apart_in_one_line() -> None:
    target = model_of("a", "b", "c")
    assert difference_of(target, model_of("a", "b", "c")) == ""
    assert difference_of(target, model_of("a", "x", "c")) == (
        "vocab sizes 3 and 3; the first tokens that differ are 1: 'b' and 'x'"
    )
    assert difference_of(target, model_of("a", "b")) == (
        "vocab sizes 3 and 2; the first tokens that differ are 2: 'c' and None"
    )
    assert "not how a text is split" in difference_of(target, model_of("a", "b", "c", split="bytes"))


def test_forwards_of_both_models_are_timed_by_their_rows() -> None:
    times = Pair(target_model(), draft_model()).measure([1, 4], [1], 16, 1)
    assert set(times["target_forward_ms"]) == {1, 4}
    assert set(times["draft_forward_ms"]) == {1}
    assert min(ms for found in times.values() for ms in found.values()) > 0

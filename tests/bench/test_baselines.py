"""The baselines of the benchmark: the same tokens in every way, and counts that fit them."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest

from outrider.models.backend import CPU
from outrider_bench.workers.bare import BareBaseline
from outrider_bench.workers.hf import HfBaseline
from tests.support.tiny_models import VOCAB_SIZE, build

MAX_TOKENS = 24
PROMPT = "a prompt of some length, of some length"
CONSTANT = {
    "num_assistant_tokens_schedule": "constant",
    "assistant_confidence_threshold": 0.0,
    "num_assistant_tokens": 5,
}


class Characters:
    """A codec with a token for each character."""

    def encode(self, text: str) -> list[int]:
        return [ord(character) % VOCAB_SIZE for character in text]


def request(temperature: float) -> dict[str, Any]:
    return {"prompt": PROMPT, "temperature": temperature, "seed": 5, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def baseline() -> HfBaseline:
    # The draft is the target itself, so greedy drafts are always right.
    return HfBaseline(build("llama"), build("llama"), Characters())  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("options", [{}, {"assistant": {}}, {"assistant": CONSTANT}, {"prompt_lookup_num_tokens": 10}])
def test_every_way_gives_as_many_tokens_as_asked_for(
    baseline: HfBaseline, options: dict[str, Any], temperature: float
) -> None:
    answer = baseline.generate(request(temperature), options)
    rounds, chunks = answer["rounds"], answer["chunks"]
    assert len(answer["token_ids"]) == sum(tokens for _, tokens in chunks) == MAX_TOKENS
    assert answer["num_prompt_tokens"] == len(PROMPT)
    assert rounds["num_rounds"] == len(chunks)
    assert rounds["num_rounds"] + rounds["num_accepted"] == MAX_TOKENS
    assert 0 <= rounds["num_accepted"] <= rounds["num_drafted"]
    times = [at_s for at_s, _ in chunks]
    assert list(accumulate(times, max)) == times
    assert times[-1] <= answer["duration_s"]


def test_all_greedy_ways_give_the_same_text_and_so_does_the_bare_loop(baseline: HfBaseline) -> None:
    ways = [{}, {"assistant": {}}, {"assistant": CONSTANT}, {"prompt_lookup_num_tokens": 10}]
    texts = [baseline.generate(request(0.0), options)["token_ids"] for options in ways]
    bare: Any = BareBaseline(CPU.make_runner(build("llama")), CPU.make_runner(build("llama")), Characters())  # type: ignore[arg-type]
    texts.append(bare.generate(request(0.0), {})["token_ids"])
    assert all(text == texts[0] for text in texts)


def test_a_draft_model_that_is_the_target_is_accepted_to_the_last_token(baseline: HfBaseline) -> None:
    rounds = baseline.generate(request(0.0), {"assistant": CONSTANT})["rounds"]
    assert rounds == {"num_rounds": 4, "num_drafted": 20, "num_accepted": 20}


def test_a_setting_of_the_draft_model_does_not_stay_for_the_next_generation(baseline: HfBaseline) -> None:
    baseline.generate(request(0.0), {"assistant": CONSTANT})
    rounds = baseline.generate(request(0.0), {"assistant": {}})["rounds"]
    assert rounds["num_drafted"] != 20


def test_the_bare_loop_measures_both_models() -> None:
    bare: Any = BareBaseline(CPU.make_runner(build("llama")), CPU.make_runner(build("llama")), Characters())  # type: ignore[arg-type]
    times = bare.measure([1, 4], [1], 32)
    assert list(times["target_forward_ms"]) == [1, 4]
    assert list(times["draft_forward_ms"]) == [1]
    assert all(time > 0 for series in times.values() for time in series.values())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_that_is_the_target_ranks_every_token_first(temperature: float) -> None:
    same = BareBaseline(CPU.make_runner(build("llama")), CPU.make_runner(build("llama")), Characters())  # type: ignore[arg-type]
    assert same.ranks(request(temperature), 4) == {"ranks": [0] * MAX_TOKENS}


def test_a_token_that_is_none_of_the_drafts_choices_has_no_rank() -> None:
    other = BareBaseline(CPU.make_runner(build("llama")), CPU.make_runner(build("qwen2")), Characters())  # type: ignore[arg-type]
    ranks, first = (other.ranks(request(1.0), num_ranks)["ranks"] for num_ranks in (4, 1))
    assert len(ranks) == MAX_TOKENS
    assert -1 in ranks
    assert set(ranks) <= {-1, 0, 1, 2, 3}
    assert first == [0 if rank == 0 else -1 for rank in ranks]

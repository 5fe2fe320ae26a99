"""Drafts of real peers reach the batch; peers with faults cost drafts, never time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.models.demo.names import demo_folder
from outrider.vllm.drafting import Drafting
from outrider.vllm.settings import read_settings
from tests.support.metric_values import Values, values_of
from tests.support.scripted_speculator import AModel
from tests.support.services import target_model
from tests.support.waiting import until_true
from tests.vllm.peers import ParrotBatch, process

pytestmark = pytest.mark.slow

PROMPTS = ("def read(path):\n", "import os\n\nclass Cache:\n")
PROMPT_LEN = 6
PATIENCE_MS = 20.0
SLACK_S = 0.25
"""On a loaded machine a thread that is ready may not run for so long; a wait for a second would still be seen."""
SPECULATOR = ("outrider.speculator", "--listen", "127.0.0.1:0", "--log-level", "error")


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """What the demo target says at temperature 0."""
    model, told = AutoModelForCausalLM.from_pretrained(demo_folder("demo/target"), dtype=torch.float32), []
    for prompt in PROMPTS:
        token_ids = torch.tensor([target_model().tokenizer.encode(prompt)[:PROMPT_LEN]])
        mask = torch.ones_like(token_ids)
        told.append(model.generate(token_ids, attention_mask=mask, max_new_tokens=120, do_sample=False)[0].tolist())
    return told


@pytest.fixture(scope="module")
def speculator() -> Iterator[str]:
    """The address of a speculator with the demo draft model."""
    with process(*SPECULATOR) as (_, address):
        yield address


def identity(**other: Any) -> AModel:
    """The demo target, as handshakes name it."""
    model = target_model()
    return replace(AModel("target", model.tokenizer_hash, model.vocab_size, model.max_context_len), **other)


@contextmanager
def drafting(model: AModel | None = None, **given: Any) -> Iterator[Drafting]:
    settings = read_settings({"outrider": {"patience_ms": PATIENCE_MS, **given}})
    made = Drafting(settings, model or identity(), 8)
    try:
        yield made
    finally:
        made.close()


def counts(drafts: Drafting) -> Values:
    return values_of(drafts.metrics())


def is_connected(drafts: Drafting) -> bool:
    return bool(counts(drafts)["outrider_peer_up"].get("speculator"))


def longest_step_s(batch: ParrotBatch, drafts: Drafting, num_steps: int = 20) -> float:
    """The longest time of some steps, during which the target would have stood still."""
    longest = 0.0
    for _ in range(num_steps):
        began_at = time.perf_counter()
        batch.step(drafts)
        longest = max(longest, time.perf_counter() - began_at)
        time.sleep(0.005)  # the target's forward
    return longest


@pytest.mark.parametrize("method", ["best-first", "pearl", "saguaro", "card", "double", "speculative", "auto"])
def test_each_method_brings_drafts_that_the_target_keeps(method: str, speculator: str, texts: list[list[int]]) -> None:
    with drafting(speculator=speculator, method=method) as drafts:

        def num_accepted() -> int:
            batch = ParrotBatch(texts, PROMPT_LEN)
            while not batch.is_over:
                assert all(len(draft) <= 8 for draft in batch.step(drafts))
                time.sleep(0.005)
            return batch.num_accepted

        # A speculator that has just started compiles its kernels while the first texts go by.
        assert until_true(num_accepted)
        told = counts(drafts)
        assert sum(told["outrider_vllm_accepted_tokens_total"].values()) > 0
        assert told["outrider_vllm_failures_total"][""] == 0


def test_a_text_that_repeats_itself_needs_no_peer(texts: list[list[int]]) -> None:
    text = texts[0][:20] * 5
    with drafting(method="retrieval") as drafts:
        batch = ParrotBatch([text], PROMPT_LEN)
        while not batch.is_over:
            batch.step(drafts)
        assert batch.num_accepted > 30


def test_a_speculator_that_sleeps_is_not_waited_for(texts: list[list[int]]) -> None:
    with process("tests.vllm.stub_speculator", "slow") as (_, address), drafting(speculator=address) as drafts:
        batch = ParrotBatch(texts, PROMPT_LEN)
        assert longest_step_s(batch, drafts) < PATIENCE_MS / 1e3 + SLACK_S
        assert batch.num_drafted == 0


def test_a_speculator_that_lies_is_given_fewer_and_fewer_rows(texts: list[list[int]]) -> None:
    with process("tests.vllm.stub_speculator", "lying") as (_, address), drafting(speculator=address) as drafts:
        until_true(lambda: longest_step_s(ParrotBatch(texts, PROMPT_LEN), drafts, 3) and is_connected(drafts))
        batch = ParrotBatch(texts, PROMPT_LEN)
        assert longest_step_s(batch, drafts, 60) < PATIENCE_MS / 1e3 + SLACK_S
        assert batch.num_accepted == 0
        told = counts(drafts)
        assert told["outrider_vllm_proposed_tokens_total"].get("draft", 0) > 0
        assert told["outrider_vllm_failures_total"][""] == 0


def test_a_speculator_that_dies_costs_its_drafts_alone(texts: list[list[int]]) -> None:
    with process(*SPECULATOR) as (running, address), drafting(speculator=address) as drafts:
        until_true(lambda: longest_step_s(ParrotBatch(texts, PROMPT_LEN), drafts, 3) and is_connected(drafts))
        running.kill()
        running.wait()
        batch = ParrotBatch(texts, PROMPT_LEN)
        assert longest_step_s(batch, drafts) < PATIENCE_MS / 1e3 + SLACK_S
        until_true(lambda: not is_connected(drafts))
        assert [len(draft) for draft in batch.step(drafts)] == [0, 0]
        assert counts(drafts)["outrider_vllm_failures_total"][""] == 0


def test_a_speculator_of_another_tokenizer_brings_nothing_and_says_so_once(
    speculator: str, texts: list[list[int]], capfd: pytest.CaptureFixture[str]
) -> None:
    with drafting(identity(tokenizer_hash="another"), speculator=speculator) as drafts:
        batch = ParrotBatch(texts, PROMPT_LEN)
        for _ in range(10):
            longest_step_s(batch, drafts, 3)
        assert batch.num_drafted == 0
    told = capfd.readouterr()
    assert (told.out + told.err).count("speculator.lost") == 1
    assert "the token ids of the two models do not mean the same" in told.out + told.err


def test_no_peer_is_needed_to_start() -> None:
    with drafting(speculator="127.0.0.1:1", datastore="127.0.0.1:2", retrieval=True) as drafts:
        batch = ParrotBatch([list(range(1, 60))], PROMPT_LEN)
        assert longest_step_s(batch, drafts, 5) < PATIENCE_MS / 1e3 + SLACK_S

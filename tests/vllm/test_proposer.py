"""vLLM's interface: what a configuration must be, and that no error reaches vLLM."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY, generate_latest

from outrider.vllm import Proposer
from outrider.vllm.proposer import CannotDraft
from tests.support.services import target_model

OURS = {"outrider": {"method": "retrieval"}}


@pytest.fixture(autouse=True)
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What the proposer needs of vLLM, which is not installed here."""
    package, tokenizers = ModuleType("vllm"), ModuleType("vllm.tokenizers")
    package.__version__ = "0.32.0"  # type: ignore[attr-defined]
    package.tokenizers = tokenizers  # type: ignore[attr-defined]
    tokenizers.cached_tokenizer_from_config = lambda _: target_model().tokenizer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", package)
    monkeypatch.setitem(sys.modules, "vllm.tokenizers", tokenizers)
    return package


def config(additional: object = OURS, *, num_tokens: int = 4, rank: int = 0, tensor: int = 1, pipeline: int = 1) -> Any:
    """A configuration of vLLM's."""
    return SimpleNamespace(
        additional_config=additional,
        speculative_config=SimpleNamespace(num_speculative_tokens=num_tokens),
        parallel_config=SimpleNamespace(rank=rank, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline),
        model_config=SimpleNamespace(
            model="demo/target", served_model_name=None, max_model_len=256, dtype="float32", get_vocab_size=lambda: 2048
        ),
    )


def propose(proposer: Proposer, text: list[int]) -> list[list[int]]:
    token_ids = np.zeros((2, 256), np.int32)
    token_ids[0, : len(text)] = text
    return proposer.propose([[text[-1]]], np.array([len(text), 0]), token_ids, slot_mappings={})


def drafts_of(proposer: Proposer) -> list[list[int]]:
    """Drafts in a text that repeats itself, of some steps."""
    text = [5, 6, 7, 8, 9, 10, 11, 12] * 8
    return [propose(proposer, text[:length])[0] for length in range(20, 60)]


def test_the_first_rank_drafts_and_no_other() -> None:
    first, second = Proposer(config(rank=2, tensor=2)), Proposer(config(rank=1, tensor=2))
    try:
        first.load_model(None)
        assert any(drafts_of(first))
        assert all(len(draft) <= 4 for draft in drafts_of(first))
        assert not any(drafts_of(second))
    finally:
        first.close()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (config(pipeline=2), "pipeline_parallel_size must be 1, got 2"),
        (config(num_tokens=65), "num_speculative_tokens must be at most 64, as a speculator drafts, got 65"),
    ],
)
def test_what_cannot_be_drafted_for_is_refused(given: Any, told: str) -> None:
    with pytest.raises(CannotDraft, match=told):
        Proposer(given)


def test_a_vllm_that_was_not_tried_is_refused_unless_asked_for(vllm: ModuleType) -> None:
    vllm.__version__ = "0.40.1"  # type: ignore[attr-defined]
    with pytest.raises(CannotDraft, match=r"was tried with vLLM 0\.32, and this is 0\.40\.1"):
        Proposer(config())
    Proposer(config({"outrider": {"method": "retrieval", "any_vllm": True}})).close()


def test_a_tokenizer_without_a_tokenizer_json_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.tokenizers.cached_tokenizer_from_config", lambda _: object())
    with pytest.raises(CannotDraft, match=r"must be a fast one of transformers \(tokenizer.json\), got object"):
        Proposer(config())


def test_an_error_of_ours_is_no_error_of_vllms(capfd: pytest.CaptureFixture[str]) -> None:
    proposer = Proposer(config())
    try:
        for _ in range(3):
            assert proposer.propose([[1], [2]], np.array([9]), np.zeros((1, 4), np.int32)) == [[], []]
        assert any(drafts_of(proposer))
    finally:
        proposer.close()
    told = capfd.readouterr()
    assert (told.out + told.err).count("proposer.failed") == 1


def test_metrics_are_in_the_registry_of_the_process_and_the_latest_proposers() -> None:
    for _ in range(2):
        proposer = Proposer(config())
        try:
            num_steps = len(drafts_of(proposer))
            told = generate_latest(REGISTRY).decode()
        finally:
            proposer.close()
        assert f"outrider_vllm_steps_total {num_steps}.0" in told
        assert 'outrider_vllm_proposed_tokens_total{source="dynamic"}' in told

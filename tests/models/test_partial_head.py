"""A model whose config limits its head to some tokens: only they have logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from outrider.models.backend import CPU, TORCH
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.reference import Reference
from outrider.models.runner import Segment
from tests.support.tiny_models import VOCAB_SIZE, build, reference_logits, text

KEPT = [3, 7, 8, 100, 150, 210]


def limited(family: str, token_ids: Any = KEPT) -> Any:
    """A model with such a head."""
    model = build(family)
    model.config.head_token_ids = token_ids
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [CPU, TORCH], ids=["cpu", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
def test_the_kept_tokens_have_the_models_logits_and_no_other_token_has_any(family, backend, dtype):
    model, ids = limited(family).to(dtype), text(12)
    runner = backend.make_runner(model, is_exact=False)
    logits = runner.forward([Segment(runner.new_cache(), ids, len(ids))])
    assert logits.shape == (len(ids), VOCAB_SIZE)
    expected = reference_logits(family, ids)
    others = [token_id for token_id in range(VOCAB_SIZE) if token_id not in KEPT]
    assert bool((logits[:, others] == -torch.inf).all())
    gap = (logits[:, KEPT] - expected[:, KEPT]).abs().max() / expected.abs().max()
    assert gap < (1e-5 if dtype is torch.float32 else 0.1)


def test_a_model_with_such_a_head_passes_the_comparison_with_the_library():
    model = limited("llama")
    reference = Reference(model)
    reference.check(CPU.make_runner(model))


@pytest.mark.parametrize("token_ids", [[], [1, 1], [-1, 5], [VOCAB_SIZE], ["5"], [True, 2], 7, {"5": 1}])
def test_a_list_that_names_no_tokens_of_the_model_is_refused(token_ids):
    with pytest.raises(UnsupportedModel, match="its head_token_ids must be"):
        CPU.make_runner(limited("llama", token_ids))


def test_a_model_of_another_family_is_refused():
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    model = Gemma2ForCausalLM(Gemma2Config(vocab_size=50, num_attention_heads=2, num_key_value_heads=1, **sizes))
    model.config.head_token_ids = [1, 2]
    with pytest.raises(UnsupportedModel, match="type gemma2 cannot have a head of some tokens alone"):
        CPU.make_runner(model)

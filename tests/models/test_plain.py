"""Models that run as the library has them: with everything that it does around its head, whatever runs next to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    GPT2Config,
    GraniteConfig,
    HyperCLOVAXConfig,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    StableLmConfig,
)

from outrider.models.backend import CPU
from outrider.models.checkpoint import UnsupportedModel
from outrider.models.reference import Reference
from outrider.models.runner import Segment
from tests.support.tiny_models import VOCAB_SIZE, text

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
SMALL: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i for i in range(8)],
}
CONFIGS: dict[str, Any] = {
    "a divisor after the head": GraniteConfig(logits_scaling=8.0, **SMALL),
    "a factor after the head": CohereConfig(logit_scale=0.25, **SMALL),
    "a cap after the head": Gemma2Config(
        head_dim=16, attn_logit_softcapping=None, final_logit_softcapping=2.0, sliding_window=128, **SMALL
    ),
    "a product that is scaled": HyperCLOVAXConfig(logits_scaling=0.25, **SMALL),
    "a head below which another part is called": OPTConfig(ffn_dim=48, word_embed_proj_dim=32, init_std=0.2, **SIZES),
    "layers that hand nothing down": StableLmConfig(partial_rotary_factor=0.5, **SMALL),
    "frequencies by the length of the text": LlamaConfig(rope_parameters=LONGROPE, **SMALL),
}


def build(config: Any) -> PreTrainedModel:
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float().eval()  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_library_in_pieces_and_next_to_another_text(name: str) -> None:
    model = build(CONFIGS[name])
    reference = Reference(model)
    token_ids = text(30)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    runner = CPU.make_runner(model, num_blocks=8)
    reference.check(runner)
    cache, other = runner.new_cache(), runner.new_cache()
    first = runner.forward([Segment(cache, token_ids[:12], 12)])
    runner.forward([Segment(other, text(runner.max_context_len - 1, seed=1), 0)])
    rest = runner.forward([Segment(other, [3], 0), Segment(cache, token_ids[12:], 18)])
    torch.testing.assert_close(torch.cat((first, rest)), expected, rtol=1e-4, atol=1e-4)


def test_a_rotary_embedding_that_goes_by_the_length_bounds_the_context_and_says_so() -> None:
    runner = CPU.make_runner(build(CONFIGS["frequencies by the length of the text"]), num_blocks=2)
    assert runner.max_context_len == 32
    assert runner.context_reason == "beyond 32 tokens its rotary embedding (longrope) is another one"


def test_logits_that_are_not_the_librarys_are_refused() -> None:
    model = build(LlamaConfig(**SMALL))
    reference = Reference(model)
    model.get_output_embeddings().weight.data *= 1.25
    with pytest.raises(
        UnsupportedModel, match="its logits from position 0 on are not those of the library's own forward"
    ):
        reference.check(CPU.make_runner(model, num_blocks=8))


def test_logits_that_differ_at_the_end_of_the_context_alone_are_refused() -> None:
    model = build(GPT2Config(**SIZES))
    reference = Reference(model)
    model.base_model.wpe.weight.data[100:] *= -1
    with pytest.raises(UnsupportedModel, match="its logits from position 116 on are not those"):
        reference.check(CPU.make_runner(model, num_blocks=8))

"""Inflated demo models: larger, with the same logits."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.backend import CPU
from outrider.models.demo.inflate import forget, inflate, num_layers_for
from outrider.models.demo.names import Inflation, parse_inflation
from outrider.models.runner import Segment
from tests.support.tiny_models import text


def base_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=211,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            tie_word_embeddings=True,
            max_position_embeddings=128,
        )
    ).eval()


SMALL = Inflation(num_parameters=1e6, intermediate_size=512)


@torch.inference_mode()
def logits_of(model: LlamaForCausalLM) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([text(40)]), use_cache=False).logits
    return logits


def test_an_inflated_model_has_the_logits_of_its_base() -> None:
    model = base_model()
    expected = logits_of(model)
    torch.testing.assert_close(logits_of(inflate(model, SMALL)), expected, rtol=1e-5, atol=1e-5)


def test_the_runner_gives_the_same_logits_for_both() -> None:
    model = base_model()
    results = []
    for each in (copy.deepcopy(model), inflate(model, SMALL)):
        runner = CPU.make_runner(each)
        results.append(runner.forward([Segment(runner.new_cache(), text(40), 40)]))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_the_number_of_parameters_is_right_to_half_a_layer() -> None:
    model = inflate(base_model(), SMALL)
    layer = sum(p.numel() for p in model.model.layers[0].parameters())
    assert abs(model.num_parameters() - 1e6) <= layer / 2
    assert len(model.model.layers) == model.config.num_hidden_layers


def test_added_layers_read_real_weights() -> None:
    layer = inflate(base_model(), SMALL).model.layers[-1]
    assert layer.mlp.gate_proj.weight.abs().mean() > 0.01
    assert layer.self_attn.q_proj.weight.unique().numel() > 1000


def test_the_library_generates_with_an_inflated_model() -> None:
    model = base_model()
    prompt = torch.tensor([text(10)])
    mask = torch.ones_like(prompt)
    expected = model.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    inflated = inflate(model, SMALL)
    actual = inflated.generate(prompt, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)
    assert actual.tolist() == expected.tolist()


def test_an_inflated_model_survives_saving(tmp_path: object) -> None:
    model = inflate(base_model(), SMALL)
    model.save_pretrained(str(tmp_path))
    again = LlamaForCausalLM.from_pretrained(str(tmp_path)).eval()
    assert torch.equal(logits_of(again), logits_of(model))


def test_a_wider_model_cannot_be_inflated_to_a_narrower_one() -> None:
    with pytest.raises(ValueError, match="96 wide, more than 64"):
        inflate(base_model(), Inflation(1e6, 64))


def test_a_model_that_forgets_says_nothing_that_it_said_and_is_nearly_indifferent() -> None:
    model = base_model()
    expected = logits_of(model)
    forgotten = logits_of(forget(model, seed=1))
    assert (forgotten - expected).abs().mean() > 0.1
    assert forgotten.softmax(-1).max() < 0.1
    assert torch.equal(logits_of(forget(base_model(), seed=1)), forgotten)
    assert not torch.equal(logits_of(forget(base_model(), seed=2)), forgotten)


@pytest.mark.parametrize(
    ("name", "base", "num_parameters"),
    [
        ("target", "target", None),
        ("draft", "draft", None),
        ("target-100m", "target", 100e6),
        ("target-300m", "target", 300e6),
        ("draft-c5", "draft", 20e6),
        ("draft-c2.5", "draft", 40e6),
        ("target-100", "target-100", None),
        ("other", "other", None),
    ],
)
def test_names_say_the_base_and_the_size(name: str, base: str, num_parameters: float | None) -> None:
    actual_base, inflation = parse_inflation(name)
    assert actual_base == base
    assert (inflation and inflation.num_parameters) == num_parameters


def test_a_model_is_never_cut() -> None:
    assert num_layers_for(base_model().config, Inflation(1.0, 512)) == 2

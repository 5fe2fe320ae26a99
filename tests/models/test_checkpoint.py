"""What a model's files tell before any weight is loaded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from outrider.models.checkpoint import (
    UnknownModel,
    UnsupportedModel,
    causal_models,
    judge_tensors,
)
from outrider.models.names import judge_checkpoint
from tests.support.checkpoints import in_cache, write

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
HEADER = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
WEIGHTS = len(HEADER).to_bytes(8, "little") + HEADER + 8 * b"\0"
WHOLE = {"config.json": LLAMA, "model.safetensors": WEIGHTS, "tokenizer.json": {}}
ADAPTER = {"base_model_name_or_path": "some/base"}


def with_config(**fields: Any) -> dict[str, Any]:
    """Files of a model whose config has additional fields."""
    return WHOLE | {"config.json": LLAMA | fields}


def without(name: str) -> dict[str, Any]:
    """Files of a model except one."""
    return {each: content for each, content in WHOLE.items() if each != name}


FINE = {
    "a plain model": WHOLE,
    "pickled weights": without("model.safetensors") | {"pytorch_model.bin": b""},
    "shards": without("model.safetensors")
    | {"model.safetensors.index.json": {"weight_map": {"w": "one.safetensors"}}, "one.safetensors": WEIGHTS},
    "an old spelling": with_config(architectures=["LLaMAForCausalLM"]),
    "code of its own that the library has by now": with_config(auto_map={"AutoModelForCausalLM": "modeling_x.X"}),
    "a merged adapter": WHOLE | {"adapter_config.json": ADAPTER},
    "images, in a model that runs by its text": with_config(
        model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], vision_config={"hidden_size": 1}
    ),
    "a sliding window": with_config(layer_types=["full_attention", "sliding_attention"]),
}
REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no config": (without("config.json"), "no config.json in "),
    "a config that is none": (
        WHOLE | {"config.json": b'{"model_type": '},
        "config.json cannot be read: Expecting value",
    ),
    "a list for a config": (WHOLE | {"config.json": []}, "config.json holds no object"),
    "an adapter": ({"adapter_config.json": ADAPTER}, "is a LoRA adapter of some/base: merge it first"),
    "an adapter next to its base": (
        WHOLE | {"adapter_config.json": ADAPTER, "adapter_model.safetensors": WEIGHTS},
        "is a LoRA adapter of some/base: merge it first",
    ),
    "AWQ": (with_config(quantization_config={"quant_method": "awq", "bits": 4}), "is quantised (awq, 4 bits): "),
    "FP8": (with_config(quantization_config={"quant_method": "fp8"}), "is quantised (fp8): quantised weights are not"),
    "bitsandbytes": (with_config(quantization_config={"load_in_4bit": True}), "is quantised (bitsandbytes): "),
    "MLX": (with_config(quantization={"group_size": 64, "bits": 4}), "is quantised (mlx, 4 bits): "),
    "quantised text of several senses": (
        with_config(text_config={"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        "is quantised (gptq, 4 bits): ",
    ),
    "ModelOpt": (WHOLE | {"hf_quant_config.json": {}}, "is quantised (modelopt): "),
    "an encoder and a decoder": (
        with_config(model_type="t5", is_encoder_decoder=True, architectures=["T5ForConditionalGeneration"]),
        "a model of type t5 has an encoder and a decoder",
    ),
    "images": (
        with_config(
            model_type="qwen2_5_vl", architectures=["Qwen2_5_VLForConditionalGeneration"], vision_config={"a": 1}
        ),
        "a model of type qwen2_5_vl takes images too: only models of text alone are served",
    ),
    "sound": (
        with_config(model_type="qwen2_audio", audio_config={"a": 1}),
        "a model of type qwen2_audio takes sound too",
    ),
    "masked words": (with_config(model_type="bert", architectures=["BertForMaskedLM"]), "is a BertForMaskedLM: "),
    "a reward model": (with_config(architectures=["LlamaForSequenceClassification"]), "is a LlamaForSequenceClassif"),
    "a draft head": (with_config(architectures=["LlamaForCausalLMEagle3"]), "is a LlamaForCausalLMEagle3: "),
    "no type": (WHOLE | {"config.json": {"hidden_size": 8}}, "its config.json names no model_type"),
    "an unknown type": (with_config(model_type="quantum"), "has no causal language model of type quantum"),
    "code of its own": (
        with_config(model_type="quantum", auto_map={"AutoConfig": "x.Config"}),
        "a model of type quantum needs code of its own, which is never run",
    ),
    "states": (
        with_config(model_type="mamba", state_size=8),
        "has layers that keep a state in place of keys and values",
    ),
    "linear attention": (with_config(layer_types=["linear_attention"]), "has layers of linear_attention: only full"),
    "capped scores": (with_config(attn_logit_softcapping=50.0), "caps its attention scores"),
    "alibi": (with_config(model_type="falcon", alibi=True), "adds biases of position to its attention scores"),
    "latent attention": (with_config(kv_lora_rank=16), "has latent attention (kv_lora_rank), which is not supported"),
    "no weights": (without("model.safetensors"), "no weights in "),
    "weights that are cut off": (
        WHOLE | {"model.safetensors": WEIGHTS[:-3]},
        f"model.safetensors is cut off: {len(WEIGHTS) - 3} of {len(WEIGHTS)} bytes are there",
    ),
    "weights that are none": (
        WHOLE | {"model.safetensors": b"<html>not found"},
        "model.safetensors is cut off, or is no",
    ),
    "a pointer": (
        WHOLE | {"model.safetensors": b"version https://git-lfs.github.com/spec/v1"},
        "is a pointer of Git LFS",
    ),
    "a shard that is not there": (
        without("model.safetensors") | {"model.safetensors.index.json": {"weight_map": {"w": "one.safetensors"}}},
        "one.safetensors is missing, which model.safetensors.index.json names",
    ),
    "no tokenizer": (without("tokenizer.json"), "no tokenizer in "),
}


@pytest.mark.parametrize("name", FINE)
def test_a_model_that_may_run_is_let_through(name: str, tmp_path: Path) -> None:
    judge_checkpoint(str(write(tmp_path / "model", FINE[name])))


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    files, reason = REFUSED[name]
    with pytest.raises(UnsupportedModel) as refused:
        judge_checkpoint(str(write(tmp_path / "model", files)))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    write(tmp_path, {"model.safetensors": WEIGHTS})
    with pytest.raises(UnsupportedModel, match=r"is a file, and no GGUF: the folder is to be given"):
        judge_checkpoint(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "~/nothing", "a/b/c"])
def test_a_path_is_no_name_on_the_hub(name: str) -> None:
    with pytest.raises(UnknownModel, match=r"^no such folder$"):
        judge_checkpoint(name)


def test_of_a_name_on_the_hub_what_the_cache_has_is_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    judge_checkpoint("some/model")
    in_cache(tmp_path, "some/model", {"config.json": LLAMA})
    judge_checkpoint("some/model")
    in_cache(tmp_path, "some/awq", {"config.json": LLAMA | {"quantization_config": {"quant_method": "awq"}}})
    in_cache(tmp_path, "some/adapter", {"adapter_config.json": ADAPTER})
    for model_id, reason in (("some/awq", r"is quantised \(awq\)"), ("some/adapter", "is a LoRA adapter of some/base")):
        with pytest.raises(UnsupportedModel, match=reason):
            judge_checkpoint(model_id)


def test_demo_models_pass_and_the_library_is_known_without_being_imported() -> None:
    assert causal_models()["llama"] == "LlamaForCausalLM"
    code = (
        "import sys; from outrider.models.checkpoint import causal_models\n"
        "from outrider.models.names import judge_checkpoint as judge\n"
        "judge('demo/target'); assert causal_models(); print(*{'torch', 'transformers'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == []


MODULES = {"", "model", "model.layers", "model.layers.0", "model.layers.0.mlp", "model.layers.0.mlp.up_proj", "lm_head"}


@pytest.mark.parametrize(
    ("missing", "unexpected", "mismatched", "reason"),
    [
        ({"b.weight", "a.weight"}, (), (), "its weights have no a.weight, b.weight"),
        (
            {f"{letter}.weight" for letter in "abcde"},
            (),
            (),
            "its weights have no a.weight, b.weight, c.weight and 2 oth",
        ),
        ((), (), [("a", (90, 64), (96, 64))], r"a is \[90, 64\] in its weights, and \[96, 64\] by its config"),
        (
            (),
            ["model.layers.0.mlp.up_proj.bias"],
            (),
            "have model.layers.0.mlp.up_proj.bias, which a model of its type",
        ),
        ((), ["model.layers.0.q_norm.weight"], (), "its weights have model.layers.0.q_norm.weight, which"),
        ((), ["lm_head.bias"], (), "its weights have lm_head.bias, which"),
    ],
)
def test_weights_that_are_not_those_of_the_model_are_refused_by_their_names(
    missing: Any, unexpected: Any, mismatched: Any, reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        judge_tensors(missing, unexpected, mismatched, MODULES)


def test_weights_of_what_the_model_does_not_have_are_told_of() -> None:
    others = ["mtp.norm.weight", "model.layers.7.mlp.up_proj.weight", "score.weight"]
    assert judge_tensors((), others, (), MODULES) == sorted(others)

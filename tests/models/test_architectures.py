"""Architectures of the library, each as a tiny random model, are served correctly or refused in one line, as the table
of services/MODELS.md says."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from outrider.models.loading import CannotLoadModel, LoadedModel, load_for
from outrider.models.runner import Segment
from outrider.speculator.settings import SpeculatorSettings
from tests.support.tiny_models import VOCAB_SIZE, text
from tests.support.word_tokenizer import word_tokenizer

TABLE = Path(__file__).parents[2] / "services" / "MODELS.md"
HEADER = "| model | type | runs | why not, or what bounds its context |"

CONTEXT, WINDOW, ORIGINAL = 256, 64, 128
COMMON: Mapping[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.12,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
"""Fields that a config gets if its class knows them."""
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
GRANITE = {"embedding_multiplier": 12.0, "logits_scaling": 8.0, "residual_multiplier": 0.3, "attention_multiplier": 0.1}
SLIDING = {"sliding_window": WINDOW}
QWEN_SLIDING = {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}
IMAGES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Fields of a config with this rotary embedding."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LONGROPE = rope(
    "longrope",
    factor=2.0,
    original_max_position_embeddings=ORIGINAL,
    short_factor=[1.0] * 8,
    long_factor=[1.0 + 0.5 * i for i in range(8)],
)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 2.0, "original_max_position_embeddings": ORIGINAL}

ARCHITECTURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "AFMoE, sliding window": ("Afmoe", {**EXPERTS, **SLIDING}),
    "Apertus": ("Apertus", {}),
    "Arcee": ("Arcee", {}),
    "BioGPT": ("BioGpt", {}),
    "BitNet": ("BitNet", {}),
    "Bloom": ("Bloom", {}),
    "CodeGen": ("CodeGen", {"rotary_dim": 8}),
    "Cohere (Command R)": ("Cohere", {"logit_scale": 0.25}),
    "Cohere 2, sliding window": ("Cohere2", {"logit_scale": 0.25, **SLIDING}),
    "CTRL": ("CTRL", {"dff": 96}),
    "CWM, sliding window": ("Cwm", SLIDING),
    "DeepSeek V3": ("DeepseekV3", {**EXPERTS, **SHARED, **LATENT, "num_key_value_heads": 4}),
    "DeepSeek V3, values as wide as keys": (
        "DeepseekV3",
        {**EXPERTS, **SHARED, **LATENT, "qk_nope_head_dim": 8, "num_key_value_heads": 4},
    ),
    "DiffLlama": ("DiffLlama", {}),
    "Doge": ("Doge", {}),
    "dots.llm1": ("Dots1", {**EXPERTS, **SHARED}),
    "Ernie 4.5": ("Ernie4_5", {}),
    "Ernie 4.5 MoE": ("Ernie4_5_Moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32}),
    "Exaone 4, sliding window": ("Exaone4", {**SLIDING, "sliding_window_pattern": 2}),
    "Falcon, multi-query": ("Falcon", {"multi_query": True}),
    "Falcon, new decoder": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "Falcon, alibi": ("Falcon", {"alibi": True, "multi_query": False}),
    "Falcon H1": ("FalconH1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}),
    "FlexOlmo": ("FlexOlmo", EXPERTS),
    "Gemma": ("Gemma", {}),
    "Gemma 2": ("Gemma2", {**SLIDING, "query_pre_attn_scalar": 16}),
    "Gemma 2 without a cap on scores": (
        "Gemma2",
        {**SLIDING, "query_pre_attn_scalar": 16, "attn_logit_softcapping": None, "final_logit_softcapping": 3.0},
    ),
    "Gemma 3, text": ("Gemma3Text", {**SLIDING, "query_pre_attn_scalar": 16}),
    "Gemma 3, full attention": (
        "Gemma3Text",
        {**SLIDING, "layer_types": ["full_attention"] * 4, "query_pre_attn_scalar": 16},
    ),
    "Gemma 3 with images, by its text": (
        "Gemma3",
        {
            "text_config": {**COMMON, **SLIDING, "query_pre_attn_scalar": 16},
            "vision_config": {**IMAGES, "patch_size": 14},
            "image_token_index": 210,
            "boi_token_index": 209,
            "eoi_token_index": 208,
            "mm_tokens_per_image": 4,
        },
    ),
    "Gemma 4, text": ("Gemma4Text", {**SLIDING, "vocab_size_per_layer_input": VOCAB_SIZE}),
    "GLM": ("Glm", {"partial_rotary_factor": 0.5}),
    "GLM 4": ("Glm4", {"partial_rotary_factor": 0.5}),
    "GLM 4 MoE": ("Glm4Moe", {**EXPERTS, **SHARED}),
    "GPT-2": ("GPT2", {}),
    "GPT-2, scaled by layer": ("GPT2", {"scale_attn_by_inverse_layer_idx": True}),
    "GPT BigCode (StarCoder)": ("GPTBigCode", {}),
    "GPT-J": ("GPTJ", {"rotary_dim": 8}),
    "GPT-Neo": ("GPTNeo", {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW}),
    "GPT-NeoX (Pythia)": ("GPTNeoX", {}),
    "gpt-oss": ("GptOss", {**EXPERTS, **SLIDING}),
    "Granite": ("Granite", GRANITE),
    "Granite MoE": ("GraniteMoe", {**GRANITE, **EXPERTS}),
    "Granite MoE, shared": ("GraniteMoeShared", {**GRANITE, **EXPERTS, "shared_intermediate_size": 32}),
    "Helium": ("Helium", {}),
    "HunYuan": ("HunYuanDenseV1", {}),
    "HunYuan MoE": ("HunYuanMoEV1", {**EXPERTS, "moe_topk": 2}),
    "HyperCLOVA X": ("HyperCLOVAX", {"logits_scaling": 0.25}),
    "InternLM 3": ("InternLM3", {}),
    "Jamba": (
        "Jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 8},
    ),
    "LFM 2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 96}),
    "Llama": ("Llama", {}),
    "Llama, untied, with biases": ("Llama", {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}),
    "Llama, wide heads": ("Llama", {"head_dim": 32}),
    "Llama, rope linear": ("Llama", rope("linear", factor=4.0)),
    "Llama, rope dynamic": ("Llama", rope("dynamic", factor=4.0)),
    "Llama, rope llama3": ("Llama", rope("llama3", **LLAMA3)),
    "Llama, rope yarn": ("Llama", rope("yarn", **YARN)),
    "Llama, rope yarn with mscale": ("Llama", rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.5)),
    "Llama, longrope": ("Llama", LONGROPE),
    "Llama 4, text": ("Llama4Text", {**EXPERTS, "intermediate_size_mlp": 96, "attention_chunk_size": WINDOW}),
    "Mamba": ("Mamba", {"state_size": 8}),
    "MiniCPM 3": ("MiniCPM3", LATENT),
    "MiniMax M2": ("MiniMaxM2", EXPERTS),
    "Ministral, sliding window": ("Ministral", SLIDING),
    "Ministral 3": ("Ministral3", rope("yarn", **YARN, llama_4_scaling_beta=0.1)),
    "Mistral": ("Mistral", {}),
    "Mistral, sliding window": ("Mistral", SLIDING),
    "Mixtral": ("Mixtral", EXPERTS),
    "Mixtral, sliding window": ("Mixtral", {**EXPERTS, **SLIDING}),
    "MPT": ("Mpt", {}),
    "NanoChat": ("NanoChat", {}),
    "Nemotron": ("Nemotron", {"partial_rotary_factor": 0.5}),
    "OLMo": ("Olmo", {}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 3, sliding window": ("Olmo3", SLIDING),
    "OLMoE": ("Olmoe", EXPERTS),
    "OpenAI GPT": ("OpenAIGPT", {}),
    "OPT": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.12}),
    "OPT, projected": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 32, "init_std": 0.12}),
    "Persimmon": ("Persimmon", {}),
    "Phi": ("Phi", {"tie_word_embeddings": False}),
    "Phi 3": ("Phi3", {}),
    "Phi 3, longrope": ("Phi3", {**LONGROPE, "original_max_position_embeddings": ORIGINAL}),
    "Phi 3, sliding window": ("Phi3", SLIDING),
    "Phi MoE": ("Phimoe", EXPERTS),
    "Qwen 2": ("Qwen2", {}),
    "Qwen 2, sliding window": ("Qwen2", QWEN_SLIDING),
    "Qwen 2 MoE": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    "Qwen 3": ("Qwen3", {"head_dim": 32}),
    "Qwen 3, sliding window": ("Qwen3", {"head_dim": 32, **QWEN_SLIDING}),
    "Qwen 3 MoE": ("Qwen3Moe", {**EXPERTS, "decoder_sparse_step": 1}),
    "Qwen 3 Next": (
        "Qwen3Next",
        {**EXPERTS, "shared_expert_intermediate_size": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 2},
    ),
    "Seed-OSS": ("SeedOss", {}),
    "SmolLM 3": ("SmolLM3", {"no_rope_layer_interval": 2}),
    "Solar Open": ("SolarOpen", {**EXPERTS, **SHARED}),
    "StableLM": ("StableLm", {"partial_rotary_factor": 0.25}),
    "StarCoder 2": ("Starcoder2", {}),
    "StarCoder 2, sliding window": ("Starcoder2", SLIDING),
    "VaultGemma": ("VaultGemma", SLIDING),
    "XGLM": ("XGLM", {"ffn_dim": 96}),
}

pytestmark = pytest.mark.suite


def config_of(name: str) -> Any:
    """The config of a tiny model."""
    family, fields = ARCHITECTURES[name]
    kind: Any = getattr(transformers, f"{family}Config")
    known = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    return kind(**{field: value for field, value in {**COMMON, **fields}.items() if field in known})


def build(name: str) -> PreTrainedModel:
    """A tiny model with random weights, norms and biases included."""
    torch.manual_seed(1)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(name)).float().eval()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    return model


@pytest.fixture(scope="module")
def rows() -> dict[str, str]:
    """The rows of the table by their first cell."""
    lines = TABLE.read_text(encoding="utf-8").partition(f"{HEADER}\n")[2].splitlines()[1:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines if line.startswith("| ")}


def test_the_table_has_a_row_for_each(rows: dict[str, str]) -> None:
    assert list(rows) == list(ARCHITECTURES)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_it_is_served_right_or_refused_in_one_line(name: str, rows: dict[str, str], tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path)
    word_tokenizer(VOCAB_SIZE).save_pretrained(tmp_path)
    loaded, how, reason = load(tmp_path)
    assert rows[name] == f"| {name} | `{model.config.model_type}` | {how} | {reason} |"
    if loaded is None:
        return
    token_ids = text(loaded.max_context_len)
    with torch.inference_mode():
        expected = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    torch.testing.assert_close(in_pieces(loaded, token_ids), expected, rtol=1e-3, atol=1e-3)


def load(folder: Path) -> tuple[LoadedModel | None, str, str]:
    """Loads a model as a service does. Returns it, or None if it is refused; and the last two cells of its row."""
    try:
        loaded = load_for(SpeculatorSettings(model=str(folder), dtype="float32", num_threads=1, kv_cache_tokens=4096))
    except CannotLoadModel as error:
        return None, "no", str(error).removeprefix(f"--model {folder}: ")
    return loaded, "yes, by own kernels" if loaded.runner.is_fused else "yes", loaded.runner.context_reason


def in_pieces(loaded: LoadedModel, token_ids: list[int]) -> Tensor:
    """The logits of a text that is read in pieces, chains and single rows, each next to a longer or shorter session."""
    runner = loaded.runner
    cache, other, found, first = runner.new_cache(), runner.new_cache(), [], 0
    runner.forward([Segment(other, token_ids[: len(token_ids) // 2], 0)])
    for size in (30, 1, 4, 1, 17, *[64] * 4):
        if piece := token_ids[first : first + size]:
            logits = runner.forward([Segment(other, [7], 1), Segment(cache, piece, len(piece))])
            found.append(logits[1:])
            first += len(piece)
    return torch.cat(found)

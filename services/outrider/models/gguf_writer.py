"""Writes a model of ours as a GGUF file: what `outrider.models.gguf_model` reads, and llama.cpp too."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter, LlamaFileType, get_tensor_name_map
from gguf.quants import quantize
from safetensors import safe_open

from outrider.models.gguf import FAMILIES, HEAD_TOKEN_IDS

_BLOCK = 32
"""Numbers that share a scale in Q8_0."""


def write_gguf(
    path: Path, config: Mapping[str, Any], weights: Path, more: Mapping[str, Any], without: Collection[str] = ()
) -> None:
    """Writes a model, its matrices as Q8_0.

    Args:
        path: The file.
        config: transformers' config, of which `why_no_gguf` says nothing.
        weights: Its file of safetensors.
        more: Facts besides those of the config: of the tokenizer.
        without: Names of tensors to leave out.

    Raises:
        OSError: The file cannot be written.
    """
    family = _family_of(config)
    writer = GGUFWriter(path, family)
    try:
        for name, value in (_facts(family, config) | dict(more)).items():
            _add_fact(writer, name, value)
        _add_weights(writer, family, config, weights, without)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def why_no_gguf(config: Mapping[str, Any]) -> str:
    """Returns why a file would not say all that there is to say of a model; empty if it would."""
    if (family := _family_of(config)) not in FAMILIES:
        return f"{family} is none of the families {', '.join(FAMILIES)}"
    if any(config[name] % _BLOCK for name in ("hidden_size", "intermediate_size")):
        return f"its widths are no multiples of {_BLOCK}"
    if config["rope_parameters"].get("rope_type", "default") != "default":
        return "its positions are scaled (rope_parameters)"
    if "sliding_attention" in (config.get("layer_types") or ()):
        return "it has sliding windows (layer_types)"
    return ""


def _family_of(config: Mapping[str, Any]) -> str:
    kind = str(config["model_type"])
    return "llama" if kind == "mistral" else kind


def _facts(family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what a file says of a model, by llama.cpp's names."""
    num_heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    of_model = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": float(config["rope_parameters"]["rope_theta"]),
        "rope.dimension_count": head_dim,
        "vocab_size": config["vocab_size"],
    }
    facts = {f"{family}.{name}": value for name, value in of_model.items()}
    facts["general.file_type"] = int(LlamaFileType.MOSTLY_Q8_0)
    facts["general.quantization_version"] = 2
    if limited_to := config.get("head_token_ids"):
        facts[HEAD_TOKEN_IDS] = limited_to
    return facts


def _add_fact(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list() if value:
            writer.add_array(name, value)


def _add_weights(
    writer: GGUFWriter, family: str, config: Mapping[str, Any], file: Path, without: Collection[str]
) -> None:
    architecture = next(each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == family)
    names = get_tensor_name_map(architecture, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    with safe_open(file, framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it is no mapping
            if (stored := str(names.get_name(name, (".weight", ".bias")))) in without:
                continue
            rows = weights.get_tensor(name).float().numpy()
            if family == "llama" and (num_heads := heads.get(name.split(".")[-2])):
                # llama.cpp rotates neighbours there, transformers the two halves of a head.
                rows = rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
            kind = GGMLQuantizationType.Q8_0 if rows.ndim > 1 else GGMLQuantizationType.F32
            writer.add_tensor(stored, quantize(rows, kind), raw_dtype=kind)

"""Tiny GGUF files, written by the format's own library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer
from torch import Tensor

F32 = GGMLQuantizationType.F32


def stored(weight: Tensor, kind: GGMLQuantizationType) -> Any:
    """A weight as a file holds it: vectors are never quantised."""
    return quantize(weight.detach().float().numpy(), kind if weight.ndim > 1 else F32)


def after_storing(weight: Tensor, kind: GGMLQuantizationType) -> Tensor:
    """A weight as it comes back."""
    return torch.tensor(dequantize(stored(weight, kind), kind if weight.ndim > 1 else F32))


def write_gguf(
    path: Path,
    model: Any,
    kind: GGMLQuantizationType = F32,
    facts: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Writes a model.

    Args:
        path: The file.
        model: Of a family that llama.cpp has.
        kind: Format of its matrices.
        facts: More of them, or others; None in place of one leaves it out.
        tokenizer: From `tokens_of`. None: as many words as the model has rows.
        tensors: More of them, or others; None in place of one leaves it out.
    """
    config, family = model.config, {"mistral": "llama"}.get(model.config.model_type, model.config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = config.rope_parameters
    of_model = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": float(rope["rope_theta"]),
    }
    found = {f"{family}.{name}": value for name, value in of_model.items()}
    found |= {f"tokenizer.ggml.{name}": value for name, value in (tokenizer or words(config.vocab_size)).items()}
    writer = GGUFWriter(path, family)
    for name, value in (found | dict(facts or {})).items():
        _add(writer, name, value)
    architecture = next(each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == family)
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    weights: dict[str, Any] = {}
    for name, weight in model.named_parameters():
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads and family == "llama":
            weight = weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        weights[str(names.get_name(name, (".weight", ".bias")))] = weight
    for name, weight in (weights | dict(tensors or {})).items():
        if weight is not None:
            writer.add_tensor(name, stored(weight, kind), raw_dtype=kind if weight.ndim > 1 else F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def words(count: int, letter: str = "w") -> dict[str, Any]:
    """What a file says of a tokenizer that has names for token ids, and one merge."""
    tokens = [*(f"{letter}{i}" for i in range(count - 3)), "a", "b", "ab"]
    return {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "merges": ["a b"]}


def _add(writer: GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case _ if value:
            writer.add_array(name, value)


def tokens_of(tokenizer: Tokenizer, pre: str, num_padding: int = 0, **facts: Any) -> dict[str, Any]:
    """What a file says of a byte-level tokenizer, whose special tokens are control tokens there, and the other added
    ones the user's."""
    state = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    kinds = np.full(len(tokens) + num_padding, int(TokenType.NORMAL))
    kinds[len(tokens) :] = TokenType.UNUSED
    for entry in state["added_tokens"]:
        kinds[entry["id"]] = TokenType.CONTROL if entry["special"] else TokenType.USER_DEFINED
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *(f"[PAD{i}]" for i in range(num_padding))],
        "token_type": kinds.tolist(),
        "merges": [" ".join(merge) for merge in state["model"]["merges"]],
        **facts,
    }

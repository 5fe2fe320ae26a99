"""Writes a model of transformers and its tokenizer as a GGUF file, which llama.cpp reads: Llama and Qwen3.

Format and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Weights keep their number format, bfloat16
or float32; norms and biases are in float32, as llama.cpp requires. Nothing is quantized.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize

Array = npt.NDArray[np.float32]


class CannotConvert(ValueError):
    """The model or its tokenizer is of a kind that this module cannot write."""


@dataclass(frozen=True)
class _Family:
    """How llama.cpp names a family of models."""

    architecture: MODEL_ARCH
    rotates_neighbours: bool
    """True if llama.cpp rotates neighbouring dimensions of a head; transformers rotates its two halves."""


_FAMILIES = {"llama": _Family(MODEL_ARCH.LLAMA, True), "qwen3": _Family(MODEL_ARCH.QWEN3, False)}
_TYPES = {
    torch.float32: (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    torch.bfloat16: (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
}


def write_gguf(model: Any, tokenizer: Any, path: Path) -> None:
    """Writes a model and its tokenizer.

    Args:
        model: A LlamaForCausalLM or Qwen3ForCausalLM on the CPU, in bfloat16 or float32.
        tokenizer: Its fast tokenizer, byte-level BPE.
        path: The file to write; an existing one is replaced.

    Raises:
        CannotConvert: The model, number format or tokenizer is another one, or its positions are scaled.
    """
    config = model.config
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise CannotConvert(f"a model must be one of {', '.join(_FAMILIES)} to be written, got {config.model_type!r}")
    if model.dtype not in _TYPES:
        raise CannotConvert(f"a model must be in {' or '.join(map(str, _TYPES))} to be written, got {model.dtype}")
    # A file object of ours, closed even if something cannot be written.
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[family.architecture])
    try:
        _add_shape(writer, config)
        writer.add_file_type(_TYPES[model.dtype][1])
        _add_tokenizer(writer, tokenizer, config.vocab_size)
        _add_tensors(writer, model, family)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    """Adds what llama.cpp must know besides the weights."""
    rope = config.rope_parameters
    if rope["rope_type"] != "default":
        raise CannotConvert(f"positions must not be scaled, got {rope['rope_type']!r}")
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _add_tokenizer(writer: GGUFWriter, tokenizer: Any, vocab_size: int) -> None:
    """Adds a BPE with its merges. Token ids past the tokenizer's, which pad the logits, are unused ones."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if state["model"]["type"] != "BPE":
        raise CannotConvert(f"a tokenizer must be BPE to be written, got {state['model']['type']!r}")
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    special = {added["id"]: TokenType.CONTROL for added in state["added_tokens"] if added["special"]}
    for token, token_id in tokenizer.get_vocab().items():
        tokens[token_id], types[token_id] = token, special.get(token_id, TokenType.NORMAL)
    # Older tokenizer files write a merge as "a b", newer ones as ["a", "b"].
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in state["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    # llama.cpp knows the rule that splits a text before the merges by a name. Other tokenizers must send token ids.
    writer.add_tokenizer_pre("gpt-2" if state["pre_tokenizer"] == _GPT_2 else "default")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_add_bos_token(False)


_GPT_2 = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
"""GPT-2's own rule, as tokenizers describes it."""


def _add_tensors(writer: GGUFWriter, model: Any, family: _Family) -> None:
    """Adds all weights under llama.cpp's names. An output matrix that is the embedding itself is not written twice."""
    config, matrix_type = model.config, _TYPES[model.dtype][0]
    names = get_tensor_name_map(family.architecture, config.num_hidden_layers)
    num_heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise CannotConvert(f"llama.cpp has no name for {name}")
        values = parameter.detach().float().numpy()
        layer = name.split(".")[-2]
        if family.rotates_neighbours and layer in num_heads:
            values = halves_interleaved(values, num_heads[layer])
        kind = matrix_type if values.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(found, quantize(values, kind), raw_dtype=kind)


def halves_interleaved(rows: Array, num_heads: int) -> Array:
    """Reorders the rows of q or k for a rotation of neighbours: the two halves of each head alternate.

    transformers rotates dimension i of a head with i + head_dim / 2, llama.cpp's Llama rotates 2i with 2i + 1.

    Args:
        rows: float32 [num_heads * head_dim, ...]: a weight or a bias.
        num_heads: Heads of q, or of k.

    Returns:
        float32 of the same shape.
    """
    halves = rows.reshape(num_heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)

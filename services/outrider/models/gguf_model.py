"""Loads GGUF files: dequantises their weights, so that they run like any other model of their family, and makes their
tokenizers. These come from transformers, and are corrected where a file says more than it reads."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, MODEL_ARCH, MODEL_ARCH_NAMES, GGMLQuantizationType, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from outrider.models.checkpoint import NUM_NAMED, UnsupportedModel
from outrider.models.gguf import (
    CONTROL,
    DIGIT_BY_DIGIT,
    LIKE_LLAMA_3,
    LIKE_QWEN_2,
    UNUSED,
    USER_DEFINED,
    Header,
    config_of,
)

_ENDS = {"<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|im_end|>", "<|endoftext|>", "<|end|>"}
"""Control tokens that end a text in whatever model has them: files name one of them, models have up to three."""


def read_model(header: Header, dtype: Any) -> tuple[Any, Mapping[str, Any]]:
    """Reads the weights of a judged file.

    Args:
        header: From `judge_gguf`.
        dtype: Type that they are dequantised to.

    Returns:
        transformers' model, and what its loader found missing or of another shape.

    Raises:
        UnsupportedModel: The file has tensors that the model does not use.
    """
    fields = config_of(header)
    config = AutoConfig.for_model(**fields)
    with torch.device("meta"):
        empty: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    architecture = next(each for each in MODEL_ARCH if MODEL_ARCH_NAMES[each] == header.family)
    named = get_tensor_name_map(architecture, config.num_hidden_layers)
    names = {named.get_name(name, (".weight", ".bias")): name for name in empty.state_dict()}
    # The library computes the frequencies; older files have a copy of them in each layer.
    unused = [name for name in header.tensors.keys() - names if not re.search("rope_freqs|rot_embd", name)]
    if unused:
        first = ", ".join(sorted(unused)[:NUM_NAMED])
        raise UnsupportedModel(f"its weights have {first}, which a model of its type does not use")
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    content = {path: np.memmap(path, mode="r") for path in {tensor.path for tensor in header.tensors.values()}}
    state = {}
    for name, tensor in header.tensors.items():
        if name not in names:
            continue
        kind = GGMLQuantizationType(tensor.kind)
        block, size = GGML_QUANT_SIZES[kind]
        stored = content[tensor.path][tensor.begin : tensor.begin + math.prod(tensor.shape) // block * size]
        rows = dequantize(stored.reshape(*tensor.shape[:-1], -1), kind)
        if header.family == "llama" and (num_heads := heads.get(name.split(".")[-2])):
            # llama.cpp rotates neighbours there, transformers the two halves of a head.
            rows = rows.reshape(num_heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        state[names[name]] = torch.tensor(rows).to(dtype)
    model, found = type(empty).from_pretrained(
        None, config=config, state_dict=state, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True
    )
    model.config.name_or_path = model.name_or_path = str(header.path)
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=fields["bos_token_id"], eos_token_id=_end_ids(header)
    )
    return model, found


def _end_ids(header: Header) -> list[int] | None:
    """Returns the tokens that end a text, the file's own first."""
    own = [header.of_tokenizer(f"{name}_token_id") for name in ("eos", "eot", "eom")]
    kinds = header.of_tokenizer("token_type", [])
    tokens = enumerate(zip(header.of_tokenizer("tokens"), kinds, strict=False))
    known = [token_id for token_id, (token, kind) in tokens if token in _ENDS and kind == CONTROL]
    return list(dict.fromkeys(each for each in (*own, *known) if each is not None)) or None


def read_tokenizer(header: Header) -> Any:
    """Makes the fast tokenizer of a judged file, with its chat template."""
    split = header.of_tokenizer("pre", "default")
    # Files of Llama 3 often do not say it, and llama.cpp knows.
    begins: dict[str, Any] = {"add_bos_token": True} if split in LIKE_LLAMA_3 else {}
    with TemporaryDirectory() as folder:  # where no tokenizer.json lies, which would come first
        link = Path(folder) / "model.gguf"
        link.symlink_to(header.tokenizer_path.resolve())
        made: Any = PreTrainedTokenizerFast.from_pretrained(folder, gguf_file=link.name, **begins)
    state = json.loads(made.backend_tokenizer.to_str())
    _correct(state, header, split)
    special = {name: getattr(made, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(state)), chat_template=made.chat_template, **special
    )


def _correct(state: dict[str, Any], header: Header, split: str) -> None:
    """Changes a tokenizer, as its library writes it, where transformers does not read what the file says."""
    tokens, kinds = header.of_tokenizer("tokens"), header.of_tokenizer("token_type", [])
    names = {token_id: token for token, token_id in state["model"]["vocab"].items()}
    # The library adds a GPT-2's <|endoftext|> to files that do not have it.
    added = {entry["id"]: entry for entry in state["added_tokens"] if entry["id"] < len(tokens)}
    for token_id, kind in enumerate(kinds):
        if kind == UNUSED:
            names.pop(token_id, None)
        elif kind in (CONTROL, USER_DEFINED):
            names[token_id] = tokens[token_id]
            added[token_id] = _added(token_id, tokens[token_id], is_special=kind == CONTROL)
    state["model"]["vocab"] = {token: token_id for token_id, token in names.items()}
    state["added_tokens"] = [added[token_id] for token_id in sorted(added)]
    if header.of_tokenizer("model") == "llama":
        if not header.of_tokenizer("add_space_prefix", True):
            state["pre_tokenizer"]["prepend_scheme"] = "never"
            state["decoder"]["decoders"] = [each for each in state["decoder"]["decoders"] if each["type"] != "Strip"]
        return
    if split in LIKE_LLAMA_3:
        state["model"]["ignore_merges"] = True
    if split in DIGIT_BY_DIGIT:
        digits = {"type": "Digits", "individual_digits": True}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [digits, state["pre_tokenizer"]]}
    if split in LIKE_QWEN_2:
        state["normalizer"] = {"type": "NFC"}


def _added(token_id: int, token: str, *, is_special: bool) -> dict[str, Any]:
    no = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": token, "special": is_special, **no}

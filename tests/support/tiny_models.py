"""Tiny random models of the four families, and the library's own logits for a text."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCAB_SIZE = 211
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(num_key_value_heads=4, attention_bias=True, mlp_bias=True, **_COMMON),
    "qwen2": Qwen2Config(num_key_value_heads=2, **_COMMON),
    "qwen3": Qwen3Config(num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, **_COMMON),
    "mistral": MistralConfig(num_key_value_heads=1, sliding_window=None, **_COMMON),
}


@cache
def _built(family: str) -> PreTrainedModel:
    torch.manual_seed(1)
    config = copy.deepcopy(CONFIGS[family])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            # Far from the initial values: norms of exactly 1 and biases of 0 would hide mistakes.
            is_matrix = parameter.ndim == 2
            parameter.normal_(0.0 if is_matrix else 1.0, 0.2)
    return model


def build(family: str) -> PreTrainedModel:
    """A new model each time, because a runner takes its model over."""
    return copy.deepcopy(_built(family))


@torch.inference_mode()
def reference_logits(family: str, token_ids: Sequence[int]) -> Tensor:
    """The library's logits of every token: float32 [tokens, vocab]."""
    logits: Tensor = _built(family)(torch.tensor([list(token_ids)]), use_cache=False).logits[0]
    return logits


def text(length: int, seed: int = 0) -> list[int]:
    """A text of random tokens."""
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).tolist()
    return ids


def tree_visibility(trunk: int, parents: Sequence[int]) -> npt.NDArray[np.bool_]:
    """The ancestor mask of a tree in which node i hangs on node `parents[i]`, or on the trunk if that is -1."""
    visible = np.zeros((len(parents), trunk + len(parents)), dtype=np.bool_)
    visible[:, :trunk] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] = visible[parent]
        visible[node, trunk + node] = True
    return visible

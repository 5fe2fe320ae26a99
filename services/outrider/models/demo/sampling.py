"""Sampling from a model in batches, for distillation and for the evaluation."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, StaticCache


@torch.no_grad()
def sample_continuations(
    model: LlamaForCausalLM,
    prompts: Tensor,
    new_tokens: int,
    temperature: float,
    generator: torch.Generator,
) -> Tensor:
    """``prompts`` (rows of equal length) with ``new_tokens`` more; greedy at temperature 0."""
    # A cache that grows is copied at every step, which costs more than the model.
    cache = StaticCache(config=model.config, max_cache_len=prompts.shape[1] + new_tokens)
    pieces = [prompts]
    for _ in range(new_tokens):
        logits = model(input_ids=pieces[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        if temperature == 0:
            pieces.append(logits.argmax(-1, keepdim=True))
        else:
            probabilities = (logits.float() / temperature).softmax(-1)
            pieces.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(pieces, dim=1)

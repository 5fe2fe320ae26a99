"""Makes demo models cost as much as larger ones, by layers that do work and change nothing.

On a CPU the demo target is so cheap that no draft could pay for itself. An inflated model has the same logits, at
the price of a model of a given size: every layer gets a wider MLP whose added down-projection columns are zero, and
further layers follow whose output projections are zero. All other added weights are random, from a fixed seed.
The result is an ordinary Llama: it can be saved, and run by any other engine.

`target-100m` and `target-300m` have about that many parameters. `draft-cX` has about 1/X of the parameters of
`target-100m`, in the same type: a forward of few rows costs what reading its weights costs, so its speed ratio to
that target is about X.

`draft-untrained` is the opposite: the draft at its own cost, with output unrelated to the target's.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from outrider.models.demo.names import Inflation


def num_layers_for(config: LlamaConfig, inflation: Inflation) -> int:
    """Computes the layers that come closest to the wanted number of parameters; no fewer than there are."""
    hidden = config.hidden_size
    head_dim = config.head_dim or hidden // config.num_attention_heads
    num_keys = config.num_key_value_heads or config.num_attention_heads
    # q and o are as wide as the query heads, k and v as the key-value heads; then gate, up and down, and two norms.
    attention = 2 * hidden * head_dim * (config.num_attention_heads + num_keys)
    layer = attention + 3 * hidden * inflation.intermediate_size + 2 * hidden
    rest = config.vocab_size * hidden * (1 if config.tie_word_embeddings else 2) + hidden
    return max(config.num_hidden_layers, round((inflation.num_parameters - rest) / layer))


@torch.no_grad()
def inflate(model: LlamaForCausalLM, inflation: Inflation) -> LlamaForCausalLM:
    """Inflates a Llama model without biases, in place. Its logits stay the same.

    Raises:
        ValueError: The MLP is wider than the wanted width.
    """
    if inflation.intermediate_size < model.config.intermediate_size:
        raise ValueError(f"the MLP is {model.config.intermediate_size} wide, more than {inflation.intermediate_size}")
    config: Any = copy.deepcopy(model.config)
    config.intermediate_size = inflation.intermediate_size
    config.num_hidden_layers = num_layers_for(model.config, inflation)
    config.layer_types = None
    generator = torch.Generator().manual_seed(inflation.seed)
    trained = list(model.model.layers)
    layers = nn.ModuleList()
    for index in range(config.num_hidden_layers):
        layer = _identity_layer(config, index, generator).to(model.dtype)
        if index < len(trained):
            _copy_into_corner(trained[index], layer)
        layers.append(layer.eval())
    model.model.layers = layers
    # The inner model holds the config, too.
    model.config = model.model.config = config
    return model


@torch.no_grad()
def forget(model: LlamaForCausalLM, seed: int = 0) -> LlamaForCausalLM:
    """Draws the weights of a Llama model in place, as before the first step of a training. A seed always gives the same
    weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, model.config.initializer_range, generator=generator)
    return model


def _identity_layer(config: LlamaConfig, index: int, generator: torch.Generator) -> LlamaDecoderLayer:
    """Makes a layer that adds zero to its input: both output projections are zero."""
    # On the meta device, where the library's random initial weights cost no time.
    with torch.device("meta"):
        layer = LlamaDecoderLayer(config, index)
    # Its memory is undefined until every parameter is written below. A Llama layer has no buffers.
    layer.to_empty(device="cpu")
    for name, parameter in layer.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        elif "o_proj" in name or "down_proj" in name:
            parameter.zero_()
        else:
            parameter.uniform_(-0.03, 0.03, generator=generator)
    return layer


def _copy_into_corner(trained: nn.Module, layer: nn.Module) -> None:
    """Copies trained weights over the first rows and columns of wider ones."""
    wide = dict(layer.named_parameters())
    for name, parameter in trained.named_parameters():
        wide[name][tuple(slice(size) for size in parameter.shape)] = parameter

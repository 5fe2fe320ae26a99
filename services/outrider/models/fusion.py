"""Surgery on Hugging Face models: the same weights and arithmetic, in far fewer operator calls.

A decoder layer of the library makes about 40 operator calls and as many Python calls; at a few rows that is most of a
small model's time. For families whose layers are known to be alike, the modules of a layer are taken apart. Their
weights become one product for queries, keys and values, one for gate and up, and a rotary embedding that is a single
complex multiplication. Any other model runs as it is (`outrider.models.runner`).

If the arithmetic differs, it is more precise: on a CPU the residual stream, the norms, the rotary embedding and the
attention stay in float32 even if the weights are bfloat16 (and attention of one row is five times as fast).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from outrider.models.rotary import RotaryTable, interleave_halves
from outrider.models.steps import Steps
from outrider.models.torch.plan import Plan
from outrider.models.torch.products import MIN_LARGE_ENTRIES, MakeProduct, Product, concatenate

FUSABLE_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose code was compared with this code. Others share the names of modules, but not the arithmetic."""
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_fusable(model: Any) -> bool:
    """Returns True if the model consists of exactly the parts that `FusedStack` knows."""
    inner = model.base_model
    rope: dict[str, Any] = getattr(model.config, "rope_parameters", None) or {}
    return (
        model.config.model_type in FUSABLE_TYPES
        and rope.get("rope_type", "default") in STATIC_ROPE_TYPES
        and _part_names(inner) == {"embed_tokens", "layers", "norm", "rotary_emb"}
        # The exact type, here and below: a subclass, such as a quantised or adapted layer, computes something else.
        and type(inner.embed_tokens) is nn.Embedding
        and all(_is_fusable_layer(layer) for layer in inner.layers)
    )


def _is_fusable_layer(layer: nn.Module) -> bool:
    if _part_names(layer) != _LAYER_PARTS:
        return False
    attention: Any = layer.self_attn
    mlp: Any = layer.mlp
    return (
        _part_names(attention) - _HEAD_NORMS == _ATTENTION_PARTS
        and _part_names(mlp) == _MLP_PARTS
        and all(type(getattr(attention, name)) is nn.Linear for name in _ATTENTION_PARTS)
        and all(type(getattr(mlp, name)) is nn.Linear for name in _MLP_PARTS - {"act_fn"})
    )


def _part_names(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


class FusedStack:
    """Runs embedding, layers and last norm. Takes the layers out of the model one by one, so that no weights are held
    twice."""

    def __init__(
        self,
        model: Any,
        make_steps: Callable[[RotaryTable], Steps[Any]],
        make_product: MakeProduct,
        stream: torch.dtype,
    ) -> None:
        """
        Args:
            model: One that `is_fusable`.
            make_steps: Makes the steps of the layers, given the model's rotary embedding.
            make_product: Makes the products of the layers.
            stream: Type of the residual stream.
        """
        inner = model.base_model
        self._stream, self._embedding = stream, inner.embed_tokens.weight
        steps = make_steps(RotaryTable(inner.rotary_emb.inv_freq, inner.rotary_emb.attention_scaling))
        # From here on only the list holds the layers: `pop` frees each layer's weights as soon as it is fused.
        layers = list(inner.layers)
        inner.layers = nn.ModuleList()
        self._layers = [FusedLayer(index, layers.pop(0), steps, make_product) for index in range(len(layers))]
        self._norm = steps.norm(inner.norm)

    def large_products(self) -> list[tuple[Product, int]]:
        """Returns the products of all layers that are not small (`MIN_LARGE_ENTRIES`), each with its inputs."""
        return [
            (product, num_inputs)
            for layer in self._layers
            for product, num_inputs, num_outputs in layer.products
            if num_inputs * num_outputs >= MIN_LARGE_ENTRIES
        ]

    def __call__(self, plan: Plan, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of the wanted rows: [num wanted rows, hidden], in the weights' type."""
        hidden, summand = self._below_norm(plan.token_ids, plan, num_layers)
        # The other rows are no longer needed: their keys and values are in the caches.
        if not plan.wants_all_rows:
            hidden = hidden[plan.wanted_rows]
            summand = None if summand is None else summand[plan.wanted_rows]
        return self._norm(hidden, summand)

    def all_rows(self, token_ids: Tensor, layout: Any, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of all rows: [rows, hidden], in the weights' type.

        Args:
            token_ids: [rows].
            layout: Layout for the attention of the steps.
            num_layers: Number of first layers to run; None means all.
        """
        return self._norm(*self._below_norm(token_ids, layout, num_layers))

    def _below_norm(self, token_ids: Tensor, layout: Any, num_layers: int | None) -> tuple[Tensor, Tensor | None]:
        hidden = self._embedding.index_select(0, token_ids).to(self._stream)
        summand: Tensor | None = None
        for layer in self._layers[:num_layers]:
            summand = layer(hidden, summand, layout)
        return hidden, summand


class FusedLayer:
    """Runs a decoder layer: attention and gated MLP, each after a norm and added to the residual stream."""

    def __init__(self, index: int, layer: Any, steps: Steps[Any], make: MakeProduct) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = _make_qkv(attention, make)
        output = make(attention.o_proj.weight, attention.o_proj.bias)
        gate_up = make(*concatenate([mlp.gate_proj, mlp.up_proj]))
        down = make(mlp.down_proj.weight, mlp.down_proj.bias)
        self._heads = steps.heads(index, layer.input_layernorm, qkv)
        self._attend = steps.attention(index, attention)
        self._mlp = steps.mlp(index, output, layer.post_attention_layernorm, gate_up, mlp.act_fn, down)
        size, attended, gated = mlp.gate_proj.in_features, attention.o_proj.in_features, mlp.down_proj.in_features
        self.products = [
            (qkv, size, attended + attention.k_proj.out_features + attention.v_proj.out_features),
            (output, attended, size),
            (gate_up, size, 2 * gated),
            (down, gated, size),
        ]
        """Products of the layer, each with its inputs and outputs, for measurements."""

    def __call__(self, hidden: Tensor, summand: Tensor | None, layout: Any) -> Tensor | None:
        """Runs the layer.

        Args:
            hidden: [rows, hidden]: the residual stream, written.
            summand: [rows, hidden], or another form that the steps define: what the layer before still has to add to
                the stream; None if that is nothing.
            layout: Layout for the attention of the steps, mostly a `Plan`.

        Returns:
            What this layer still has to add to the stream, likewise.
        """
        return self._mlp(hidden, self._attend(self._heads(hidden, summand), layout))


def _make_qkv(attention: Any, make: MakeProduct) -> Product:
    """Makes one product for queries, keys and values, with the halves that turn together interleaved."""
    weight, bias = concatenate([attention.q_proj, attention.k_proj, attention.v_proj])
    # The library turns dimension i with i + d/2; a complex product needs them side by side. Scores do not change when
    # queries and keys are reordered alike. Values are not turned and keep their order, which `o_proj` expects.
    num_turned = attention.q_proj.out_features + attention.k_proj.out_features
    order = torch.arange(weight.shape[0], device=weight.device)
    order[:num_turned] = interleave_halves(order[:num_turned].view(-1, attention.head_dim)).flatten()
    return make(weight[order], None if bias is None else bias[order])

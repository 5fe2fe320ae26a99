"""Surgery on Hugging Face models: the same weights and arithmetic, in far fewer operator calls.

A decoder layer of the library makes about 40 operator calls and as many Python calls; at a few rows that is most of
a small model's time. For families whose layers are known to be alike, the modules of a layer are taken apart and
their weights put together again as one product for queries, keys and values, one for gate and up, and a rotary
embedding that is a single complex multiplication. Any other model runs as it is (`outrider.models.runner`).

Where arithmetic may differ, it is more precise: on a CPU the residual stream, the norms, the rotary embedding and
the attention stay in float32 even if the weights are bfloat16 (and attention of one row is five times as fast).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from outrider.models.packing import Plan

FUSABLE_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Families whose code was compared with this one. Others share the names of modules, but not the arithmetic."""
STATIC_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Rotary embeddings whose frequencies do not depend on the length of the sequence."""

_LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def is_fusable(model: Any) -> bool:
    """Returns True if the model is built of exactly the parts that `FusedStack` knows."""
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

    def __init__(self, model: Any, *, is_exact: bool = True) -> None:
        inner = model.base_model
        weight = inner.embed_tokens.weight
        # The residual stream stays in float32 on a CPU: it is small beside the weights, and attention of one bfloat16
        # row is five times as slow there as that of a float32 row.
        stream = torch.float32 if weight.device.type == "cpu" else weight.dtype
        self._embedding: Tensor = weight
        self._stream = stream
        self._rotary = RotaryTable(inner.rotary_emb.inv_freq, inner.rotary_emb.attention_scaling)
        make = partial(make_product, is_exact=is_exact)
        # From here on the list alone holds the layers: `pop` lets each one's weights go as soon as it is fused.
        layers = list(inner.layers)
        inner.layers = nn.ModuleList()
        self._layers = [FusedLayer(index, layers.pop(0), stream, make) for index in range(len(layers))]
        self._norm = Norm(inner.norm, stream, weight.dtype)

    def __call__(self, plan: Plan, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of the wanted rows: [num wanted rows, hidden], in the weights' type."""
        hidden = self._embedding.index_select(0, plan.token_ids)
        if hidden.dtype is not self._stream:
            hidden = hidden.to(self._stream)
        turns = self._rotary.turns(plan)
        for layer in self._layers[:num_layers]:
            hidden = layer(hidden, turns, plan)
        # The other rows have done their part: their keys and values are in the caches.
        if not plan.wants_all_rows:
            hidden = hidden[plan.wanted_rows]
        return self._norm(hidden)


class FusedLayer:
    """Runs a decoder layer: attention and gated MLP, each behind a norm and added to the residual stream."""

    def __init__(self, index: int, layer: Any, stream: torch.dtype, make: Callable[..., Product]) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        weight = attention.q_proj.weight
        self._index = index
        self._dtype: torch.dtype = weight.dtype
        self._stream = stream
        self._scale: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._num_queries: int = attention.q_proj.out_features // self._head_dim
        self._num_keys: int = attention.k_proj.out_features // self._head_dim
        self._num_heads = self._num_queries + 2 * self._num_keys
        self._num_turned = self._num_queries + self._num_keys
        self._split = [self._num_queries, 2 * self._num_keys]
        self._attention_norm = Norm(layer.input_layernorm, stream, weight.dtype)
        self._head_norm = HeadNorm(attention, self._num_queries, self._num_keys, stream)
        self._qkv = self._make_qkv(attention, make)
        self._output = make(attention.o_proj.weight, attention.o_proj.bias)
        self._mlp_norm = Norm(layer.post_attention_layernorm, stream, weight.dtype)
        self._gate_up = make(*concatenate([mlp.gate_proj, mlp.up_proj]))
        self._activate = functional.silu if isinstance(mlp.act_fn, nn.SiLU) else mlp.act_fn
        self._down = make(mlp.down_proj.weight, mlp.down_proj.bias)

    def _make_qkv(self, attention: Any, make: Callable[..., Product]) -> Product:
        """Makes one product for queries, keys and values, with the halves that turn together interleaved."""
        weight, bias = concatenate([attention.q_proj, attention.k_proj, attention.v_proj])
        # The library turns dimension i with i + d/2, a complex product wants them side by side. Scores do not change
        # when queries and keys are reordered alike. Values are not turned and keep their order, which `o_proj` expects.
        num_turned = self._num_turned * self._head_dim
        order = torch.arange(weight.shape[0], device=weight.device)
        order[:num_turned] = interleave_halves(order[:num_turned].view(-1, self._head_dim)).flatten()
        return make(weight[order], None if bias is None else bias[order])

    def __call__(self, hidden: Tensor, turns: Tensor, plan: Plan) -> Tensor:
        """[rows, hidden] to [rows, hidden], both in the type of the residual stream."""
        rows = hidden.shape[0]
        heads = self._qkv(self._attention_norm(hidden))
        if heads.dtype is not self._stream:
            heads = heads.to(self._stream)
        # Qwen3 norms its heads before it turns them.
        heads = self._turn(self._head_norm(heads.view(rows, self._num_heads, self._head_dim)), turns)
        queries, keys_values = heads.split_with_sizes(self._split, 1)
        keys_values = keys_values.view(rows, 2, self._num_keys, self._head_dim)
        attended = plan.attend(self._index, queries, keys_values, self._scale)
        # A bfloat16 summand is promoted: the residual stream keeps its type, here and in the last line.
        hidden = hidden + self._output(attended.to(self._dtype))
        gate, up = self._gate_up(self._mlp_norm(hidden)).chunk(2, 1)
        return hidden + self._down(self._activate(gate).mul_(up))

    def _turn(self, heads: Tensor, turns: Tensor) -> Tensor:
        """Applies complex [rows, 1, head_dim / 2] to the queries and keys among [rows, heads, head_dim]."""
        part = heads.narrow(1, 0, self._num_turned)
        pairs = torch.view_as_complex(part.float().view(-1, self._num_turned, self._head_dim // 2, 2))
        pairs.mul_(turns)
        # In float32 `pairs` is a view, and `heads` are turned by now; of any other type `float()` has made a copy.
        if heads.dtype is not torch.float32:
            part.copy_(torch.view_as_real(pairs).flatten(-2))
        return heads


class Norm:
    """Computes the RMS norm of the residual stream, with the result in the type of the weights."""

    def __init__(self, module: Any, stream: torch.dtype, out: torch.dtype) -> None:
        weight: Tensor = module.weight
        self._epsilon: float = module.variance_epsilon
        self._out = out
        self._size = weight.shape[-1]
        self._is_composed = weight.device.type == "cpu"
        # x / sqrt(mean(x^2) + e)  =  x * sqrt(n) / hypot(norm(x), sqrt(n e))
        self._floor = torch.tensor(math.sqrt(self._size * self._epsilon), dtype=stream, device=weight.device)
        self._weight = (weight.to(stream) * math.sqrt(self._size)) if self._is_composed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to [..., size]."""
        if not self._is_composed:
            return functional.rms_norm(x, (self._size,), self._weight, self._epsilon)
        # The library's own CPU kernel is a chain of seven operators; these are four.
        scaled = x / torch.hypot(torch.linalg.vector_norm(x, 2, -1, True), self._floor)
        scaled.mul_(self._weight)
        return scaled if scaled.dtype is self._out else scaled.to(self._out)


class HeadNorm:
    """Computes the norms of queries and keys that Qwen3 has; does nothing where a layer has none."""

    def __init__(self, attention: Any, num_queries: int, num_keys: int, stream: torch.dtype) -> None:
        self._weight: Tensor | None = None
        if hasattr(attention, "q_norm"):
            self._num_normed = num_queries + num_keys
            # `_make_qkv` has interleaved the heads: their mean of squares is the same, the weights must follow.
            queries, keys = (interleave_halves(norm.weight.to(stream)) for norm in (attention.q_norm, attention.k_norm))
            self._weight = torch.cat([queries.expand(num_queries, -1), keys.expand(num_keys, -1)])
            self._epsilon: float = attention.q_norm.variance_epsilon  # k_norm's too: both have the config's

    def __call__(self, heads: Tensor) -> Tensor:
        """[rows, heads, head_dim], queries before keys before values, with the halves interleaved."""
        if self._weight is None:
            return heads
        # Without weights: `rms_norm` takes one row of them for all heads, and queries and keys have different ones.
        normed = functional.rms_norm(heads[:, : self._num_normed], heads.shape[-1:], None, self._epsilon)
        return torch.cat((normed.mul_(self._weight), heads[:, self._num_normed :]), 1)


class RotaryTable:
    """Holds the rotary embedding of every position, as complex numbers; grown by doubling."""

    def __init__(self, inv_freq: Tensor, attention_scaling: float) -> None:
        self._inv_freq = inv_freq.float()
        self._scaling = attention_scaling
        self._table = self._compute(1024)

    def turns(self, plan: Plan) -> Tensor:
        """Looks up the turns of a plan's rows: complex64 [rows, 1, head_dim / 2]."""
        if plan.last_position >= self._table.shape[0]:
            # The last position is at least 1024 here, so twice as many positions include it.
            self._table = self._compute(2 * plan.last_position)
        return self._table.index_select(0, plan.position_ids)

    def _compute(self, num_positions: int) -> Tensor:
        positions = torch.arange(num_positions, device=self._inv_freq.device, dtype=torch.float32)
        # As the library computes them: the product rounded to float32 before the cosine.
        angles = positions[:, None] * self._inv_freq
        return torch.complex(angles.cos() * self._scaling, angles.sin() * self._scaling).unsqueeze(1)


def interleave_halves(x: Tensor) -> Tensor:
    """Reorders the last dimension: (0, 1, ..., d-1) to (0, d/2, 1, d/2 + 1, ...)."""
    return x.reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)


Product = Callable[[Tensor], Tensor]
"""Maps [rows, in] to [rows, out]."""

MIN_PACKED_ENTRIES = 2**20
"""Matrices of float32 with fewer entries are faster unpacked."""
PACKED_FOR_ROWS = {torch.bfloat16: 1, torch.float32: 8}
"""Rows of a product that the layout of the weights is chosen for."""


def make_product(weight: Tensor, bias: Tensor | None = None, *, is_exact: bool = True) -> Product:
    """Makes the function `x @ weight.T + bias` for [out, in] weights that will not change.

    Args:
        weight: [out, in].
        bias: [out].
        is_exact: True if the bits of a row may not depend on the number of rows: on a CPU those of oneDNN's products do
            not, and those of torch's own in float32 do.
    """
    if not _can_be_packed(weight) or not (is_exact or _is_worth_packing(weight)):
        transposed = weight.contiguous().t()

        def plain(x: Tensor) -> Tensor:
            return torch.mm(x, transposed) if bias is None else torch.addmm(bias, x, transposed)

        return plain

    # oneDNN multiplies weights in a blocked layout of its own: they are put into it once, not at every call.
    # The operators are private; torch's own compiler calls them for frozen weights (`_inductor`, mkldnn_fusion.py).
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACKED_FOR_ROWS[weight.dtype])
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def prepacked(x: Tensor) -> Tensor:
        # "none": no activation is fused into the product.
        product: Tensor = multiply(x, packed, bias, "none", [], "")
        return product

    return prepacked


def concatenate(linears: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Puts together weight and bias of one product that gives the outputs of all `linears` side by side."""
    weight = torch.cat(tuple(linear.weight for linear in linears))
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases: list[Tensor] = [
        linear.bias if linear.bias is not None else linear.weight.new_zeros(linear.out_features) for linear in linears
    ]
    return weight, torch.cat(biases)


def _can_be_packed(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.enabled:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def _is_worth_packing(weight: Tensor) -> bool:
    return weight.dtype != torch.float32 or weight.numel() >= MIN_PACKED_ENTRIES

"""The library's own code of a model, run over packed rows: entered through its attention interface below the head, and
through its forward for the head."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from outrider.models.checkpoint import UnsupportedModel
from outrider.models.torch.plan import Plan
from outrider.models.torch.products import Product

ATTENTION_NAME = "outrider"

_plan: ContextVar[Plan] = ContextVar("plan")
"""The plan of the forward that this thread runs: not all models pass further arguments on to their layers."""


class PlainStack:
    """Runs everything below the head."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._inner: Any = model.base_model
        # The library's layers look the name up in the config at every call, so it may be changed now.
        for config in (model.config, model.config.get_text_config()):
            config._attn_implementation = ATTENTION_NAME

    def __call__(self, plan: Plan, num_layers: int | None = None) -> Tensor:
        """Computes the normed hidden states of the wanted rows: [num wanted rows, hidden], with all layers."""
        token_ids, position_ids = plan.token_ids.unsqueeze(0), plan.position_ids.unsqueeze(0)
        token = _plan.set(plan)
        try:
            outputs = self._inner(input_ids=token_ids, position_ids=position_ids, use_cache=False)
        finally:
            _plan.reset(token)
        hidden: Tensor = outputs.last_hidden_state[0]
        return hidden if plan.wants_all_rows else hidden[plan.wanted_rows]


class PlainHead:
    """Makes logits of hidden states as the model's own class does, including its steps before and after the head, such
    as Granite's divisor and Gemma's cap. The product itself is ours."""

    def __init__(self, model: PreTrainedModel, product: Product) -> None:
        """
        Args:
            model: The model, whose head is taken out.
            product: Product of the model's head.
        """
        head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        name = next(name for name, module in model.named_modules() if module is head)
        model.set_submodule(name, _Product(product))
        self._model: Any = model
        # The class calls one of these for hidden states: OPT's skips the first.
        decoder = model.get_decoder()  # type: ignore[no-untyped-call]
        self._below: set[Any] = {model.base_model, decoder} - {model}
        self._outputs = _Outputs()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [rows, hidden] to [rows, vocab]."""
        self._outputs.last_hidden_state = hidden.unsqueeze(0)
        token_ids = torch.zeros(1, len(hidden), dtype=torch.int64, device=hidden.device)
        for module in self._below:
            module.forward = self._given
        try:
            logits: Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        finally:
            for module in self._below:
                del module.forward
        return logits

    def _given(self, *_arguments: object, **_options: object) -> _Outputs:
        """Replaces the forward of the layers below the head."""
        return self._outputs


class _Product(nn.Module):
    """Puts a product in the place of a head."""

    def __init__(self, product: Product) -> None:
        super().__init__()
        self._product = product

    def forward(self, hidden: Tensor) -> Tensor:
        """Computes the logits: [1, rows, hidden] to [1, rows, vocab]."""
        return self._product(hidden[0]).unsqueeze(0)


class _Outputs:
    """Replaces the outputs of a model's layers: holds hidden states, and None for everything else."""

    last_hidden_state: Tensor

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    scaling: float | None = None,
    **extras: Any,
) -> tuple[Tensor, None]:
    """Attends for the library's layers: [1, heads, rows, head_dim] to [1, rows, heads, head_dim]."""
    # Capped scores (Gemma 2), attention sinks (gpt-oss), position biases: ignored, they would give wrong logits.
    unsupported = [name for name in ("softcap", "s_aux", "position_bias") if extras.get(name) is not None]
    # The only possible mask is one that a model makes by itself.
    unsupported += ["a mask of its own"] if attention_mask is not None else []
    if unsupported or key.shape != value.shape:
        raise UnsupportedModel(
            f"attention with {' and '.join(unsupported) or 'values of another width than keys'} is not supported"
        )
    plan = _plan.get()
    if key.shape[1::2] != plan.slot_shape:
        found, expected = (f"{heads} key-value heads of {dim}" for heads, dim in (key.shape[1::2], plan.slot_shape))
        raise UnsupportedModel(f"a layer has {found}, and {expected} by its config")
    dtype = plan.cache_dtype
    # [2, heads, rows, head_dim] becomes [rows, 2, heads, head_dim], the order of a slot.
    keys_values = torch.stack((key[0], value[0])).transpose(0, 2).transpose(1, 2).to(dtype)
    layer: Any = module.layer_idx
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    attended = plan.attend(layer, query[0].transpose(0, 1).to(dtype), keys_values, scale)
    return attended.to(query.dtype).view(1, query.shape[2], query.shape[1], query.shape[3]), None


def _no_mask(**_arguments: object) -> None:
    """Builds no mask, because the plan has the masks: the library's would be for a single text, and cost time."""


AttentionInterface.register(ATTENTION_NAME, _attend)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)

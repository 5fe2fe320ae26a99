"""A plain loop of greedy decoding in one CUDA graph: the speed of a model without a server and without speculation.

Everything has a fixed place, as in gpt-fast: keys and values of the longest text, the token, its position. A step reads
and writes only these, so a graph can replay it. On a CPU the same step runs as it is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class PlainLoop:
    """Decodes one text at a time with a Llama or Qwen3 of transformers."""

    @torch.inference_mode()
    def __init__(self, model: Any, max_len: int) -> None:
        """
        Args:
            model: Only its weights are used, not its code.
            max_len: Maximum tokens of a prompt and its text together.
        """
        config, inner = model.config, model.base_model
        max_len = -(-max_len // 8) * 8  # the mask of fast kernels is aligned
        self._layers, self._inner, self._head = inner.layers, inner, model.lm_head
        self._head_dim, self._device = config.head_dim, model.device
        shape = (2, config.num_hidden_layers, config.num_key_value_heads, max_len, config.head_dim)
        self._cache = torch.zeros(shape, dtype=model.dtype, device=model.device)
        positions = torch.arange(max_len, device=model.device)
        self._turns = torch.stack(inner.rotary_emb(self._cache, positions[None]))[:, 0]
        self._places = positions
        self._token = torch.zeros(1, dtype=torch.long, device=model.device)
        self._position = torch.zeros(1, dtype=torch.long, device=model.device)
        self._graph: torch.cuda.CUDAGraph | None = None
        if model.device.type == "cuda":
            self._graph = self._captured()

    @torch.inference_mode()
    def generate(self, token_ids: Sequence[int], num_tokens: int) -> dict[str, Any]:
        """Continues a prompt. Returns the tokens, and the seconds for those after the first one."""
        prompt = torch.tensor(token_ids, device=self._device)
        self._token.copy_(self._next(prompt, self._places[: len(token_ids)]))
        self._position.fill_(len(token_ids))
        found = [self._token.item()]
        started = time.perf_counter()
        for _ in range(num_tokens - 1):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
            # Read at once, because a server must see a token before it can stop.
            found.append(self._token.item())
        return {"token_ids": found, "decode_s": time.perf_counter() - started}

    def _captured(self) -> torch.cuda.CUDAGraph:
        # Libraries choose their kernels in the first calls, during which nothing may be captured.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    def _step(self) -> None:
        self._token.copy_(self._next(self._token, self._position))
        self._position.add_(1)

    def _next(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Computes the most probable token after tokens at these positions: [1]."""
        hidden = functional.embedding(token_ids, self._inner.embed_tokens.weight)
        turns = self._turns[:, positions]
        # [rows, places]: all places up to a row's own.
        is_seen = self._places[None] <= positions[:, None]
        for index, layer in enumerate(self._layers):
            heads = self._attended(
                index, layer.self_attn, _norm(layer.input_layernorm, hidden), positions, turns, is_seen
            )
            hidden = hidden + layer.self_attn.o_proj(heads)
            mlp, normed = layer.mlp, _norm(layer.post_attention_layernorm, hidden)
            hidden = hidden + mlp.down_proj(functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        logits: Tensor = self._head(_norm(self._inner.norm, hidden[-1:]))
        return logits.argmax(-1)

    def _attended(
        self, index: int, attention: Any, normed: Tensor, positions: Tensor, turns: Tensor, is_seen: Tensor
    ) -> Tensor:
        queries, keys, values = (
            project(normed).view(len(normed), -1, self._head_dim)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        if hasattr(attention, "q_norm"):
            queries, keys = _norm(attention.q_norm, queries), _norm(attention.k_norm, keys)
        self._cache[0, index].index_copy_(1, positions, _turned(keys, turns).transpose(0, 1))
        self._cache[1, index].index_copy_(1, positions, values.transpose(0, 1))
        seen_keys, seen_values = self._cache[:, index]
        # Queries of one group are rows of one head, because kernels with a mask know no groups.
        num_rows, num_keys = len(normed), len(seen_keys)
        grouped = _turned(queries, turns).view(num_rows, num_keys, -1, self._head_dim).permute(1, 2, 0, 3)
        num_grouped = grouped.shape[1]
        heads = functional.scaled_dot_product_attention(
            grouped.reshape(1, num_keys, -1, self._head_dim),
            seen_keys[None],
            seen_values[None],
            attn_mask=is_seen.repeat(num_grouped, 1),
        )
        return heads.view(num_keys, num_grouped, num_rows, -1).permute(2, 0, 1, 3).reshape(num_rows, -1)


def _norm(norm: Any, hidden: Tensor) -> Tensor:
    return functional.rms_norm(hidden, hidden.shape[-1:], norm.weight, norm.variance_epsilon)


def _turned(heads: Tensor, turns: Tensor) -> Tensor:
    cosines, sines = turns[:, :, None]
    first, second = heads.chunk(2, -1)
    turned: Tensor = heads * cosines + torch.cat([-second, first], -1) * sines
    return turned

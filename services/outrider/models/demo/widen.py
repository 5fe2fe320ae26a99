"""Makes checkpoints in the shapes of large models: a demo model in the corner of a wide one, or random weights.

A widened demo model has the demo model's output, at the cost of the model whose sizes it has: added channels, heads,
layers and neurons do work and change nothing. In float32 its logits are the demo model's but for rounding, as long as
positions stay within the trained context. The result is an ordinary checkpoint: any engine runs it.

How it stays the same:
* Added channels of the residual stream are zero. A norm then divides by sqrt(hidden / wide) times its former divisor.
  Its weights undo that, and epsilon shrinks alike.
* In a wider head, every n-th pair of dimensions turns at the frequency of a pair of the trained head. Queries grow,
  because scores are divided by more.
* The outputs of added heads, neurons and layers meet columns of zeros.
* One more channel holds a small constant. Only the head reads it, to make the ids after the trained vocabulary
  impossible.

So most weights that write to the residual stream are zeros, some 30 % of all weights. Memory is read at the same speed,
but a chip that is limited by its power may multiply zeros somewhat faster than trained weights.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config

CONSTANT = 2.0**-20
"""Value of the constant channel. Its square is negligible in the mean that a norm divides by. A power of two is exact
in every number format."""
IMPOSSIBLE = -(2.0**14)
"""The logit of an id after the vocabulary, for a stream whose mean square is 1."""
TOKENIZER_FILES = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class Size:
    """Describes the shape of a model."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    is_tied: bool
    """True if embedding and head are one matrix."""
    max_positions: int = 16_384
    """Longest context."""


QWEN3_8B = Size(4096, 12_288, 36, 32, 8, 128, 151_936, is_tied=False)
QWEN3_0_6B = Size(1024, 3072, 28, 16, 8, 128, 151_936, is_tied=True)


def widen(model: LlamaForCausalLM, tokenizer_folder: Path, size: Size, folder: Path, *, dtype: torch.dtype) -> None:
    """Writes a checkpoint of a wider model with the output of a Llama model.

    Args:
        model: A Llama without biases, with as many heads of keys as of queries, and one matrix for embedding and head.
            The weights are made on its device.
        tokenizer_folder: Folder of the tokenizer's files.
        size: Shape of the wider model: wider by at least one channel.
        folder: Takes the checkpoint.
        dtype: The number format of the file.

    Raises:
        ValueError: The model is of another kind, or does not fit into the shape.
    """
    trained: Any = model.config
    _check_fits(trained, size)
    # Adding zeros has made the mean square smaller.
    epsilon = trained.rms_norm_eps * trained.hidden_size / size.hidden_size
    config = LlamaConfig(
        **_sizes_of(size),
        rms_norm_eps=epsilon,
        rope_parameters=trained.rope_parameters,
        dtype=str(dtype).removeprefix("torch."),
    )
    config.architectures = ["LlamaForCausalLM"]
    corner = _Corner(model, size)
    _write(folder, config, (corner.placed(one) for one in _drawn(size, model.device, dtype, has_head_norms=False)))
    _write_tokenizer(tokenizer_folder, size, folder)


def randomise(size: Size, tokenizer_folder: Path, folder: Path, *, device: str, dtype: torch.dtype) -> None:
    """Writes a checkpoint of random weights in Qwen3's architecture, with the cost of its shape and meaningless output.

    The arguments are those of `widen`; the weights are made on `device`.
    """
    config = Qwen3Config(**_sizes_of(size), rms_norm_eps=1e-6, dtype=str(dtype).removeprefix("torch."))
    config.architectures = ["Qwen3ForCausalLM"]
    _write(folder, config, _drawn(size, torch.device(device), dtype, has_head_norms=True))
    _write_tokenizer(tokenizer_folder, size, folder)


class _Corner:
    """Puts the weights of a trained model into random ones."""

    def __init__(self, model: LlamaForCausalLM, size: Size) -> None:
        config: Any = model.config
        self._weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._size = size
        self._hidden, self._head_dim = config.hidden_size, config.head_dim
        self._norm_factor = math.sqrt(config.hidden_size / size.hidden_size)
        self._query_factor = math.sqrt(size.head_dim / config.head_dim)
        step, half = size.head_dim // config.head_dim, config.head_dim // 2
        turned = torch.arange(half, device=model.device) * step
        # The library turns dimension i with i + d/2, and pair i at a frequency of theta^(-2 i / d).
        self._turned = torch.cat([turned, turned + size.head_dim // 2])
        # One query head reads the keys of each trained head; the reads of the others in its group are wasted.
        self._queries = torch.arange(config.num_attention_heads, device=model.device) * (
            size.num_heads // size.num_key_value_heads
        )

    def placed(self, shard: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns a shard, changed so that it computes what the trained weights compute."""
        for name, drawn in shard.items():
            if name.endswith(("embed_tokens.weight", "lm_head.weight")):
                self._place_ids(drawn, is_head=name.startswith("lm_head"))
            else:
                # None in a layer after the trained ones.
                self._place(name.split(".")[-2], drawn, self._weights.get(name))
        return shard

    def _place(self, part: str, drawn: Tensor, trained: Tensor | None) -> None:
        if part in ("o_proj", "down_proj"):
            drawn.zero_()
        if trained is None:
            return
        heads = (
            drawn.view(-1, self._size.head_dim, drawn.shape[-1]) if part in ("q_proj", "k_proj", "v_proj") else drawn
        )
        of_head = trained.view(-1, self._head_dim, trained.shape[-1]) if heads is not drawn else trained
        match part:
            case "q_proj":
                # The dimensions between are zero, so keys may have any values there.
                heads[self._queries] = 0
                heads[self._queries[:, None], self._turned, : self._hidden] = (of_head * self._query_factor).to(drawn)
            case "k_proj":
                num_heads = torch.arange(len(of_head), device=drawn.device)
                heads[num_heads[:, None], self._turned, : self._hidden] = of_head.to(drawn)
            case "v_proj":
                heads[: len(of_head), : self._head_dim, : self._hidden] = of_head.to(drawn)
            case "o_proj":
                by_head = drawn.view(len(drawn), -1, self._size.head_dim)
                said = trained.view(self._hidden, -1, self._head_dim).to(drawn)
                by_head[: self._hidden, self._queries, : self._head_dim] = said
            case "norm" | "input_layernorm" | "post_attention_layernorm":
                drawn.zero_()
                drawn[: self._hidden] = (trained * self._norm_factor).to(drawn)
                if part == "norm":
                    drawn[-1] = 1 / CONSTANT
            case _:  # gate_proj, up_proj and down_proj
                drawn[: trained.shape[0], : trained.shape[1]] = trained.to(drawn)

    def _place_ids(self, drawn: Tensor, *, is_head: bool) -> None:
        trained = self._weights["model.embed_tokens.weight"]
        num_ids = len(trained)
        drawn[:num_ids] = 0
        drawn[:num_ids, : self._hidden] = trained.to(drawn)
        # If one matrix is both, the head adds the same constant to all trained ids, which changes nothing.
        drawn[:num_ids, -1] = 0 if is_head else CONSTANT
        drawn[num_ids:, -1] = IMPOSSIBLE


def _check_fits(trained: Any, size: Size) -> None:
    """Raises ValueError."""
    num_heads, num_keys = trained.num_attention_heads, trained.num_key_value_heads
    if not trained.tie_word_embeddings or num_heads != num_keys or trained.attention_bias or trained.mlp_bias:
        raise ValueError(
            "only a Llama without biases and grouped heads, with one matrix for embedding and head, is widened"
        )
    fits = {
        "hidden_size": size.hidden_size > trained.hidden_size,
        "intermediate_size": size.intermediate_size >= trained.intermediate_size,
        "num_layers": size.num_layers >= trained.num_hidden_layers,
        "num_key_value_heads": size.num_key_value_heads >= num_keys,
        "head_dim": size.head_dim % trained.head_dim == 0,
        "vocab_size": size.vocab_size >= trained.vocab_size,
    }
    if wrong := [name for name, is_fitting in fits.items() if not is_fitting]:
        raise ValueError(f"the model does not fit into that shape: {', '.join(wrong)}")


def _sizes_of(size: Size) -> dict[str, Any]:
    """Returns a shape as the fields of a transformers config."""
    return {
        "hidden_size": size.hidden_size,
        "intermediate_size": size.intermediate_size,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_key_value_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab_size,
        "max_position_embeddings": size.max_positions,
        "tie_word_embeddings": size.is_tied,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def _drawn(
    size: Size, device: torch.device, dtype: torch.dtype, *, has_head_norms: bool
) -> Iterator[dict[str, Tensor]]:
    """Yields random weights, one layer at a time, and then those of embedding, norm and head. They are always the
    same."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(num_outputs: int, num_inputs: int) -> Tensor:
        weight = torch.empty(num_outputs, num_inputs, dtype=dtype, device=device)
        return weight.normal_(0.0, 0.02, generator=generator)

    def ones(length: int) -> Tensor:
        return torch.ones(length, dtype=dtype, device=device)

    hidden, neurons, head_dim = size.hidden_size, size.intermediate_size, size.head_dim
    queries, keys = size.num_heads * head_dim, size.num_key_value_heads * head_dim
    for index in range(size.num_layers):
        layer = {
            "input_layernorm": ones(hidden),
            "self_attn.q_proj": draw(queries, hidden),
            "self_attn.k_proj": draw(keys, hidden),
            "self_attn.v_proj": draw(keys, hidden),
            "self_attn.o_proj": draw(hidden, queries),
            "post_attention_layernorm": ones(hidden),
            "mlp.gate_proj": draw(neurons, hidden),
            "mlp.up_proj": draw(neurons, hidden),
            "mlp.down_proj": draw(hidden, neurons),
        }
        if has_head_norms:
            layer |= {"self_attn.q_norm": ones(head_dim), "self_attn.k_norm": ones(head_dim)}
        yield {f"model.layers.{index}.{name}.weight": weight for name, weight in layer.items()}
    ends = {"model.embed_tokens.weight": draw(size.vocab_size, hidden), "model.norm.weight": ones(hidden)}
    if not size.is_tied:
        ends["lm_head.weight"] = draw(size.vocab_size, hidden)
    yield ends


def _write(folder: Path, config: PretrainedConfig, shards: Iterable[Mapping[str, Tensor]]) -> None:
    """Writes a checkpoint; shards are made one by one, so that only one is held."""
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str] = {}
    num_bytes = 0
    for number, shard in enumerate(shards):
        name = f"model-{number:05}.safetensors"
        save_file({key: weight.cpu() for key, weight in shard.items()}, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, name)
        num_bytes += sum(weight.nbytes for weight in shard.values())
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config.save_pretrained(folder)


def _write_tokenizer(source: Path, size: Size, folder: Path) -> None:
    """Copies a tokenizer, and adds ids after its own that no text is encoded to: a draw is then as wide as the head."""
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, folder / name)
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    # No merge leads to the added ids.
    vocabulary |= {f"<unused-{index}>": index for index in range(len(vocabulary), size.vocab_size)}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    settings = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["model_max_length"] = size.max_positions
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")

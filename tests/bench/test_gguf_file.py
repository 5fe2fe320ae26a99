"""Models as GGUF files: what gguf's own reader finds in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, TokenType
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.models.loading import cast
from outrider_bench.workers.gguf_file import CannotConvert, halves_interleaved, write_gguf
from tests.support.tiny_models import VOCAB_SIZE, build

TOKENS = ("<|end|>", "a", "b", "Ġ", "ab", "Ġab")
MERGES = [("a", "b"), ("Ġ", "ab")]


def tokenizer(split: Any = None) -> PreTrainedTokenizerFast:
    """A byte-level BPE of six tokens; the rest of the models' vocabulary is padding."""
    backend = Tokenizer(models.BPE({token: place for place, token in enumerate(TOKENS)}, MERGES))
    backend.pre_tokenizer = split or pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([AddedToken("<|end|>", special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>")


def written(model: Any, folder: Path) -> GGUFReader:
    path = folder / "model.gguf"
    write_gguf(model, tokenizer(), path)
    return GGUFReader(path)


def values_of(reader: GGUFReader) -> dict[str, npt.NDArray[np.float32]]:
    """The weights by name, in rows and columns."""
    return {one.name: dequantize(one.data, one.tensor_type) for one in reader.tensors}


def field(reader: GGUFReader, name: str) -> Any:
    found = reader.get_field(name)
    assert found is not None, name
    return found.contents()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_every_weight_of_a_model_is_in_its_file_under_the_name_that_llama_cpp_knows(
    family: str, tmp_path: Path
) -> None:
    model = build(family)
    found = values_of(written(model, tmp_path))
    weights = {name: each.detach().numpy() for name, each in model.named_parameters()}
    assert len(found) == len(weights)
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for place in range(model.config.num_hidden_layers):
        ours, theirs = f"model.layers.{place}", f"blk.{place}"
        names |= {
            f"{theirs}.attn_norm.weight": f"{ours}.input_layernorm.weight",
            f"{theirs}.attn_v.weight": f"{ours}.self_attn.v_proj.weight",
            f"{theirs}.attn_output.weight": f"{ours}.self_attn.o_proj.weight",
            f"{theirs}.ffn_norm.weight": f"{ours}.post_attention_layernorm.weight",
            f"{theirs}.ffn_gate.weight": f"{ours}.mlp.gate_proj.weight",
            f"{theirs}.ffn_up.weight": f"{ours}.mlp.up_proj.weight",
            f"{theirs}.ffn_down.weight": f"{ours}.mlp.down_proj.weight",
        }
    for theirs, ours in names.items():
        np.testing.assert_array_equal(found[theirs], weights[ours], theirs)
    # Only this family's embedding is its output matrix too.
    assert ("output.weight" in found) == (family == "llama")


def test_q_and_k_of_a_llama_are_reordered_and_those_of_a_qwen3_are_not(tmp_path: Path) -> None:
    llama, qwen3 = build("llama"), build("qwen3")
    found, weights = values_of(written(llama, tmp_path)), dict(llama.named_parameters())
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        for kind in ("weight", "bias"):
            rows = weights[f"model.layers.1.self_attn.{ours}.{kind}"].detach().numpy()
            np.testing.assert_array_equal(found[f"blk.1.{theirs}.{kind}"], halves_interleaved(rows, 4))
    found, weights = values_of(written(qwen3, tmp_path)), dict(qwen3.named_parameters())
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k"), ("q_norm", "attn_q_norm")):
        rows = weights[f"model.layers.1.self_attn.{ours}.weight"].detach().numpy()
        np.testing.assert_array_equal(found[f"blk.1.{theirs}.weight"], rows)


def test_neighbours_that_are_rotated_after_the_reordering_are_halves_that_were_rotated_before_it() -> None:
    num_heads, head_dim = 2, 8
    random = np.random.default_rng(0)
    rows = random.normal(size=(num_heads * head_dim,)).astype(np.float32)
    angles = random.normal(size=head_dim // 2)

    def rotated(first: Any, second: Any) -> tuple[Any, Any]:
        return first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)

    heads = rows.reshape(num_heads, 2, head_dim // 2)
    halves = np.stack(rotated(heads[:, 0], heads[:, 1]), axis=1)
    pairs = halves_interleaved(rows, num_heads).reshape(num_heads, head_dim // 2, 2)
    neighbours = np.stack(rotated(pairs[..., 0], pairs[..., 1]), axis=-1)
    expected = halves_interleaved(halves.reshape(-1).astype(np.float32), num_heads)
    np.testing.assert_allclose(neighbours.reshape(-1), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.float32, GGMLQuantizationType.F32), (torch.bfloat16, GGMLQuantizationType.BF16)]
)
def test_matrices_keep_their_number_format_and_norms_are_in_float32(
    dtype: torch.dtype, kind: GGMLQuantizationType, tmp_path: Path
) -> None:
    model = build("qwen3")
    cast(model, dtype)
    reader = written(model, tmp_path)
    kinds = {one.name: one.tensor_type for one in reader.tensors}
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == kind
    assert kinds["blk.0.attn_norm.weight"] == kinds["blk.0.attn_k_norm.weight"] == GGMLQuantizationType.F32
    expected = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"].detach().float().numpy()
    np.testing.assert_array_equal(values_of(reader)["blk.0.ffn_up.weight"], expected)


def test_a_file_says_what_llama_cpp_must_know_beside_the_weights(tmp_path: Path) -> None:
    reader = written(build("qwen3"), tmp_path)
    assert field(reader, "general.architecture") == "qwen3"
    expected = {
        "block_count": 3,
        "context_length": 512,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 32,
        "vocab_size": VOCAB_SIZE,
    }
    assert {name: field(reader, f"qwen3.{name}") for name in expected} == expected
    assert field(reader, "qwen3.attention.layer_norm_rms_epsilon") == pytest.approx(1e-6)
    assert field(reader, "qwen3.rope.freq_base") == pytest.approx(10_000.0)


def test_the_tokenizer_comes_with_its_merges_and_what_pads_the_vocabulary_is_unused(tmp_path: Path) -> None:
    reader = written(build("llama"), tmp_path)
    tokens, types = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    assert tuple(tokens[: len(TOKENS)]) == TOKENS
    assert len(tokens) == len(types) == len(set(tokens)) == VOCAB_SIZE
    assert types[:2] == [TokenType.CONTROL, TokenType.NORMAL]
    assert set(types[len(TOKENS) :]) == {TokenType.UNUSED}
    assert field(reader, "tokenizer.ggml.merges") == ["a b", "Ġ ab"]
    assert field(reader, "tokenizer.ggml.model") == "gpt2"
    assert field(reader, "tokenizer.ggml.pre") == "gpt-2"
    assert field(reader, "tokenizer.ggml.eos_token_id") == 0
    assert not field(reader, "tokenizer.ggml.add_bos_token")


def test_a_rule_of_splitting_that_has_no_name_is_not_called_by_another_ones(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(build("llama"), tokenizer(pre_tokenizers.Digits()), path)
    assert field(GGUFReader(path), "tokenizer.ggml.pre") == "default"


def test_what_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    path, words = tmp_path / "model.gguf", tokenizer()
    with pytest.raises(CannotConvert, match="one of llama, qwen3 to be written, got 'mistral'"):
        write_gguf(build("mistral"), words, path)
    half = build("llama")
    cast(half, torch.float16)
    with pytest.raises(CannotConvert, match=r"torch\.float32 or torch\.bfloat16 to be written, got torch\.float16"):
        write_gguf(half, words, path)
    scaled = build("llama")
    scaled.config.rope_parameters["rope_type"] = "llama3"
    with pytest.raises(CannotConvert, match="positions must not be scaled, got 'llama3'"):
        write_gguf(scaled, words, path)
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    with pytest.raises(CannotConvert, match="a tokenizer must be BPE to be written, got 'WordLevel'"):
        write_gguf(build("llama"), other, path)

"""Models in GGUF files: logits as in transformers, the tokens of their tokenizers, and what headers tell."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import LlamaForCausalLM

from outrider.models.checkpoint import UnknownModel, UnsupportedModel
from outrider.models.generation_config import default_sampling
from outrider.models.gguf import chosen, read_header
from outrider.models.gguf_model import read_tokenizer
from outrider.models.loading import build_hf_model, load_model
from outrider.models.names import gguf_of, is_here, judge_checkpoint, why_no_model
from outrider.models.pairs import complaints
from tests.support import tiny_models
from tests.support.gguf_files import after_storing, tokens_of, words, write_gguf

IDS = tiny_models.text(40)


@torch.inference_mode()
def logits_of(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([IDS]), use_cache=False).logits[0]
    return found


def dequantised(model: Any, kind: Kind, dtype: torch.dtype) -> Any:
    """The model with weights as a file gives them back."""
    for parameter in model.parameters():
        parameter.data = after_storing(parameter.data, kind).to(dtype)
    return model


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "llama.gguf", tiny_models.build("llama"), Kind.Q4_0)


@pytest.mark.parametrize(
    "kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("family", tiny_models.CONFIGS)
def test_logits_are_those_of_the_same_weights_in_transformers(family: str, kind: Kind, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build(family), kind)
    expected = dequantised(tiny_models.build(family), kind, torch.float32)
    assert torch.equal(logits_of(build_hf_model(str(path), "float32").model), logits_of(expected))


def test_a_file_is_served_in_bfloat16_and_says_what_it_was_stored_as(llama: Path) -> None:
    with structlog.testing.capture_logs() as logs:
        loaded = load_model(str(llama))
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert loaded.dtype == "bfloat16"
    assert loaded.stored_as == "Q4_0"
    assert loaded.runner.is_fused
    (said,) = [line for line in logs if line["event"] == "model.dequantised"]
    assert (said["file"], said["stored_as"]) == (str(llama), "Q4_0")
    assert load_model("demo/draft").stored_as == ""


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "linear", "factor": 4.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ],
    ids=lambda rope: str(rope["rope_type"]),
)
def test_positions_are_scaled_as_the_file_says(rope: dict[str, Any], tmp_path: Path) -> None:
    config = copy.deepcopy(tiny_models.CONFIGS["llama"])
    # Low frequencies, or Llama 3's rule would change none.
    config.rope_parameters = {"rope_theta": 500_000.0, **rope}
    config.head_dim = 64
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    facts: dict[str, Any] = {f"llama.rope.scaling.{name}": rope[key] for name, key in (("factor", "factor"),)}
    facts["llama.rope.scaling.type"] = rope["rope_type"]
    facts["llama.rope.scaling.original_context_length"] = rope.get("original_max_position_embeddings")
    tensors: dict[str, Any] = {}
    if rope["rope_type"] == "llama3":
        facts = {}
        plain = 500_000.0 ** -(torch.arange(0, 64, 2) / 64)
        tensors["rope_freqs.weight"] = (plain / model.model.rotary_emb.inv_freq).round(decimals=5)
        assert tensors["rope_freqs.weight"].unique().numel() > 1
    path = write_gguf(tmp_path / "model.gguf", model, facts=facts, tensors=tensors)
    found: Any = build_hf_model(str(path), "float32").model
    assert torch.equal(found.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    torch.testing.assert_close(logits_of(found), logits_of(model), rtol=0, atol=1e-6)


TEXT = "It's 1234 or 12\n\n1.  Cafe\u0301 naïve 5\n    x = 10 <think>no</think><|im_end|> for the time being\n"
GPT_2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def by_rule(rule: str) -> Any:
    split = pre_tokenizers.Split(Regex(rule), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WAYS = {
    "gpt-2": GPT_2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT_2]),
    "llama-bpe": by_rule(LLAMA_3),
    "qwen2": by_rule(LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


def byte_level(pre: str) -> Tokenizer:
    """A tokenizer that splits in one of the ways, and has merges for what is split off."""
    tokenizer = Tokenizer(BPE(ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer, tokenizer.decoder = WAYS[pre], decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT, "for the time\n\nbeing\n\n" * 3, "naïve  café   1  2   34"] * 9, trainer)
    tokenizer.add_special_tokens(["<|im_end|>", "<｜end｜>"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    return tokenizer


@pytest.mark.parametrize("pre", WAYS)
def test_texts_become_the_tokens_of_the_tokenizer_that_the_file_was_made_from(pre: str, tmp_path: Path) -> None:
    made = byte_level(pre)
    end = made.token_to_id("<|im_end|>")
    tokens = tokens_of(made, pre, num_padding=3, eos_token_id=end, bos_token_id=end, add_bos_token=False)
    path = write_gguf(
        tmp_path / "model.gguf",
        tiny_models.build("qwen2"),
        tokenizer=tokens,
        facts={"tokenizer.chat_template": "{{ messages[0].content }}!"},
    )
    found = read_tokenizer(read_header(path))
    for text in (TEXT, "the  12 345\n\n1", "<｜end｜> <think>"):
        ids = found(text).input_ids
        assert ids == made.encode(text).ids, made.encode(text).tokens
        assert found.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)
    assert found.get_vocab() == made.get_vocab()
    assert found.eos_token == "<|im_end|>"
    assert "<|im_end|>" not in found.decode(found("a<|im_end|>").input_ids, skip_special_tokens=True)
    chat = [{"role": "user", "content": "hello"}]
    assert found.apply_chat_template(chat, tokenize=False) == "hello!"


def test_a_llama_3_begins_with_its_token_also_where_the_file_does_not_say_so(tmp_path: Path) -> None:
    made = byte_level("llama-bpe")
    begin = made.token_to_id("<|im_end|>")
    tokens = tokens_of(made, "llama-bpe", bos_token_id=begin)
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("qwen2"), tokenizer=tokens)
    assert read_tokenizer(read_header(path))("a").input_ids[0] == begin


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_sentencepiece_puts_a_space_first_or_does_not(prefix: bool, tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁ab", "▁a", "ab", "▁ab"]
    scores = [0.0] * (259 + 3) + [-1.0, -2.0, -3.0]
    facts = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": prefix,
    }
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("llama"), tokenizer=facts)
    found = read_tokenizer(read_header(path))
    ids = found("ab é").input_ids
    assert found.convert_ids_to_tokens(ids) == ["<s>", "▁ab" if prefix else "ab", "▁", "<0xC3>", "<0xA9>"]
    assert found.decode(ids, skip_special_tokens=True) == "ab é"


def test_a_text_ends_at_every_token_that_ends_one(tmp_path: Path) -> None:
    tokenizer = words(tiny_models.VOCAB_SIZE)
    tokenizer["tokens"][3:6] = ["<|im_end|>", "<|endoftext|>", "<|end|>"]
    kinds = [1, 1, 1, 3, 3, *[1] * (tiny_models.VOCAB_SIZE - 5)]  # the last one of the three is a plain word
    tokenizer |= {"token_type": kinds, "eos_token_id": 3, "eot_token_id": 9}
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("qwen3"), tokenizer=tokenizer)
    assert load_model(str(path)).eos_token_ids == (3, 9, 4)


def test_the_sampling_of_a_file_is_that_of_requests(tmp_path: Path, llama: Path) -> None:
    facts = {"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.5}
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("qwen3"), facts=facts)
    assert default_sampling(str(path)) == {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.5}
    assert default_sampling(str(llama)) == {}


QWEN = "somebody/qwen"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a foreign architecture": (
        {"facts": {"general.architecture": "gemma3"}},
        "is a GGUF file of architecture gemma3: llama, qwen2, qwen3 (Mistral is llama) are supported",
    ),
    "a part": ({"facts": {"split.count": 3}}, "is one of 3 parts of a model: merge them first"),
    "experts": ({"facts": {"qwen3.expert_count": 8}}, "has 8 experts, which of GGUF files are not supported"),
    "no number of layers": ({"facts": {"qwen3.block_count": None}}, "names no qwen3.block_count"),
    "layers of several shapes": (
        {"facts": {"qwen3.attention.head_count_kv": [2, 2, 4]}},
        "has layers of several shapes (qwen3.attention.head_count_kv)",
    ),
    "partly rotated heads": (
        {"facts": {"qwen3.rope.dimension_count": 16}},
        "has qwen3.rope.dimension_count 16: only the width of keys, 32, runs",
    ),
    "another scaling": ({"facts": {"qwen3.rope.scaling.type": "su"}}, "scales positions by su (qwen3.rope.scaling.ty"),
    "other factors": (
        {"tensors": {"rope_freqs.weight": torch.linspace(1, 9, 16)}},
        "by factors (rope_freqs.weight) that are not Llama 3's",
    ),
    "no embedding": ({"tensors": {"token_embd.weight": None}}, "its weights have no token_embd.weight"),
    "no tokenizer": ({"facts": {"tokenizer.ggml.tokens": None}}, "has no tokenizer in it"),
    "no merges": ({"facts": {"tokenizer.ggml.merges": None}}, "has no tokenizer in it"),
    "another tokenizer": ({"facts": {"tokenizer.ggml.model": "rwkv"}}, "has a tokenizer of kind rwkv, and of GGUF fi"),
    "an unknown rule": ({"facts": {"tokenizer.ggml.pre": "viking"}}, "splits texts by the rule viking"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_cannot_be_served_is_refused_by_its_header(name: str, tmp_path: Path) -> None:
    given, reason = REFUSED[name]
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("qwen3"), **given)
    with pytest.raises(UnsupportedModel) as refused:
        judge_checkpoint(str(path))
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert why_no_model(str(path)) == str(refused.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GGUF", "is cut off, or its header is no GGUF's"),
        (b"GGUF" + (3).to_bytes(4, "little") + 16 * b"\xff", "is cut off, or its header is no GGUF's"),
        (b"GGUF" + (1).to_bytes(4, "little") + 16 * b"\0", "is a GGUF file of version 1: 2 and 3 are supported"),
        (b"version https://git-lfs.github.com/spec/v1", "is a pointer of Git LFS"),
        (b"<html>not found", "is no GGUF file"),
        (b"", "is no GGUF file"),
    ],
)
def test_what_is_no_gguf_file_is_said_to_be_none(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=reason):
        judge_checkpoint(str(path))


def test_a_file_that_is_cut_off_anywhere_is_refused(llama: Path, tmp_path: Path) -> None:
    whole, path = llama.read_bytes(), tmp_path / "model.gguf"
    for length in [*range(5, 4000, 97), len(whole) // 2, len(whole) - 40]:
        path.write_bytes(whole[:length])
        with pytest.raises(UnsupportedModel, match="is cut off"):
            judge_checkpoint(str(path))
    judge_checkpoint(str(llama))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"blk.1.ffn_up.weight": None}, r"its weights have no model\.layers\.1\.mlp\.up_proj\.weight"),
        ({"blk.1.attn_gate.weight": torch.ones(2, 32)}, r"its weights have blk\.1\.attn_gate\.weight, which a model"),
        ({"blk.1.ffn_up.weight": torch.ones(96, 64)}, r"up_proj\.weight is \[96, 64\] in its weights, and \[128, 64\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(tensors: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", tiny_models.build("qwen3"), tensors=tensors)
    with pytest.raises(UnsupportedModel, match=reason):
        build_hf_model(str(path))


def test_a_folder_may_stand_for_the_one_file_in_it(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')  # some repositories have one next to the files
    (folder / "a-Q4_0.gguf").symlink_to(llama)
    assert gguf_of(str(folder)) == folder / "a-Q4_0.gguf"
    assert is_here(str(folder))
    judge_checkpoint(str(folder))
    (folder / "a-Q8_0.gguf").symlink_to(llama)
    assert why_no_model(str(folder)) == ("has 2 GGUF files, and one of them is to be named: a-Q4_0.gguf, a-Q8_0.gguf")
    (folder / "model.safetensors").touch()
    assert gguf_of(str(folder)) is None


def test_a_file_without_the_suffix_is_known_by_its_first_bytes(llama: Path, tmp_path: Path) -> None:
    blob = tmp_path / "sha256-0123"
    blob.symlink_to(llama)
    assert gguf_of(str(blob)) == blob
    with pytest.raises(UnknownModel, match="no such file"):
        judge_checkpoint(str(tmp_path / "nothing.gguf"))


def test_a_file_is_chosen_by_its_name_or_by_how_it_is_quantised() -> None:
    names = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.Q8_0.gguf", "m-f16.gguf"]
    assert chosen(names, "q4_k_m") == "m-Q4_K_M.gguf"
    assert chosen(names, "F16") == "m-f16.gguf"
    assert chosen(names, "m.Q8_0.gguf") == "m.Q8_0.gguf"
    assert chosen(names, "Q4_K") == chosen([], "") == ""
    assert chosen(names[:1], "") == names[0]
    with pytest.raises(UnsupportedModel, match="has 4 GGUF files"):
        chosen(names, "m")


def test_a_draft_with_other_tokens_is_refused_before_anything_is_loaded(llama: Path, tmp_path: Path) -> None:
    tokens = words(tiny_models.VOCAB_SIZE, letter="v")
    draft = write_gguf(tmp_path / "draft.gguf", tiny_models.build("qwen3"), tokenizer=tokens)
    assert list(complaints("cpu", str(llama), str(llama))) == []
    (complaint,) = complaints("cpu", str(llama), str(draft))
    assert complaint.endswith("the first tokens that differ are 0: 'w0' and 'v0'")

"""Models in GGUF files, llama.cpp's format: weights that are mostly quantised, the tokenizer, and the facts of both.

A file is judged by its header, without torch. What loads it is in `outrider.models.gguf_model`.

Format and names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from outrider.models.checkpoint import PICKLES, WEIGHTS, WEIGHTS_INDEX, UnsupportedModel
from outrider.models.wheels import WHEELS, path_of

MAGIC = b"GGUF"
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""Class in transformers by the architecture that a file names, which is the type there too. Mistral is a llama here."""

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5
"""Kinds of tokens."""
LIKE_LLAMA_3 = {"llama-bpe", "llama3", "llama-v3", "pixtral", "tekken"}
DIGIT_BY_DIGIT = {"smollm", "starcoder", "refact"}
LIKE_QWEN_2 = {"qwen2"}
_SPLITS = {*LIKE_LLAMA_3, *DIGIT_BY_DIGIT, *LIKE_QWEN_2, "deepseek-r1-qwen", "smaug-bpe", "gpt-2", "default"}
"""Names of rules by which a byte-level tokenizer splits a text before it merges."""
_ROTARY_FACTORS = "rope_freqs.weight"
HEAD_TOKEN_IDS = "outrider.head_token_ids"
"""Fact of a draft whose head is limited to some tokens; other programs do not know it, and use the whole head."""
REST_OF = "outrider.rest_of"
"""Fact of a draft that has layers alone: short name of the target, whose file has `SHARED` and the tokenizer."""
SHARED = ("token_embd.weight", "output.weight")
TOKENIZER = "tokenizer."
"""Begin of the names of facts about the tokenizer."""
_LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"
}  # fmt: skip


class Tensor(NamedTuple):
    """Describes a tensor of a file."""

    shape: tuple[int, ...]
    """In torch's order."""
    kind: int
    """Number of its format, see `gguf.GGMLQuantizationType`."""
    begin: int
    """Place of its first byte in the file."""
    path: Path
    """The file."""


@dataclass(frozen=True)
class Header:
    """Holds all of a file but the weights."""

    path: Path
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer_path: Path
    """The file that has the tokenizer."""

    @property
    def family(self) -> str:
        """The architecture, by llama.cpp's name."""
        return str(self.facts.get("general.architecture", ""))

    def of_model(self, name: str, default: Any = None) -> Any:
        """Returns a fact about the model. Raises UnsupportedModel if it is missing and has no default."""
        found = self.facts.get(f"{self.family}.{name}", default)
        if found is None:
            raise UnsupportedModel(f"names no {self.family}.{name}")
        if isinstance(found, list):
            raise UnsupportedModel(f"has layers of several shapes ({self.family}.{name}), which are not supported")
        return found

    def of_tokenizer(self, name: str, default: Any = None) -> Any:
        """Returns a fact about the tokenizer."""
        return self.facts.get(f"tokenizer.ggml.{name}", default)


def is_gguf(path: Path) -> bool:
    """Returns True for a GGUF file, whatever its name is, and for one that its name says to be one."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return path.suffix == ".gguf" or file.read(len(MAGIC)) == MAGIC


def gguf_in(folder: Path, which: str = "") -> Path | None:
    """Returns the GGUF file of a folder; None if there is none, or if it has the model in another format too.

    Args:
        folder: A folder.
        which: See `chosen`; the other formats do not count then.

    Raises:
        UnsupportedModel: There are several, and it is not said which.
    """
    if not which and any((folder / name).is_file() for name in (WEIGHTS, WEIGHTS_INDEX, *PICKLES)):
        return None
    name = chosen([path.name for path in folder.glob("*.gguf")], which)
    return folder / name if name else None


def chosen(names: Sequence[str], which: str) -> str:
    """Returns the one of several GGUF files that is meant; empty if there is none.

    Args:
        names: Their names.
        which: A name, or a part of one that says how it is quantised, as `Q4_K_M`, in any case. Empty: the only one.

    Raises:
        UnsupportedModel: Several may be meant.
    """
    part = re.compile(rf"(?<![a-z0-9]){re.escape(which)}(?![a-z0-9_])" if which else "", re.IGNORECASE)
    found = [which] if which in names else sorted(name for name in names if part.search(name))
    if len(found) > 1:
        raise UnsupportedModel(f"has {len(found)} GGUF files, and one of them is to be named: {', '.join(found)}")
    return found[0] if found else ""


def judge_gguf(path: Path) -> Header:
    """Judges a file by its header, and returns that. Raises UnsupportedModel."""
    header = read_header(path)
    if header.family not in FAMILIES:
        raise UnsupportedModel(
            f"is a GGUF file of architecture {header.family or 'unknown'}: {', '.join(FAMILIES)} (Mistral is llama) "
            "are supported; of others give the model that it was made from"
        )
    if header.facts.get("split.count", 0) > 1:
        raise UnsupportedModel(
            f"is one of {header.facts['split.count']} parts of a model: merge them first (llama-gguf-split --merge)"
        )
    if problem := _problem_of_size(header):
        raise UnsupportedModel(problem)
    config_of(header)
    kind, split = header.of_tokenizer("model"), header.of_tokenizer("pre", "default")
    if not header.of_tokenizer("tokens") or (kind == "gpt2" and not header.of_tokenizer("merges")):
        raise UnsupportedModel("has no tokenizer in it: give the model that it was made from")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedModel(f"has a tokenizer of kind {kind}, and of GGUF files gpt2 and llama are supported")
    if kind == "gpt2" and split not in _SPLITS:
        raise UnsupportedModel(f"splits texts by the rule {split} (tokenizer.ggml.pre), which is not known")
    return header


def read_header(path: Path) -> Header:
    """Reads the header of a GGUF file, and in its target's what it leaves to that. Raises UnsupportedModel if it has
    none, is cut off in it, or its target is missing."""
    header = _read(path)
    if (target := header.facts.get(REST_OF)) is None:
        return header
    if target not in WHEELS or not path_of(target).is_file():
        raise UnsupportedModel(
            f"has its layers alone, for {target}, which is not on this machine: python -m outrider.models.hub {target}"
        )
    rest = _read(path_of(target))
    facts = {name: value for name, value in rest.facts.items() if name.startswith(TOKENIZER)}
    tensors = {name: tensor for name, tensor in rest.tensors.items() if name in SHARED}
    tensors |= header.tensors
    return Header(path, facts | dict(header.facts), tensors, tokenizer_path=rest.path)


def _read(path: Path) -> Header:
    with path.open("rb") as file:
        begin = file.read(len(MAGIC))
        if begin != MAGIC:
            is_pointer = begin == b"vers"
            raise UnsupportedModel(
                "is a pointer of Git LFS: git lfs pull fetches the file" if is_pointer else "is no GGUF file"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            try:
                return _parsed(path, _Reader(content))
            except UnsupportedModel:
                raise
            except (struct.error, ValueError, LookupError, TypeError, ArithmeticError) as error:
                raise UnsupportedModel("is cut off, or its header is no GGUF's") from error


class _Reader:
    """Reads one value after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.place = content, len(MAGIC)

    def number(self, code: str) -> Any:
        """Reads a number, by its code in `struct`."""
        return self.numbers(code, 1)[0]

    def numbers(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{code}") * count
        self._pass(size)
        return struct.unpack_from(f"<{count}{code}", self._content, self.place - size)

    def text(self) -> str:
        return self.texts(1)[0]

    def texts(self, count: int) -> list[str]:
        """Reads texts with their lengths before them: a vocabulary has 300 000, so this does nothing else."""
        content, place, length_at, found = self._content, self.place, _LENGTH.unpack_from, []
        for _ in range(count):
            begin = place + 8
            place = begin + length_at(content, place)[0]
            found.append(content[begin:place].decode(errors="replace"))
        self._pass(place - self.place)
        return found

    def _pass(self, size: int) -> None:
        self.place += size
        if self.place > len(self._content):
            raise ValueError("less is there")

    def value(self, kind: int) -> Any:
        """Reads a value by the number of its kind. Arrays are lists."""
        if kind == _TEXT:
            return self.text()
        if kind == _ARRAY:
            kind, count = self.number("I"), self.number("Q")
            return self.texts(count) if kind == _TEXT else list(self.numbers(_NUMBERS[kind], count))
        return self.number(_NUMBERS[kind])


def _parsed(path: Path, reader: _Reader) -> Header:
    if (version := reader.number("I")) not in (2, 3):
        raise UnsupportedModel(f"is a GGUF file of version {version}: 2 and 3 are supported")
    num_tensors, num_facts = reader.number("Q"), reader.number("Q")
    facts = {reader.text(): reader.value(reader.number("I")) for _ in range(num_facts)}
    listed = {}
    for _ in range(num_tensors):
        name = reader.text()
        shape = reader.numbers("Q", reader.number("I"))[::-1]
        listed[name] = Tensor(shape, reader.number("I"), reader.number("Q"), path)
    alignment = facts.get("general.alignment", 32)
    begin = -(-reader.place // alignment) * alignment
    tensors = {name: each._replace(begin=begin + each.begin) for name, each in listed.items()}
    return Header(path, facts, tensors, tokenizer_path=path)


def _problem_of_size(header: Header) -> str:
    """Returns what is wrong with the size of a file, and with the formats that say how large it must be; empty if it is
    whole."""
    whole = dict.fromkeys((header.path, *(tensor.path for tensor in header.tensors.values())), 0)
    for name, tensor in header.tensors.items():
        if tensor.kind not in set(GGMLQuantizationType):
            return f"has {name} in format {tensor.kind}, which is not known"
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
        whole[tensor.path] = max(whole[tensor.path], tensor.begin + math.prod(tensor.shape) // block * size)
    for path, num_bytes in whole.items():
        if (there := path.stat().st_size) < num_bytes:
            return f"is cut off: {there} of {num_bytes} bytes are there"
    return ""


def config_of(header: Header) -> dict[str, Any]:
    """Returns the fields of transformers' config for a model. Raises UnsupportedModel if there is none."""
    get, names = header.of_model, header.tensors
    if num_experts := get("expert_count", 0):
        raise UnsupportedModel(f"has {num_experts} experts, which of GGUF files are not supported")
    if "token_embd.weight" not in names:
        raise UnsupportedModel("its weights have no token_embd.weight")
    num_heads, hidden_size = get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden_size // max(1, num_heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if get(name, head_dim) != head_dim:
            raise UnsupportedModel(f"has {header.family}.{name} {get(name)}: only the width of keys, {head_dim}, runs")
    rope_theta, context_len = get("rope.freq_base", 10_000.0), get("context_length")
    return {
        "model_type": header.family,
        "architectures": [FAMILIES[header.family]],
        "vocab_size": names["token_embd.weight"].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": get("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": context_len,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_theta": rope_theta, **_scaling_of(header, rope_theta, head_dim, context_len)},
        "attention_bias": "blk.0.attn_q.bias" in names,
        "mlp_bias": "blk.0.ffn_up.bias" in names,
        "tie_word_embeddings": "output.weight" not in names,
        "head_token_ids": header.facts.get(HEAD_TOKEN_IDS),
        "bos_token_id": header.of_tokenizer("bos_token_id"),
        "eos_token_id": header.of_tokenizer("eos_token_id"),
    }


def _scaling_of(header: Header, rope_theta: float, head_dim: int, context_len: int) -> dict[str, Any]:
    """Returns how positions are scaled, in the words of transformers. Raises UnsupportedModel for another way."""
    kind = header.of_model("rope.scaling.type", "none")
    factor = header.of_model("rope.scaling.factor", 0.0) or header.of_model("rope.scale_linear", 1.0)
    if _ROTARY_FACTORS in header.tensors:
        return {"rope_type": "llama3", "factor": _llama_3_factor(header, rope_theta, head_dim), **_LLAMA_3}
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return {"rope_type": "default"}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise UnsupportedModel(f"scales positions by {kind} ({header.family}.rope.scaling.type): not supported")
    original = header.of_model("rope.scaling.original_context_length", context_len)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    betas = {name: header.of_model(f"rope.scaling.yarn_{name}", 0.0) for name in ("beta_fast", "beta_slow")}
    attention = header.of_model("rope.scaling.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
    return scaling | {name: beta for name, beta in betas.items() if beta} | {"attention_factor": attention}


def _llama_3_factor(header: Header, rope_theta: float, head_dim: int) -> float:
    """Returns the factor of Llama 3's scaling, of which a file has nothing but what divides each frequency. Raises
    UnsupportedModel if these numbers are not Llama 3's."""
    found: tuple[float, ...] = struct.unpack(f"<{head_dim // 2}f", _bytes_of(header, _ROTARY_FACTORS, 2 * head_dim))
    low, high, length = _LLAMA_3.values()
    for pair, divisor in enumerate(found):
        turns = length * rope_theta ** (-2 * pair / head_dim) / math.tau  # in the original context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        if not math.isclose(divisor, 1 / ((1 - share) / found[-1] + share), rel_tol=1e-4):
            raise UnsupportedModel(f"scales its positions by factors ({_ROTARY_FACTORS}) that are not Llama 3's")
    return found[-1]


def _bytes_of(header: Header, name: str, num_bytes: int) -> bytes:
    with header.tensors[name].path.open("rb") as file:
        file.seek(header.tensors[name].begin)
        return file.read(num_bytes)


def format_of(header: Header) -> str:
    """Returns what the weights are stored as, by llama.cpp's name: Q4_K_M, or F16."""
    number = header.facts.get("general.file_type", -1)
    if number in set(LlamaFileType):
        return LlamaFileType(number).name.removeprefix("ALL_").removeprefix("MOSTLY_")
    largest = max(header.tensors.values(), key=lambda tensor: math.prod(tensor.shape))
    return GGMLQuantizationType(largest.kind).name


def is_quantised(header: Header) -> bool:
    """Returns True if weights are in a format that no model computes in."""
    return format_of(header) not in ("F32", "F16", "BF16")


def sampling_of(header: Header) -> dict[str, Any]:
    """Returns the sampling that a file asks for, in the words of a generation_config.json."""
    given = {ours: header.facts.get(f"general.sampling.{theirs}") for theirs, ours in _SAMPLING.items()}
    return {name: value for name, value in given.items() if value is not None}


def vocabulary_of(header: Header) -> dict[int, str]:
    """Returns the tokens by their ids, without those that pad the vocabulary."""
    tokens = header.of_tokenizer("tokens", [])
    kinds = header.of_tokenizer("token_type", [])
    return {
        token_id: token for token_id, token in enumerate(tokens) if token_id >= len(kinds) or kinds[token_id] != UNUSED
    }

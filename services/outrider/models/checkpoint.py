"""Judges a model by the files next to its weights: in a tenth of a second, without torch, before anything is loaded.

Loading the model finds what a config cannot tell (`outrider.models.loading`).
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

DEMO_PREFIX = "demo/"
CONFIG = "config.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
CONFIGS = "*config.json"
"""Pattern of the files on the hub that tell most about a model."""
WEIGHTS = "model.safetensors"
WEIGHTS_INDEX = "model.safetensors.index.json"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
"""Files that a tokenizer is read from; one of them is enough."""
PLAIN_LAYER_TYPES = {"full_attention", "sliding_attention", "attention"}
STATE_KEYS = ("state_size", "ssm_state_size", "mamba_d_state", "lru_width")
"""Config fields of models with layers that keep a state in place of keys and values."""
NUM_NAMED = 3
"""Most wrong tensors that a message names."""

_UNQUANTISED = "quantised weights are not supported: give the unquantised model"
_OTHER_SENSES = {"vision_config": "images", "audio_config": "sound", "speech_config": "sound", "video_config": "videos"}


class UnsupportedModel(ValueError):
    """A model cannot be served. The message is the reason, in one line."""


class UnknownModel(UnsupportedModel):
    """There is no such model."""


def judge_config_in(folder: Path) -> None:
    """Judges a model by the config in a folder and the files next to it; weights need not be there. Raises
    UnsupportedModel."""
    config = folder / CONFIG
    if not config.is_file():
        raise UnsupportedModel(_no_config(folder))
    judge_config(read_json(config), folder)


def judge_folder(folder: Path) -> None:
    """Judges a model that lies in a folder as a whole. Raises UnsupportedModel."""
    judge_config_in(folder)
    _judge_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise UnsupportedModel(f"no tokenizer in {folder}: it needs tokenizer.json, or what one is made of")


def judge_config(config: Mapping[str, Any], folder: Path | None = None) -> None:
    """Judges a config.

    Args:
        config: Content of config.json, or all fields of the library's config.
        folder: Folder of the files next to it. None means that there are none.

    Raises:
        UnsupportedModel: The model cannot be served.
    """
    reasons = chain(_of_neighbours(folder), _of_numbers(config), _of_kind(config), _of_layers(config))
    if (reason := next(reasons, None)) is not None:
        raise UnsupportedModel(reason)


def _of_neighbours(folder: Path | None) -> Iterator[str]:
    """Yields reasons that files next to a config give."""
    if folder is None:
        return
    # An adapter's config without an adapter's weights is left over from a merge.
    if any((folder / name).is_file() for name in ADAPTERS) or not (folder / CONFIG).is_file():
        yield _adapter_of(folder)
    if (folder / "hf_quant_config.json").is_file():
        yield f"is quantised (modelopt): {_UNQUANTISED}"
    if (folder / "quantize_config.json").is_file():
        yield f"is quantised (gptq): {_UNQUANTISED}"


def _of_numbers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields how the weights are quantised, if they are."""
    text = config.get("text_config") or {}
    for key in ("quantization_config", "compression_config", "quantization"):  # the last one is MLX's
        how = config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
        if not how:
            continue
        how = how if isinstance(how, Mapping) else {}
        method = how.get("quant_method") or how.get("method")
        if not method:
            is_bnb = any(name.startswith(("load_in_", "bnb_")) for name in how)
            method = "bitsandbytes" if is_bnb else "mlx" if key == "quantization" else "by an unknown method"
        bits = how.get("bits") or how.get("w_bit")
        yield f"is quantised ({method}{f', {bits} bits' if bits else ''}): {_UNQUANTISED}"


def _of_kind(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields why a model is not one that continues a text, or not one that the library has."""
    model_type = config.get("model_type")
    known = causal_models()
    if config.get("is_encoder_decoder"):
        yield f"a model of type {model_type} has an encoder and a decoder: only models that continue a text are served"
    architectures = [str(name) for name in config.get("architectures") or ()]
    is_ours = known.get(str(model_type)) in architectures
    for key, what in _OTHER_SENSES.items():
        # Some run as text models: those that the library lists, as a whole, as causal language models.
        if config.get(key) and not is_ours:
            yield f"a model of type {model_type} takes {what} too: only models of text alone are served"
    if not model_type:
        yield f"its {CONFIG} names no model_type"
    for name in architectures:
        if not is_ours and re.search(r"For(?!CausalLM$)[A-Z]|RewardModel", name):
            yield f"is a {name}: only models that continue a text (...ForCausalLM) are served"
    if known and model_type not in known:
        if "auto_map" in config:
            yield f"a model of type {model_type} needs code of its own, which is never run"
        yield f"transformers {version('transformers')} has no causal language model of type {model_type}"


def _of_layers(config: Mapping[str, Any]) -> Iterator[str]:
    """Yields why the layers of a model cannot be run."""
    text = config.get("text_config")
    config = {**config, **text} if isinstance(text, Mapping) else config
    # An older name in the library, and the only one in some configs.
    types = config.get("layer_types") or config.get("layers_block_type") or ()
    if others := sorted({str(kind) for kind in types} - PLAIN_LAYER_TYPES):
        yield f"has layers of {' and '.join(others)}: only full attention and sliding windows are supported"
    if config.get("per_layer_config"):
        yield "has layers of several shapes (per_layer_config), which are not supported"
    if any(config.get(key) for key in STATE_KEYS):
        yield "has layers that keep a state in place of keys and values, which are not supported"
    if config.get("attn_logit_softcapping"):
        yield "caps its attention scores (attn_logit_softcapping), which is not supported"
    if config.get("alibi"):
        yield "adds biases of position to its attention scores (alibi), which is not supported"
    if config.get("kv_lora_rank"):
        yield "has latent attention (kv_lora_rank), which is not supported"


def judge_tensors(
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]],
    modules: Collection[str],
) -> list[str]:
    """Judges weights by the differences that were found when they were loaded.

    Args:
        missing: Names of tensors that the model has and the checkpoint lacks.
        unexpected: Names of tensors that the checkpoint has and the model lacks.
        mismatched: Names of tensors that both have, with the shape in the checkpoint and that in the model.
        modules: Names of all parts of the model.

    Returns:
        Names of unexpected tensors that belong to no part of the model, such as heads for other purposes.

    Raises:
        UnsupportedModel: Tensors are missing, have another shape, or belong to a part that does not use them: the
            checkpoint has another architecture than its config says.
    """
    if missing:
        raise UnsupportedModel(f"its weights have no {_listed(missing)}")
    if mismatched:
        name, found, expected = min(mismatched)
        shapes = f"{list(found)} in its weights, and {list(expected)} by its config"
        raise UnsupportedModel(f"{name} is {shapes}{_and_others(len(mismatched) - 1)}")
    inner = {name for name in unexpected if _is_of_a_part(name, modules)}
    if inner:
        raise UnsupportedModel(f"its weights have {_listed(inner)}, which a model of its type does not use")
    return sorted(unexpected)


def _is_of_a_part(name: str, modules: Collection[str]) -> bool:
    """Returns True for a tensor of a layer that the model has, or of a module that holds tensors itself."""
    parents = [".".join(name.split(".")[:count]) for count in range(1, name.count(".") + 1)]
    known = [parent for parent in parents if parent in modules]
    is_leaf = bool(known) and not any(module.startswith(f"{known[-1]}.") for module in modules)
    return is_leaf or any(part.isdecimal() for parent in known for part in parent.split("."))


def _listed(names: Collection[str]) -> str:
    first = sorted(names)[:NUM_NAMED]
    return ", ".join(first) + _and_others(len(names) - len(first))


def _and_others(count: int) -> str:
    return f" and {count} others" if count > 0 else ""


def causal_models() -> Mapping[str, str]:
    """Returns the library's causal language models: class by model type. Empty if the library is not installed."""
    spec = find_spec("transformers")
    return {} if spec is None or spec.origin is None else _causal_models(Path(spec.origin).parent)


@cache
def _causal_models(library: Path) -> Mapping[str, str]:
    # Read, not imported: that would import torch.
    source = (library / "models" / "auto" / "modeling_auto.py").read_text(encoding="utf-8")
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES")], value=ast.Call(args=[pairs])):
                return dict(ast.literal_eval(pairs))
    return {}


def _no_config(folder: Path) -> str:
    if (folder / ADAPTER_CONFIG).is_file():
        return _adapter_of(folder)
    return f"no {CONFIG} in {folder}"


def _adapter_of(folder: Path) -> str:
    base = read_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "another model"
    return (
        f"is a LoRA adapter of {base}: merge it first (merge_and_unload of peft), and give the folder that this makes"
    )


def _judge_weights(folder: Path) -> None:
    """Raises UnsupportedModel if weights are missing or incomplete."""
    if (folder / WEIGHTS).is_file():
        shards = {WEIGHTS}
    elif (folder / WEIGHTS_INDEX).is_file():
        weight_map = read_json(folder / WEIGHTS_INDEX).get("weight_map")
        shards = set(map(str, weight_map.values())) if isinstance(weight_map, Mapping) else set()
        if not shards:
            raise UnsupportedModel(f"{WEIGHTS_INDEX} is no index of weights")
    elif any((folder / name).is_file() for name in PICKLES):
        return
    else:
        raise UnsupportedModel(f"no weights in {folder} ({WEIGHTS})")
    for shard in sorted(shards):
        if not (folder / shard).is_file():
            raise UnsupportedModel(f"{shard} is missing, which {WEIGHTS_INDEX} names")
        if problem := _problem_of_weights(folder / shard):
            raise UnsupportedModel(f"{shard} {problem}")


def _problem_of_weights(path: Path) -> str:
    """Returns what is wrong with a file of safetensors; empty if it is whole."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        if first == b"version ":
            return "is a pointer of Git LFS: git lfs pull fetches the file"
        header_len = int.from_bytes(first, "little")
        if len(first) < 8 or 8 + header_len > num_bytes:
            return "is cut off, or is no safetensors file"
        try:
            header = json.loads(file.read(header_len))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return "is no safetensors file"
    whole = 8 + header_len + max(ends, default=0)
    return f"is cut off: {num_bytes} of {whole} bytes are there" if num_bytes < whole else ""


def read_json(path: Path) -> Mapping[str, Any]:
    """Reads a JSON object. Raises UnsupportedModel if there is none."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise UnsupportedModel(f"{path.name} holds no object")
    return found

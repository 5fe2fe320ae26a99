"""The `generation_config.json` of a model: the sampling that its makers recommend."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog
from huggingface_hub import try_to_load_from_cache

from outrider.core.params import InvalidParameter, SamplingParams, check
from outrider.models.gguf import is_gguf, read_header, sampling_of
from outrider.models.loading import CannotLoadModel

log = structlog.get_logger(__name__)

NAME = "generation_config.json"
_NUMBERS = {"temperature", "top_p", "min_p", "repetition_penalty"}
_WHOLE_NUMBERS = {"top_k": -1, "max_new_tokens": 1}
"""Fields that are whole numbers, and their least values."""
_MAX = 2**31 - 1
"""Largest whole number that a request can contain."""


def default_sampling(checkpoint: str) -> Mapping[str, float]:
    """Returns the sampling that a model's file asks for: the defaults of requests.

    Fields are those that vLLM takes, by their names in `SamplingParams`: temperature, top_p, top_k, min_p,
    repetition_penalty, max_tokens. `do_sample: false` is temperature 0.

    Args:
        checkpoint: A folder, a GGUF file, or a name on the Hugging Face hub, whose files must be in the cache.

    Raises:
        CannotLoadModel: The file cannot be read or is no JSON object, or a value of it is outside its range. The
            message names the flag, the file, the field and the rule.
    """
    path = _path(checkpoint)
    if path is None:
        return {}
    try:
        given = sampling_of(read_header(path)) if is_gguf(path) else json.loads(path.read_bytes())
        check(isinstance(given, dict), "it", "a JSON object", type(given).__name__)
        given = {name: value for name, value in given.items() if value is not None}
        found = _checked(given)
    # Also raised for a file that is no JSON, or no text.
    except (OSError, ValueError) as error:
        raise CannotLoadModel(f"--generation-config auto: {path}: {error}; with none it is left out") from error
    unused = sorted(name for name in given if not _is_known(name))
    log.info("generation_config.read", file=str(path), sampling=found, unused=unused)
    return found


def _path(checkpoint: str) -> Path | None:
    """Returns the path of the file; None if the model has none."""
    if is_gguf(Path(checkpoint)):
        return Path(checkpoint)
    if Path(checkpoint).is_dir():
        path = Path(checkpoint) / NAME
        return path if path.is_file() else None
    cached = try_to_load_from_cache(checkpoint, NAME)
    return Path(cached) if isinstance(cached, str) else None


def _checked(given: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for name in _NUMBERS & given.keys():
        # JSON's true is an int to Python.
        check(type(given[name]) in (int, float), name, "a number", repr(given[name]))
        found[name] = given[name]
    for name, least in _WHOLE_NUMBERS.items():
        if name in given:
            is_whole = type(given[name]) is int and least <= given[name] <= _MAX
            check(is_whole, name, f"a whole number in [{least}, {_MAX}]", repr(given[name]))
            found[name] = max(0, given[name])  # a top_k of -1 also means all tokens
    max_tokens = found.pop("max_new_tokens", None)
    try:
        SamplingParams(**found)  # type: ignore[arg-type]
    except InvalidParameter as error:
        name = error.field.removeprefix("sampling.")
        raise InvalidParameter(name, error.rule, given[name]) from None
    do_sample = given.get("do_sample", True)
    check(type(do_sample) is bool, "do_sample", "true or false", repr(do_sample))
    if not do_sample:
        found["temperature"] = 0.0
    return found if max_tokens is None else {**found, "max_tokens": max_tokens}


def _is_known(name: str) -> bool:
    """Returns True for a field that is used, or that says nothing about sampling."""
    known = {*_NUMBERS, *_WHOLE_NUMBERS, "do_sample", "transformers_version"}
    return name in known or name.startswith("_") or name.endswith("_token_id")

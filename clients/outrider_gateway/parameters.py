"""Parameters of requests: names and types, as in OpenAI's and vLLM's APIs. The verifier checks ranges.

An unknown field is an error unless its value changes nothing. Harmless notes of OpenAI's are ignored.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, WithJsonSchema, create_model
from pydantic_core import ErrorDetails

from outrider.core.methods import METHODS
from outrider_gateway.errors import ApiError, invalid, shown

_M = TypeVar("_M", bound="Parameters")

Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Report = Literal["sources", "rounds", "trees"]

_TOKENS: dict[str, Any] = {"type": "array", "items": {"type": "integer"}}
Text = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _TOKENS,
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _TOKENS]}},
            ]
        }
    ),
]
"""A prompt, or several. `completion_prompts` checks it."""

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "request_id", "cache_control", "client_metadata", "inference_geo", "max_tool_calls",
    }
)  # fmt: skip
"""Fields that change nothing here, whatever their value."""

_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
    "functions": ([],),
    "guided_json": (),
    "cache_salt": ("",),
    "background": (False,),
    "truncation": ("disabled",),
    "reasoning": ({}, {"effort": "none"}, {"effort": "none", "summary": "auto"}),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "function_call": ("none",),
    "thinking": ({"type": "disabled"},),
    "context_management": ([], {}, {"edits": []}),
    "mcp_servers": ([],),
    "betas": ([],),
    "speed": ("standard",),
}
"""Values, besides null, that change nothing. Fields in them may be null."""
_INSTEAD = {
    "functions": ("tools",),
    "function_call": ("tool_choice",),
    "guided_json": ("structured_outputs",),
    "guided_regex": ("structured_outputs",),
    "guided_choice": ("structured_outputs",),
    "guided_grammar": ("structured_outputs",),
    "best_of": ("n",),
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_tokens",),
    "messages": ("input",),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "response_format": ("text", "output_config"),
}
"""Fields that correspond to others here or in other requests. The first one that the request may have is suggested."""
_OF_OTHERS = frozenset(
    {
        "chat_template", "documents", "grammar", "json_schema", "regex", "images", "audio", "logits_processors",
        "web_search_options", "n_predict", "container",
    }
)  # fmt: skip
"""Fields of other servers that change an answer and have no counterpart here."""
_NEAR = 0.75
"""Similarity from which on a name is taken for a misspelling of another one."""
_NOTHING_IS_STORED = "nothing is stored here, so send the whole conversation as input"
_BECAUSE = {
    "previous_response_id": _NOTHING_IS_STORED,
    "conversation": _NOTHING_IS_STORED,
    "prompt": "no prompts are stored here, so send the text itself",
    "background": _NOTHING_IS_STORED,
    "truncation": 'an input that is too long is an error, as with "disabled"',
    "reasoning": "what a model thinks is part of its text",
    "reasoning_effort": "what a model thinks is part of its text",
    "thinking": "what a model thinks is part of its text",
}
"""Reasons why known fields are not supported."""


class Parameters(BaseModel):
    """Holds named values of a JSON object. Types are strict: a number is no string, and true is no number."""

    # `checked` judges unknown fields, as it knows more of them than pydantic.
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    def set_of(self, kind: type[Parameters]) -> dict[str, Any]:
        """Returns the set values of those fields that a type has."""
        return {name: getattr(self, name) for name in kind.model_fields if name in self.model_fields_set}


def checked(kind: type[_M], values: Mapping[str, Any]) -> _M:
    """Returns the values as a request of this type. Raises ApiError, which names the field, the rule and the value."""
    given = {name: value for name, value in values.items() if value is not None}
    for name in given:
        if not is_taken(kind, given, name):
            raise _unsupported(kind, name)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _complaint(error.errors(include_url=False)[0]) from None


def is_taken(kind: type[Parameters], given: Mapping[str, Any], name: str) -> bool:
    """Returns True if a field is known in requests of this type, or changes nothing."""
    value = given[name]
    if value is None or name in kind.model_fields or name in HARMLESS:
        return True
    # The best n of n texts are all of them.
    if name == "best_of" and _same(value, given.get("n", 1)):
        return True
    return any(_same(value, each) for each in _WITHOUT_EFFECT.get(name, ()))


def is_foreign(kind: type[Parameters], name: str) -> bool:
    """Returns True if a name is unknown and resembles no known one."""
    known = {field for other in _kinds(Parameters) for field in other.model_fields}
    known |= _WITHOUT_EFFECT.keys() | _INSTEAD.keys() | _BECAUSE.keys() | _OF_OTHERS
    return name not in known and not difflib.get_close_matches(name, kind.model_fields, 1, _NEAR)


def _kinds(kind: type[Parameters]) -> Iterator[type[Parameters]]:
    for each in kind.__subclasses__():
        yield each
        yield from _kinds(each)


def _same(value: object, other: object) -> bool:
    if isinstance(value, dict):
        value = {name: each for name, each in value.items() if each is not None}
    # True equals 1 in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _unsupported(kind: type[Parameters], name: str) -> ApiError:
    instead = next((each for each in _INSTEAD.get(name, ()) if each in kind.model_fields), "")
    near = next(iter(difflib.get_close_matches(name, kind.model_fields, 1, _NEAR)), "")
    reason = _BECAUSE.get(name) or (instead and f"use {instead}") or (near and f"did you mean {near}?")
    hint = f": {reason}" if reason else ""
    return invalid(name, f"is not supported{hint}", code="unsupported_parameter")


_RULES = {
    "missing": "is required",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "too_short": "must not be empty",
}
"""Rules by pydantic's name for their violation."""


def _complaint(item: ErrorDetails) -> ApiError:
    param = ""
    for part in item["loc"]:
        param += f"[{part}]" if isinstance(part, int) else f".{part}" if param else part
    kind, context = item["type"], item.get("ctx", {})
    if kind in ("greater_than_equal", "less_than"):
        rule = "must be at least {ge}" if "ge" in context else "must be below {lt}"
        rule = rule.format(**context)
    elif kind == "literal_error":
        rule = f"must be {context['expected']}".replace("'", '"')
    elif kind == "extra_forbidden":
        return invalid(param, "is not supported", code="unsupported_parameter")
    else:
        rule = _RULES.get(kind) or item["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return invalid(param, rule)
    if kind == "missing":
        return invalid(param, rule, code="missing_required_parameter")
    return invalid(
        param, f"{rule}, got {shown(item['input'])}", code="invalid_type" if kind in _RULES else "invalid_value"
    )


def _list(value: object) -> object:
    return [value] if isinstance(value, str) else value


Stop = Annotated[
    list[str],
    BeforeValidator(_list),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]


def _by_token(value: object) -> object:
    """Returns a bias by token ids: the names of a JSON object are strings."""
    if not isinstance(value, dict):
        return value
    biases = {}
    for key, bias in value.items():
        if not (isinstance(key, str) and key.isascii() and key.isdecimal() and int(key[:12]) < 2**31):
            raise ValueError(f"must have token ids as names, got {key!r}")
        biases[int(key)] = bias
    return biases


class StreamOptions(Parameters):
    """Holds what a stream tells beside the text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False
    """Has no effect: nothing is obfuscated."""


class SpeculationOptions(Parameters):
    """Holds how drafts are made: the options of the SDK by their names."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    method: str | None = None
    num_speculative_tokens: Int32 | None = None
    lookahead: Int32 | None = None
    min_path_probability: float | None = None
    retrieval: bool | None = None
    retrieval_scope: str | None = None
    contribute: bool | None = None
    sources: list[str] | None = None
    retrieval_remote: bool | None = None
    rows: str | None = None
    max_rows: Int32 | None = None
    acceptance_rule: str | None = None
    shared_noise: bool | None = None
    calibration: bool | None = None
    as_published: bool | None = None
    allow_fallback: bool | None = None


if not TYPE_CHECKING:
    # With the parameters of each method, by its name. A type checker cannot read a computed class.
    SpeculationOptions = create_model(
        "SpeculationOptions",
        __base__=SpeculationOptions,
        __doc__=SpeculationOptions.__doc__,
        **{method.field: (dict[str, Any] | None, None) for method in METHODS.values() if method.parameters},
    )


class SamplingParameters(Parameters):
    """Holds the parameters of every request that generates."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    min_tokens: Int32 | None = None
    stop_token_ids: list[Int32] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], BeforeValidator(_by_token)] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Int32 | None = None
    structured_outputs: dict[str, Any] | None = None
    skip_special_tokens: bool | None = None
    stream: bool = False
    prediction: dict[str, Any] | None = None
    speculation: SpeculationOptions | None = None


class GenerationParameters(SamplingParameters):
    """Holds the parameters of requests whose answers have choices."""

    n: Int32 = 1
    max_tokens: Int32 | None = None
    stop: Stop | None = None
    prompt_logprobs: Int32 | None = None
    response_format: dict[str, Any] | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    speculation_report: list[Report] = []
    timings_per_token: bool = False

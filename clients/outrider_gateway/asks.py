"""Converts the parameters of an HTTP request to a prompt and options of the SDK."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from outrider_client.requests import GenerateOptions, Prompt
from outrider_gateway.errors import FieldNames, invalid, shown
from outrider_gateway.parameters import (
    GenerationParameters,
    StreamOptions,
)
from outrider_gateway.tools.calls import ToolCallFormat

_AS_THEY_ARE = (
    "temperature", "top_p", "min_p", "seed", "min_tokens", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "bad_words",
    "prompt_logprobs", "truncate_prompt_tokens", "skip_special_tokens",
)  # fmt: skip
"""Parameters that have the same names in the SDK."""
CHAT_NAMES = (("prompt.chat.", ""), ("prompt", "messages"))
"""Prefixes of the names of a chat's fields, and their replacements in a request."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Holds what is needed to separate the calls of tools from the text around them."""

    format: ToolCallFormat
    """The format in which the model writes calls."""
    tools: Sequence[Mapping[str, Any]]
    """The tools that were offered, in OpenAI's shape."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Holds everything that a request asks of the verifier, and the form of its answer."""

    prompts: Sequence[Prompt]
    options: GenerateOptions
    names: FieldNames
    n: int
    """Texts of each prompt."""
    stop_token_ids: frozenset[int] = frozenset()
    """The stop tokens of the request."""
    tool_use: ToolUse | None = None
    """Parser of calls. None: everything is text."""
    prediction: str = ""
    reports: frozenset[str] = frozenset()
    """The parts of the report about speculation: "sources", "rounds", "trees"."""
    has_timings: bool = False
    stream: StreamOptions | None = None
    """The reports of a stream; None: the answer is not streamed."""
    returns_token_ids: bool = False
    echo: bool = False
    """True if the text of a completion begins with the prompt."""
    tells_prompt_logprobs: bool = False
    is_prompt_alone: bool = False
    """True if the text is the prompt alone. Tokens that the verifier generates to report on the prompt are left out."""


def ask_of(
    given: GenerationParameters,
    prompts: Sequence[Prompt],
    options: GenerateOptions,
    renamed: Sequence[tuple[str, str]] = (),
    *,
    tool_use: ToolUse | None = None,
    echo: bool = False,
) -> Ask:
    if given.response_format is not None:
        renamed = [
            *renamed,
            ("structured_outputs.json", "response_format.json_schema.schema"),
            ("structured_outputs", "response_format"),
        ]
    if given.speculation is not None:
        # The SDK has them next to all other options.
        renamed = [*renamed, *((name, f"speculation.{name}") for name in given.speculation.model_fields_set)]
    return Ask(
        prompts,
        options,
        FieldNames(renamed),
        max(1, given.n),
        frozenset(given.stop_token_ids or ()),
        tool_use,
        str(options.get("prediction") or ""),
        frozenset(given.speculation_report),
        given.timings_per_token or "rounds" in given.speculation_report,
        _stream(given),
        given.return_token_ids,
        echo,
        given.prompt_logprobs is not None,
    )


def _stream(given: GenerationParameters) -> StreamOptions | None:
    if not given.stream:
        if given.stream_options is not None:
            raise invalid("stream_options", "must be unset unless stream is true")
        return None
    if given.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "must be unset where stream is true")
    return given.stream_options or StreamOptions()


def options_of(given: GenerationParameters) -> GenerateOptions:
    """Returns the options of the SDK that every request may have."""
    options: dict[str, Any] = {name: value for name in _AS_THEY_ARE if (value := getattr(given, name)) is not None}
    if given.top_k is not None:
        # In vLLM -1 also means all tokens.
        options["top_k"] = 0 if given.top_k == -1 else given.top_k
    if given.n != 1:
        options["n"] = given.n
    if given.max_tokens is not None:
        options["max_tokens"] = given.max_tokens
    options["clamp_max_tokens"] = True
    if (structure := _structure(given)) is not None:
        options["structured_outputs"] = structure
    if given.prediction is not None:
        options["prediction"] = _prediction(given.prediction)
    if given.prompt_logprobs is not None or given.return_token_ids:
        options["echo"] = True
    if given.speculation is not None:
        options |= given.speculation.model_dump(exclude_none=True)
    if given.speculation_report:
        options |= {"text_ends": True, "rounds": "rounds" in given.speculation_report}
        if "trees" in given.speculation_report:
            options["trees"] = True
    return cast(GenerateOptions, options)


def _structure(given: GenerationParameters) -> Mapping[str, Any] | None:
    """Returns the structure that the output must have, as the SDK takes it."""
    formatted = _response_format(given.response_format) if given.response_format is not None else None
    if given.structured_outputs is None:
        return formatted
    if formatted is not None:
        raise invalid("response_format", "must be unset with structured_outputs: both say what the text is")
    # A client of vLLM sends all fields, most of them unset.
    return {name: value for name, value in given.structured_outputs.items() if value is not None and value is not False}


def _response_format(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    described = given.get("json_schema")
    schema = described.get("schema") if isinstance(described, dict) else None
    return text_format(given.get("type"), schema, "response_format.type", "response_format.json_schema.schema")


def text_format(kind: object, schema: object, kind_place: str, schema_place: str) -> Mapping[str, Any] | None:
    """Returns the structure of one of OpenAI's formats, as the SDK takes it; None for plain text.

    Args:
        kind: The kind of format.
        schema: Its schema, if it has one.
        kind_place: The place of the kind in the request, for errors.
        schema_place: The place of the schema, likewise.

    Raises:
        ApiError: There is no such kind, or the schema is not one.
    """
    match kind:
        case "text":
            return None
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            if not isinstance(schema, dict):
                raise invalid(schema_place, f"must be an object, got {shown(schema)}")
            return {"json": schema}
    raise invalid(kind_place, f'must be "text", "json_object" or "json_schema", got {shown(kind)}')


def _prediction(given: Mapping[str, Any]) -> str:
    content = given.get("content")
    if given.get("type", "content") != "content":
        raise invalid("prediction.type", f'must be "content", got {shown(given["type"])}')
    if isinstance(content, list):
        content = "".join(_prediction_part(part, index) for index, part in enumerate(content))
    if not isinstance(content, str):
        raise invalid("prediction.content", f"must be a text or a list of parts, got {shown(content)}")
    return content


def _prediction_part(part: object, index: int) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise invalid(f"prediction.content[{index}]", f"must be a part of type text, got {shown(part)}")
    return text

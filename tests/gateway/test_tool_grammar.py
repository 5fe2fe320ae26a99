"""Tool calls that must follow their schemas: the request to the server, the grammars, and the results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from outrider.models.structure import Grammars
from outrider.v1 import verifier_pb2
from outrider.wire.structure import structure_from_proto
from outrider_client import Client, FinishReason, Result
from outrider_client.requests import GenerateOptions, generate_request
from outrider_gateway.tools.calls import ToolCall, ToolCallFormat, ToolCallStream, parse_tool_calls
from outrider_gateway.tools.grammar import UnheldCalls, hold_calls, shown_tools
from tests.support.chat_templates import CHATML, with_tokens
from tests.support.schemas import Schema, random_schemas
from tests.support.services import RunningVerifier, draft_model, running_speculator, running_verifier, target_model

FORMATS = ("hermes", "mistral", "llama3_json", "deepseek_v3")
USER = {"role": "user", "content": "How warm is it?"}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}


def tool(name: str, parameters: Any = None, strict: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


WEATHER, STRICT, NOW = tool("weather", CITY), tool("weather", CITY, strict=True), tool("now")


def request(**options: Any) -> verifier_pb2.GenerateRequest:
    return generate_request([USER], held(**options))


def held(tool_call_format: str = "hermes", tool_choice: Any = None, **options: Any) -> GenerateOptions:
    is_parallel = options.pop("parallel_tool_calls", None)
    return hold_calls(options, ToolCallFormat(tool_call_format), tool_choice, is_parallel)


# The request to the server.


@pytest.mark.parametrize("options", [{}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}])
def test_without_a_strict_tool_a_text_is_as_free_as_ever(options: dict[str, Any]) -> None:
    assert request(tools=[WEATHER, NOW], **options) == request(tools=[WEATHER, NOW])
    assert not request(tools=[WEATHER], **options).HasField("structured_outputs")


@pytest.mark.parametrize(
    "options",
    [
        {"tools": [STRICT]},
        {"tools": [WEATHER], "tool_choice": "required"},
        {"tools": [WEATHER], "tool_choice": function("weather")},
        {"tools": [WEATHER], "parallel_tool_calls": False},
        {"tools": [verifier_pb2.Tool(name="weather", parameters=json.dumps(CITY))], "tool_choice": "required"},
    ],
)
def test_what_holds_calls_to_their_tools_is_a_grammar_of_the_whole_text(options: dict[str, Any]) -> None:
    sent = request(**options)
    assert sent.structured_outputs.grammar.startswith("%llguidance {}")
    assert sent.structured_outputs.special_tokens_as_text
    assert (sent.HasField("skip_special_tokens"), sent.skip_special_tokens) == (True, False)
    assert [each.name for each in sent.prompt.chat.tools] == ["weather"]


def test_with_none_the_model_is_not_shown_the_tools_and_says_what_it_likes() -> None:
    sent = request(tools=[STRICT, NOW], tool_choice="none", structured_outputs={"json_object": True})
    assert sent == request(structured_outputs={"json_object": True})
    assert shown_tools({"tools": [STRICT]}, "none") == {}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tool_choice": "any"}, ValueError, 'tool_choice must be "auto", "none", "required", or {"type": "function"'),
        ({"tool_choice": "weather"}, ValueError, 'tool_choice must be "auto", "none", "required", or {"type": "funct'),
        ({"tool_choice": {"name": "weather"}}, TypeError, "tool_choice must have keys of type, function only"),
        ({"tool_choice": {"type": "function"}}, TypeError, "tool_choice.function must be a dict, got NoneType"),
        ({"tool_choice": function("f")}, ValueError, "tool_choice.function.name must be one of weather, got 'f'"),
        ({"tool_choice": "required", "tools": None}, ValueError, 'tool_choice must be unset or "none" without tools'),
        ({"tool_choice": "auto", "tools": []}, ValueError, 'tool_choice must be unset or "none" without tools'),
        ({"parallel_tool_calls": True, "tools": None}, ValueError, "parallel_tool_calls must be unset without tools"),
        (
            {"tool_choice": "required", "tool_call_format": "auto"},
            UnheldCalls,
            "tool_choice 'required' needs to know how this model writes calls",
        ),
        (
            {"tools": [STRICT], "tool_call_format": "pythonic"},
            UnheldCalls,
            "strict tools needs calls that a schema can hold, as those of hermes, ",
        ),
        (
            {"parallel_tool_calls": False, "tool_call_format": "qwen3_coder"},
            UnheldCalls,
            "parallel_tool_calls false needs calls that a schema can hold",
        ),
        (
            {"tool_choice": "required", "structured_outputs": {"json_object": True}},
            ValueError,
            "structured_outputs must be unset with tool_choice 'required'",
        ),
        (
            {"tool_choice": function("weather"), "skip_special_tokens": True},
            ValueError,
            "skip_special_tokens must be unset or false with tool_choice 'weather'",
        ),
        (
            {"tools": [tool("f", CITY, strict="yes")]},
            TypeError,
            "tools[0].function.strict must be true or false, got s",
        ),
        (
            {"tools": [WEATHER, tool("f g", CITY, strict=True)]},
            ValueError,
            "tools[1].function.name must be of letters, digits and _.:/- only, got 'f g'",
        ),
        (
            {"tools": [tool("f", {"type": "string"}, strict=True)]},
            ValueError,
            'tools[0].function.parameters must be a schema of "type": "object"',
        ),
        (
            {"tools": [verifier_pb2.Tool(name="f", parameters="{")], "tool_choice": "required"},
            ValueError,
            "tools[0].parameters must be JSON: ",
        ),
    ],
)
def test_what_cannot_be_held_or_contradicts_is_refused_by_its_place(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        request(**{"tools": [WEATHER], **options})
    assert str(caught.value).startswith(words)


# The grammars.


@cache
def grammars() -> Grammars:
    model = target_model()
    return Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)


def allows(text: str, **options: Any) -> bool:
    """True if a text is allowed as a whole."""
    matcher = grammars().matcher(structure_from_proto(request(**options).structured_outputs))
    token_ids = target_model().tokenizer(text, add_special_tokens=False)["input_ids"]
    return all(matcher.consume(token_id) for token_id in token_ids) and (
        matcher.is_over or matcher.consume(target_model().eos_token_ids[0])
    )


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def mistral(*calls: tuple[str, str]) -> str:
    listed = ", ".join(f'{{"name": "{name}", "arguments": {arguments}}}' for name, arguments in calls)
    return f"[TOOL_CALLS] [{listed}]"


def deepseek(*calls: str) -> str:
    joined = "".join(f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>" for call in calls)
    return f"<｜tool▁calls▁begin｜>{joined}<｜tool▁calls▁end｜>"


ROME, NONE = '{"city": "Rome"}', "{}"
SINGLE: list[tuple[str, str]] = [
    ("hermes", hermes("weather", ROME)),
    ("mistral", mistral(("weather", ROME))),
    ("mistral", f"[TOOL_CALLS][{mistral(('weather', ROME)).partition('[{')[2].join(['{', ''])}"),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ROME}"),
    ("mistral", f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{ROME}"),
    ("llama3_json", f'{{"name": "weather", "parameters": {ROME}}}'),
    ("llama3_json", f'<|python_tag|>{{"name": "weather", "parameters": {ROME}}}'),
    ("deepseek_v3", deepseek(f"weather<｜tool▁sep｜>{ROME}")),
    ("deepseek_v3", deepseek(f"function<｜tool▁sep｜>weather\n```json\n{ROME}\n```")),
]
"""Texts by format, each of which is a call of the weather in Rome."""
PAIRS: list[tuple[str, str]] = [
    ("hermes", hermes("weather", ROME) + "\n" + hermes("now", NONE)),
    ("mistral", mistral(("weather", ROME), ("now", NONE))),
    ("mistral", f"[TOOL_CALLS]weather[ARGS]{ROME}[TOOL_CALLS]now[ARGS]{NONE}"),
    ("llama3_json", f'{{"name": "weather", "parameters": {ROME}}}; {{"name": "now", "parameters": {{}}}}'),
    ("deepseek_v3", deepseek(f"weather<｜tool▁sep｜>{ROME}", f"now<｜tool▁sep｜>{NONE}")),
    (
        "deepseek_v3",
        deepseek(f"function<｜tool▁sep｜>weather\n```json\n{ROME}\n```", "function<｜tool▁sep｜>now\n```json\n{}\n```"),
    ),
]
"""Texts that continue with a call of the time."""
CALLS = [ToolCall("weather", ROME), ToolCall("now", NONE)]


@pytest.mark.parametrize("choice", [None, "required", function("weather")], ids=["auto", "required", "named"])
@pytest.mark.parametrize(("format", "text"), SINGLE)
def test_a_call_is_allowed_as_each_format_writes_it_and_read_back(format: str, text: str, choice: Any) -> None:
    options = {"tools": [STRICT, NOW], "tool_call_format": format, "tool_choice": choice}
    assert allows(text, **options)
    assert allows(text, parallel_tool_calls=False, **options)
    assert [(call.name, call.arguments) for call in parse_tool_calls(text, format)[1]] == [("weather", ROME)]
    for wrong in ('{"town": "Rome"}', '{"city": 5}', '{"city": "Rome", "days": 1.5}', "{}", "[]"):
        assert not allows(text.replace(ROME, wrong), **options)
    assert not allows(text.replace("weather", "forecast"), **options)


@pytest.mark.parametrize(("format", "text"), PAIRS)
def test_several_calls_are_allowed_unless_one_alone_is_asked_for(format: str, text: str) -> None:
    assert parse_tool_calls(text, format) == ("", CALLS)
    for choice in ("auto", "required"):
        options = {"tools": [STRICT, NOW], "tool_call_format": format, "tool_choice": choice}
        assert allows(text, **options)
        assert allows(text, parallel_tool_calls=True, **options)
        assert not allows(text, parallel_tool_calls=False, **options)
    twice, tools = text.replace("now", "weather"), [tool("weather", CITY, strict=False), NOW]
    assert allows(twice, tools=tools, tool_call_format=format, tool_choice="required")
    assert not allows(twice, tools=tools, tool_call_format=format, tool_choice=function("weather"))


@pytest.mark.parametrize(("format", "text"), [each for each in SINGLE if not each[1].startswith("{")])
def test_text_may_stand_before_a_call_with_auto_alone(format: str, text: str) -> None:
    options = {"tools": [STRICT, NOW], "tool_call_format": format}
    for said in ("Let me see: {}, <tool>, [1]. ", "", "\n"):
        assert allows(said, **options)
        assert allows(said + text, **options)
        assert not allows(said, tool_choice="required", **options)
        assert not said or not allows(said + text, tool_choice="required", **options)
    assert not allows("Let me see. " + text.replace(ROME, '{"city": 5}'), **options)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "<tool_call> is a marker"),
        ("hermes", hermes("weather", ROME) + " and <tool_call>"),
        ("mistral", "So: [TOOL_CALLS]!"),
        ("llama3_json", '{"answer": 5}'),
        ("llama3_json", ' {"name": "weather"}'),
        ("llama3_json", "So: <|python_tag|>print(5)"),
        ("deepseek_v3", f"So: <｜tool▁call▁begin｜>weather<｜tool▁sep｜>{NONE}<｜tool▁call▁end｜>"),
    ],
)
def test_every_marker_that_is_read_begins_a_call(format: str, text: str) -> None:
    assert not allows(text, tools=[STRICT], tool_call_format=format)
    assert not allows(text, tools=[STRICT], tool_call_format=format, parallel_tool_calls=False)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("strict", "choice", "is_held"),
    [
        (True, "auto", True),
        (None, "auto", False),
        (False, "auto", False),
        (True, "required", True),
        (None, "required", True),
        (False, "required", False),
        (None, function("weather"), True),
        (False, function("weather"), False),
    ],
)
def test_strictness_and_choice_decide_if_the_schema_counts(
    format: str, strict: bool | None, choice: Any, is_held: bool
) -> None:
    tools = [tool("weather", CITY, strict), tool("other", CITY, strict=True)]
    for text in (text for of, text in SINGLE if of == format):
        other = text.replace(ROME, '{"town": ["Rome", 1]}')
        assert allows(other, tools=tools, tool_call_format=format, tool_choice=choice) is not is_held
        assert not allows(text.replace(ROME, '"Rome"'), tools=tools, tool_call_format=format, tool_choice=choice)


@pytest.mark.parametrize("strict", [None, True, False])
def test_a_tool_without_parameters_has_no_arguments(strict: bool | None) -> None:
    options = {"tools": [tool("now", strict=strict)], "tool_choice": "required", "tool_call_format": "hermes"}
    assert allows(hermes("now", "{}"), **options)
    assert not allows(hermes("now", '{"zone": "UTC"}'), **options)


def test_references_and_combinations_hold_within_each_schema() -> None:
    one = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}
    two = {"$defs": {"n": {"enum": ["é"]}}, "anyOf": [{"properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"]}]}
    options = {"tools": [tool("one", one), tool("two", two)], "tool_choice": "required", "tool_call_format": "hermes"}
    assert allows(hermes("one", '{"a": 5}') + "\n" + hermes("two", '{"a": "é"}'), **options)
    assert not allows(hermes("one", '{"a": "é"}'), **options)
    assert not allows(hermes("two", '{"a": 5}'), **options)


# The results. The demo model knows nothing of tools: only the grammar makes it call them.

ADDED = {
    "<tool_call>": False, "</tool_call>": False, "[TOOL_CALLS]": True, "[ARGS]": True, "<|python_tag|>": True,
    "<｜tool▁calls▁begin｜>": True, "<｜tool▁calls▁end｜>": True, "<｜tool▁call▁begin｜>": False,
}  # fmt: skip
"""Markers that are tokens, special ones and others, as with the models of the formats; the rest is plain text."""
OPENERS = dict(zip(FORMATS, ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "<｜tool▁calls▁begin｜>"), strict=True))


@pytest.fixture(params=["plain text", "tokens"])
async def verifier(request: pytest.FixtureRequest) -> AsyncIterator[RunningVerifier]:
    """A verifier with a speculator, for whose models markers are plain text, or tokens."""
    tokenizer = with_tokens(ADDED if request.param == "tokens" else {}, CHATML)
    async with running_speculator(model=replace(draft_model(), tokenizer=tokenizer)) as speculator:
        model = replace(target_model(), tokenizer=tokenizer)
        async with running_verifier(speculator=speculator.address, model=model) as running:
            yield running


def checked(result: Result, format: str, schemas: Mapping[str, Schema]) -> tuple[str, list[ToolCall]]:
    """Returns the text around the calls, and the calls, and checks that they obey their schemas."""
    assert result.finish_reason is FinishReason.STOP
    content, calls = parse_tool_calls(result.text, format)
    for call in calls:
        Draft202012Validator(schemas[call.name]).validate(json.loads(call.arguments))
    stream = ToolCallStream(format)
    events = [event for sign in result.text for event in stream.feed(sign)] + stream.finish()
    assert [event for event in events if isinstance(event, ToolCall)] == calls
    return content, calls


def objects(count: int, seed: int) -> list[Schema]:
    """Random schemas of arguments."""
    inner = [schema for schema in random_schemas(13 + 2 * count, seed)[13:] if "$defs" not in schema][:count]
    rest = {"required": ["value"], "additionalProperties": False}
    return [{"type": "object", "properties": {"value": each, "ok": {"type": "boolean"}}, **rest} for each in inner]


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
async def test_what_comes_are_calls_that_obey_their_schemas_and_the_text_of_off(
    verifier: RunningVerifier, format: str, full: bool
) -> None:
    tokenizer, limit = verifier.model.tokenizer, asyncio.Semaphore(8)
    # With "auto" the model is made to begin a call, if a single token can do that.
    openers = OPENERS if "<tool_call>" in tokenizer.get_vocab() else {"llama3_json": "{"}
    choices = ["required", function("g.h"), *(["auto"] if format in openers else [])]

    async def run(seed: int, temperature: float, choice: Any, method: str) -> int:
        first, second = objects(2, seed)
        schemas = {"f": first, "g.h": second}
        options = held(
            tools=[tool(name, schema, strict=True) for name, schema in schemas.items()],
            tool_choice=choice,
            tool_call_format=format,
            parallel_tool_calls=False,
            temperature=temperature,
            seed=seed,
            max_tokens=400,
        )
        if choice == "auto":
            options["logit_bias"] = {tokenizer.convert_tokens_to_ids(openers[format]): 100}
        async with limit:
            plain = await client.complete([USER], method="off", **options)
            drafted = await client.complete([USER], method=method, **options)
        content, calls = checked(plain, format, schemas)
        assert (content, len(calls)) == ("", 1)
        assert choice in ("auto", "required") or calls[0].name == "g.h"
        assert (drafted.token_ids, drafted.text) == (plain.token_ids, plain.text)
        return drafted.summary.num_accepted_tokens

    async with Client(verifier.address) as client:
        num_accepted = await asyncio.gather(
            *(
                run(seed, temperature, choice, method)
                for seed in range(10 if full else 1)
                for temperature, method in ((0.0, "pearl"), (0.8, "best-first"))
                for choice in choices
            )
        )
    assert sum(num_accepted) > 0
    assert await verifier.is_idle()

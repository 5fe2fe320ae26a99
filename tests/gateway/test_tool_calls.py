"""Tool calls in a model's text: each format, texts that are no calls, and cuts that change nothing."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import from_json

from outrider_gateway.tools.calls import (
    CALL_BEGIN,
    CallBegun,
    CallGrown,
    Event,
    ToolCall,
    ToolCallFormat,
    ToolCallStream,
    parse_tool_calls,
)
from outrider_gateway.tools.growing_text import MAX_JSON_DEPTH

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "where": {"type": "object"},
                "hourly": {"type": ["boolean", "null"]},
            },
        },
    },
}
DEEPSEEK = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>\n'
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
DEEPSEEK_31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
CODER_F = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
CODER_G = "<tool_call>\n<function=g>\n</function>\n</tool_call>"
F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")
F_WITH_ID = ToolCall("f", '{"a": 1}', "1")
F_AS_JSON = '{"name": "f", "arguments": {"a": 1}}'
F_AS_TEXT = ToolCall("f", '{"a": "1"}')

WRITTEN: list[tuple[str, str, list[ToolCall]]] = [
    ("hermes", f'<tool_call>\n{F_AS_JSON}\n</tool_call>\n<tool_call>{{"name": "g"}}</tool_call>', [F, G]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', [F]),
    ("hermes", '<tool_call>{"id": "1", "name": "f", "arguments": {"a": 1}}</tool_call>', [F_WITH_ID]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "type": "function", "id": "1"}', [F_WITH_ID]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "id": "1", "name": "f"}</tool_call>', [F_WITH_ID]),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]', [F, G]),
    ("mistral", '[TOOL_CALLS][{"name": "g", "arguments": {}, "id": "abcdef123"}]', [ToolCall("g", "{}", "abcdef123")]),
    ("mistral", '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS]g{}', [F, G]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}', [F]),
    ("mistral", "[TOOL_CALLS]g[CALL_ID]abcdef123[ARGS]{}", [ToolCall("g", "{}", "abcdef123")]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}', [F]),
    ("llama3_json", f' {F_AS_JSON}; {{"type": "function", "name": "g", "parameters": {{}}}};\n', [F, G]),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}, "id": "1"}; ' + F_AS_JSON, [F_WITH_ID, F]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F]),
    ("pythonic", "[f(a=1), g()]", [F, G]),
    ("pythonic", "<|python_start|>[f(a=1), g()]<|python_end|>", [F, G]),
    ("deepseek_v3", DEEPSEEK, [F, G]),
    ("deepseek_v3", DEEPSEEK_31, [F, G]),
    ("qwen3_coder", f"{CODER_F}\n{CODER_G}", [F_AS_TEXT, G]),
    ("qwen3_coder", "<function=g>\n</function>\n</tool_call>", [G]),
]  # fmt: skip
"""Texts by format, with the calls in them and nothing else."""


@pytest.mark.parametrize(("format", "text", "calls"), WRITTEN)
def test_calls_are_found_in_each_format(format: str, text: str, calls: list[ToolCall]) -> None:
    assert parse_tool_calls(text, format) == ("", calls)
    assert parse_tool_calls(text, ToolCallFormat(format)) == ("", calls)
    assert one_by_one(text, format) == ("", calls)


def test_every_format_is_among_those_tested() -> None:
    assert {format for format, _, _ in WRITTEN} == {each.value for each in ToolCallFormat} - {"auto"}


@pytest.mark.parametrize(
    ("format", "text", "calls"), [each for each in WRITTEN if each[1][0] in "<[" and each[0] != "pythonic"]
)
def test_text_before_a_marker_and_behind_a_call_is_kept(format: str, text: str, calls: list[ToolCall]) -> None:
    if text.endswith("</tool_call>") or format == "mistral":
        assert parse_tool_calls(f"Let me see.\n{text}\n\nDone.", format) == ("Let me see.\n\n\nDone.", calls)
    assert parse_tool_calls(f" Let me see. {text} \n", format) == (" Let me see. ", calls)


@pytest.mark.parametrize(("format", "text", "calls"), WRITTEN)
def test_auto_takes_what_begins_with_a_marker_and_nothing_else(format: str, text: str, calls: list[ToolCall]) -> None:
    is_bare = text.lstrip()[0] == "{" or text.startswith(("[f", "<function"))
    assert parse_tool_calls(text) == ((text, []) if is_bare else ("", calls))


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ("hermes", "Plain text, with < and <tool and {} and [f(a=1)]."),
        ("hermes", ""),
        ("hermes", " \n"),
        ("hermes", "<tool_call>"),
        ("hermes", "<tool_call> f(a=1) </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": '),
        ("hermes", '<tool_call>{"name": "f", "arguments"; {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "why": "because", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "name": "g", "why": {}}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "name": "f"} and </tool_call>'),
        ("hermes", '<tool_call>{"arguments": {"a": NaN}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"arguments": {}, "name": "f"'),
        ("hermes", '<tool_call>{"name": ["f"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>["f"]</tool_call>'),
        ("hermes", '<tool_call>"f", "g"</tool_call>'),
        ("hermes", "<tool_call>" + '{"a":' * 5000 + "1" + "}" * 5000 + "</tool_call>"),
        ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "f", "arguments": {'),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[TOOL_CALLS] [1]"),
        ("mistral", "[TOOL_CALLS]f"),
        ("mistral", "[TOOL_CALLS]f [1]"),
        ("mistral", "[TOOL_CALLS]! {}"),
        ("mistral", "[TOOL_CALLS]f[CALL_ID][ARGS]{}"),
        ("llama3_json", '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"name": "Ada"}'),
        ("llama3_json", 'So: {"name": "f", "parameters": {}}'),
        ("llama3_json", '<|python_tag|>search.call(query="a")'),
        ("pythonic", "[a link](http://example.com)"),
        ("pythonic", "[1, 2]"),
        ("pythonic", "[]"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(**a)]"),
        ("pythonic", "[f(a=b)]"),
        ("pythonic", "[f(a={1: 2})]"),
        ("pythonic", "[f(a={1})]"),
        ("pythonic", "[f(a=b'x')]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[f(a=1)"),
        ("pythonic", "[f(a=1])"),
        ("pythonic", "[f(a='1)]"),
        ("pythonic", "[f(a='\\"),
        ("pythonic", "[f(a=1)] is a call"),
        ("pythonic", "[f(), 1]"),
        ("pythonic", "[f().g()]"),
        ("pythonic", "[f(a=" + "(" * 300 + ")" * 300 + ")]"),
        ("pythonic", "[f(a=" + "-" * 99999 + "1)]"),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("qwen3_coder", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call><function=f><parameter=a"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("qwen3_coder", "<tool_call><function=f>text</function></tool_call>"),
    ],
)
def test_what_is_no_call_stays_text(format: str, text: str) -> None:
    assert parse_tool_calls(text, format) == (text, [])
    assert one_by_one(text, format) == (text, [])


def cut(arguments: str) -> list[ToolCall]:
    return [ToolCall("f", arguments, is_complete=False)]


NESTED = '{"a":' * MAX_JSON_DEPTH


@pytest.mark.parametrize(
    ("format", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {', "", cut("{")),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1', "", cut('{"a": "1')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", cut('{"a": 1')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru', "tru", cut('{"a": ')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\u00', "\\u00", cut('{"a": "')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "</tool_call>", [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "}}</tool_call>", cut('{"a": 1,')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN}}</tool_call>", cut('{"a": ')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": -1e999}}', "-1e999}}", cut('{"a": ')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\d"}}', '\\d"}}', cut('{"a": "')),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "why": ""}', ', "why": ""}', [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "1"', ', "id": "1"', [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": 1}', ', "id": 1}', [F]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "id": "1"} </tool_call>', "", [F_WITH_ID]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} and </tool_call>', " and </tool_call>", [F]),
        ("hermes", f'<tool_call>{{"name": "f", "arguments": {NESTED}{{}}', "{}", cut(NESTED)),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', "", cut('{"a": 1')),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}, "arguments": {}}', ', "arguments": {}}', [F]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}} is a call', " is a call", [F]),
        ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {', "; {", [F]),
        ("llama3_json", f'{F_AS_JSON}; {{"arguments": {{}}, "name": "g"}}; {F_AS_JSON} .', " .", [F, G, F]),
        ("llama3_json", F_AS_JSON + '; {"arguments": {}, "name": "g"} .', '; {"arguments": {}, "name": "g"} .', [F]),
        ("deepseek_v3", DEEPSEEK_31[: DEEPSEEK_31.index("<｜tool▁call▁end｜>")], "", [F]),
        ("deepseek_v3", DEEPSEEK[: DEEPSEEK.index("\n```<")] + "<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", [F]),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>1\n</parameter", "", cut('{"a": "1\\n</parameter')),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter> and", " and", cut('{"a": "1"')),
        ("qwen3_coder", "<function=f><parameter=a>1</parameter><parameter=b", "<parameter=b", cut('{"a": "1"')),
    ],
)  # fmt: skip
def test_a_call_that_has_begun_stays_one_and_the_rest_is_text(
    format: str, text: str, content: str, calls: list[ToolCall]
) -> None:
    assert parse_tool_calls(text, format) == (content, calls)
    assert one_by_one(text, format) == (content, calls)


def test_a_broken_call_takes_no_good_one_with_it() -> None:
    text = f'<tool_call>{{"name": "f", <tool_call>{{"name": "g"}}</tool_call> and {CODER_F}'
    assert parse_tool_calls(text) == ('<tool_call>{"name": "f",  and ', [G, F_AS_TEXT])
    outer = "<｜tool▁calls▁begin｜>oops<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    assert parse_tool_calls(outer) == ("<｜tool▁calls▁begin｜>oops", [G])


def test_a_marker_within_an_argument_ends_nothing() -> None:
    for value in ("</tool_call>", "<tool_call>", '\\"}', "[TOOL_CALLS]", "a\nb", "\\u00e9"):
        text = f'<tool_call>{{"name": "f", "arguments": {{"a": "{value}"}}}}</tool_call>'
        _, [call] = parse_tool_calls(text, "hermes")
        assert json.loads(call.arguments)["a"] == json.loads(f'"{value}"', strict=False)
    assert parse_tool_calls('[f(a="(]", b=\'"\')]', "pythonic")[1] == [ToolCall("f", '{"a": "(]", "b": "\\""}')]


def test_arguments_are_json_that_utf_8_can_hold() -> None:
    _, [call] = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"a": "\\ud83d é"}}</tool_call>', "hermes")
    assert call.arguments == '{"a": "\\ud83d é"}'
    _, [call] = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"a": "\ud83d\t"}}</tool_call>', "hermes")
    assert call.arguments == '{"a": "\\ud83d\\t"}'
    _, [call] = parse_tool_calls('<tool_call>{"arguments": {"a": "\\ud83d é"}, "name": "f"}</tool_call>', "hermes")
    assert call.arguments == '{"a": "\\ud83d \\u00e9"}'
    _, [call] = parse_tool_calls('<tool_call>{"name": "f", "arguments": {"a": "é"}}</tool_call>', "hermes")
    assert call.arguments == '{"a": "é"}'


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ("a=-1, b=2.5, c='x'", {"a": -1, "b": 2.5, "c": "x"}),
        ("a=True, b=None, c=true, d=null", {"a": True, "b": None, "c": True, "d": None}),
        ("a=[1, ('x',)], b={'k': {'l': []}}", {"a": [1, ["x"]], "b": {"k": {"l": []}}}),
        (r"a='\d\n\'\\', b=r'\d'", {"a": "\\d\n'\\", "b": "\\d"}),
    ],
)
def test_python_literals_become_json(source: str, arguments: dict[str, Any]) -> None:
    _, [call] = parse_tool_calls(f"[m.f({source})]", "pythonic")
    assert (call.name, json.loads(call.arguments)) == ("m.f", arguments)


@pytest.mark.parametrize(
    ("parameter", "written", "value"),
    [
        ("city", "\nRome\n", "Rome"),
        ("city", "12", "12"),
        ("city", "\n a\n<b>\n\n", " a\n<b>\n"),
        ("days", "\n12\n", 12),
        ("days", "a dozen", "a dozen"),
        ("units", "12", "12"),
        ("units", "null", None),
        ("where", '{"lat": 1}', {"lat": 1}),
        ("hourly", "True", True),
        ("hourly", "null", None),
        ("unknown", "12", "12"),
    ],
)
def test_a_value_written_as_text_gets_the_type_of_its_schema(parameter: str, written: str, value: object) -> None:
    text = f"<tool_call><function=weather><parameter={parameter}>{written}</parameter></function></tool_call>"
    _, [call] = parse_tool_calls(text, "qwen3_coder", tools=[WEATHER])
    assert json.loads(call.arguments) == {parameter: value}


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ '<tool_call>\\n' + call | tojson + '\\n</tool_call>' }}", "hermes"),
        ("{{ '[TOOL_CALLS] [' + call | tojson + ']' }}", "mistral"),
        ("{{ '<|python_tag|>' + call.name + '.call(' }}", "llama3_json"),
        (
            'Respond with {"name": function name, "parameters": dictionary of argument name and its value}.',
            "llama3_json",
        ),
        ("{{ '<|python_start|>[' + calls + ']<|python_end|>' }}", "pythonic"),
        ("{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' }}", "deepseek_v3"),
        ("{{ '<tool_call>\\n<function=' + name + '>\\n<parameter=' }}", "qwen3_coder"),
        ("{{ '<tool_call>' + name + '\\n<arg_key>' }}", "auto"),
        ("{{ messages[0].content }}", "auto"),
        ("", "auto"),
    ],
)
def test_a_chat_template_tells_the_format(template: str, format: str) -> None:
    assert ToolCallFormat.of_template(template).value == format


def test_a_format_that_there_is_not_is_named() -> None:
    with pytest.raises(ValueError, match=r"format must be one of auto, hermes, .*, got 'xml'"):
        parse_tool_calls("", "xml")


# Streams.


def one_by_one(text: str, format: str) -> tuple[str, list[ToolCall]]:
    return streamed(list(text), format)


def streamed(pieces: list[str], format: str) -> tuple[str, list[ToolCall]]:
    stream = ToolCallStream(format, tools=[WEATHER])
    return joined([event for piece in pieces for event in stream.feed(piece)] + stream.finish())


def joined(events: list[Event]) -> tuple[str, list[ToolCall]]:
    """Joins a text and its calls from their pieces, and checks that they equal the whole calls that come with them."""
    content, calls, begun = "", list[ToolCall](), list[str]()
    for event in events:
        match event:
            case CallBegun():
                assert not begun
                begun = [event.name, event.id, ""]
            case CallGrown():
                assert event.arguments
                begun[2] += event.arguments
            case ToolCall():
                assert begun[::2] == [event.name, event.arguments]
                assert begun[1] in (event.id, "")
                calls.append(event)
                begun = []
            case _:
                assert event
                assert not begun
                content += event
    assert not begun
    return content, calls


PIECES = [
    *(text for _, text, _ in WRITTEN), "Hello", " ", "\n", "<", "<tool_call>", "</tool_call>", "{", "}", "[", "]", '"',
    "\\", "é", "[TOOL_CALLS]", "<|python_tag|>", "<function=", "<parameter=a>", '{"name": "f", "parameters": {}}', ";",
    "(", '{"name": "f", "arguments": {', '<tool_call>{"name": "f", "arguments": {"a": ', '{"b": [tru', "e, 1.5e", "}}",
    "[TOOL_CALLS]f{", "\\u00", "e9", "<function=f><parameter=a>\n", "\n</parameter>", "</function>",
    "f(a='", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
]  # fmt: skip
"""Whole calls and pieces of calls."""


@given(
    st.lists(st.sampled_from(PIECES), max_size=6).map("".join),
    st.sampled_from([each.value for each in ToolCallFormat]),
    st.lists(st.integers(min_value=0, max_value=400), max_size=12),
)
def test_cuts_change_nothing(text: str, format: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    whole = parse_tool_calls(text, format, tools=[WEATHER])
    assert streamed(pieces, format) == whole
    assert one_by_one(text, format) == whole
    for call in whole[1]:
        # An incomplete call's arguments are the beginning of an object.
        assert isinstance(from_json(call.arguments, allow_partial=not call.is_complete), dict)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
HEADS = {
    "hermes": '<tool_call>{"name": "f", "arguments": ', "mistral": "[TOOL_CALLS]f[ARGS]",
    "llama3_json": '{"name": "f", "parameters": ', "deepseek_v3": f"{CALL_BEGIN}f<｜tool▁sep｜>",
}  # fmt: skip


@given(st.dictionaries(st.text(max_size=3), JSON), st.sampled_from(list(HEADS)), st.booleans(), st.data())
def test_any_arguments_come_as_they_are_written_as_soon_as_they_are(
    arguments: dict[str, Any], format: str, is_ascii: bool, data: st.DataObject
) -> None:
    written = json.dumps(arguments, ensure_ascii=is_ascii)
    edge = data.draw(st.integers(1, len(written)))
    stream = ToolCallStream(format)
    assert stream.feed(HEADS[format]) == []
    begun, *grown = stream.feed(written[:edge])
    assert begun == CallBegun("f")
    told = "".join(event.arguments for event in grown if isinstance(event, CallGrown))
    # Numbers, names and escape sequences are held back until they end.
    assert written.startswith(told)
    assert re.fullmatch(r"[-+.\w]*|\\(u[0-9a-f]{0,3})?", written[len(told) : edge])
    # An object that contains them may continue with an id.
    end = "}" if format in ("hermes", "llama3_json") else ""
    *_, call = grown + stream.feed(written[edge:] + end)
    assert call == ToolCall("f", written)


@given(st.text(), st.data())
def test_a_text_between_tags_comes_while_it_is_written(value: str, data: st.DataObject) -> None:
    edge = data.draw(st.integers(0, len(value)))
    stream = ToolCallStream("qwen3_coder", tools=[WEATHER])
    events = stream.feed("<function=weather><parameter=city>\n" + value[:edge])
    told = "".join(event.arguments for event in events if isinstance(event, CallGrown))
    # A line break, and what may be the beginning of the end, are held back.
    assert re.fullmatch(r"\n?(</?[a-z]*)?", value[:edge].removeprefix(json.loads(told + '"}')["city"]))
    events += stream.feed(value[edge:] + "\n</parameter></function>")
    assert json.loads(joined(events)[1][0].arguments) == {"city": value}


@given(st.text(), st.sampled_from([each.value for each in ToolCallFormat]))
def test_any_other_text_is_kept_as_it_is(text: str, format: str) -> None:
    assert parse_tool_calls(text, format) == (text, [])


def test_an_id_behind_the_arguments_comes_with_the_whole_call() -> None:
    stream = ToolCallStream("hermes")
    stream.feed('<tool_call>{"name": "f", "arguments": ')
    assert stream.feed('{"a": 1}') == [CallBegun("f"), CallGrown('{"a": 1}')]
    assert stream.feed(', "id": "1') == []
    assert stream.feed('"}') == [F_WITH_ID]
    assert stream.feed('<tool_call>{"id": "1", "name": "f", "arguments": {') == [CallBegun("f", "1"), CallGrown("{")]


def test_text_comes_at_once_and_a_beginning_marker_never() -> None:
    stream = ToolCallStream("hermes")
    assert stream.feed("Let me see. <") == ["Let me see. "]
    assert stream.feed("tool_") == []
    assert stream.feed("box> <tool_call") == ["<tool_box> "]
    assert stream.feed('>{"name": "g"}') == []
    assert stream.feed("</tool_call>") == [CallBegun("g"), CallGrown("{}"), G]
    assert stream.feed("\n") == []
    assert stream.feed("Done") == ["\nDone"]
    assert stream.finish() == []


def test_what_can_be_no_call_is_told_before_the_text_ends() -> None:
    stream = ToolCallStream("hermes")
    assert "".join(map(str, stream.feed("<tool_call> is a marker. "))) == "<tool_call> is a marker. "
    assert "".join(map(str, stream.feed('<tool_call>{"name": oops, '))) == ""
    stream = ToolCallStream("pythonic")
    assert "".join(map(str, stream.feed("[a link]"))) == "[a link]"


def test_arguments_come_parameter_by_parameter_where_types_say_how() -> None:
    stream = ToolCallStream("qwen3_coder", tools=[WEATHER])
    assert stream.feed("<tool_call><function=weather><parameter=days>") == [
        CallBegun("weather"),
        CallGrown('{"days": '),
    ]
    assert stream.feed("\n1") == []
    assert stream.feed("2\n</parameter>") == [CallGrown("12")]
    assert stream.feed("<parameter=city>\nRo") == [CallGrown(', "city": "Ro')]
    assert stream.feed('"me\n</parameter>\n</func') == [CallGrown('\\"me"')]
    assert stream.feed("tion>") == [CallGrown("}"), ToolCall("weather", '{"days": 12, "city": "Ro\\"me"}')]
    assert stream.feed("</tool_call>") + stream.finish() == []


def test_a_finished_stream_takes_no_more() -> None:
    stream = ToolCallStream()
    assert stream.feed("<tool_call>") == []
    assert stream.finish() == ["<tool_call>"]
    with pytest.raises(RuntimeError, match="the text is finished"):
        stream.feed("more")

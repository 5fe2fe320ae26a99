"""Text to token ids and back: chats as templates render them, and special tokens."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.models.structure import Grammars
from outrider.models.text import (
    RESERVED_TEMPLATE_VARIABLES,
    Chat,
    ChatRefused,
    NoChatTemplate,
    NotInTemplate,
    TextCodec,
)
from tests.support.chat_templates import ALTERNATING, CHATML, TRIMMING, UPPERCASE, with_template
from tests.support.services import target_model
from tests.support.tokenizers import sentencepiece_like

USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}
CALLING = {"role": "assistant", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": "21"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def rendered(template: str | None, *messages: dict[str, Any], **fields: Any) -> str:
    """The text of a chat's token ids."""
    codec = TextCodec(with_template(template))
    return codec.decode(codec.encode_chat(Chat(messages=messages, **fields)), skip_special_tokens=False)


def test_a_chat_is_rendered_up_to_the_assistants_turn() -> None:
    assert rendered(CHATML, USER) == "<|im_start|>user\nHow warm is it?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(CHATML, USER, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize("role", ["system", "critic"])
def test_a_role_that_the_template_understands_is_rendered(role: str) -> None:
    assert f"<|im_start|>{role}\nBe brief." in rendered(CHATML, {"role": role, "content": "Be brief."}, USER)


def test_the_developer_is_the_system_where_the_template_has_no_word_of_one() -> None:
    chat = [{"role": role, "content": "Be brief."} for role in ("developer", "user", "developer")]
    as_system = [{**message, "role": message["role"].replace("developer", "system")} for message in chat]
    assert rendered(CHATML, *chat) == rendered(CHATML, *as_system)
    knowing = CHATML.replace("message.role }}", "('DEV' if message.role == 'developer' else message.role) }}")
    assert rendered(knowing, *chat).count("DEV\nBe brief.") == 2


def test_a_call_and_its_answer_are_rendered_with_the_arguments_as_a_dict() -> None:
    text = rendered(CHATML, USER, CALLING, ANSWER)
    assert '<|im_start|>assistant\n<call id=c1 type=function>weather city="Rome" days=2</call><|im_end|>' in text
    assert "<|im_start|>tool name=weather answers=c1\n21<|im_end|>" in text


def test_tools_are_rendered() -> None:
    text = rendered(CHATML, USER, tools=[TOOL])
    assert text.startswith('<|im_start|>tools\n{"name": "weather", "parameters": {"type": "object", "properties": {}}}')


def test_a_template_that_ignores_tools_is_named_instead_of_dropping_them() -> None:
    with pytest.raises(NotInTemplate, match="ignores tools") as caught:
        rendered(ALTERNATING, USER, tools=[TOOL])
    assert caught.value.part == "tools"


def test_a_template_that_insists_on_tools_does_not_ignore_them() -> None:
    insisting = "{{- tools | length }}{%- if not tools %}{{- raise_exception('no tools') }}{%- endif %}"
    assert rendered(insisting, USER, tools=[TOOL]) == "1"


def test_a_template_of_its_own_for_tools_is_used_with_tools_alone() -> None:
    templates: Any = {"default": ALTERNATING, "tool_use": CHATML}
    assert rendered(templates, USER) == "[user]How warm is it?"
    assert rendered(templates, USER, tools=[TOOL]).startswith("<|im_start|>tools")


def test_the_last_message_is_left_open_to_be_continued() -> None:
    begun = {"role": "assistant", "content": "It is "}
    text = rendered(CHATML, USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is ")


@pytest.mark.parametrize(
    ("template", "content"), [(UPPERCASE, "It is"), (TRIMMING, "It is "), (TRIMMING, "\nIt is"), ("{{ 1 }}", "It is")]
)
def test_a_template_that_changes_the_last_message_cannot_continue_it(template: str, content: str) -> None:
    begun = {"role": "assistant", "content": content}
    with pytest.raises(NotInTemplate, match="does not render the last message as it is") as caught:
        rendered(template, USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.part == "continue_final_message"


def test_a_template_that_trims_continues_what_has_nothing_to_trim() -> None:
    begun = {"role": "assistant", "content": "It is"}
    text = rendered(TRIMMING, USER, begun, add_generation_prompt=False, continue_final_message=True)
    assert text == "[How warm is it?][It is"


def test_a_template_for_tools_alone_may_continue_what_another_cannot() -> None:
    templates: Any = {"default": UPPERCASE, "tool_use": CHATML}
    begun = {"role": "assistant", "content": "It is"}
    text = rendered(templates, USER, begun, tools=[TOOL], add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nIt is")


def test_a_variable_reaches_the_template() -> None:
    assert rendered(CHATML, USER, chat_template_kwargs={"enable_thinking": False}).endswith("<think></think>")
    assert not rendered(CHATML, USER, chat_template_kwargs={"enable_thinking": True}).endswith("<think></think>")


@pytest.mark.parametrize("name", ["enable_thinkin", "thinking", "(", ""])
def test_a_variable_that_the_template_does_not_read_is_named(name: str) -> None:
    with pytest.raises(NotInTemplate, match="reads no variable") as caught:
        rendered(CHATML, USER, chat_template_kwargs={name: False})
    assert caught.value.part == "chat_template_kwargs"


def test_what_rendering_takes_itself_is_no_variable_of_a_template() -> None:
    assert {"messages", "tools", "documents", "chat_template", "tokenize"} <= RESERVED_TEMPLATE_VARIABLES
    assert {"add_generation_prompt", "continue_final_message", "conversations"} <= RESERVED_TEMPLATE_VARIABLES
    assert "enable_thinking" not in RESERVED_TEMPLATE_VARIABLES


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (ALTERNATING, "no role tool"),
        ("{{ messages[0].content + 1 }}", "TypeError: "),
        ("{{ messages[7].content }}", "no element 7"),
        ("{{ messages[0].content / 0 }}", "TypeError: "),
        ("{{ 1 / 0 }}", "ZeroDivisionError: "),
    ],
)
def test_whatever_stops_a_template_is_a_refusal_in_its_own_words(template: str, words: str) -> None:
    with pytest.raises(ChatRefused, match=words):
        rendered(template, ANSWER)


def test_values_nested_too_deeply_and_half_a_surrogate_pair_are_refused() -> None:
    deep: Any = {}
    for _ in range(2000):
        deep = {"a": deep}
    with pytest.raises(ChatRefused, match="RecursionError"):
        rendered(CHATML, USER, chat_template_kwargs={"enable_thinking": deep})
    with pytest.raises(ChatRefused, match="surrogates not allowed"):
        rendered(CHATML, {"role": "user", "content": "\ud83d"})


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(NoChatTemplate, match="no chat template"):
        rendered(None, USER)


@pytest.mark.parametrize(("skip_special_tokens", "expected"), [(True, "ab"), (False, "a<|endoftext|>b")])
def test_special_tokens_are_left_out_or_written(skip_special_tokens: bool, expected: str) -> None:
    codec = TextCodec(target_model().tokenizer)
    token_ids = [*codec.encode("a"), 0, *codec.encode("b")]
    assert codec.decode(token_ids, skip_special_tokens=skip_special_tokens) == expected
    stream = codec.stream(skip_special_tokens=skip_special_tokens)
    assert "".join(stream.step([token_id]) for token_id in token_ids) + stream.finish() == expected


def test_the_bytes_of_each_token_make_up_the_text() -> None:
    model = target_model()
    grammars = Grammars(model.tokenizer, model.vocab_size, model.eos_token_ids)
    text = "h\u00e9 \U0001f600\x00 def"
    token_ids = [*TextCodec(model.tokenizer).encode(text), 0]
    pieces = grammars.token_bytes(token_ids)
    assert len(pieces) == len(token_ids)
    assert all(pieces)
    assert b"".join(pieces[:-1]).decode() == text
    assert pieces[-1] == b"<|endoftext|>"
    assert b"\xf0" in pieces, "a character of several tokens has its bytes one by one"


def test_a_word_is_spelled_within_a_text_too_where_a_text_begins_with_a_space() -> None:
    tokenizer = sentencepiece_like()
    names = [tokenizer.convert_ids_to_tokens(list(spelling)) for spelling in TextCodec(tokenizer).spellings("s")]
    assert ["s"] in names
    assert ["\u2581", "s"] in names

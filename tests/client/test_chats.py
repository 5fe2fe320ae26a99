"""Chats in OpenAI's format: what is sent, and what is refused before that."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from outrider.v1 import verifier_pb2
from outrider.v1.verifier_pb2 import ChatMessage, ChatMessages
from outrider_client import BlockingClient, Client
from outrider_client.chats import ChatOptions
from outrider_client.requests import GenerateOptions, generate_request, prompt_message
from tests.support.fake_verifier import FakeVerifier

USER = {"role": "user", "content": "How warm is it?"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": {"type": "object", "properties": {}}},
}


def sent(*messages: Any, **options: Any) -> ChatMessages:
    return prompt_message(list(messages), ChatOptions(**options)).chat  # type: ignore[typeddict-item]


def test_a_chat_with_tools_arrives_field_by_field() -> None:
    chat = sent(
        {"role": "developer", "content": "Be brief."},
        {**USER, "name": "Ada"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "21", "tool_call_id": "c1"},
        tools=[TOOL, {"type": "function", "function": {"name": "now"}}],
        chat_template_kwargs={"enable_thinking": False},
    )
    assert list(chat.messages) == [
        ChatMessage(role="developer", content="Be brief."),
        ChatMessage(role="user", content="How warm is it?", name="Ada"),
        ChatMessage(role="assistant", tool_calls=[{"id": "c1", "name": "weather", "arguments": '{"city": "Rome"}'}]),
        ChatMessage(role="tool", content="21", tool_call_id="c1"),
    ]
    assert [(tool.name, tool.description) for tool in chat.tools] == [("weather", "Tells it."), ("now", "")]
    assert json.loads(chat.tools[0].parameters) == {"type": "object", "properties": {}}
    assert json.loads(chat.chat_template_kwargs) == {"enable_thinking": False}


def test_what_is_unset_stays_unset_and_an_empty_text_is_none_of_it() -> None:
    chat = sent({"role": "tool", "content": ""}, {"role": "assistant", "tool_calls": [CALL]})
    assert [message.HasField("content") for message in chat.messages] == [True, False]
    assert not any(chat.HasField(name) for name in ("add_generation_prompt", "continue_final_message"))
    assert sent(USER, tools=None, add_generation_prompt=None) == sent(USER)
    assert sent(USER, add_generation_prompt=False).HasField("add_generation_prompt")
    assert sent(USER, continue_final_message=True).continue_final_message


def test_a_message_of_openais_sdk_goes_back_as_it_came() -> None:
    came = {"role": "assistant", "content": "Hi", "refusal": None, "annotations": [], "audio": None, "tool_calls": None}
    assert sent(came).messages[0] == ChatMessage(role="assistant", content="Hi")


def test_parts_of_text_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "How "}, {"type": "text", "text": "warm?"}]
    assert sent({"role": "user", "content": parts}).messages[0].content == "How warm?"


def test_messages_of_the_protocol_are_taken_too() -> None:
    message, tool = ChatMessage(role="user", content="hi"), verifier_pb2.Tool(name="now")
    call = verifier_pb2.ToolCall(name="now")
    chat = sent(message, {"role": "assistant", "tool_calls": [call]}, tools=[tool])
    assert (chat.messages[0], chat.messages[1].tool_calls[0], chat.tools[0]) == (message, call, tool)


def test_arguments_may_be_a_dict() -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert sent({"role": "assistant", "tool_calls": [call]}).messages[0].tool_calls[0].arguments == '{"city": "Rome"}'


def calling(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL, {"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("messages", "options", "error", "words"),
    [
        ([USER, 5], {}, TypeError, "prompt[1] must be a dict, got int"),
        ([{"role": "user", "text": "hi"}], {}, TypeError, "prompt[0] must have keys of role, content, name, tool_call"),
        (
            [{"role": "user", "content": 5}],
            {},
            TypeError,
            "prompt[0].content must be a text or a list of parts, got in",
        ),
        ([{"role": 5, "content": ""}], {}, TypeError, "prompt[0].role must be a text, got int"),
        ([{"role": "user", "content": "\ud83d"}], {}, ValueError, "prompt[0].content must be text that UTF-8 can hold"),
        ([{"role": "user", "content": ["hi"]}], {}, TypeError, "prompt[0].content[0] must be a dict, got str"),
        (
            [
                USER,
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]},
            ],
            {},
            ValueError,
            "prompt[1].content[1].type must be \"text\", the only kind of content that is supported, got 'image_url'",
        ),
        ([{"role": "user", "content": [{"type": "text"}]}], {}, TypeError, "prompt[0].content[0].text must be a text"),
        ([{"role": "assistant", "tool_calls": CALL}], {}, TypeError, "prompt[0].tool_calls must be a list, got dict"),
        (
            [calling(arguments="{}")],
            {},
            TypeError,
            "prompt[0].tool_calls[1].function.name must be a text, got NoneType",
        ),
        (
            [calling(name="f", arguments=[1])],
            {},
            TypeError,
            "prompt[0].tool_calls[1].function.arguments must be a text",
        ),
        (
            [calling(name="f", args="{}")],
            {},
            TypeError,
            "prompt[0].tool_calls[1].function must have keys of name, argu",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"type": "custom"}]}],
            {},
            ValueError,
            "prompt[0].tool_calls[0].type must be \"function\", got 'custom'",
        ),
        ([USER], {"tools": TOOL}, TypeError, "tools must be a list, got dict"),
        (
            [USER],
            {"tools": [TOOL, {"name": "f"}]},
            TypeError,
            "tools[1] must have keys of type, function only, got 'na",
        ),
        ([USER], {"tools": [{"type": "function"}]}, TypeError, "tools[0].function must be a dict, got NoneType"),
        ([USER], {"tools": [{"type": "code"}]}, ValueError, "tools[0].type must be \"function\", got 'code'"),
        (
            [USER],
            {"tools": [{"function": {"name": "f", "parameters": "{}"}}]},
            TypeError,
            "tools[0].function.parameters must be a dict, got str",
        ),
        (
            [USER],
            {"tools": [{"function": {"name": "f", "parameters": {"default": float("nan")}}}]},
            ValueError,
            "tools[0].function.parameters must be JSON: ",
        ),
        (
            [USER],
            {"tools": [{"function": {"name": "f", "strict": 1}}]},
            TypeError,
            "tools[0].function.strict must be true or false, got int",
        ),
        (
            [USER],
            {"tools": [TOOL, {"function": {"name": "f", "strict": True}}]},
            ValueError,
            "tools[1].function.strict must be unset or false: only the gateway holds calls to their schemas",
        ),
        ([USER], {"add_generation_prompt": "no"}, TypeError, "add_generation_prompt must be true or false, got str"),
        ([USER], {"chat_template_kwargs": "{}"}, TypeError, "chat_template_kwargs must be a dict, got str"),
        (
            [USER],
            {"chat_template_kwargs": {"a": {1}}},
            TypeError,
            "chat_template_kwargs must be JSON: Object of type se",
        ),
    ],
)
def test_what_cannot_be_sent_is_refused_by_its_place(
    messages: list[Any], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as caught:
        sent(*messages, **options)
    assert str(caught.value).startswith(words)


@pytest.mark.parametrize("prompt", ["hello", [1, 2], []])
def test_options_of_a_chat_are_refused_without_one(prompt: Any) -> None:
    with pytest.raises(TypeError, match="tools must be unset unless the prompt is a chat"):
        generate_request(prompt, GenerateOptions(tools=[TOOL]))


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_both_clients_send_the_options_of_a_chat(verifier: FakeVerifier, kind: str) -> None:
    begun = [USER, {"role": "assistant", "content": "It is"}]
    options = GenerateOptions(continue_final_message=True, skip_special_tokens=False)
    if kind == "asyncio":
        async with Client(verifier.address) as client:
            await client.complete(begun, **options)
            token_ids = await client.tokenize(begun, continue_final_message=True)
    else:

        def ask() -> list[int]:
            with BlockingClient(verifier.address) as client:
                client.complete(begun, **options)
                return client.tokenize(begun, continue_final_message=True)

        token_ids = await asyncio.to_thread(ask)
    request = verifier.requests[0]
    assert request.prompt.chat == sent(*begun, continue_final_message=True)
    assert (request.HasField("skip_special_tokens"), request.skip_special_tokens) == (True, False)
    assert bytes(token_ids).decode() == "How warm is it?It is"
    with pytest.raises(TypeError, match=r"tokenize\(\) got an unexpected keyword argument 'temperature'$"):
        BlockingClient(verifier.address).tokenize(begun, temperature=1)  # type: ignore[call-arg]

"""Chats in requests: the names of wrong fields, and the parts of a chat that reach the template."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import grpc
import pytest
from tokenizers import AddedToken

from outrider.core.speculation import SpeculationLimits
from outrider.models.structure import Grammars
from outrider.models.text import TextCodec
from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider.v1.verifier_pb2 import ChatMessages
from outrider.verifier.admission import MAX_TOKEN_LEN, Limits, prompt_token_ids, session_specs
from outrider.verifier.chats import chat_from_proto, num_characters
from outrider.wire.errors import FailedPrecondition, InvalidArgument, OutOfRange, RpcError
from outrider_client.requests import prompt_message
from tests.support.chat_templates import ALTERNATING, CHATML, HERMES, UPPERCASE, model_with_template, with_template
from tests.support.services import running_verifier, target_model

USER = {"role": "user", "content": "How warm is it?"}
BEGUN = {"role": "assistant", "content": "It is"}


def call(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"name": "weather", **fields}]}


def chat(*messages: dict[str, Any], **fields: Any) -> ChatMessages:
    return ChatMessages(messages=messages, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "field", "rule"),
    [
        (chat(), "messages", "must hold at least one message"),
        (chat(USER, {"content": "?"}), "messages[1].role", "must be set"),
        (chat(USER, {"role": "user"}), "messages[1].content", "must be set, but for a message that calls tools"),
        (chat({"role": "tool", "tool_call_id": "c1"}), "messages[0].content", "must be set"),
        (chat(call(name="")), "messages[0].tool_calls[0].name", "must be set"),
        (chat({**call(), "role": "user"}), "messages[0].tool_calls", 'must be empty for role "user"'),
        (chat(call(arguments="{")), "messages[0].tool_calls[0].arguments", "must be a JSON object as text: Expecting"),
        (chat(call(arguments="[1]")), "messages[0].tool_calls[0].arguments", "must be a JSON object as text, got a l"),
        (chat(call(arguments='{"a": NaN}')), "messages[0].tool_calls[0].arguments", "NaN is no JSON value"),
        (chat(USER, tools=[{"name": "a"}, {"description": "?"}]), "tools[1].name", "must be set"),
        (chat(USER, tools=[{"name": "a", "parameters": "object"}]), "tools[0].parameters", "must be a JSON object"),
        (chat(USER, tools=[{"name": "a", "definition": "a"}]), "tools[0].definition", "must be a JSON object"),
        (
            chat(USER, tools=[{"name": "a", "definition": '{"function": {"name": "b"}}'}]),
            "tools[0].definition",
            """must have "function", an object with the name 'a'""",
        ),
        (chat(USER, chat_template_kwargs="{'a': 1}"), "chat_template_kwargs", "must be a JSON object as text: Expecti"),
        (chat(USER, chat_template_kwargs="null"), "chat_template_kwargs", "must be a JSON object as text, got a None"),
        (chat(USER, chat_template_kwargs="[" * 9999), "chat_template_kwargs", "must be a JSON object as text"),
        (chat(USER, chat_template_kwargs='{"tools": []}'), "chat_template_kwargs", "must not have 'tools'"),
        (chat(USER, chat_template_kwargs='{"messages": []}'), "chat_template_kwargs", "must not have 'messages'"),
        (
            chat(USER, chat_template_kwargs='{"add_generation_prompt": false}'),
            "chat_template_kwargs",
            "must not have 'add_generation_prompt'",
        ),
        (
            chat(USER, BEGUN, continue_final_message=True, add_generation_prompt=True),
            "continue_final_message",
            "must be false with prompt.chat.add_generation_prompt",
        ),
        (chat(USER, continue_final_message=True), "continue_final_message", 'is the assistant\'s, got "user"'),
        (chat(call(), continue_final_message=True), "continue_final_message", "unless the last message has content"),
        (
            chat({**call(), "content": "?"}, continue_final_message=True),
            "continue_final_message",
            "must be false where the last message calls tools",
        ),
    ],
)
def test_a_wrong_field_is_named_with_its_rule(wrong: ChatMessages, field: str, rule: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        chat_from_proto(wrong)
    assert str(caught.value).startswith(f"prompt.chat.{field} ")
    assert rule in str(caught.value)


def test_a_template_gets_what_was_set_and_nothing_else() -> None:
    converted = chat_from_proto(
        chat(
            {"role": "user", "content": "", "name": "Ada"},
            call(id="c1", arguments='{"city": "Rome", "days": [1, 2.5, null]}'),
            {"role": "tool", "content": "21", "tool_call_id": "c1"},
            call(),
            tools=[
                {"name": "weather", "description": "Tells it.", "parameters": '{"type": "object"}'},
                {"name": "now"},
            ],
            chat_template_kwargs='{"enable_thinking": false}',
        )
    )
    calls = [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "weather", "arguments": {"city": "Rome", "days": [1, 2.5, None]}},
        }
    ]
    assert converted.messages == [
        {"role": "user", "content": "", "name": "Ada"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "21", "tool_call_id": "c1"},
        {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {}}}]},
    ]
    no_parameters = {"type": "object", "properties": {}}
    assert [tool["function"] for tool in converted.tools] == [
        {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}},
        {"name": "now", "parameters": no_parameters},
    ]
    assert converted.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        ({}, True),
        ({"add_generation_prompt": True}, True),
        ({"add_generation_prompt": False}, False),
        ({"continue_final_message": False}, True),
        ({"continue_final_message": True}, False),
        ({"continue_final_message": True, "add_generation_prompt": False}, False),
    ],
)
def test_the_assistants_turn_begins_unless_another_is_continued(fields: dict[str, bool], adds: bool) -> None:
    converted = chat_from_proto(chat(USER, BEGUN, **fields))
    assert (converted.add_generation_prompt, converted.continue_final_message) == (
        adds,
        fields.get("continue_final_message", False),
    )


@pytest.mark.parametrize(
    ("template", "prompt", "error", "words"),
    [
        (None, chat(USER), FailedPrecondition, "prompt.chat: the target's tokenizer has no chat template"),
        (
            ALTERNATING,
            chat({"role": "tool", "content": "21"}),
            InvalidArgument,
            "prompt.chat.messages must be a chat that the tokenizer's template takes: no role tool",
        ),
        (ALTERNATING, chat(USER, tools=[{"name": "a"}]), FailedPrecondition, "prompt.chat.tools: the chat template"),
        (
            UPPERCASE,
            chat(USER, BEGUN, continue_final_message=True),
            FailedPrecondition,
            "prompt.chat.continue_final_message: the chat template",
        ),
        (
            ALTERNATING,
            chat(USER, chat_template_kwargs='{"enable_thinking": true}'),
            FailedPrecondition,
            "prompt.chat.chat_template_kwargs: the chat template of the target's tokenizer reads no variable 'enable_t",
        ),
    ],
)
def test_what_a_template_cannot_do_is_refused_by_field(
    template: str | None, prompt: ChatMessages, error: type[RpcError], words: str
) -> None:
    with pytest.raises(error) as caught:
        prompt_token_ids(verifier_pb2.Prompt(chat=prompt), target_model(), TextCodec(with_template(template)))
    assert str(caught.value).startswith(words)


def test_every_text_of_a_chat_counts_towards_its_length() -> None:
    message = {"role": "ab", "content": "c", "name": "de", "tool_call_id": "f"}
    calls = [{"id": "g", "name": "hi", "arguments": "j"}]
    full = chat(
        {**message, "tool_calls": calls},
        tools=[{"name": "k", "description": "lm", "parameters": "n"}],
        chat_template_kwargs="op",
    )
    assert num_characters(full) == len("abcdefghijklmnop")


@pytest.mark.parametrize(
    "long",
    [
        {"tools": [{"name": "a", "description": "b" * 256}] * 2048},
        {"chat_template_kwargs": " " * (MAX_TOKEN_LEN * 2048)},
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "a"}] * (MAX_TOKEN_LEN * 2048)}]},
    ],
)
def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(long: dict[str, Any]) -> None:
    class Unused:
        backend_tokenizer = target_model().tokenizer.backend_tokenizer

    request = verifier_pb2.GenerateRequest(prompt={"chat": {"messages": [USER], **long}})  # type: ignore[arg-type]
    limits = Limits(defaults=None, speculation=SpeculationLimits(), has_speculator=False, has_datastore=False)  # type: ignore[arg-type]
    grammars = Grammars(target_model().tokenizer, 1, ())
    with pytest.raises(OutOfRange, match="prompt must be shorter than the context of 2048 tokens, got"):
        session_specs(request, target_model(), TextCodec(Unused()), limits, grammars, brings_drafts=False)


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "function", "function": {"name": "now"}},
        {"function": {"strict": False, "parameters": {"type": "object"}, "name": "now"}, "type": "function"},
        {"type": "function", "function": {"name": "now", "strict": False, "description": "größer", "parameters": {}}},
        {"type": "function", "function": {"description": None, "name": "now", "parameters": {"b": 1.0, "a": [None]}}},
    ],
)
def test_a_template_shows_a_tool_as_its_caller_has_written_it(tool: dict[str, Any]) -> None:
    model = model_with_template(HERMES)
    prompt = prompt_message([USER], {"tools": [tool]})
    shown = model.tokenizer.apply_chat_template([USER], tools=[tool], tokenize=False, add_generation_prompt=True)
    expected = model.tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert list(prompt_token_ids(prompt, model, TextCodec(model.tokenizer))) == expected


async def test_a_chat_with_tools_is_generated_from_and_tokenized_alike() -> None:
    prompt = verifier_pb2.Prompt(chat=chat(USER, tools=[{"name": "weather"}]))
    sampling = types_pb2.SamplingParams(max_tokens=2, temperature=0)
    async with (
        running_verifier(model=model_with_template(CHATML)) as running,
        grpc.aio.insecure_channel(running.address) as channel,
    ):
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        tokenized = await stub.Tokenize(verifier_pb2.TokenizeRequest(prompt=prompt))
        call = stub.Generate(verifier_pb2.GenerateRequest(prompt=prompt, sampling=sampling))
        started = (await call.read()).started
        call.cancel()
    assert started.num_prompt_tokens == len(tokenized.token_ids)
    text = TextCodec(target_model().tokenizer).decode(tokenized.token_ids)
    assert text.startswith('<|im_start|>tools\n{"name": "weather"')


@pytest.mark.parametrize(
    ("fields", "text"), [({}, ""), ({"skip_special_tokens": True}, ""), ({"skip_special_tokens": False}, "aa")]
)
async def test_special_tokens_are_part_of_the_text_where_the_request_says_so(
    fields: dict[str, bool], text: str
) -> None:
    tokenizer = with_template(CHATML)
    tokenizer.add_tokens([AddedToken("a", special=True)])
    request = verifier_pb2.GenerateRequest(
        prompt=verifier_pb2.Prompt(text="a"), sampling=types_pb2.SamplingParams(max_tokens=2, temperature=0), **fields
    )
    model = replace(target_model(), tokenizer=tokenizer)
    async with running_verifier(model=model) as running, grpc.aio.insecure_channel(running.address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        chunks = [response.chunk async for response in stub.Generate(request)]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == tokenizer("aa")["input_ids"]
    assert "".join(chunk.text for chunk in chunks) == text

"""`outrider chat`: a conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.v1.verifier_pb2 import GenerateRequest, GenerateResponse
from outrider_cli.app import app
from outrider_cli.chat import can_chat
from outrider_client.blocking import BlockingClient
from tests.support.fake_verifier import FakeVerifier, Script, a_good_generation

CONTEXT_LEN = 2048
"""As the fake verifier, which counts each character as a token."""

runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb", "OUTRIDER_ADDRESS": ""})


def chat(verifier: FakeVerifier, typed: list[str], *flags: str) -> Any:
    return runner.invoke(app, ["chat", "--address", verifier.address, *flags], input="\n".join(typed) + "\n")


def spoken(verifier: FakeVerifier) -> list[list[str]]:
    return [[message.content for message in request.prompt.chat.messages] for request in verifier.requests]


def answering_within(verifier: FakeVerifier, max_prompt_tokens: int = CONTEXT_LEN) -> Script:
    """Refuses prompts that are too long, as a real verifier does, and does not remember them."""

    def script(request: GenerateRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        num_tokens = sum(len(message.content) for message in request.prompt.chat.messages)
        room = CONTEXT_LEN - num_tokens
        if request.sampling.max_tokens > room or num_tokens > max_prompt_tokens:
            verifier.requests.remove(request)
            context.abort(grpc.StatusCode.OUT_OF_RANGE, f"too long: room for {room}")
        yield from a_good_generation(request, context)

    return script


def test_a_chat_remembers_until_it_is_reset(verifier: FakeVerifier) -> None:
    result = chat(verifier, ["hi", "again", "/reset", "new", "/exit", "never"], "--system", "Be brief.")
    assert result.exit_code == 0
    assert spoken(verifier) == [["Be brief.", "hi"], ["Be brief.", "hi", "a b c d", "again"], ["Be brief.", "new"]]


def test_the_oldest_turns_are_forgotten_where_the_context_is_full(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier)
    first, second, third = "1" * 600, "2" * 600, "3" * 700
    result = chat(verifier, [first, second, third, "/exit"], "--system", "Be brief.", "--max-tokens", "400")
    assert result.exit_code == 0
    assert spoken(verifier)[-1] == ["Be brief.", second, "a b c d", third]
    assert "the context is full: the oldest turn is forgotten" in result.stderr
    assert {request.sampling.max_tokens for request in verifier.requests} == {400}


def test_as_many_turns_are_forgotten_as_it_takes(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier)
    result = chat(verifier, ["1" * 400, "2" * 400, "3" * 400, "4" * 1500, "5", "/stats", "/exit"])
    assert result.exit_code == 0
    assert spoken(verifier)[3:] == [["4" * 1500], ["4" * 1500, "a b c d", "5"]]
    assert "the oldest 3 turns are forgotten" in result.stderr
    assert "turns forgotten: 3" in result.stderr


def test_an_answer_is_shortened_rather_than_forgetting_what_leaves_room_for_one(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier)
    result = chat(verifier, ["1" * 500, "2", "/exit"], "--max-tokens", "2000")
    assert result.exit_code == 0
    assert [request.sampling.max_tokens for request in verifier.requests] == [1548, 1540]
    assert spoken(verifier)[1] == ["1" * 500, "a b c d", "2"]
    assert "the context is full: the answer may have 1540 tokens, not 2000" in result.stderr


def test_a_message_that_is_too_long_alone_is_left_out_and_the_chat_goes_on(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier)
    result = chat(verifier, ["hi", "1" * 3000, "again", "/exit"])
    assert result.exit_code == 0
    assert "error: too long: room for -961; what you said is left out" in result.stderr
    assert spoken(verifier) == [["hi"], ["hi", "a b c d", "again"]]


def test_a_limit_that_the_server_does_not_tell_is_kept_too(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier, max_prompt_tokens=300)
    result = chat(verifier, ["1" * 200, "2" * 200, "3" * 400, "/exit"])
    assert result.exit_code == 0
    assert spoken(verifier) == [["1" * 200], ["2" * 200]]
    assert "what you said is left out" in result.stderr


def test_a_command_is_not_sent_and_one_that_there_is_not_is_an_error(verifier: FakeVerifier) -> None:
    result = chat(verifier, ["/help", "/reste now", "", "/", "/etc/hosts?", "/stats", "/exit"], "--plain")
    assert result.exit_code == 0
    assert spoken(verifier) == [["/"], ["/", "a b c d", "/etc/hosts?"]]
    assert all(f"{name} " in result.stderr for name in ("/help", "/reset", "/stats", "/exit"))
    assert "error: there is no command /reste: did you mean /reset?" in result.stderr
    assert "answers: 2 · tokens: 8 in " in result.stderr
    assert "messages remembered: 4 · turns forgotten: 0 · context: 26 of 2048 tokens" in result.stderr
    assert result.stdout == "a b c d\na b c d\n", "what is no answer goes to stderr"


def test_variables_of_the_template_go_along(verifier: FakeVerifier) -> None:
    result = chat(verifier, ["hi", "/exit"], "--chat-template-kwargs", '{"enable_thinking": false}')
    assert result.exit_code == 0
    assert verifier.requests[0].prompt.chat.chat_template_kwargs == '{"enable_thinking": false}'


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_variables_that_are_no_json_object_are_wrong_usage(verifier: FakeVerifier, text: str) -> None:
    result = chat(verifier, [], "--chat-template-kwargs", text)
    assert result.exit_code == 2
    assert f"--chat-template-kwargs must be a JSON object, got '{text}'" in result.stderr


def test_commands_answer_and_a_misspelt_one_is_guessed(verifier: FakeVerifier) -> None:
    result = chat(verifier, ["/rest", "/nothing", "/reset", "/exit"])
    assert "there is no command /rest: did you mean /reset?" in result.stderr
    assert "there is no command /nothing: /help lists them" in result.stderr
    assert "what was said is forgotten" in result.stderr
    assert not verifier.requests


def test_a_model_that_was_not_trained_to_chat_is_named_as_such(verifier: FakeVerifier) -> None:
    words = "was trained on Python's library, not to chat"
    assert words not in chat(verifier, ["/exit"]).stderr
    verifier.model_id = "demo/target-100m"
    assert f"demo/target-100m {words}" in chat(verifier, ["/exit"]).stderr
    assert words not in chat(verifier, ["/exit"], "--plain").stderr


def test_a_line_that_is_not_utf8_is_left_out_and_ends_nothing(
    verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["a\udcff", "hello", "/exit"])  # as Python reads such bytes in the locale C
    monkeypatch.setattr(Console, "input", lambda *_: next(lines))
    result = chat(verifier, [])
    assert result.exit_code == 0
    assert "error: this line is not UTF-8, and left out" in result.stderr
    assert spoken(verifier) == [["hello"]]


def test_a_model_without_a_chat_template_is_told_before_anything_is_typed(verifier: FakeVerifier) -> None:
    verifier.has_template = False
    result = chat(verifier, ["hi"])
    assert result.exit_code == 1
    assert "there is no chat template; `outrider generate` goes on with a text" in result.stderr
    assert not verifier.requests


def test_json_is_an_object_for_each_turn_and_nothing_else(verifier: FakeVerifier) -> None:
    verifier.script = answering_within(verifier)
    result = chat(verifier, ["hi", "", "/stats", "1" * 3000, "again", "/exit"], "--json")
    assert result.exit_code == 0
    first, refused, second = map(json.loads, result.stdout.splitlines())
    assert (first["turn"], first["message"], first["text"]) == (1, "hi", "a b c d")
    assert (first["finish_reason"], first["summary"]["method"]) == ("stop", "METHOD_PEARL")
    assert (refused["turn"], refused["error"]) == (2, "too long: room for -961")
    assert (second["turn"], second["message"]) == (3, "again")
    assert "you>" not in result.stderr


def test_a_model_with_a_template_that_is_no_toy_can_chat(verifier: FakeVerifier) -> None:
    with BlockingClient(verifier.address) as client:
        assert can_chat(client)
        verifier.model_id = "demo/target-100m"
        assert not can_chat(client)
        verifier.model_id, verifier.has_template = "", False
        assert not can_chat(client)

"""Prompts: what a chat template writes around turns, and the lines of a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider_cli.prompts import PromptError
from outrider_client import Client
from outrider_draft.prompts import SYSTEMS, chat_frames, load_prompts
from tests.support.chat_templates import ALTERNATING, CHATML, model_with_template
from tests.support.services import running_verifier


async def test_a_frame_is_what_the_template_writes_around_turns() -> None:
    async with running_verifier(model=model_with_template(CHATML)) as verifier, Client(verifier.address) as client:
        frames = await chat_frames(client)
        told = [
            [await client.detokenize(part) for part in (frame.opening, frame.to_answer, frame.to_next_turn)]
            for frame in frames
        ]
    assert len(frames) == len(SYSTEMS)
    user, assistant = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    for system, (opening, to_answer, to_next_turn) in zip(SYSTEMS, told, strict=True):
        assert opening == (f"<|im_start|>system\n{system}<|im_end|>\n{user}" if system else user)
        assert to_answer == assistant
        assert to_next_turn == f"<|im_end|>\n{user}"


async def test_a_template_that_takes_no_system_message_still_has_a_frame() -> None:
    async with running_verifier(model=model_with_template(ALTERNATING)) as verifier, Client(verifier.address) as client:
        assert await chat_frames(client) == []  # nothing stands between a user's words and the answer


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_texts_and_chats_are_prompts_and_an_answer_at_the_end_is_left_out(tmp_path: Path) -> None:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    lines = ({"prompt": "def f"}, {"messages": [user]}, {"messages": [user, answer, user, answer]}, {"question": "1?"})
    text, chat, longer, question = load_prompts(written(tmp_path / "p.jsonl", *lines))
    assert (text.text, question.text) == ("def f", "1?")
    assert [each.content for each in chat.chat.messages] == ["a"]
    assert [each.role for each in longer.chat.messages] == ["user", "assistant", "user"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"prompt": 3}, "prompt must be a string"),
        ({"text": "a"}, "has text"),
        ({"messages": "a"}, "messages must be a list"),
        ({"messages": []}, "messages must be a list that is not empty"),
        ({"messages": [3]}, r"messages\[0\] must be an object"),
        ({"messages": [{"role": "user", "content": 3}]}, r"messages\[0\].content must be a text"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "user", "text": "a"}]}, r"messages\[1\] must have"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "one that is not the assistant's"),
        ({"prompt": "\ud800"}, "prompt must be text that UTF-8 can hold"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path: Path, line: object, words: str) -> None:
    with pytest.raises(PromptError, match=f"p.jsonl, line 2: .*{words}"):
        load_prompts(written(tmp_path / "p.jsonl", {"prompt": "a"}, line))

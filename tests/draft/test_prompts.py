"""What a chat template writes around turns."""

from __future__ import annotations

from outrider_client import Client
from outrider_draft.prompts import SYSTEMS, chat_frames
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

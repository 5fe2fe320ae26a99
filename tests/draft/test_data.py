"""`outrider draft data`: the target's own answers with its own distribution; goes on where the folder stands."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner, Result

from outrider_cli.prompts import PromptError
from outrider_client import Client
from outrider_draft.answers import Answers, BadAnswers, read_answers
from outrider_draft.data import data, sample
from outrider_draft.prompts import prompts_to_answer
from outrider_draft.sampler import Plan, Progress
from tests.support.chat_templates import model_with_template, with_template
from tests.support.services import RunningVerifier, running_verifier, target_model
from tests.support.waiting import until

LINES = """
{%- for message in messages %}{{- '# ' + message.role + '\\n' + message.content + '\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '# assistant\\n' }}{%- endif %}
"""
"""A line ends a turn, which the demo target does often."""
COMMAND = "import typer\nfrom outrider_draft.data import data\ntyper.run(data)"


@pytest.fixture
async def chatting() -> AsyncIterator[RunningVerifier]:
    """A verifier whose model has a chat template."""
    async with running_verifier(model=model_with_template(LINES)) as verifier:
        yield verifier


async def sampled(verifier: RunningVerifier, out: Path, prompts: Path | None = None, **plan: object) -> Progress:
    """Samples into a folder, four top log-probabilities a token."""
    progress = Progress()
    defaults = {"num_tokens": None, "seconds": None, "max_tokens": 16, "num_at_once": 8}
    given = None if prompts is None else prompts_to_answer(str(prompts))
    made = Plan(**(defaults | plan))  # type: ignore[arg-type]
    await sample(verifier.address, out, made, 4, given, progress, {})
    return progress


def texts(path: Path, *given: str) -> Path:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in given))
    return path


def prompts_of(answers: Answers) -> list[tuple[int, ...]]:
    return [tuple(document.token_ids[: document.first].tolist()) for document in answers.documents]


async def test_the_target_holds_conversations_with_itself(chatting: RunningVerifier, tmp_path: Path) -> None:
    progress = await sampled(chatting, tmp_path, num_tokens=200)
    answers = read_answers(tmp_path)
    assert answers.num_tokens == progress.num_tokens == progress.num_new_tokens
    assert 200 <= answers.num_tokens < 200 + 8, "it ends with the last token, and keeps the answers that were cut off"
    assert answers.header.model == "demo/target"
    async with Client(chatting.address) as client:
        beginnings = {await client.detokenize(prompt) for prompt in prompts_of(answers)}
    assert len(beginnings) == len(answers.documents), "no prompt comes twice"
    assert all("# user\n" in text and text.endswith("# assistant\n") for text in beginnings)
    assert await chatting.is_idle()


async def test_log_probabilities_are_the_models_own_at_every_temperature(
    chatting: RunningVerifier, tmp_path: Path
) -> None:
    await sampled(chatting, tmp_path / "out", texts(tmp_path / "p", "def add(a, b):"), temperatures=(0.0, 0.5, 2.0))
    documents = read_answers(tmp_path / "out").documents
    assert len(documents) == 3
    async with Client(chatting.address) as client:
        for document in documents:
            result = await client.complete(document.token_ids.tolist(), max_tokens=1, prompt_logprobs=4)
            expected = result.prompt_logprobs[document.first - 1 :]
            assert [[pair[0] for pair in each.top] for each in expected] == document.top_ids.tolist()
            numbers = np.array([[pair[1] for pair in each.top] for each in expected], np.float16)
            np.testing.assert_allclose(numbers, document.top_logprobs, atol=0.01)


async def test_a_file_is_answered_once_at_each_temperature_over_several_runs(
    chatting: RunningVerifier, tmp_path: Path
) -> None:
    prompts, out = texts(tmp_path / "p", "def add(", "import os\n", "class A:", "def add("), tmp_path / "out"
    first = await sampled(chatting, out, prompts, num_tokens=40)
    assert first.dropped["duplicate"] == 1
    second = await sampled(chatting, out, prompts)
    answers = read_answers(out)
    assert sorted(Counter(prompts_of(answers)).values()) == [3, 3, 3]
    assert second.num_new_tokens == answers.num_tokens - first.num_tokens
    third = await sampled(chatting, out, prompts)
    assert third.num_new_tokens == 0


async def test_a_run_goes_on_where_the_folder_stands(chatting: RunningVerifier, tmp_path: Path) -> None:
    await sampled(chatting, tmp_path, num_tokens=60)
    await sampled(chatting, tmp_path, num_tokens=120)
    answers = read_answers(tmp_path)
    assert 120 <= answers.num_tokens < 128
    assert len(set(prompts_of(answers))) == len(answers.documents)


async def test_answers_of_another_kind_are_refused(chatting: RunningVerifier, tmp_path: Path) -> None:
    prompts, out = texts(tmp_path / "p", "def add("), tmp_path / "out"
    await sampled(chatting, out, prompts)
    with pytest.raises(BadAnswers, match="num_top 4, not 5"):
        await sample(chatting.address, out, Plan(100, None), 5, prompts_to_answer(str(prompts)), Progress(), {})


async def test_time_ends_it(chatting: RunningVerifier, tmp_path: Path) -> None:
    progress = await sampled(chatting, tmp_path, seconds=0.5, max_tokens=64)
    assert read_answers(tmp_path).num_tokens == progress.num_tokens > 0
    assert await chatting.is_idle()


async def test_a_prompt_without_room_for_an_answer_is_dropped(chatting: RunningVerifier, tmp_path: Path) -> None:
    prompts = texts(tmp_path / "p", "x = 1\n" * 2000, "def add(")
    progress = await sampled(chatting, tmp_path / "out", prompts)
    assert progress.dropped["too long"] == 1
    assert len(read_answers(tmp_path / "out").documents) == 3


async def test_a_model_that_loops_is_stopped(chatting: RunningVerifier, tmp_path: Path) -> None:
    prompts = texts(tmp_path / "p", "x = [" + "0, " * 60)
    await sampled(chatting, tmp_path / "out", prompts, temperatures=(0.0,), max_tokens=400)
    (document,) = read_answers(tmp_path / "out").documents
    assert len(document.top_ids) < 400


async def test_a_model_without_turns_asks_for_prompts(tmp_path: Path) -> None:
    model = replace(target_model(), tokenizer=with_template(None))
    async with running_verifier(model=model) as verifier:
        with pytest.raises(PromptError, match="demo/target: it has no chat template"):
            await sampled(verifier, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
async def test_ctrl_c_keeps_what_was_written_and_says_how_to_go_on(chatting: RunningVerifier, tmp_path: Path) -> None:
    prompts = texts(tmp_path / "p", *(f"x{number} = " for number in range(1000)))
    flags = ["--address", chatting.address, "--out", str(tmp_path / "out"), "--prompts", str(prompts)]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        COMMAND,
        *flags,
        "--at-once",
        "4",
        "--max-tokens",
        "8",
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "TERM": "dumb"},
    )
    seen: set[str] = set()

    def have_come() -> int:
        seen.update(chatting.engine.sessions)
        return len(seen)

    # The fifth comes when one of the first four has ended.
    await until(lambda: have_come() > 4)
    process.send_signal(signal.SIGINT)
    errors = (await process.communicate())[1].decode()
    assert process.returncode == 130, errors
    assert "this goes on: outrider" in errors
    assert errors.endswith("interrupted\n")
    assert read_answers(tmp_path / "out").num_tokens > 0
    assert await chatting.is_idle()


@pytest.mark.slow
async def test_a_full_disk_is_one_line_and_leaves_nothing_half(chatting: RunningVerifier, tmp_path: Path) -> None:
    flags = ["--address", chatting.address, "--out", str(tmp_path / "out"), "--tokens", "300"]
    # No file of the command may grow beyond 4 kB.
    limited = ["bash", "-c", 'ulimit -f 4; exec "$@"', "bash", sys.executable, "-c", COMMAND, *flags]
    process = await asyncio.create_subprocess_exec(*limited, stderr=asyncio.subprocess.PIPE)
    errors = (await process.communicate())[1].decode()
    assert process.returncode == 1, errors
    assert "File too large" in errors.splitlines()[-1]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["data.json"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "5", "--hours", "1"], "--tokens and --hours"),
        (["--hours", "0"], "--hours must be"),
        (["--temperature", "nan"], "--temperature"),
        (["--prompts", "nowhere.jsonl"], "--prompts: nowhere.jsonl: No such file"),
    ],
)
def test_a_wrong_flag_is_named(tmp_path: Path, flags: list[str], words: str) -> None:
    done = invoked(tmp_path, "127.0.0.1:1", *flags)
    assert done.exit_code == 2
    assert words in done.stderr


def test_a_verifier_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = invoked(tmp_path, "127.0.0.1:1")
    assert done.exit_code == 3
    assert done.stderr.count("\n") == 1
    assert "start one with `outrider up`" in done.stderr


def invoked(tmp_path: Path, address: str, *flags: str) -> Result:
    app = typer.Typer()
    app.command()(data)
    runner = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"})
    return runner.invoke(app, ["--out", str(tmp_path / "out"), "--address", address, *flags])

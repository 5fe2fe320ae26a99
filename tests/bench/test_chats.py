"""Chats in the benchmark: every contender gets the verifier's prompt, and a target without a template is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.models.text import TextCodec
from outrider.verifier.admission import prompt_token_ids
from outrider_bench.drivers import to_proto
from outrider_bench.samples import Request
from outrider_bench.workers.worker import encode
from outrider_cli.prompts import load_prompts
from tests.support.chat_templates import CHATML, model_with_template, with_template

CONTEXT_LEN = 4096


@pytest.mark.parametrize("prompts", ["chats", "demo"])
def test_a_baseline_reads_the_very_tokens_that_the_verifier_reads(prompts: str) -> None:
    model = model_with_template(CHATML)
    codec = TextCodec(model.tokenizer)
    for prompt in load_prompts(prompts):
        sent = to_proto(Request(prompt.input, 0.0, 0, 8), {"method": "off"}).prompt
        # A worker gets its requests as JSON.
        asked = json.loads(json.dumps(prompt.input))
        served = list(prompt_token_ids(sent, model, codec))
        assert encode(codec, asked) == served
        assert codec.decode(served).endswith("<|im_start|>assistant\n") == bool(prompt.messages)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two random models: `chat`, and `plain`, which has no chat template."""
    folder = tmp_path_factory.mktemp("models")
    for name, template in (("chat", CHATML), ("plain", None)):
        tokenizer = with_template(template)
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT_LEN,
            initializer_range=0.2,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return folder


def bench(suite: str, target: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Runs a suite on chats, with the target as its own draft."""
    models = ["--target", str(target), "--draft", str(target), "--dtype", "float32", "--draft-dtype", "float32"]
    command = [sys.executable, "-m", "outrider_cli", "bench", suite, *models, "--prompts", "chats", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.timeout(220)
@pytest.mark.suite
def test_all_contenders_answer_the_same_chats_and_the_report_has_every_kind(models: Path, tmp_path: Path) -> None:
    flags = ["--methods", "off,auto", "--baselines", "hf,bare", "--temperatures", "0", "--repeats", "1"]
    done = bench("generate", models / "chat", *flags, "--num-prompts", "8", "--max-tokens", "8", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["category"] for row in rows} == {"all", *(prompt.category for prompt in load_prompts("chats"))}
    assert {row["method"] for row in rows} >= {"off", "auto", "bare", "hf-generate", "hf-assisted"}
    assert [row for row in rows if row["method"] != "off" and row["identical_to_off"] != 1] == []
    assert "8 prompts of chats, not held out of tuning, 8 tokens each" in (tmp_path / "report.md").read_text()


@pytest.mark.timeout(220)
@pytest.mark.suite
@pytest.mark.parametrize("suite", ["generate", "pair"])
def test_chats_are_refused_in_one_line_where_the_target_has_no_template(suite: str, models: Path) -> None:
    done = bench(suite, models / "plain")
    rule = f"chats has chats, and {models / 'plain'} has no chat template; demo and humaneval are texts"
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (done.returncode, errors) == (2, [f"error: --prompts: {rule}, which it can continue"])

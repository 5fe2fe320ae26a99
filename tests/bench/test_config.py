"""Flags and prompt files: what is wrong is said in one line."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from outrider.models.demo.training.corpus import is_heldout
from outrider_bench.app import bench
from outrider_bench.config import BenchConfig, parse_cores
from outrider_bench.experiment import contenders_of
from outrider_cli.prompts import Prompt, PromptError, choose, default_prompts, parse_prompts

app = typer.Typer()
app.command()(bench)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "off,magic"], "--methods must be one of off, speculative, pearl, retrieval"),
        (["--temperatures", "0,-1"], "--temperatures must be a number >= 0, got '-1'"),
        (["--temperatures", "0,nan"], "--temperatures must be a number >= 0, got 'nan'"),
        (["--temperatures", "0,,1"], "--temperatures must be a number >= 0, got ''"),
        (["--max-tokens", "1"], "--max-tokens must be >= 2"),
        (["--repeats", "0"], "--repeats must be >= 1, got '0'"),
        (["--seed", "-1"], "--seed must be in [0, 2**32), got '-1'"),
        (["--dtype", "int8"], "--dtype must be one of auto, bfloat16, float32, got 'int8'"),
        (["--draft-dtype", "int8"], "--draft-dtype must be one of auto, bfloat16, float32, got 'int8'"),
        (["--baselines", "vllm"], "--baselines must be one of hf, bare, got 'vllm'"),
        (["--concurrency", "0"], "--concurrency must be >= 1, a whole number, got '0'"),
        (
            ["--concurrency", "4", "--baselines", "hf"],
            "--concurrency must be a list with 1 in it for --baselines, got '4'",
        ),
        (["--rtt-ms", "soon"], "--rtt-ms must be a number >= 0, got 'soon'"),
        (["--num-speculative-tokens", "4,0"], "--num-speculative-tokens must be >= 1, a whole number, got '0'"),
        (["--lookahead", "0"], "--lookahead must be >= 1, got '0'"),
        (["--min-path-probability", "1"], "--min-path-probability must be in [0, 1), got '1.0'"),
        (["--num-prompts", "0"], "--num-prompts must be >= 1, got '0'"),
        (["--categories", "poems"], "--categories: there is no category 'poems' (there are: code, prose, repetitive)"),
        (["--prompts", "/nowhere.jsonl"], "--prompts: /nowhere.jsonl: No such file or directory"),
        (["--cores", "zero"], "--cores must be auto, none, or one or two of the cores"),
        (["--address", "h:1", "--baselines", "hf"], "--baselines must be empty with --address, got 'hf'"),
        (["--address", "h:1", "--rtt-ms", "20"], "--rtt-ms must be 0 with --address, got '20.0'"),
        (["--out", "/proc/nothing"], "--out must be a folder that can be written to"),
    ],
)
def test_a_wrong_flag_is_one_line_that_names_it(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {message}")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "f, line 2: must be JSON"),
        ('["a"]', "f, line 1: must be an object"),
        ('{"category": "code"}', "f, line 1: prompt must be a string that is not empty"),
        ('{"prompt": ""}', "f, line 1: prompt must be a string that is not empty"),
        ('{"prompt": "a", "category": 3}', "f, line 1: category must be a string"),
        ('{"prompt": "a", "category": "all"}', "f, line 1: category must be a string, not empty and not 'all'"),
        ('{"prompt": "a", "prmpt": "b"}', "f, line 1: unknown key 'prmpt'"),
        ("\n\n", "f: holds no prompts"),
    ],
)
def test_a_wrong_prompt_file_is_told_by_line_and_rule(text: str, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompts(text, "f")
    assert str(caught.value).startswith(message)


def test_a_file_that_is_not_utf8_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    result = CliRunner().invoke(app, ["--prompts", str(path)])
    assert "prompts.jsonl: must be UTF-8" in result.stderr


def test_line_numbers_count_lines_and_not_separators_inside_of_strings() -> None:
    with pytest.raises(PromptError, match="line 2"):
        parse_prompts('{"prompt": "a\u2028b"}\n{', "f")


def test_the_default_prompts_are_eight_of_each_kind_and_all_different() -> None:
    prompts = default_prompts()
    categories = [prompt.category for prompt in prompts]
    assert {name: categories.count(name) for name in set(categories)} == {"code": 8, "prose": 8, "repetitive": 8}
    assert len({prompt.text for prompt in prompts}) == 24
    assert all(250 <= len(prompt.text) <= 450 for prompt in prompts)
    assert all(prompt.text.endswith(":\n") for prompt in prompts if prompt.category == "code")


def test_the_code_prompts_come_from_files_that_the_demo_pair_was_not_trained_on() -> None:
    lines = resources.files("outrider_cli").joinpath("prompts.jsonl").read_text().splitlines()
    sources = [entry["source"] for entry in map(json.loads, lines) if entry["category"] == "code"]
    names = [source.removeprefix("CPython 3.11, Lib/").removesuffix(" (PSF-2.0)") for source in sources]
    assert len(names) == 8
    assert all(is_heldout(name) for name in names)


def test_few_prompts_are_of_all_categories_in_turn() -> None:
    prompts = [Prompt(text, category) for category in ("code", "prose") for text in "abc"]
    assert [(p.category, p.text) for p in choose(prompts, count=3)] == [("code", "a"), ("prose", "a"), ("code", "b")]
    assert {p.category for p in choose(prompts, ["prose"])} == {"prose"}


def options_of(**settings: Any) -> list[tuple[str, str, dict[str, Any]]]:
    found = contenders_of(BenchConfig(prompts=(Prompt("a"),), **settings))
    return [(contender.method, contender.setting, dict(contender.options)) for contender in found]


def test_off_always_takes_part() -> None:
    assert options_of(methods=("pearl",))[0] == ("off", "", {"method": "off"})


def test_each_chain_length_is_a_setting_of_its_own_and_lookahead_is_pearls() -> None:
    found = options_of(methods=("off", "speculative", "pearl+retrieval"), num_speculative_tokens=(4, 16), lookahead=8)
    assert found[1:] == [
        ("speculative", "k=4", {"method": "speculative", "num_speculative_tokens": 4}),
        ("speculative", "k=16", {"method": "speculative", "num_speculative_tokens": 16}),
        (
            "pearl+retrieval",
            "k=4",
            {"method": "pearl", "retrieval": True, "num_speculative_tokens": 4, "lookahead": 8},
        ),
        (
            "pearl+retrieval",
            "k=16",
            {"method": "pearl", "retrieval": True, "num_speculative_tokens": 16, "lookahead": 16},
        ),
    ]


def test_the_baselines_are_named_with_their_settings() -> None:
    found = [(method, setting) for method, setting, _ in options_of(methods=(), baselines=("hf", "bare"))]
    assert found == [
        ("off", ""),
        ("bare", ""),
        ("hf-generate", ""),
        ("hf-assisted", "default"),
        ("hf-assisted", "constant 3"),
        ("hf-assisted", "constant 5"),
        ("hf-assisted", "constant 8"),
        ("hf-prompt-lookup", "10 tokens"),
    ]


@pytest.mark.parametrize(
    ("text", "available", "cores"),
    [
        ("auto", [3, 5, 7], (3, 5)),
        ("auto", [4], (4, 4)),
        ("auto", [], ()),
        ("none", [0, 1], ()),
        ("1,0", [0, 1], (1, 0)),
        ("1", [0, 1], (1, 1)),
    ],
)
def test_cores_of_the_target_and_of_everything_else(text: str, available: list[int], cores: tuple[int, ...]) -> None:
    assert parse_cores(text, available) == cores

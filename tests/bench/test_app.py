"""`outrider bench`: a wrong command line is reported in one line, a right one becomes configurations."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from outrider_bench import app as app_module
from outrider_bench.app import app
from outrider_bench.config import BenchConfig, ServeConfig
from outrider_bench.papers.claims import PAPERS

GENERATE = [
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
    (["--concurrency", "4", "--baselines", "hf"], "--concurrency must be a list with 1 in it for --baselines, got '4'"),
    (["--rtt-ms", "soon"], "--rtt-ms must be a number >= 0, got 'soon'"),
    (["--num-speculative-tokens", "4,0"], "--num-speculative-tokens must be >= 1, a whole number, got '0'"),
    (["--lookahead", "0"], "--lookahead must be >= 1, got '0'"),
    (["--min-path-probability", "1"], "--min-path-probability must be in [0, 1), got '1.0'"),
    (["--num-prompts", "0"], "--num-prompts must be >= 1, got '0'"),
    (["--categories", "poems"], "--categories: there is no category 'poems' (there are: code, prose, repetitive)"),
    (["--prompts", "/nowhere.jsonl"], "--prompts: /nowhere.jsonl: No such file or directory"),
    (["--prompts", "chat"], "--prompts: chat: No such file or directory (there are the sets chats, demo, humaneval"),
    (["--prompts", "demo", "--held-out"], "--prompts: demo: no prompt is held out"),
    (["--cores", "zero"], "--cores must be auto, none, or one or two of the cores"),
    (["--address", "h:1", "--baselines", "hf"], "--baselines must be empty with --address, got 'hf'"),
    (["--address", "h:1", "--rtt-ms", "20"], "--rtt-ms must be 0 with --address, got '20.0'"),
    (
        ["--llama-server", "/nowhere"],
        "--llama-server must be the path of llama.cpp's llama-server, which can be executed",
    ),
    (["--llama-server", "sh", "--address", "h:1"], "--llama-server must be empty with --address, got 'sh'"),
    (["--llama-server", "sh", "--concurrency", "4"], "--concurrency must be a list with 1 in it for --llama-server"),
    (["--out", "/proc/nothing"], "--out must be a folder that can be written to"),
]
OTHERS = [
    ("pair --max-tokens 8", "--max-tokens must be >= 16 (a few rounds of every setting), got '8'"),
    ("pair --dtype int8", "--dtype must be one of auto, bfloat16, float32, got 'int8'"),
    ("pair --draft-dtype int8", "--draft-dtype must be one of auto, bfloat16, float32, got 'int8'"),
    ("pair --num-speculative-tokens 4,33", "--num-speculative-tokens must be at most 32, got '33'"),
    ("pair --temperatures -1", "--temperatures must be a number >= 0, got '-1'"),
    ("pair --num-prompts 0", "--num-prompts must be >= 1, got '0'"),
    ("pair --repeats 0", "--repeats must be >= 1, got '0'"),
    ("pair --family --draft demo/draft-c5", "--target and --draft must be their defaults with --family"),
    ("pair --address h:1 --target demo/target", "--target and --draft must be their defaults with --address"),
    ("pair --address h:1 --family", "--family must be unset with --address"),
    ("gpu --device tpu", "--device must be cuda, cuda:NUMBER or cpu, got 'tpu'"),
    ("gpu --size 70b", "--size must be one of 8b, tiny, got '70b'"),
    ("gpu --weights mine", "--weights must be one of widened, random, got 'mine'"),
    ("gpu --drafter edge", "--drafter must be one of speculator, in-process, got 'edge'"),
    ("gpu --parts=", "--parts must be some of services, peers, micro, got ''"),
    ("gpu --methods=", "--methods must be some of off, speculative"),
    ("gpu --contexts 16384", "--contexts must be at most 16256 with --size 8b and --max-tokens 128, got '16384'"),
    ("gpu --size tiny --contexts 2048", "--contexts must be at most 2032 with --size tiny and --max-tokens 16"),
    ("gpu --max-tokens 1", "--max-tokens must be >= 2"),
    ("gpu --minutes 0", "--minutes must be in (0, 1440], got '0.0'"),
    ("serve --request-rate 1,0 --guidellm sh", "--request-rate must be a number > 0, or inf, got '0'"),
    ("serve --request-rate fast --guidellm sh", "--request-rate must be a number > 0, or inf, got 'fast'"),
    ("serve --guidellm /nowhere", "--guidellm must be the path of GuideLLM, which can be executed"),
    ("serve --guidellm sh --methods off,magic", "--methods must be one of off, speculative"),
    ("serve --guidellm sh --url h:1", "--url must be a URL of http or https, got 'h:1'"),
    ("serve --guidellm sh --num-prompts 0", "--num-prompts must be >= 1, got '0'"),
    ("serve --guidellm sh --seed -1", "--seed must be in [0, 2**32), got '-1'"),
    ("serve --guidellm sh --temperature -1", "--temperature must be a number >= 0, got '-1.0'"),
    ("serve --guidellm sh --prompts /nowhere.jsonl", "--prompts: /nowhere.jsonl: No such file or directory"),
    ("serve --guidellm sh --prompts chats", "--prompts must be texts, as demo and humaneval are, because GuideLLM"),
    (
        "serve --guidellm sh --url http://h:1 --draft demo/draft-c5",
        "--target and --draft must be their defaults with --url",
    ),
    ("serve --guidellm sh --out /proc/nothing", "--out must be a folder that can be written to"),
    ("papers --papers CARD,magic", "--papers must be one of the tutorial, CARD, SAGUARO, DOUBLE"),
    ("papers --seed -1", "--seed must be in [0, 2**32), got '-1'"),
    ("papers --out /proc/nothing", "--out must be a folder that can be written to"),
]
MISPLACED = [
    ("papers --methods off", "--methods is a flag of outrider bench generate, serve, gpu, not of papers"),
    ("pair --rtt-ms=10", "--rtt-ms is a flag of outrider bench generate, not of pair"),
    ("serve --address h:1", "--address is a flag of outrider bench generate, pair, not of serve"),
    ("generate --quick", "--quick is a flag of outrider bench papers, pair, not of generate"),
]


def complaint(*arguments: str) -> str:
    """The only line that a wrong command line prints."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    return result.stderr.removeprefix("error: ")


@pytest.mark.parametrize(("arguments", "message"), GENERATE)
def test_a_wrong_value_is_one_line_that_names_the_flag(arguments: list[str], message: str) -> None:
    assert complaint("generate", *arguments).startswith(message)


@pytest.mark.parametrize(("line", "message"), OTHERS)
def test_a_wrong_value_of_another_suite_is_one_line_too(line: str, message: str) -> None:
    assert complaint(*line.split()).startswith(message)


@pytest.mark.parametrize(("line", "message"), MISPLACED)
def test_a_flag_of_another_suite_says_where_it_belongs(line: str, message: str) -> None:
    assert complaint(*line.split()).startswith(message)


def test_an_unknown_suite_names_the_nearest_one() -> None:
    message = complaint("serv", "--seed", "3")
    assert message == "the suite must be one of generate, papers, pair, serve, gpu, got 'serv'; did you mean serve?\n"
    assert complaint("xyz").endswith("gpu, got 'xyz'\n")


def test_a_file_of_prompts_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}')
    assert "prompts.jsonl: must be UTF-8" in complaint("generate", "--prompts", str(path))


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """The suites that a command line would run, with their configurations."""
    found: list[tuple[str, Any]] = []

    def suite(module: str) -> Any:
        name = module.split(".")[-2]

        class Recorded:
            def __init__(self, config: Any, *_: Any) -> None:
                found.append((name, config))

            def run(self, *_: Any) -> int:
                return 0

        return SimpleNamespace(**{f"{name.title()}Suite": Recorded})

    monkeypatch.setattr(app_module, "import_module", suite)
    return found


def test_flags_become_a_configuration(runs: list[tuple[str, Any]]) -> None:
    for line in (
        "generate --max-tokens 8 --cores none",
        "serve --guidellm sh --url http://127.0.0.1:1 --request-rate 0.5,4,inf",
        "papers --cores none",
    ):
        result = CliRunner().invoke(app, line.split())
        assert (result.exit_code, result.stderr) == (0, "")
    (first, generate), (second, serve), (third, papers) = runs
    assert (first, second, third) == ("generate", "serve", "papers")
    assert isinstance(generate, BenchConfig)
    assert (generate.max_tokens, generate.cores) == (8, ())
    assert isinstance(serve, ServeConfig)
    assert (serve.request_rates, serve.methods, serve.cores) == ((0.5, 4.0, math.inf), ("off", "auto"), ())
    assert serve.num_prompts == len(serve.prompts) == 24
    assert papers.papers == PAPERS


def test_every_suite_has_a_help_with_all_its_flags() -> None:
    assert [command.name or command.callback.__name__ for command in app.registered_commands if command.callback] == [
        "generate",
        "papers",
        "pair",
        "serve",
        "gpu",
    ]
    commands: Any = get_command(app)
    for name, command in commands.commands.items():
        result = CliRunner().invoke(app, [name, "--help-all"], env={"COLUMNS": "80"})
        assert result.exit_code == 0
        assert command.params
        missing = [flag for param in command.params for flag in param.opts if flag not in result.stdout]
        assert not missing
        brief = CliRunner().invoke(app, [name, "--help"]).stdout
        assert max(map(len, f"{brief}{result.stdout}".splitlines())) <= 80
        assert "--json" in brief


def test_json_leaves_stdout_to_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    class Found:
        def __init__(self, *_: Any) -> None: ...

        def run(self, out: Path | None, console: Any) -> int:
            console.print("a report")
            return 1

        def results(self) -> dict[str, Any]:
            return {"suite": "pair", "failures": {"a": "b"}}

    monkeypatch.setattr(app_module, "import_module", lambda _: SimpleNamespace(PairSuite=Found))
    result = CliRunner().invoke(app, ["pair", "--json", "--cores", "none"])
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"suite": "pair", "failures": {"a": "b"}}
    assert "a report" in result.stderr
    result = CliRunner().invoke(app, ["pair", "--cores", "none"])
    assert result.stdout == "a report\n"

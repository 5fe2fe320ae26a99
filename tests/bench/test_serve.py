"""A gateway under load: GuideLLM's arguments, and the use of its results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from outrider_bench.config import ServeConfig
from outrider_bench.serve.suite import ServeSuite
from outrider_cli.failures import FAILED
from outrider_cli.prompts import Prompt

FAKE = f"""#!{sys.executable}
import json, pathlib, sys
words = sys.argv[2:]
flags = {{words[i]: json.loads(words[i + 1]) for i in range(0, len(words) - 1, 2)}}
prompts = pathlib.Path(flags["--data"]["path"]).read_text().splitlines()
with open(pathlib.Path(__file__).with_name("asked.jsonl"), "a") as file:
    file.write(json.dumps({{"flags": flags, "prompts": [json.loads(one)["prompt"] for one in prompts]}}) + "\\n")
if flags["--backend"]["extras"]["body"]["speculation"]["method"] == "pearl":
    sys.exit("the server does not answer")
found = {{"successful": {{"mean": 2.0, "median": 0.5, "percentiles": {{"p99": 0.9}}}}}}
names = ("requests_per_second", "output_tokens_per_second", "time_to_first_token_ms", "time_per_output_token_ms")
metrics = {{name: found for name in (*names, "request_latency")}}
metrics["request_totals"] = {{"successful": 3, "errored": 0, "incomplete": 1}}
rates = flags["--profile"].get("rate", [None])
benchmarks = [{{"metrics": metrics, "config": {{"strategy": {{"rate": rate}} if rate else {{}}}}}} for rate in rates]
pathlib.Path(flags["--output"]["path"]).write_text(json.dumps({{"benchmarks": benchmarks}}))
"""


@pytest.fixture
def guidellm(tmp_path: Path) -> Path:
    """A program that records its arguments, and answers as GuideLLM does."""
    path = tmp_path / "guidellm"
    path.write_text(FAKE, encoding="utf-8")
    path.chmod(0o755)
    return path


def run(guidellm: Path, **changes: Any) -> tuple[int, dict[str, Any], list[dict[str, Any]]]:
    """The exit status, the results, and GuideLLM's arguments."""
    settings: dict[str, Any] = {
        "url": "http://127.0.0.1:1",
        "guidellm": str(guidellm),
        "num_prompts": 3,
        "prompts": (Prompt("a", "code"), Prompt("b", "code")),
    }
    out = guidellm.parent / "out"
    status = ServeSuite(ServeConfig(**settings | changes)).run(out, Console(quiet=True))
    asked = (guidellm.parent / "asked.jsonl").read_text(encoding="utf-8").splitlines()
    return status, json.loads((out / "results.json").read_text(encoding="utf-8")), [json.loads(one) for one in asked]


def test_each_method_is_asked_for_all_rates_and_then_for_all_at_once(guidellm: Path) -> None:
    status, results, asked = run(guidellm, request_rates=(2.0, 4.0, float("inf")), max_tokens=16, seed=7)
    assert status == 0
    bodies = [one["flags"]["--backend"]["extras"]["body"] for one in asked]
    assert [body["speculation"]["method"] for body in bodies] == ["off", "off", "auto", "auto"]
    assert all((body["max_tokens"], body["seed"], body["ignore_eos"]) == (16, 7, True) for body in bodies)
    profiles = [one["flags"]["--profile"] for one in asked[:2]]
    assert profiles == [{"kind": "poisson", "rate": [2.0, 4.0]}, {"kind": "throughput"}]
    assert asked[0]["prompts"] == ["a", "b", "a"]
    assert asked[0]["flags"]["--constraint"]["count"] == 3
    assert [(one["method"], one["request_rate"]) for one in results["runs"]] == [
        (method, rate) for method in ("off", "auto") for rate in (2.0, 4.0, None)
    ]
    first = results["runs"][0]
    assert (first["completed"], first["failed"], first["output_throughput"]) == (3, 1, 2.0)
    assert (first["median_ttft_ms"], first["median_e2el_ms"], first["p99_e2el_ms"]) == (0.5, 500.0, 900.0)
    report = (guidellm.parent / "out" / "report.md").read_text(encoding="utf-8")
    assert "| off | all at once | 2.00 | 2 | 1 |" in report


def test_a_method_that_fails_leaves_the_others(guidellm: Path) -> None:
    status, results, _ = run(guidellm, methods=("pearl", "off"))
    assert status == FAILED
    assert "the server does not answer" in results["failures"]["pearl"]
    assert [one["method"] for one in results["runs"]] == ["off"]

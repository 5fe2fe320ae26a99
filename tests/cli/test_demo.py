"""The table of the demo, which is the first thing that visitors read."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from outrider.v1 import verifier_pb2
from outrider_cli import demo
from outrider_cli.app import app
from outrider_cli.demo import METHODS, REFERENCE, STREAMED_METHOD, Measured, conclusion_of, num_same, table_of
from outrider_client.enums import method_name
from outrider_client.generation import FinishReason, Result
from tests.support.fake_verifier import FakeVerifier


def measured(method: str, *texts: Sequence[int], seconds: float, num_rounds: int) -> Measured:
    counts = verifier_pb2.SpeculationSummary(num_rounds=num_rounds, num_accepted_tokens=len(texts[0]) - num_rounds)
    results = [Result("", tuple(text), FinishReason.LENGTH, None, 7, 3, len(text), counts) for text in texts]
    return Measured(method, results, seconds)


def printed(rows: list[Measured]) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=100)
    console.print(table_of(rows))
    assert isinstance(console.file, io.StringIO)
    return [line.split() for line in console.file.getvalue().splitlines()[1:]]


OFF = measured("off", [1, 2, 3, 4], [5, 6, 7, 8], seconds=4.0, num_rounds=4)


def test_what_is_streamed_and_what_is_compared_are_methods_that_run() -> None:
    assert METHODS[0] == REFERENCE
    assert STREAMED_METHOD in METHODS


def test_equal_texts_are_good_news_without_a_footnote() -> None:
    rows = [OFF, measured("auto", [1, 2, 3, 4], [5, 6, 7, 8], seconds=2.0, num_rounds=2)]
    assert printed(rows) == [["off", "2.0", "1.00x", "1.00"], ["auto", "4.0", "2.00x", "2.00", "yes"]]
    assert conclusion_of(rows, "").strip() == (
        "Every method gave the target's own text, token for token; "
        "auto was 2.0 times as fast as off, the target model alone."
    )


def test_a_text_that_parts_is_counted_and_explained() -> None:
    rows = [OFF, measured("auto", [1, 2, 3, 4], [5, 9, 7, 8], seconds=2.0, num_rounds=2)]
    assert printed(rows)[1][4:] == ["5", "of", "8", "tokens"]
    assert "nearly equally likely: chains of 3 differ." in conclusion_of(rows, "chains of 3 differ")


def test_json_has_the_verifier_the_generation_and_each_method(
    verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stack(*_: Any) -> nullcontext[SimpleNamespace]:
        return nullcontext(SimpleNamespace(address=verifier.address))

    monkeypatch.setattr(demo, "LocalStack", stack)
    result = CliRunner().invoke(app, ["demo", "--json", "--max-tokens", "9"])
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    info, generation, told = lines[0], lines[1 : -len(METHODS)], lines[-len(METHODS) :]
    assert info["info"]["address"] == verifier.address
    assert info["info"]["model"]["model_id"] == "fake"
    *chunks, last = generation
    assert "".join(each["chunk"]["text"] for each in chunks) == last["result"]["text"] == "a b c d"
    methods = [each["method"] for each in told]
    assert [each["name"] for each in methods] == list(METHODS)
    assert methods[0]["speed_up"] == 1.0
    # Two prompts, four tokens each, all the same.
    assert {(each["num_tokens"], each["num_same_tokens"]) for each in methods} == {(8, 8)}
    asked = [(method_name(request.speculation.method), request.sampling.max_tokens) for request in verifier.requests]
    assert asked == [(STREAMED_METHOD, 9), *((method, 9) for _ in range(2) for method in METHODS)]


@pytest.mark.parametrize(
    ("ours", "theirs", "count"), [((1, 2), (1, 2), 2), ((1, 3), (1, 2), 1), ((1,), (1, 2), 1), ((), (), 0)]
)
def test_tokens_are_counted_up_to_the_first_difference(
    ours: tuple[int, ...], theirs: tuple[int, ...], count: int
) -> None:
    assert num_same(ours, theirs) == count

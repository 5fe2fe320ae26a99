"""The gateway suite: what it makes of answers and turns, and a small run of all of it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from outrider_bench.config import GatewayConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.suites.gateway.claims import GatewayEvidence, sections_of
from outrider_bench.suites.gateway.doors import GRPC, HTTP, sample_of
from outrider_bench.suites.gateway.experiments import Turn
from outrider_bench.suites.gateway.suite import GatewaySuite


def event(text: str = "", usage: int | None = None) -> bytes:
    choices = [] if usage is not None else [{"index": 0, "text": text}]
    told = {"choices": choices, "usage": None if usage is None else {"completion_tokens": usage}}
    return b"data: " + json.dumps(told).encode() + b"\n\n"


def chunked(*parts: bytes) -> bytes:
    body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + body


def test_an_answer_in_chunks_is_read_to_its_text_and_its_tokens() -> None:
    done = b"data: [DONE]\n\n"
    sample = sample_of(chunked(event("a\r\nb"), b": ping\n\n" + event(" 1f"), event(usage=7), done), first_s=0.5)
    assert (sample.text, sample.num_tokens, sample.num_events, sample.first_s) == ("a\r\nb 1f", 7, 4, 0.5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\nloading", "HTTP/1.1 503 Service Unavailable: loading"),
        (chunked(b'data: {"error": {"message": "gone"}}\n\n'), "gone"),
        (chunked(event("a")), "the stream ended without usage"),
    ],
)
def test_an_answer_that_is_none_is_a_failure(answer: bytes, message: str) -> None:
    with pytest.raises(GenerationFailed, match=message):
        sample_of(answer, first_s=0.0)


def turn(tokens_per_s: float, text: str = "a") -> Turn:
    return Turn(num_tokens=100, num_events=50, duration_s=100 / tokens_per_s, cpu_s=0.01, texts=(text,))


def test_doors_are_compared_within_pairs_of_turns() -> None:
    evidence = GatewayEvidence(
        turns={
            ("off", 8): [
                {GRPC: turn(100), HTTP: turn(99)},
                {GRPC: turn(50), HTTP: turn(49, "b")},
                {GRPC: turn(10), HTTP: turn(2)},
            ]
        },
        firsts_ms=[{GRPC: 10.0, HTTP: 11.0}],
        leavings_ms=[4.0, 120.0, 130.0],
        floods_us=[{GRPC: 40.0, HTTP: 52.0}],
    )
    speed, flood, ends = sections_of(evidence)
    found = {one.name: one for section in (speed, flood, ends) for one in section.measurements}
    assert found["8 streams: HTTP by gRPC"].value == pytest.approx(0.98)
    assert found["8 streams: HTTP by gRPC"].verdict == "met"
    assert "2 of 3 texts are the same through both doors." in speed.notes
    assert found["CPU that HTTP takes beyond the SDK"].value == pytest.approx(12)
    assert found["first text over HTTP, later by"].value == pytest.approx(1)
    assert found["a closed connection frees its session within"].verdict == "missed"


@pytest.mark.suite
@pytest.mark.timeout(300)
def test_a_small_run_measures_everything(tmp_path: Path) -> None:
    suite = GatewaySuite(GatewayConfig(repeats=1, is_quick=True))
    assert suite.run(tmp_path, Console(file=StringIO())) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    titles = ["Speed, method off", "Speed, method auto", "A stream as fast as it goes", "Beginning and end"]
    assert [section["title"] for section in results["sections"]] == titles
    assert results["failures"] == {}
    for section in results["sections"][:2]:
        assert any("5 of 5 texts are the same" in note for note in section["notes"])
    assert (tmp_path / "speed.png").exists()

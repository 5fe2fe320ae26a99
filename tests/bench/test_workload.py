"""The order of generations, with a fake verifier and real worker processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from rich.console import Console

from outrider.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from outrider_bench.config import BenchConfig
from outrider_bench.drivers import GenerationFailed
from outrider_bench.experiment import Contender, contenders_of
from outrider_bench.generate.suite import GenerateSuite
from outrider_bench.running import Turn, num_generations, run_turn, schedule, seed_of
from outrider_bench.samples import Condition, GenerationSample, Request, Sample
from outrider_bench.workers.client import Worker, WorkerError
from outrider_cli.prompts import Prompt
from tests.bench.samples import generation
from tests.support.fake_verifier import FakeVerifier

PROMPTS = (Prompt("a", "code"), Prompt("b", "prose"), Prompt("c", "code"))


class Recorder:
    """A driver that records how many generations run at once."""

    def __init__(self) -> None:
        self.running = self.most = 0

    async def generate(self, request: Request, options: Any) -> GenerationSample:
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        if request.prompt == "b":
            raise GenerationFailed("no")
        return generation(3, 1)


def config_of(**settings: Any) -> BenchConfig:
    return BenchConfig(**{"prompts": PROMPTS, "temperatures": (0.0,), "repeats": 2} | settings)


def test_all_contenders_take_the_same_prompt_one_after_the_other_and_the_first_rotates() -> None:
    config = config_of(methods=("off", "pearl"))
    turns = list(schedule(config, contenders_of(config), 0.0))
    methods = [(turn.prompt_indices, turn.condition.method) for turn in turns[:6]]
    assert methods == [
        ((0,), "off"),
        ((0,), "pearl"),
        ((1,), "pearl"),
        ((1,), "off"),
        ((2,), "off"),
        ((2,), "pearl"),
    ]
    firsts = Counter(turn.condition.method for turn in turns[::2])
    assert firsts == {"off": 3, "pearl": 3}


def test_every_contender_gets_the_same_seeds_and_every_repeat_others() -> None:
    config = config_of()
    seeds = {seed_of(config, repeat, index) for repeat in range(2) for index in range(3)}
    assert len(seeds) == 6


def test_baselines_sit_out_where_they_have_nothing_to_show() -> None:
    config = config_of(methods=("off",), baselines=("bare",), concurrencies=(1, 3), rtts_ms=(0.0, 20.0))
    turns = [turn for rtt_ms in config.rtts_ms for turn in schedule(config, contenders_of(config), rtt_ms)]
    bare = {turn.condition for turn in turns if turn.condition.method == "bare"}
    assert bare == {Condition("bare", "", 0.0)}
    assert {(t.condition.concurrency, t.condition.rtt_ms) for t in turns} == {(1, 0), (3, 0), (1, 20), (3, 20)}
    assert num_generations(config, contenders_of(config)) == sum(len(turn.prompt_indices) for turn in turns)


async def test_a_turn_runs_as_many_generations_at_once_as_it_should_and_survives_failures() -> None:
    recorder, seen = Recorder(), list[Sample]()
    turn = Turn(Contender("off"), Condition("off", "", 0.0, concurrency=2), 0, (0, 1, 2))
    block = await run_turn(turn, config_of(), recorder, seen.append)
    assert recorder.most == 2
    assert sorted(sample.prompt_index for sample in seen) == [0, 1, 2]
    assert [sample.error for sample in block.samples if sample.generation is None] == ["no"]


def bench_script(request: verifier_pb2.GenerateRequest, _: grpc.ServicerContext) -> Iterator[Any]:
    """Three tokens a round when speculating, one otherwise; the tokens are the same."""
    drafted = request.speculation.method != types_pb2.METHOD_OFF
    step = 3 if drafted else 1
    yield verifier_pb2.GenerateResponse(started=verifier_pb2.Started(num_prompt_tokens=5))
    for first in range(0, request.sampling.max_tokens, step):
        tokens = list(range(first, first + step))
        yield verifier_pb2.GenerateResponse(chunk=verifier_pb2.Chunk(token_ids=tokens))
    summary = verifier_pb2.SpeculationSummary(
        num_rounds=request.sampling.max_tokens // step,
        num_drafted_tokens=8 * drafted,
        num_accepted_tokens=4 * drafted,
        times_p50=verifier_pb2.RoundTimes(forward_ms=7.0),
    )
    yield verifier_pb2.GenerateResponse(finished=verifier_pb2.Finished(summary=summary))


class BenchVerifier(FakeVerifier):
    """Offers two methods, knows its forwards, and follows the script above."""

    def __init__(self) -> None:
        super().__init__()
        self.script = bench_script

    def GetInfo(
        self, request: verifier_pb2.GetInfoRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.GetInfoResponse:
        times = [verifier_pb2.ForwardTime(num_rows=rows, forward_ms=9.0 + rows) for rows in (1, 8)]
        methods = [types_pb2.METHOD_OFF, types_pb2.METHOD_PEARL]
        return verifier_pb2.GetInfoResponse(
            model=types_pb2.ModelInfo(model_id="fake"), methods=methods, forward_times=times
        )


@pytest.fixture
def bench_verifier() -> Iterator[BenchVerifier]:
    fake = BenchVerifier()
    with futures.ThreadPoolExecutor(max_workers=2) as pool:
        server = grpc.server(pool, options=[("grpc.so_reuseport", 0)])
        verifier_pb2_grpc.add_VerifierServiceServicer_to_server(fake, server)
        fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        yield fake
        server.stop(None).wait()


def test_a_running_server_is_measured_and_the_report_written(bench_verifier: BenchVerifier, tmp_path: Path) -> None:
    config = config_of(address=bench_verifier.address, methods=("off", "pearl"), max_tokens=12, temperatures=(0.0, 0.7))
    console = Console(width=118, quiet=True)
    assert GenerateSuite(config).run(tmp_path, console) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    rows = {(row["method"], row["temperature"]): row for row in found["rows"] if row["category"] == "all"}
    assert rows.keys() == {("off", 0.0), ("pearl", 0.0), ("off", 0.7), ("pearl", 0.7)}
    pearl = rows["pearl", 0.7]
    assert (pearl["completed"], pearl["total_output_tokens"], pearl["identical_to_off"]) == (6, 72, 1.0)
    assert pearl["forward_ms_p50"] == 7.0
    assert found["machine"]["target_forward_ms"] == {"1": 10.0, "8": 17.0}
    assert found["environment"]["models"]["target"]["model_id"] == "fake"
    assert not found["interrupted"]
    request = bench_verifier.requests[-1]
    assert request.sampling.ignore_eos
    assert request.sampling.HasField("seed")


def test_ctrl_c_keeps_what_has_been_measured(bench_verifier: BenchVerifier, tmp_path: Path) -> None:
    config = config_of(address=bench_verifier.address, methods=("off",), max_tokens=4)
    benchmark = GenerateSuite(config)
    calls = 0

    def interrupting(request: verifier_pb2.GenerateRequest, context: grpc.ServicerContext) -> Iterator[Any]:
        nonlocal calls
        calls += 1
        if calls == 4:  # the warm-up, two prompts, and now
            os.kill(os.getpid(), signal.SIGINT)
            bench_verifier.ended.clear()
            bench_verifier.ended.wait(30)
        yield from bench_script(request, context)

    bench_verifier.script = interrupting
    assert benchmark.run(tmp_path, Console(quiet=True)) == 130
    found = json.loads((tmp_path / "results.json").read_text())
    assert found["interrupted"]
    assert [(row["completed"], row["partial"]) for row in found["rows"] if row["category"] == "all"] == [(2, True)]


def test_a_method_that_the_server_does_not_offer_is_told_by_its_flag(
    bench_verifier: BenchVerifier, capsys: pytest.CaptureFixture[str]
) -> None:
    config = config_of(address=bench_verifier.address, methods=("off", "retrieval"))
    assert GenerateSuite(config).run(None, Console(quiet=True)) == 3
    assert "--methods: the verifier does not offer 'retrieval' (it offers off, pearl)" in capsys.readouterr().err


WORKER = """
import json, sys, threading
print(json.dumps({"target": {"model_id": "t"}}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if message["operation"] == "die":
        sys.exit("the model is broken")
    if message["operation"] == "ponder":
        threading.Event().wait()
    answer = {"num_prompt_tokens": 1, "token_ids": [1, 2], "chunks": [[0.1, 1], [0.2, 1]], "duration_s": 0.2,
              "rounds": {"num_rounds": 2}}
    if message["request"]["prompt"] == "bad":
        answer = {"error": "ValueError: bad"}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def worker_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "small_worker.py").write_text(WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "small_worker"


async def test_a_worker_answers_fails_and_dies_with_its_last_words(worker_module: str) -> None:
    worker = await Worker.start(worker_module, [], None)
    assert worker.hello == {"target": {"model_id": "t"}}
    done = await worker.generate(Request("good", 0.0, 1, 2), {})
    assert done.token_ids == (1, 2)
    assert done.ttft_s == 0.1
    with pytest.raises(GenerationFailed, match="bad"):
        await worker.generate(Request("bad", 0.0, 1, 2), {})
    with pytest.raises(WorkerError, match="the model is broken"):
        await worker.call("die")
    await worker.stop()


async def test_a_worker_that_works_on_an_answer_is_not_waited_for(worker_module: str) -> None:
    worker = await Worker.start(worker_module, [], None)
    async with asyncio.timeout(5):
        asked = asyncio.create_task(worker.call("ponder"))
        await asyncio.sleep(0)  # it is sent
        asked.cancel()
        await asyncio.wait([asked])
        await worker.stop()
    assert asked.cancelled()


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="No module named"):
        await Worker.start("there_is_no_such_module", [], None)

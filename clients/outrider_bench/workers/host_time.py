"""Print what a round costs the host, without any model: ``python -m outrider_bench.workers.host_time``.

Both models are stubs whose forwards look their logits up in one table, so that every draft is right and all the time is
that of the services: packing as for a GPU, draws, trees, threads and, with the speculator in a process of its own,
messages. The verifier's generations are driven directly: what clients' streams cost is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import structlog
import torch
from torch import Tensor

from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.session import SessionSpec, Verdict
from outrider.models.cuda.inputs import Packer, Shape
from outrider.models.loading import LoadedModel, load_model
from outrider.models.packing import Segment
from outrider.models.runner import Runner
from outrider.speculator.service import SpeculatorService
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.generation import Generation
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings

WAYS = ("off", "speculator", "in-process")
"""Plain decoding, a speculator in a process of its own, and one in the verifier's process."""
MAX_NUM_SESSIONS = 64
SHAPES = (Shape(128), Shape(MAX_NUM_SESSIONS * 64))
"""Those of forwards that decode, and of those that read prompts, all of them at once."""
QUERIES_PER_KEY = 4
"""Those of Qwen3-8B."""
WARM_UP_TOKENS = 64
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StubRunner:
    """A runner whose forwards keep the books and compute nothing: the logits of a row depend on its token alone."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._packer = Packer(runner.pool, QUERIES_PER_KEY, SHAPES, runner.max_context_len)
        self._table = torch.randn(runner.vocab_size, runner.vocab_size, generator=torch.Generator().manual_seed(1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, segments: Sequence[Segment], **_options: Any) -> Tensor:
        """See `Runner.forward`."""
        num_rows_of_all = sum(len(segment.token_ids) for segment in segments)
        self._packer.begin(next(shape for shape in SHAPES if num_rows_of_all <= shape.rows))
        wanted: list[int] = []
        for segment in segments:
            length, num_rows = segment.cache.length, len(segment.token_ids)
            segment.cache.reserve(length + num_rows)
            position_ids = segment.position_ids or range(length, length + num_rows)
            assert self._packer.add(segment, position_ids, 0, num_rows)
            segment.cache.append(position_ids)
            wanted.extend(segment.token_ids[num_rows - segment.num_logits :])
        self._packer.finish(range(len(wanted)))
        return self._table[wanted]


class Cost(NamedTuple):
    """Costs of a forward of the target with all that belongs to it, in milliseconds."""

    wall_ms: float
    engine_cpu_ms: float
    """CPU time of the thread that the target's engine is: what stands between two forwards of a GPU."""
    verifier_cpu_ms: float
    speculator_cpu_ms: float
    """CPU time of a speculator in a process of its own; the one in process is part of the verifier's."""
    tokens: float
    """Tokens of all sessions."""


def stub_model(name: str) -> LoadedModel:
    """Load a demo model and take its arithmetic away."""
    model = load_model(name, dtype="float32", num_tokens=MAX_NUM_SESSIONS * 1024, num_sessions=MAX_NUM_SESSIONS)
    return replace(model, runner=StubRunner(model.runner))  # type: ignore[arg-type]  # it runs as one does


async def measure(way: str, num_sessions: int, num_tokens: int, method: Method = Method.SPECULATIVE) -> Cost:
    """Run so many generations side by side, after a short one of each; `method` is that of all ways but off."""
    method = Method.OFF if way == "off" else method
    with _speculator(way) as (address, process):
        settings = VerifierSettings.model_validate(
            {
                "drafter": "in-process" if way == "in-process" else "speculator",
                "speculator": address,
                "max_num_sessions": MAX_NUM_SESSIONS,
            }
        )
        draft = stub_model("demo/draft") if way == "in-process" else None
        service = VerifierService(settings, stub_model("demo/target"), {1: 5.0}, draft_model=draft)
        await service.load()
        try:
            await _generate_all(service, method, num_sessions, WARM_UP_TOKENS)
            assert service.serving is not None
            counts = service.serving.engine.counts
            num_before = counts.forwards.num_observations
            before = _times_s(process)
            await _generate_all(service, method, num_sessions, num_tokens)
            after = _times_s(process)
            num_forwards = counts.forwards.num_observations - num_before
        finally:
            await service.close()
    wall_ms, engine_ms, verifier_ms, speculator_ms = (
        1e3 * (end - begin) / num_forwards for begin, end in zip(before, after, strict=True)
    )
    return Cost(wall_ms, engine_ms, verifier_ms, speculator_ms, num_sessions * num_tokens / num_forwards)


def _times_s(process: subprocess.Popen[str] | None) -> tuple[float, float, float, float]:
    """Return the time by the clock, and the CPU time of the engine's thread, of this process and of the other."""
    engine = next(thread for thread in threading.enumerate() if thread.name == "verifier-engine")
    assert engine.ident is not None, "it runs"
    engine_s = time.clock_gettime(time.pthread_getcpuclockid(engine.ident))
    return time.perf_counter(), engine_s, time.process_time(), _cpu_s(process)


async def _generate_all(service: VerifierService, method: Method, num_sessions: int, num_tokens: int) -> None:
    assert service.serving is not None
    speculation = SpeculationParams(method, num_speculative_tokens=5, lookahead=32)

    async def generate(number: int) -> None:
        assert service.serving is not None
        spec = SessionSpec(
            session_id=f"{num_tokens}-{number}",
            prompt_token_ids=tuple(range(10 + number, 74 + number)),
            sampling=SamplingParams(seed=number, temperature=0.0),
            speculation=speculation,
            vocab_size=service.serving.model.vocab_size,
            max_tokens=num_tokens,
        )
        generation = Generation(spec, service.serving.engine, service.serving.speculators, None)
        try:
            async for event in generation.events():
                assert isinstance(event, Verdict)
        finally:
            generation.close()

    await asyncio.gather(*map(generate, range(num_sessions)))


@contextmanager
def _speculator(way: str) -> Iterator[tuple[str, subprocess.Popen[str] | None]]:
    """Run a speculator in a process of its own, if the way asks for one; give its address, and the process."""
    if way != "speculator":
        yield "", None
        return
    command = [sys.executable, "-m", "outrider_bench.workers.host_time", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process
        finally:
            process.kill()


def _cpu_s(process: subprocess.Popen[str] | None) -> float:
    if process is None:
        return 0.0
    # The second field is a name in brackets, which may hold blanks.
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def _serve() -> None:
    """Serve drafts of the stub until the process is killed."""
    settings = SpeculatorSettings.model_validate({"max_num_sessions": MAX_NUM_SESSIONS, "keep_warm_ms": 0})
    service = SpeculatorService(settings, stub_model("demo/draft"))
    await service.load()
    server = grpc.aio.server()
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", default="1,8,32")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    methods = [method.value for method in Method]
    parser.add_argument("--method", choices=methods, default="speculative", help="that of all ways but off")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    if options.serve:
        asyncio.run(_serve())
        return
    method = Method(options.method)
    titles = ("sessions", "ms a round", "engine's CPU", "CPU ms", "+ speculator", "us/token", "tokens")
    print(f"{'way':12}" + "".join(f"{title:>{2 + len(title)}}" for title in titles))
    for way in options.ways.split(","):
        for num_sessions in map(int, options.sessions.split(",")):
            cost = asyncio.run(measure(way, num_sessions, options.tokens, method))
            us = 1e3 * (cost.verifier_cpu_ms + cost.speculator_cpu_ms) / cost.tokens
            print(
                f"{way:12}{num_sessions:10}{cost.wall_ms:12.2f}{cost.engine_cpu_ms:14.2f}{cost.verifier_cpu_ms:8.2f}"
                f"{cost.speculator_cpu_ms:14.2f}{us:10.0f}{cost.tokens:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Print what a round costs the host, without any model: ``python -m outrider_bench.workers.host_time``.

Both models are stubs whose forwards look their logits up in one table, so that every draft is right. The target's take
the time that they are given, on a device that works on by itself, and the draft model's none. All else is the time of
the services: packing as for a GPU, draws, trees, threads and, with the speculator in a process of its own, messages.
The verifier's generations are driven directly: what clients' streams cost is left out.
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import grpc
import structlog
import torch
from torch import Tensor

from outrider.core.costs import ForwardTimes
from outrider.core.methods import METHODS, OFF, SPECULATIVE
from outrider.core.params import SamplingParams
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import Method, SpeculationParams
from outrider.models.cuda.inputs import Packer, Shape
from outrider.models.draws import DrawnTokens
from outrider.models.loading import LoadedModel, load_model
from outrider.models.packing import Segment, filled_in
from outrider.models.runner import Runner
from outrider.models.sampling import Sampler
from outrider.server.process import SWITCH_INTERVAL_S, freeze_gc
from outrider.speculator.service import SpeculatorService
from outrider.speculator.settings import SpeculatorSettings
from outrider.verifier.engine import Engine
from outrider.verifier.generation import Generation
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings

WAYS = ("alone", "off", "speculator", "in-process")
"""Plain decoding by the target's engine alone, without other threads at the interpreter; the same next to the event
loop, as in a service; a speculator in its own process, and one in the verifier's process."""
MAX_NUM_SESSIONS = 64
SHAPES = (Shape(128), Shape(MAX_NUM_SESSIONS * 64))
"""Shapes of forwards that decode, and of forwards that read the prompts of all sessions at once."""
QUERIES_PER_KEY = 4
"""That of Qwen3-8B."""
WARM_UP_TOKENS = 64
SPIN_S = 2e-4
"""Time before the end of a wait from which on it polls without a pause."""
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class StubDevice:
    """A device that works asynchronously, and takes the same time for all forwards of equally many rows. Has a
    stopwatch."""

    def __init__(self, forward_ms: float, row_us: float = 0.0) -> None:
        """
        Args:
            forward_ms: Time of each forward.
            row_us: Additional time of each of its rows.
        """
        self._forward_ms, self._row_us = forward_ms, row_us
        self.busy_s = 0.0
        """Total time of all forwards so far."""
        self.free_at = 0.0
        """Time at which it will have finished all queued work."""

    def forward_ms(self, num_rows: int) -> float:
        """Returns the time of a forward."""
        return self._forward_ms + self._row_us * num_rows / 1e3

    def begin(self, num_rows: int) -> None:
        """Queues a forward."""
        time_s = self.forward_ms(num_rows) / 1e3
        self.busy_s += time_s
        self.free_at = max(time.perf_counter(), self.free_at) + time_s

    def start(self) -> StubTiming:
        """See `Stopwatch`."""
        return StubTiming(self)


class StubTiming:
    """The time that a stub of a device takes for a forward."""

    def __init__(self, device: StubDevice) -> None:
        self._device = device
        # Like an event: now, or after everything that is queued.
        self._begun = self._ended = max(time.perf_counter(), device.free_at)

    def stop(self) -> None:
        """See `Timing`."""
        self._ended = self._device.free_at

    def elapsed_ms(self) -> float:
        """See `Timing`."""
        return (self._ended - self._begun) * 1e3


class LateTokens(DrawnTokens):
    """Tokens that become available at a given time."""

    def __init__(self, on_device: Tensor, at: float) -> None:
        super().__init__(on_device)
        self._at = at

    def wait(self) -> list[int]:
        """See `DrawnTokens`."""
        # Sleep overshoots, so the end of the wait is polled, to the microsecond and without holding the interpreter.
        time.sleep(max(0.0, self._at - time.perf_counter() - SPIN_S))
        while time.perf_counter() < self._at:
            time.sleep(0)
        return super().wait()


class StubSampler(Sampler):
    """A sampler whose draws are available when the device has finished its queue."""

    def __init__(self, device: StubDevice) -> None:
        super().__init__()
        self._device = device

    def begin(self, *of_rows: Any) -> DrawnTokens:
        """See `Sampler.begin`."""
        return LateTokens(super().begin(*of_rows).on_device, self._device.free_at)


class StubRunner:
    """A runner whose forwards keep the books and compute nothing: the logits of a row depend on its token alone."""

    def __init__(self, runner: Runner, device: StubDevice) -> None:
        self._runner, self._device = runner, device
        self._packer = Packer(runner.pool, QUERIES_PER_KEY, SHAPES, runner.max_context_len)
        self._table = torch.randn(runner.vocab_size, runner.vocab_size, generator=torch.Generator().manual_seed(1))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, segments: Sequence[Segment], *, drawn: Tensor | None = None, **_options: Any) -> Tensor:
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
        self._device.begin(num_rows_of_all)
        rows = torch.tensor(wanted, dtype=torch.long)
        return self._table[rows if drawn is None else filled_in(rows, drawn)]


class Cost(NamedTuple):
    """Costs of a target forward, including all work for it, in milliseconds."""

    wall_ms: float
    device_ms: float
    """Time that the device took."""
    gap_ms: float
    """Mean time from the end of a forward until the next one is queued, which is a GPU's idle time. Rounds that wait
    for drafts are excluded."""
    engine_cpu_ms: float
    """CPU time of the target engine's thread."""
    verifier_cpu_ms: float
    speculator_cpu_ms: float
    """CPU time of a speculator in its own process; an in-process one is part of the verifier's."""
    tokens: float
    """Tokens of all sessions."""


def stub_model(name: str, device: StubDevice) -> LoadedModel:
    """Loads a demo model and removes its arithmetic."""
    model = load_model(name, dtype="float32", num_tokens=MAX_NUM_SESSIONS * 1024, num_sessions=MAX_NUM_SESSIONS)
    return replace(model, runner=StubRunner(model.runner, device))  # type: ignore[arg-type]  # has what a runner has


async def measure(
    way: str,
    num_sessions: int,
    num_tokens: int,
    method: Method = SPECULATIVE,
    forward_ms: float = 0.0,
    row_us: float = 0.0,
) -> Cost:
    """Runs so many concurrent generations, after a short one of each.

    Args:
        way: One of `WAYS`.
        num_sessions: Number of generations.
        num_tokens: Tokens of each.
        method: Method of the ways that draft.
        forward_ms: Time of each of the target's forwards.
        row_us: Additional time of each of their rows.
    """
    target = StubDevice(forward_ms, row_us)
    if way == "alone":
        return _measure_alone(target, num_sessions, num_tokens)
    method = OFF if way == "off" else method
    with _speculator(way) as (address, process):
        settings = VerifierSettings.model_validate(
            {
                "drafter": "in-process" if way == "in-process" else "speculator",
                "speculator": address,
                "max_num_sessions": MAX_NUM_SESSIONS,
            }
        )
        draft = stub_model("demo/draft", StubDevice(0.0)) if way == "in-process" else None
        service = VerifierService(settings, stub_model("demo/target", target), _times_of(target), draft_model=draft)
        await service.load()
        freeze_gc()  # as services do
        try:
            assert service.serving is not None
            engine = service.serving.engine
            use_device(engine, target)
            await _generate_all(service, method, num_sessions, WARM_UP_TOKENS)
            counted, before = _counted(engine, target), _times_s(process)
            await _generate_all(service, method, num_sessions, num_tokens)
            after = _times_s(process)
        finally:
            await service.close()
    return _cost(_counted(engine, target), counted, before, after, num_sessions * num_tokens)


def _times_of(device: StubDevice) -> dict[int, float]:
    """Returns the times of forwards by rows, as an engine would have measured them; for a device that takes no time,
    made-up ones, because they must be positive."""
    return {num_rows: device.forward_ms(num_rows) or 5.0 for num_rows in (1, 1024)}


def use_device(engine: Engine, device: StubDevice) -> None:
    """Makes an engine use this device, which works asynchronously as a GPU does."""
    engine.overlaps, engine.stopwatch, engine.sampler = True, device, StubSampler(device)


def _measure_alone(device: StubDevice, num_sessions: int, num_tokens: int) -> Cost:
    """Steps by hand an engine whose verdicts go nowhere."""
    model = stub_model("demo/target", device)
    loop = SimpleNamespace(call_soon_threadsafe=lambda *_: None)
    engine = Engine(
        model, cast(Any, loop), forward_times=ForwardTimes(_times_of(device)), max_num_sessions=MAX_NUM_SESSIONS
    )
    engine.stop()  # its thread
    use_device(engine, device)
    freeze_gc()
    listener = SimpleNamespace(on_admitted=None, on_verdict=None, on_failure=None)
    for tokens in (WARM_UP_TOKENS, num_tokens):
        for number in range(num_sessions):
            engine.open(_spec(OFF, number, tokens, model.vocab_size), cast(Any, listener))
        engine.take_posted(0.0)
        counted, before = _counted(engine, device), (time.perf_counter(), time.thread_time(), time.process_time(), 0.0)
        while engine.sessions:
            engine.turn(time.perf_counter())
        after = (time.perf_counter(), time.thread_time(), time.process_time(), 0.0)
    return _cost(_counted(engine, device), counted, before, after, num_sessions * num_tokens)


def _counted(engine: Engine, device: StubDevice) -> tuple[int, float, int, float]:
    """Returns the number of forwards so far and their time, the number of gaps between them and their time, in
    seconds."""
    counts = engine.counts
    return counts.forwards.num_observations, device.busy_s, counts.gaps.num_observations, counts.gaps.total


def _cost(
    counted: tuple[int, float, int, float],
    counted_before: tuple[int, float, int, float],
    before: Sequence[float],
    after: Sequence[float],
    num_tokens: int,
) -> Cost:
    num_forwards, busy_s, num_gaps, gaps_s = (now - then for now, then in zip(counted, counted_before, strict=True))
    per_forward = [1e3 * (end - begin) / num_forwards for begin, end in zip(before, after, strict=True)]
    wall_ms, engine_ms, verifier_ms, speculator_ms = per_forward
    gap_ms = 1e3 * gaps_s / num_gaps if num_gaps else 0.0
    device_ms = 1e3 * busy_s / num_forwards
    return Cost(wall_ms, device_ms, gap_ms, engine_ms, verifier_ms, speculator_ms, num_tokens / num_forwards)


def _times_s(process: subprocess.Popen[str] | None) -> tuple[float, float, float, float]:
    """Returns the wall-clock time, and the CPU time of the engine's thread, of this process and of the other one."""
    engine = next(thread for thread in threading.enumerate() if thread.name == "verifier-engine")
    assert engine.ident is not None, "it runs"
    engine_s = time.clock_gettime(time.pthread_getcpuclockid(engine.ident))
    return time.perf_counter(), engine_s, time.process_time(), _cpu_s(process)


async def _generate_all(service: VerifierService, method: Method, num_sessions: int, num_tokens: int) -> None:
    async def generate(number: int) -> None:
        assert service.serving is not None
        spec = _spec(method, number, num_tokens, service.serving.model.vocab_size)
        generation = Generation(spec, service.serving.engine, service.serving.speculators, None)
        try:
            async for event in generation.events():
                assert isinstance(event, Verdict)
        finally:
            generation.close()

    await asyncio.gather(*map(generate, range(num_sessions)))


def _spec(method: Method, number: int, num_tokens: int, vocab_size: int) -> SessionSpec:
    return SessionSpec(
        session_id=f"{num_tokens}-{number}",
        prompt_token_ids=tuple(range(10 + number, 74 + number)),
        sampling=SamplingParams(seed=number, temperature=0.0),
        speculation=SpeculationParams(method, num_speculative_tokens=5, lookahead=32),
        vocab_size=vocab_size,
        max_tokens=num_tokens,
    )


@contextmanager
def _speculator(way: str) -> Iterator[tuple[str, subprocess.Popen[str] | None]]:
    """Runs a speculator in its own process if the way needs one; yields its address, and the process."""
    if way != "speculator":
        yield "", None
        return
    command = [sys.executable, "-m", "outrider_bench.workers.host_time", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            # Before its address it prints the steps of its start.
            lines = (line.strip() for line in process.stdout)
            yield next(line for line in lines if not line.startswith("step: ")), process
        finally:
            process.kill()


def _cpu_s(process: subprocess.Popen[str] | None) -> float:
    if process is None:
        return 0.0
    # The second field is a name in parentheses, which may contain blanks.
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def _serve() -> None:
    """Serves drafts of the stub until the process is killed."""
    settings = SpeculatorSettings.model_validate({"max_num_sessions": MAX_NUM_SESSIONS, "keep_warm_ms": 0})
    service = SpeculatorService(settings, stub_model("demo/draft", StubDevice(0.0)))
    await service.load()
    freeze_gc()
    server = grpc.aio.server()
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def chosen_ways(parser: argparse.ArgumentParser, names: str, known: Collection[str]) -> list[str]:
    """Returns the ways of a comma-separated list; ends the process with an error if one is unknown."""
    ways = names.split(",")
    if unknown := set(ways) - set(known):
        parser.error(f"--ways must be of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return ways


def run_as_services_do() -> None:
    """Sets up this process, which logs nothing but warnings."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    torch.set_num_threads(1)
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", default="1,8,32")
    parser.add_argument("--ways", default=",".join(WAYS), help="of " + ", ".join(WAYS))
    methods = list(METHODS)
    parser.add_argument("--method", choices=methods, default="speculative", help="that of the ways that draft")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--forward-ms", type=float, default=5.0, help="time of each of the target's forwards")
    parser.add_argument("--row-us", type=float, default=0.0, help="time of each of their rows beside that")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    ways = chosen_ways(parser, options.ways, WAYS)
    run_as_services_do()
    if options.serve:
        asyncio.run(_serve())
        return
    method = METHODS[options.method]
    titles = (
        "sessions",
        "ms a forward",
        "host adds",
        "GPU waits",
        "engine's CPU",
        "CPU ms",
        "+ speculator",
        "us/token",
        "tokens",
        "tokens/s",
    )
    print(f"{'way':12}" + "".join(f"{title:>{2 + len(title)}}" for title in titles))
    for way in ways:
        for num_sessions in map(int, options.sessions.split(",")):
            cost = asyncio.run(measure(way, num_sessions, options.tokens, method, options.forward_ms, options.row_us))
            us = 1e3 * (cost.verifier_cpu_ms + cost.speculator_cpu_ms) / cost.tokens
            print(
                f"{way:12}{num_sessions:10}{cost.wall_ms:14.2f}{cost.wall_ms - cost.device_ms:11.2f}"
                f"{cost.gap_ms:11.2f}{cost.engine_cpu_ms:14.2f}{cost.verifier_cpu_ms:8.2f}"
                f"{cost.speculator_cpu_ms:14.2f}{us:10.0f}{cost.tokens:8.1f}{1e3 * cost.tokens / cost.wall_ms:10.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()

"""Print what methods bring on a GPU that both models share: ``python -m outrider_bench.workers.shared_gpu``.

No GPU is needed: both models are stubs that look their logits up, on a device that takes its time
(`outrider_bench.workers.host_time`). A step of the draft model waits for that time, and several steps are asked for at
once, as a graph makes them. Beside a forward of the target a step is slow, and makes the forward longer by what it
takes alone. By default times are about those of an H200 with models of 8 and 0.6 billion parameters in bfloat16.

Where the next token is hard, the draft model prefers another one by a little, and is not sure of it.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.core.methods import AUTO, BEST_FIRST, OFF, OPT_TREE, RETRIEVAL, SPECULATIVE
from outrider.core.methods.best_first import BestFirstParams
from outrider.core.params import Rows, SamplingParams, Source
from outrider.core.session import SessionSpec, Verdict
from outrider.core.speculation import SpeculationParams
from outrider.models.cuda.graphs import Results
from outrider.models.cuda.inputs import Shape, loop_lens
from outrider.models.cuda.rows import MAX_NUM_BEST
from outrider.models.loading import LoadedModel, load_model
from outrider.models.packing import Segment
from outrider.models.runner import Runner
from outrider.server.process import freeze_gc
from outrider.verifier.generation import Generation
from outrider.verifier.service import VerifierService
from outrider.verifier.settings import VerifierSettings
from outrider_bench.workers.host_time import (
    MAX_NUM_SESSIONS,
    SPIN_S,
    WARM_UP_TOKENS,
    StubDevice,
    StubRunner,
    chosen_ways,
    run_as_services_do,
    stub_model,
    use_device,
)
from outrider_bench.workers.packing_time import HostLoop

OWN_SOURCES = (Source.RECYCLED, Source.POOL)
"""Sources of retrieval that need no datastore."""
_IN_TURNS = SpeculationParams(BEST_FIRST, 12, 64, rows=Rows.TREE, own=(BestFirstParams(serial=True),))
WAYS = {
    "off": SpeculationParams(OFF),
    "speculative": SpeculationParams(SPECULATIVE, 12, 64, 0.2),
    "opt-tree": SpeculationParams(OPT_TREE, 12, 64, 0.2, rows=Rows.TREE),
    "best-first": _IN_TURNS,
    "ahead": SpeculationParams(BEST_FIRST, 12, 64, rows=Rows.TREE),
    "auto": SpeculationParams(AUTO, 12, 64, rows=Rows.TREE),
    "retrieval": SpeculationParams(RETRIEVAL, 12, 64, sources=OWN_SOURCES),
    "retrieving": replace(_IN_TURNS, retrieval=True, sources=OWN_SOURCES),
}
"""Parameters by name: `best-first` takes turns with the target, as it does on such a GPU; `ahead` is the same method
while it drafts ahead, and `retrieving` while it also retrieves."""
SHARPNESS = 3.0
"""Factor of the table's logits: without it neither model would be sure of anything."""
SURER, LESS_SURE = 1.5, 0.25
"""Logits that the draft model adds to its best token where it is right, and to another one where it is not."""


class SharedDevice(StubDevice):
    """A device that both models share."""

    def __init__(self, forward_ms: float, row_us: float, draft_ms: float, draft_row_us: float, slowed: float) -> None:
        """
        Args:
            forward_ms: Time of each of the target's forwards.
            row_us: Additional time of each of their rows.
            draft_ms: Time of a step of the draft model.
            draft_row_us: Additional time of each of its sessions.
            slowed: Factor of that time next to a forward of the target.
        """
        super().__init__(forward_ms, row_us)
        self._draft_ms, self._draft_row_us, self._slowed = draft_ms, draft_row_us, slowed
        self.num_steps = 0
        """Steps of the draft model so far."""

    def begin_steps(self, num_sessions: int, num_steps: int) -> float:
        """Queues steps of the draft model; returns when they will be done."""
        self.num_steps += num_steps
        now = time.perf_counter()
        left = num_steps * (self._draft_ms + self._draft_row_us * num_sessions / 1e3) / 1e3
        # Steps next to the target's forwards make these longer.
        beside = min(left, max(0.0, self.free_at - now) / self._slowed)
        self.free_at += beside
        return now + self._slowed * beside + left - beside

    def wait(self, end: float) -> None:
        """Returns when steps are done."""
        # To the microsecond, as other waits for a device.
        time.sleep(max(0.0, end - time.perf_counter() - SPIN_S))
        while time.perf_counter() < end:
            time.sleep(0)


class StubLoop(HostLoop):
    """A loop that looks up the tokens of its steps."""

    def __init__(self, runner: Runner, device: SharedDevice, table: Tensor) -> None:
        """
        Args:
            runner: Keeps the books.
            device: The target's.
            table: Logits that follow each token: float32 [vocab, vocab].
        """
        super().__init__(runner.pool, runner.max_context_len, runner.vocab_size)
        self._device, best = device, table.topk(MAX_NUM_BEST, dim=1)
        self._best = torch.stack((best.indices.int(), best.values.view(torch.int32)))
        self._token_ids = torch.empty(0, dtype=torch.long)
        self._ends_at = 0.0

    def _lay_out(self, shape: Shape, steps: Any, segments: Sequence[Segment], *draws: Any) -> int:
        count = super()._lay_out(shape, steps, segments, *draws)
        self._token_ids = torch.tensor([segment.token_ids[-1] for segment in segments[:count]])
        return count

    def _compute(self, shape: Shape, steps: Any) -> Results:
        token_ids, found = self._token_ids, []
        for _ in range(steps.length):
            found.append(self._best[:, token_ids])
            token_ids = found[-1][0, :, 0].long()
        self._ends_at = self._device.begin_steps(len(token_ids), steps.length)
        return (torch.stack(found),)

    def _read(self, best: Tensor) -> Tensor:
        self._device.wait(self._ends_at)
        return best


class StubDraftRunner(StubRunner):
    """A draft model's runner, whose steps take their time on the target's device."""

    has_loop = True

    def __init__(self, runner: Runner, device: SharedDevice, table: Tensor) -> None:
        """See `StubLoop`."""
        super().__init__(runner, StubDevice(0.0))
        self._shared, self._table = device, table
        self._loop = StubLoop(runner, device, table)
        self.draft = self._loop.run

    def make_loop(self) -> None:
        """Does nothing: there is one."""

    def loop_lens(self, num_steps: int) -> list[int]:
        """See `Runner.loop_lens`."""
        return loop_lens(num_steps)

    def forward(self, segments: Sequence[Segment], *, drawn: Tensor | None = None, **options: Any) -> Tensor:
        """See `Runner.forward`."""
        logits = super().forward(segments, drawn=drawn, **options)
        if len(logits):  # reading a prompt takes no time here
            self._shared.wait(self._shared.begin_steps(len(segments), 1))
        return logits


class Pace(NamedTuple):
    """The speed of a method."""

    tokens_per_s: float
    forward_ms: float
    """Time from one forward of the target to the next."""
    tokens_per_round: float
    steps_per_forward: float
    """Steps of the draft model."""


def models(device: SharedDevice, hard: float) -> tuple[LoadedModel, LoadedModel]:
    """Returns stubs of a target and a draft model.

    Args:
        device: The device of both.
        hard: Share of the tokens after which the draft model prefers another token than the target.
    """
    target = stub_model("demo/target", device)
    runner: Any = target.runner
    table = runner._table = SHARPNESS * runner._table
    chance, rows = torch.Generator().manual_seed(7), torch.arange(len(table))
    best = table.topk(3, dim=1)
    is_hard = torch.rand(len(table), generator=chance) < hard
    # The target's second or third.
    other = best.indices[rows, 1 + (torch.rand(len(table), generator=chance) < 0.4).long()]
    of_draft = table.clone()
    of_draft[rows[is_hard], other[is_hard]] = best.values[is_hard, 0] + LESS_SURE
    of_draft[rows[~is_hard], best.indices[~is_hard, 0]] += SURER
    draft = load_model("demo/draft", dtype="float32", num_tokens=MAX_NUM_SESSIONS * 1024, num_sessions=MAX_NUM_SESSIONS)
    stub: Any = StubDraftRunner(draft.runner, device, of_draft)
    return target, replace(draft, runner=stub)


async def measure(
    params: SpeculationParams, device: SharedDevice, num_sessions: int, num_tokens: int, hard: float
) -> Pace:
    """Runs so many concurrent greedy generations, after a short one of each.

    Args:
        params: How they draft.
        device: The device of both models.
        num_sessions: Number of generations.
        num_tokens: Tokens of each.
        hard: See `models`.
    """
    target, draft = models(device, hard)
    flags = {"drafter": "in-process", "max_num_sessions": MAX_NUM_SESSIONS}
    # Both are declared to be on one GPU, so their engines share a thread.
    settings = VerifierSettings.model_validate(flags | {"device": "cuda:0"})
    times_ms = {num_rows: device.forward_ms(num_rows) for num_rows in (1, 16, 32, 64, 128, 256)}
    service = VerifierService(settings, target, times_ms, draft_model=draft)
    await service.load()
    assert service.serving is not None
    engine, speculators = service.serving.engine, service.serving.speculators
    use_device(engine, device)
    freeze_gc()  # as services do
    num_rounds = 0

    async def generate(number: int, count: int) -> None:
        nonlocal num_rounds
        prompt = tuple(10 + (7 * number + 3 * place * place) % (target.vocab_size - 20) for place in range(64))
        sampling = SamplingParams(seed=number, temperature=0.0)
        spec = SessionSpec(f"{count}-{number}", prompt, sampling, params, target.vocab_size, count, shares_gpu=True)
        generation = Generation(spec, engine, speculators, None)
        try:
            async for event in generation.events():
                assert isinstance(event, Verdict)
        finally:
            generation.close()
        num_rounds += generation.statistics.num_rounds

    try:
        await asyncio.gather(*(generate(number, WARM_UP_TOKENS) for number in range(num_sessions)))
        num_rounds, num_steps, num_forwards = 0, device.num_steps, engine.counts.forwards.num_observations
        started = time.perf_counter()
        await asyncio.gather(*(generate(number, num_tokens) for number in range(num_sessions)))
        taken_s = time.perf_counter() - started
    finally:
        await service.close()
    num_forwards = engine.counts.forwards.num_observations - num_forwards
    num_tokens *= num_sessions
    return Pace(
        num_tokens / taken_s,
        1e3 * taken_s / num_forwards,
        num_tokens / num_rounds,
        (device.num_steps - num_steps) / num_forwards,
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ways", default="off,speculative,best-first,ahead", help="of " + ", ".join(WAYS))
    parser.add_argument("--sessions", default="1,8,32")
    parser.add_argument("--hard", default="0.1,0.25", help="shares of the tokens that the draft model does not prefer")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--forward-ms", type=float, default=4.9, help="time of each of the target's forwards")
    parser.add_argument("--row-us", type=float, default=31.0, help="time of each of their rows beside that")
    parser.add_argument("--draft-ms", type=float, default=1.3, help="time of a step of the draft model")
    parser.add_argument("--draft-row-us", type=float, default=50.0, help="time of each of its sessions beside that")
    parser.add_argument("--slowed", type=float, default=6.5, help="factor of that time beside a forward of the target")
    options = parser.parse_args()
    ways = chosen_ways(parser, options.ways, WAYS)
    run_as_services_do()
    titles = ("hard", "sessions", "tokens/s", "ms a forward", "tokens a round", "draft steps")
    print(f"{'way':12}" + "".join(f"{title:>{2 + len(title)}}" for title in titles))
    for hard in map(float, options.hard.split(",")):
        for num_sessions in map(int, options.sessions.split(",")):
            for way in ways:
                device = SharedDevice(
                    options.forward_ms, options.row_us, options.draft_ms, options.draft_row_us, options.slowed
                )
                pace = asyncio.run(measure(WAYS[way], device, num_sessions, options.tokens, hard))
                print(
                    f"{way:12}{hard:6.2f}{num_sessions:10}{pace.tokens_per_s:10.0f}{pace.forward_ms:14.1f}"
                    f"{pace.tokens_per_round:16.2f}{pace.steps_per_forward:13.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()

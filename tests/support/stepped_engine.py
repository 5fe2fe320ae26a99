"""A verifier's engine that a test steps by hand, on a device that tells what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.core.costs import ForwardTimes
from outrider.core.params import SamplingParams
from outrider.core.reports import ReportParams
from outrider.core.session import SessionSpec
from outrider.core.speculation import Method, SpeculationParams
from outrider.models.acceptance import PendingRounds
from outrider.models.draws import RowDraws
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.timing import HostStopwatch
from outrider.verifier.engine import Engine
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings

OPENED_AT = 100.0
GREEDY = SamplingParams(temperature=0.0)


def stepped_engine() -> Engine:
    """An engine whose thread has ended: the test plans in its place."""
    shape = CacheShape(num_layers=1, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    runner = SimpleNamespace(pool=KVPool(shape, 64), vocab_size=1000)
    loop = SimpleNamespace(call_soon_threadsafe=lambda *call: None)
    engine = Engine(
        cast(Any, SimpleNamespace(runner=runner, tokenizer=SimpleNamespace(backend_tokenizer=None))),
        cast(Any, loop),
        forward_times=ForwardTimes({1: 10.0}),
        stopwatch=HostStopwatch(),
    )
    engine.stop()
    return engine


def pool_of(engine: Engine) -> KVPool:
    return cast(Any, engine.residency)._pool  # type: ignore[no-any-return]


def add_session(
    engine: Engine,
    method: Method,
    num_prompt_tokens: int,
    num_cached: int,
    sampling: SamplingParams = GREEDY,
    *,
    shares_gpu: bool = False,
    has_drafter: bool = True,
    report: ReportParams | None = None,
    **fields: Any,
) -> VerifySession:
    name = f"{len(engine.sessions)}"
    prompt = tuple(range(num_prompt_tokens))
    speculation = SpeculationParams(method, 8, **fields)
    spec = SessionSpec(
        name,
        prompt,
        sampling,
        speculation,
        vocab_size=1000,
        max_tokens=1000,
        shares_gpu=shares_gpu,
        report=report or ReportParams(),
    )
    cache, listener = pool_of(engine).new_cache(), SimpleNamespace(on_admitted=None)
    timings = EngineTimings(ForwardTimes({1: 10.0}))
    counts = RoundCounts()
    session = VerifySession(
        spec, cast(Any, listener), cache, timings, counts, tiers=None, now=OPENED_AT, has_drafter=has_drafter
    )
    engine.sessions[name] = session
    engine.residency.add(session)
    for admitted in engine.residency.admit():
        admitted.enter(OPENED_AT)
    if num_cached:
        cache.reserve(num_cached)
        cache.append(range(num_cached))
    return session


class SteppedDevice:
    """A device that draws 7 for each row, and notes the rows that it is asked for: runner, stopwatch and sampler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.forward_ms = 10.0
        self.logits = torch.zeros(1000, 1000)
        self.draws: RowDraws | None = None
        """What the latest forward was told of its draws."""
        self.rows: list[list[tuple[int, int, int]]] = []
        """Of each forward: token id or placeholder, slot, and output index of the draw after the row; -1 without."""
        self.num_waits = 0
        self.unsettled: list[int] = []
        """Rows of the next flight that is waited for that the host draws for."""
        pool = pool_of(engine)
        runner = SimpleNamespace(forward=self._forward, vocab_size=1000, new_cache=lambda salt: pool.new_cache())
        monkeypatch.setattr(engine, "_runner", runner)
        monkeypatch.setattr(engine, "stopwatch", self)
        monkeypatch.setattr(engine, "_loop", SimpleNamespace(call_soon_threadsafe=lambda *_: None))
        monkeypatch.setattr("outrider.verifier.engine.begin_rounds", self._begin)

    def start(self) -> SteppedDevice:
        return self

    def stop(self) -> None:
        """Ends the measurement."""

    def elapsed_ms(self) -> float:
        return self.forward_ms

    def _forward(self, segments: list[Any], draws: RowDraws | None, drawn: object) -> torch.Tensor:
        self.draws = draws
        indices = iter(draws.output_indices if draws is not None else ())
        rows = []
        for segment in segments:
            first, count = segment.cache.length, len(segment.token_ids)
            for number, token_id in enumerate(segment.token_ids):
                is_drawn = number >= count - segment.num_logits
                rows.append((token_id, first + number, next(indices, -1) if is_drawn else -1))
            segment.cache.append(range(first, first + count))
        self.rows.append(rows)
        return self.logits[: sum(segment.num_logits for segment in segments)]

    def _begin(self, sampler: object, logits: object, rounds: list[Any], draws: object) -> PendingRounds:
        drawn = SimpleNamespace(on_device=self.logits, unsettled=())

        def wait() -> list[list[int]]:
            self.num_waits += 1
            drawn.unsettled, self.unsettled = self.unsettled, []
            return [[7] * len(each.output_indices) for each in rounds]

        is_known = any(each.adjustments for each in rounds)
        return PendingRounds(wait, None if is_known else cast(Any, drawn))

"""A verifier's engine that a test steps by hand, on a device that tells what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.core.costs import ForwardTimes
from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.session import SessionSpec
from outrider.models.cuda.rows import RowDraws
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.ratio import PendingRounds
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
    **fields: Any,
) -> VerifySession:
    name = f"{len(engine.sessions)}"
    prompt = tuple(range(num_prompt_tokens))
    speculation = SpeculationParams(method, 8, **fields)
    spec = SessionSpec(name, prompt, sampling, speculation, vocab_size=1000, max_tokens=1000, shares_gpu=shares_gpu)
    cache, listener = pool_of(engine).new_cache(), SimpleNamespace(on_admitted=None)
    timings = EngineTimings(ForwardTimes({1: 10.0}))
    session = VerifySession(spec, cast(Any, listener), cache, timings, RoundCounts(), tiers=None, now=OPENED_AT)
    engine.sessions[name] = session
    engine.residency.add(session)
    for admitted in engine.residency.admit():
        admitted.enter(OPENED_AT)
    if num_cached:
        cache.reserve(num_cached)
        cache.append(range(num_cached))
    return session


class Asynchronous:
    """A device that is told of a forward and of its draws at once, and ends both when they are read: runner, stopwatch
    and sampler."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine) -> None:
        self.happened: list[str] = []
        self.forward_ms = 10.0
        self.logits = torch.zeros(0)
        self.draws: RowDraws | None = None
        self.unsettled: list[int] = []
        """Rows of the next forward that is read that the host draws for."""
        monkeypatch.setattr(engine, "_runner", SimpleNamespace(forward=self._forward))
        monkeypatch.setattr(engine, "stopwatch", self)
        monkeypatch.setattr(engine, "_loop", SimpleNamespace(call_soon_threadsafe=lambda *_: None))
        monkeypatch.setattr("outrider.verifier.engine.begin_rounds", self._begin)

    def start(self) -> Asynchronous:
        self.happened.append("start")
        return self

    def stop(self) -> None:
        self.happened.append("stop")

    def elapsed_ms(self) -> float:
        self.happened.append("elapsed")
        return self.forward_ms

    def _forward(self, segments: list[Any], draws: RowDraws | None, drawn: object) -> torch.Tensor:
        self.happened.append("forward")
        self.draws = draws
        for segment in segments:
            first = segment.cache.length
            segment.cache.append(range(first, first + len(segment.token_ids)))
        return self.logits

    def _begin(self, sampler: object, logits: object, rounds: list[Any], draws: object) -> PendingRounds:
        drawn = SimpleNamespace(on_device=self.logits, unsettled=())

        def wait() -> list[list[int]]:
            self.happened.append("draws")
            drawn.unsettled, self.unsettled = self.unsettled, []
            return [[7] * len(each.output_indices) for each in rounds]

        is_known = any(each.adjustments for each in rounds)
        return PendingRounds(wait, None if is_known else cast(Any, drawn))


class TellingLoop:
    """An event loop that notes in a device's list when it is told of verdicts, and of how many."""

    def __init__(self, device: Asynchronous) -> None:
        self._happened = device.happened

    def call_soon_threadsafe(self, action: object, *args: Any) -> None:
        self._happened.append(f"told of {len(args[0])}")

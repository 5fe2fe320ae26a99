"""A verifier's engine whose batches a test plans step by step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from outrider.core.costs import ForwardTimes
from outrider.core.params import SamplingParams
from outrider.core.reports import ReportParams
from outrider.core.session import SessionSpec
from outrider.core.speculation import Method, SpeculationParams
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.models.timing import HostStopwatch
from outrider.rounds.timings import EngineTimings
from outrider.verifier.engine import Engine
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession

OPENED_AT = 100.0
GREEDY = SamplingParams(temperature=0.0)


def stepped_engine() -> Engine:
    """An engine whose thread has ended; the test plans instead."""
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

"""Which sessions share the next forward, and how long some are held back for the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.core.costs import ForwardTimes
from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.session import SessionSpec
from outrider.models.kv_cache import CacheShape, KVPool
from outrider.verifier.engine import HOLD_SHARE, Engine
from outrider.verifier.metrics import RoundCounts
from outrider.verifier.session import VerifySession
from outrider.verifier.timings import EngineTimings

FORWARD_TIMES = ForwardTimes({1: 10.0})
HOLD_S = HOLD_SHARE * 0.01
OPENED_AT = 100.0


@pytest.fixture
def engine() -> Engine:
    """An engine whose thread has ended: the test plans in its place."""
    shape = CacheShape(num_layers=1, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
    runner = SimpleNamespace(pool=KVPool(shape, 64))
    loop = SimpleNamespace(call_soon_threadsafe=lambda *call: None)
    engine = Engine(cast(Any, SimpleNamespace(runner=runner)), cast(Any, loop), forward_times=FORWARD_TIMES)
    engine.stop()
    return engine


def pool_of(engine: Engine) -> KVPool:
    return cast(Any, engine)._runner.pool  # type: ignore[no-any-return]


def add_session(engine: Engine, method: Method, num_prompt_tokens: int, num_cached: int) -> VerifySession:
    name = f"{len(engine.sessions)}"
    prompt = tuple(range(num_prompt_tokens))
    sampling = SamplingParams(temperature=0.0)
    spec = SessionSpec(name, prompt, sampling, SpeculationParams(method, 8), vocab_size=1000, max_tokens=1000)
    cache, listener = pool_of(engine).new_cache(), SimpleNamespace(on_admitted=None)
    session = VerifySession(
        spec, cast(Any, listener), cache, EngineTimings(FORWARD_TIMES), RoundCounts(), tiers=None, now=OPENED_AT
    )
    engine.sessions[name] = session
    engine.residency.add(session)
    for admitted in engine.residency.admit():
        admitted.enter(OPENED_AT)
    if num_cached:
        cache.reserve(num_cached)
        cache.append(range(num_cached))
    return session


def test_each_piece_of_a_prompt_is_held_back_for_a_quarter_of_a_forward_and_no_longer(engine: Engine) -> None:
    prefilling = add_session(engine, Method.OFF, 300, 0)
    waiting = add_session(engine, Method.SPECULATIVE, 3, 2)
    for ready_at in (OPENED_AT, OPENED_AT + 0.05, OPENED_AT + 0.1):
        assert waiting.deadline > ready_at + HOLD_S
        assert engine.plan(ready_at) == ([], pytest.approx(HOLD_S))
        assert engine.plan(ready_at + HOLD_S / 2) == ([], pytest.approx(HOLD_S / 2))
        assert engine.plan(ready_at + 1.01 * HOLD_S) == ([prefilling], None)
        segment = prefilling.segment(50, 0)
        prefilling.cache.reserve(prefilling.cache.length + len(segment.token_ids))
        prefilling.cache.append(range(prefilling.cache.length, prefilling.cache.length + len(segment.token_ids)))


def test_a_piece_of_a_prompt_is_not_held_back_beyond_the_deadline_of_those_that_wait(engine: Engine) -> None:
    waiting = add_session(engine, Method.SPECULATIVE, 3, 2)
    prefilling = add_session(engine, Method.OFF, 300, 0)
    assert engine.plan(waiting.deadline - HOLD_S / 2) == ([], pytest.approx(HOLD_S / 2))
    assert engine.plan(waiting.deadline) == ([waiting, prefilling], None)

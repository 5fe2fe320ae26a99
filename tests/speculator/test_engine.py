"""The speculator's engine: its drafts are those of the draft model, whatever it does between two commits."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from outrider.core.params import Method, SamplingParams, SpeculationParams
from outrider.core.tree import Draft, DraftCost
from outrider.models.engine import MAX_FAILED_STEPS
from outrider.models.runner import Segment
from outrider.models.sampling import Sampler
from outrider.speculator.engine import Engine
from outrider.speculator.session import DraftSessionSpec
from tests.support.failing_runner import with_failing_runner
from tests.support.services import draft_model

PROMPT = tuple(range(100, 130))
SAMPLING = SamplingParams(seed=9, temperature=0.7)


class Collector:
    """Collects what a session is sent."""

    def __init__(self) -> None:
        self.drafts: queue.Queue[Draft] = queue.Queue()

    def send(self, draft: Draft, cost: DraftCost) -> None:
        assert cost.forward_us > 0
        self.drafts.put(draft)

    def fail(self) -> None:
        raise AssertionError("the engine failed")


@pytest.fixture(params=[0.0, 5.0], ids=["cold", "kept warm"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    running = Engine(draft_model(), prefill_chunk=16, keep_warm_s=request.param)
    yield running
    running.stop()


def spec(session_id: str) -> DraftSessionSpec:
    speculation = SpeculationParams(Method.SPECULATIVE, num_speculative_tokens=3, lookahead=3)
    return DraftSessionSpec(session_id, PROMPT, len(PROMPT), SAMPLING, speculation, draft_model().vocab_size)


def expected_chain(committed: tuple[int, ...]) -> list[int]:
    """Three tokens, each from a fresh forward over everything before it."""
    runner, tokens = draft_model().runner, list(committed)
    for _ in range(3):
        logits = runner.forward([Segment(runner.new_cache(), tokens, 1)])
        tokens.append(Sampler().candidates(logits, [SAMPLING], [len(tokens) - len(PROMPT)], 1)[0][0][0])
    return tokens[len(committed) :]


def test_each_commit_is_answered_with_the_draft_models_own_chain(engine: Engine) -> None:
    sink = Collector()
    engine.open(spec("s"), sink)
    assert list(sink.drafts.get(timeout=30).token_ids) == expected_chain(PROMPT)
    committed = PROMPT
    for tokens in ((7,), tuple(expected_chain((*PROMPT, 7))[:2]), (8, 9)):
        committed = (*committed, *tokens)
        engine.commit("s", tokens)
        draft = sink.drafts.get(timeout=30)
        while draft.base_len < len(committed):
            draft = sink.drafts.get(timeout=30)
        chain = expected_chain(committed)
        # After a commit that agrees with the chain, only its new end is sent.
        assert list(draft.token_ids) == chain[len(chain) - len(draft.token_ids) :]


def test_sessions_share_forwards_and_keep_their_own_chains(engine: Engine) -> None:
    sinks = [Collector() for _ in range(4)]
    for number, sink in enumerate(sinks):
        engine.open(spec(f"s{number}"), sink)
    expected = expected_chain(PROMPT)
    assert [list(sink.drafts.get(timeout=30).token_ids) for sink in sinks] == [expected] * 4


def test_a_commit_for_a_session_that_has_ended_does_nothing(engine: Engine) -> None:
    sink = Collector()
    engine.open(spec("s"), sink)
    sink.drafts.get(timeout=30)
    engine.close("s")
    engine.commit("s", (7,))
    again = Collector()
    engine.open(spec("t"), again)
    again.drafts.get(timeout=30)
    assert sink.drafts.empty()
    assert engine.num_sessions == 1


def test_an_engine_that_fails_every_step_says_so() -> None:
    model, runner = with_failing_runner(draft_model())
    runner.fails = lambda segments: True
    engine = Engine(model)
    for number in range(MAX_FAILED_STEPS):
        assert engine.fault() == ""
        failed = threading.Event()
        sink = Collector()
        sink.fail = failed.set  # type: ignore[method-assign]
        engine.open(spec(f"s{number}"), sink)
        assert failed.wait(30)
    engine.stop()
    assert engine.fault()
    assert runner.num_failed == MAX_FAILED_STEPS + 1

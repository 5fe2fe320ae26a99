"""The speculator's engine sends the draft model's drafts, whatever it does between two commits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from outrider.core.blocks import PrefixScope
from outrider.core.speculation import Steering
from outrider.models.engine import MAX_FAILED_STEPS
from outrider.speculator.engine import Engine
from tests.speculator.draft_sessions import PROMPT, Collector, expected_chain, spec
from tests.support.failing_runner import with_failing_runner
from tests.support.services import draft_model


@pytest.fixture(params=[0.0, 5.0], ids=["cold", "kept warm"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    running = Engine(draft_model(), prefill_chunk=16, keep_warm_s=request.param)
    yield running
    running.stop()


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
        # After a commit that agrees with the chain, only the chain's new end is sent.
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


@pytest.mark.parametrize(
    ("scope", "salts", "is_found"),
    [
        (PrefixScope.TENANT, ("a", "a"), True),
        (PrefixScope.TENANT, ("a", "b"), False),
        (PrefixScope.TENANT, ("", ""), False),
        (PrefixScope.GLOBAL, ("a", "b"), True),
        (PrefixScope.GLOBAL, ("a", ""), False),
        (PrefixScope.OFF, ("a", "a"), False),
    ],
)
def test_a_prompt_is_found_while_its_session_still_drafts_by_those_who_may(
    scope: PrefixScope, salts: tuple[str, str], is_found: bool
) -> None:
    engine = Engine(draft_model(), prefix_scope=scope)
    try:
        before = 0
        for number, salt in enumerate(salts):
            before = engine.residency.num_found_tokens
            sink = Collector()
            prompt = (*PROMPT[::-1], *PROMPT * 4, number)
            opening = replace(spec(f"s{number}"), committed_token_ids=prompt, num_prompt_tokens=len(prompt))
            engine.open(replace(opening, prefix_salt=salt), sink)
            sink.drafts.get(timeout=30)
        assert (engine.residency.num_found_tokens > before) == is_found
    finally:
        engine.stop()


def test_a_session_that_begins_paused_reads_nothing_before_it_is_steered() -> None:
    model, runner = with_failing_runner(draft_model())
    num_forwards = 0

    def count(segments: object) -> bool:
        nonlocal num_forwards
        num_forwards += 1
        return False

    runner.fails = count
    engine = Engine(model, keep_warm_s=60.0)
    sink, paused = Collector(), replace(spec("s"), begins_paused=True)
    engine.open(paused, sink)
    engine.commit("s", (7,))
    taken_in = threading.Event()
    # Posts are taken in before a turn, so the second one comes after a turn that had the first.
    for _ in range(2):
        taken_in.clear()
        engine.post("s", lambda _: taken_in.set())
        assert taken_in.wait(30)
    assert num_forwards == 0, "neither to read nor to stay warm"
    engine.steer("s", Steering(paused.speculation))
    draft = sink.drafts.get(timeout=30)
    engine.stop()
    assert list(draft.token_ids) == expected_chain((*PROMPT, 7))

"""The engine's loop: which rows a device is asked for while it is at others, and what a flight's verdicts are."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.core.methods import BEST_FIRST, OFF, RETRIEVAL
from outrider.core.params import SamplingParams, Source
from outrider.core.reports import LogprobsMode, ReportParams
from outrider.models.draws import RowDraws
from outrider.models.packing import placeholder
from outrider.verifier.engine import Engine
from outrider.verifier.session import VerifySession
from tests.support.stepped_engine import GREEDY, SteppedDevice, add_session

PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5)
"""With these the next draw depends on the whole text, so that no round is known before the last one's verdict."""
SAMPLED = SamplingParams(seed=4)


def run(engine: Engine, num_turns: int) -> None:
    for _ in range(num_turns):
        engine.turn(time.perf_counter())


def add_plain(engine: Engine, count: int = 1, length: int = 3) -> list[VerifySession]:
    return [add_session(engine, OFF, length, length - 1, SAMPLED) for _ in range(count)]


def outputs(*sessions: VerifySession) -> list[int]:
    return [session.generation.num_output_tokens for session in sessions]


def test_a_forward_is_told_before_it_runs_how_its_rows_are_drawn_from(engine: Engine, device: SteppedDevice) -> None:
    params = [SamplingParams(seed=5, temperature=0.7), GREEDY]
    for sampling in params:
        add_session(engine, OFF, 3, 2, sampling)
    run(engine, 1)
    assert device.draws == RowDraws(params, [0, 0])
    engine.close("0")
    run(engine, 2)
    # Their best tokens are all that is wanted.
    assert device.draws is None


def test_the_next_batch_is_launched_before_the_draws_of_a_flight_are_known(
    engine: Engine, overlapping: SteppedDevice
) -> None:
    short, long = *add_plain(engine), *add_plain(engine, length=5)
    run(engine, 3)
    # Token id or placeholder, slot, output index of the draw.
    assert overlapping.rows == [
        [(2, 2, 0), (4, 4, 0)],
        [(placeholder(0), 3, 1), (placeholder(1), 5, 1)],
        [(placeholder(0), 4, 2), (placeholder(1), 6, 2)],
    ]
    assert outputs(short, long) == [2, 2]


def test_without_overlap_the_next_batch_is_launched_after_the_verdicts(engine: Engine, device: SteppedDevice) -> None:
    (session,) = add_plain(engine)
    run(engine, 3)
    assert device.rows == [[(2, 2, 0)], [(7, 3, 1)]]
    assert outputs(session) == [1]


def test_a_session_that_ends_by_its_length_or_is_paused_has_no_next_row(
    engine: Engine, overlapping: SteppedDevice
) -> None:
    ending, paused, going = add_plain(engine, 3)
    ending.generation.spec = replace(ending.spec, max_tokens=1)
    run(engine, 1)
    paused.pause()
    run(engine, 1)
    assert overlapping.rows[1] == [(placeholder(2), 3, 1)]
    assert list(engine.sessions.values()) == [paused, going]
    assert outputs(paused, going) == [1, 1]


def test_the_row_of_a_text_that_a_stop_has_ended_is_wasted(engine: Engine, overlapping: SteppedDevice) -> None:
    ending, going = add_plain(engine, 2)
    ending.generation.spec = replace(ending.spec, stop_token_ids=frozenset({7}))
    run(engine, 2)
    assert len(overlapping.rows[1]) == 2
    assert list(engine.sessions.values()) == [going]
    run(engine, 1)
    assert overlapping.rows[2] == [(placeholder(1), 4, 2)]
    assert outputs(ending, going) == [0, 2]


def test_a_session_that_comes_during_a_flight_joins_the_next_one(engine: Engine, overlapping: SteppedDevice) -> None:
    (first,) = add_plain(engine)
    run(engine, 1)
    (second,) = add_plain(engine, length=9)
    run(engine, 2)
    assert overlapping.rows[1:] == [
        [(placeholder(0), 3, 1), (8, 8, 0)],
        [(placeholder(0), 4, 2), (placeholder(1), 9, 1)],
    ]
    assert outputs(first, second) == [2, 1]


def test_pieces_of_a_prompt_follow_each_other_while_others_decode(engine: Engine, overlapping: SteppedDevice) -> None:
    (decoding,) = add_plain(engine)
    reading = add_session(engine, OFF, 600, 0, SAMPLED)
    run(engine, 4)
    lengths = [len(rows) for rows in overlapping.rows]
    assert lengths == [1 + 256, 1 + 256, 1 + 88, 2]
    assert outputs(decoding, reading) == [3, 1]


def test_a_row_whose_token_the_host_has_drawn_is_run_again(engine: Engine, overlapping: SteppedDevice) -> None:
    left, going = add_plain(engine, 2)
    overlapping.unsettled = [0]
    run(engine, 2)
    assert outputs(left, going) == [1, 1]
    run(engine, 1)
    assert outputs(left, going) == [1, 2]
    run(engine, 1)
    assert overlapping.rows[2] == [(7, 3, 1), (7, 4, 2)]


def test_a_session_that_is_closed_while_its_rows_are_in_flight_breaks_no_step(
    engine: Engine, overlapping: SteppedDevice
) -> None:
    closed, other = add_plain(engine, 2)
    run(engine, 1)
    engine.close(closed.spec.session_id)
    run(engine, 3)
    assert list(engine.sessions.values()) == [other]
    assert outputs(other) == [3]


def test_a_flight_that_nobody_waits_for_is_not_waited_for(engine: Engine, overlapping: SteppedDevice) -> None:
    (session,) = add_plain(engine)
    run(engine, 1)
    engine.close(session.spec.session_id)
    engine.take_posted(0.0)
    run(engine, 1)
    assert engine.turn(time.perf_counter()) is None
    assert overlapping.num_waits == 0


def drafting(engine: Engine) -> None:
    add_session(engine, BEST_FIRST, 3, 2)


def retrieving(engine: Engine) -> None:
    add_session(engine, RETRIEVAL, 3, 2)


def penalised(engine: Engine) -> None:
    add_session(engine, OFF, 3, 2, PENALISED)


def reading_processed_logprobs(engine: Engine) -> None:
    add_session(engine, OFF, 3, 2, report=ReportParams(logprobs=1, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS))


def reporting_its_prompt(engine: Engine) -> None:
    # Its next row would be taken for the prompt's again.
    add_session(engine, OFF, 3, 0, report=ReportParams(prompt_logprobs=1))


@pytest.mark.parametrize(
    "add_other", [drafting, retrieving, penalised, reading_processed_logprobs, reporting_its_prompt]
)
def test_no_batch_is_launched_early_while_a_session_needs_the_verdict_first(
    engine: Engine, overlapping: SteppedDevice, add_other: Callable[[Engine], None]
) -> None:
    (plain,) = add_plain(engine)
    add_other(engine)
    run(engine, 2)
    assert len(overlapping.rows) == 1
    assert outputs(plain) == [1]


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_gap_is_between_two_forwards_that_wait_for_nothing_else(
    engine: Engine, device: SteppedDevice, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    monkeypatch.setattr(engine, "overlaps", overlaps)
    add_plain(engine)
    run(engine, 4)
    assert engine.counts.gaps.num_observations == (3 if overlaps else 1)


def test_the_gap_before_a_batch_that_was_launched_late_is_what_the_device_was_idle(
    engine: Engine, overlapping: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("outrider.verifier.engine.time", SimpleNamespace(perf_counter=lambda: clock.now))
    overlapping.forward_ms = 10_000.0
    add_plain(engine)
    gaps_s = []
    for clock.now in (100, 105, 125, 131):
        engine.turn(clock.now)
        gaps_s.append(engine.counts.gaps.total)
    # The first one is done after 10 seconds, the second one after 20; the third one is launched 5 later.
    assert gaps_s == [0, 0, 5, 5]


@pytest.mark.parametrize("overlaps", [True, False])
def test_there_is_no_gap_where_a_prompt_is_read(
    engine: Engine, device: SteppedDevice, monkeypatch: pytest.MonkeyPatch, *, overlaps: bool
) -> None:
    monkeypatch.setattr(engine, "overlaps", overlaps)
    add_session(engine, OFF, 900, 0)
    run(engine, 3 if overlaps else 6)  # pieces of its prompt have no draws
    assert engine.counts.gaps.num_observations == 0


@pytest.mark.parametrize(("num_cached", "is_learnt"), [(29, True), (0, False)], ids=["a round", "a whole prompt"])
def test_the_last_piece_of_a_prompt_is_no_measure_of_rounds(
    engine: Engine, device: SteppedDevice, num_cached: int, is_learnt: bool
) -> None:
    add_session(engine, OFF, 30, num_cached)
    device.forward_ms = 20.0
    run(engine, 2)
    assert (engine.timings.forward_ms.get(0.0) > 10.0) == is_learnt


def test_each_session_learns_from_its_own_rows_and_only_those_that_want_it(
    engine: Engine, device: SteppedDevice
) -> None:
    recycled = {"sources": (Source.RECYCLED,)}
    one, other = add_session(engine, RETRIEVAL, 8, 7, **recycled), add_session(engine, OFF, 8, 7)
    third = add_session(engine, RETRIEVAL, 8, 7, **recycled)
    device.logits = torch.zeros(3, 1000)
    for row in range(3):
        device.logits[row, 100 + row] = 5.0
    # The draw is 7, the last token of the prompts: so what is known to follow that token is drafted next.
    run(engine, 2)
    assert [list(each.generation.tree.root.children) for each in (one, other, third)] == [[100], [], [102]]


def test_a_listener_hears_of_its_verdicts_before_its_failure(
    engine: Engine, overlapping: SteppedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    class Listener:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: told.append(name)

    loop = SimpleNamespace(call_soon_threadsafe=lambda call, *arguments: call(*arguments))
    monkeypatch.setattr(engine, "_loop", loop)
    session = add_session(engine, OFF, 3, 2, PENALISED)
    engine.close(session.spec.session_id)
    engine.open(replace(session.spec, session_id="opened"), cast(Any, Listener()))
    engine.take_posted(0.0)
    run(engine, 2)
    with engine.isolated("opened"):
        raise RuntimeError
    assert told == ["on_admitted", "on_verdict", "on_failure"]

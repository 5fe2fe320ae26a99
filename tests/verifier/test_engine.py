"""Which sessions share the next forward, and how long some are held back for the others."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from outrider.core.auto.strategies import PLAIN, Strategy
from outrider.core.costs import HOLD_SHARE
from outrider.core.params import Method, SamplingParams, Source
from outrider.core.reports import LogprobsMode, ReportParams, TokenLogprobs
from outrider.core.session import Verdict
from outrider.core.statistics import Absence, Peer
from outrider.core.tree import Draft
from outrider.models.cuda.rows import RowDraws
from outrider.verifier.engine import Engine
from outrider.verifier.listener import PeerRequests
from outrider.verifier.reports import SessionReports
from outrider.verifier.session import VerifySession
from tests.support.stepped_engine import GREEDY, OPENED_AT, Asynchronous, TellingLoop, add_session, pool_of

HOLD_S = HOLD_SHARE * 0.01
PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5)
"""With these the next draw depends on the whole text, so that no round is known before the last one's verdict."""


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


def draft_to(session: VerifySession, num_tokens: int) -> None:
    """A chain of tokens that the draft model is sure of, behind all that is committed."""
    tokens = list(range(100, 100 + num_tokens))
    draft = Draft(len(session.session.committed), 1, [0] + [1] * (num_tokens - 1), tokens, [], Source.DRAFT)
    session.add_draft(draft, OPENED_AT)


def add_drafted(
    engine: Engine, method: Method = Method.SPECULATIVE, num_prompt_tokens: int = 3, *, shares_gpu: bool = True
) -> VerifySession:
    """A session whose draft model has read its prompt, and has drafted nothing behind it yet."""
    session = add_session(engine, method, num_prompt_tokens, 2, shares_gpu=shares_gpu)
    session.attach()
    session.add_draft(Draft(2, 1, [0], [2], [], Source.DRAFT), OPENED_AT)
    return session


def test_who_shares_a_gpu_with_the_draft_model_is_verified_when_all_drafts_are_there(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    late = OPENED_AT + 10 * HOLD_S
    assert engine.plan(late) == ([], pytest.approx(second.deadline - late))
    draft_to(second, 8)
    assert engine.plan(late) == ([first, second], None)


def test_a_draft_that_does_not_come_holds_the_others_until_its_deadline(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    assert engine.plan(second.deadline) == ([first, second], None)


def test_nobody_waits_for_a_drafter_that_is_lost(engine: Engine) -> None:
    first, second = add_drafted(engine), add_drafted(engine)
    draft_to(first, 8)
    assert engine.plan(OPENED_AT)[0] == []
    second.detach(Peer.SPECULATOR, Absence.LOST)
    assert engine.plan(OPENED_AT) == ([first, second], None)


def another_gpu(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine, shares_gpu=False), add_drafted(engine, shares_gpu=False)]


def a_plain_one(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_session(engine, Method.OFF, 3, 2, shares_gpu=True)]


def one_that_is_drafted_ahead(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_drafted(engine, Method.PEARL)]


def one_that_reads_its_prompt(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_drafted(engine), add_drafted(engine, num_prompt_tokens=300)]


def a_draft_model_that_reads(engine: Engine) -> list[VerifySession]:
    return [add_drafted(engine), add_session(engine, Method.SPECULATIVE, 3, 2, shares_gpu=True)]


@pytest.mark.parametrize(
    "sharing",
    [
        another_gpu,
        a_plain_one,
        one_that_is_drafted_ahead,
        one_that_reads_its_prompt,
        a_draft_model_that_reads,
    ],
)
def test_none_is_held_back_for_drafts_but_among_those_that_take_turns_with_the_draft_model(
    engine: Engine, sharing: Callable[[Engine], list[VerifySession]]
) -> None:
    drafted, waiting, *others = sharing(engine)
    for session in (drafted, *(each for each in others if each.is_drafting and not each.is_prefilling)):
        draft_to(session, 8)
    assert engine.plan(OPENED_AT) == ([], pytest.approx(HOLD_S))
    assert engine.plan(OPENED_AT + 1.01 * HOLD_S) == ([drafted, *others], None)
    assert not waiting.nodes


def test_a_forward_is_timed_when_its_draws_are_there(engine: Engine, device: Asynchronous) -> None:
    session = add_session(engine, Method.OFF, 3, 2)
    device.forward_ms = 250.0
    engine.step([session])
    assert device.happened == ["start", "forward", "stop", "draws", "elapsed"]
    assert session.session.statistics.round_times[0].forward_ms == 250.0


def test_a_forward_is_told_before_it_runs_how_its_rows_are_drawn_from(engine: Engine, device: Asynchronous) -> None:
    params = [SamplingParams(seed=5, temperature=0.7), GREEDY]
    engine.step([add_session(engine, Method.OFF, 3, 2, sampling) for sampling in params])
    assert device.draws == RowDraws(params, [0, 0])
    engine.step([add_session(engine, Method.OFF, 3, 2)])
    # Their best tokens are all that is wanted.
    assert device.draws is None


def test_a_session_that_is_closed_during_a_forward_breaks_no_step(engine: Engine, device: Asynchronous) -> None:
    closed, other = add_session(engine, Method.OFF, 3, 2), add_session(engine, Method.OFF, 3, 2)
    engine.close(closed.session.spec.session_id)
    engine.step([closed, other])
    assert list(engine.sessions.values()) == [other]
    assert other.session.num_output_tokens == 1


def test_the_loop_is_told_of_verdicts_while_the_device_is_at_the_next_forward(engine: Engine, late: list[str]) -> None:
    sessions = [add_session(engine, Method.OFF, 3, 2, PENALISED) for _ in range(2)]
    engine.step(sessions)
    engine.take_posted(0.0)
    assert late == ["start", "forward", "stop", "draws", "elapsed"]
    late.clear()
    engine.step(sessions)
    assert late == ["start", "forward", "stop", "told of 2", "draws", "elapsed"]


def test_without_a_next_forward_the_loop_is_told_before_the_engine_waits(engine: Engine, late: list[str]) -> None:
    engine.step([add_session(engine, Method.OFF, 3, 2, PENALISED)])
    engine.take_posted(0.001)
    assert late[-1] == "told of 1"
    assert late.count("told of 1") == 1


def test_what_was_posted_is_done_behind_the_verdicts_so_far(engine: Engine, late: list[str]) -> None:
    session = add_session(engine, Method.OFF, 3, 2, PENALISED)
    engine.step([session])
    engine.post(session.session.spec.session_id, lambda _: late.append("done"))
    engine.take_posted(0.0)
    assert late[-2:] == ["told of 1", "done"]


def test_a_failure_is_told_behind_the_verdicts_so_far(engine: Engine, late: list[str]) -> None:
    session = add_session(engine, Method.OFF, 3, 2, PENALISED)
    session_id = session.session.spec.session_id
    cast(Any, engine)._on_failure[session_id] = lambda is_own: late.append("failed")
    engine.step([session])
    with engine.isolated(session_id):
        raise RuntimeError
    assert late[-2:] == ["told of 1", "failed"]


def test_who_fails_at_its_verdict_is_lost_alone(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sessions = [add_session(engine, Method.OFF, 3, 2, PENALISED) for _ in range(3)]
    monkeypatch.setattr(sessions[1], "apply", lambda *_, **__: 1 / 0)
    engine.step(sessions)
    engine.settle()
    assert late[-1] == "told of 2"
    assert list(engine.sessions.values()) == [sessions[0], sessions[2]]


def test_the_loop_is_told_at_once_where_somebody_drafts(engine: Engine, late: list[str]) -> None:
    session = add_session(engine, Method.BEST_FIRST, 3, 2)
    session.attach()
    engine.step([add_session(engine, Method.OFF, 3, 2, PENALISED), session])
    assert late[-1] == "told of 2"


def test_the_loop_is_told_at_once_where_the_datastore_is_asked(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = add_session(engine, Method.RETRIEVAL, 3, 2)
    monkeypatch.setattr(session, "peer_requests", lambda: PeerRequests(question=(7,)))
    engine.step([add_session(engine, Method.OFF, 3, 2, PENALISED), session])
    assert late[-1] == "told of 2"


def test_a_device_that_works_on_is_asked_for_the_next_forward_before_it_is_waited_for(
    engine: Engine, late: list[str]
) -> None:
    sessions = [add_session(engine, Method.OFF, 3, 2, SamplingParams(seed=4)) for _ in range(2)]
    asked = ["start", "forward", "stop"]
    engine.step(sessions)
    assert late == [*asked, *asked, "draws", "elapsed", "told of 2"]
    assert [session.session.num_output_tokens for session in sessions] == [1, 1]
    for count in (2, 3):
        late.clear()
        assert engine.plan(OPENED_AT) == (sessions, None)
        engine.step(sessions)
        assert late == [*asked, "draws", "elapsed", "told of 2"]
        assert [session.session.num_output_tokens for session in sessions] == [count] * 2
        assert [session.cache.length - session.num_missing for session in sessions] == [3 + count] * 2


SAMPLED = SamplingParams(seed=4)


def test_a_row_that_is_asked_for_ahead_goes_on_from_the_draw_and_is_drawn_from_as_the_next_one(
    engine: Engine, rows: list[list[tuple[object, ...]]]
) -> None:
    sessions = [add_session(engine, Method.OFF, length, length - 1, SAMPLED) for length in (3, 5)]
    engine.step(sessions)
    engine.step([])
    assert rows == [
        [(2, False, 2, 0), (4, False, 4, 0)],
        [(0, True, 3, 1), (1, True, 5, 1)],
        [(0, True, 4, 2), (1, True, 6, 2)],
    ]


def test_who_ends_by_its_length_or_is_paused_is_not_asked_for_ahead(
    engine: Engine, rows: list[list[tuple[object, ...]]]
) -> None:
    ending, paused, going = (add_session(engine, Method.OFF, 3, 2, SAMPLED) for _ in range(3))
    ending.session.spec = replace(ending.session.spec, max_tokens=1)
    paused.is_paused = True
    engine.step([ending, paused, going])
    assert rows[1] == [(2, True, 3, 1)]
    assert list(engine.sessions.values()) == [paused, going]
    assert [session.session.num_output_tokens for session in (paused, going)] == [1, 1]


def test_a_row_of_a_session_that_has_ended_is_in_vain(engine: Engine, rows: list[list[tuple[object, ...]]]) -> None:
    ending, going = (add_session(engine, Method.OFF, 3, 2, SAMPLED) for _ in range(2))
    ending.session.spec = replace(ending.session.spec, stop_token_ids=frozenset({7}))
    engine.step([ending, going])
    assert len(rows[1]) == 2
    assert list(engine.sessions.values()) == [going]
    engine.step([])
    assert rows[2] == [(1, True, 4, 2)]
    assert (ending.session.num_output_tokens, going.session.num_output_tokens) == (0, 2)


def test_who_comes_during_a_forward_is_in_the_one_behind_the_next(
    engine: Engine, rows: list[list[tuple[object, ...]]]
) -> None:
    first = add_session(engine, Method.OFF, 3, 2, SAMPLED)
    engine.step([first])
    second = add_session(engine, Method.OFF, 9, 8, SAMPLED)
    assert engine.plan(OPENED_AT) == ([first], None)
    engine.step([first])
    assert len(rows) == 2
    assert engine.plan(time.perf_counter()) == ([first, second], None)
    engine.step([first, second])
    assert rows[2:] == [[(7, False, 4, 2), (8, False, 8, 0)], [(0, True, 5, 3), (1, True, 9, 1)]]


def test_a_row_whose_token_the_host_has_drawn_is_run_again(
    engine: Engine, device: Asynchronous, rows: list[list[tuple[object, ...]]]
) -> None:
    left, going = (add_session(engine, Method.OFF, 3, 2, SAMPLED) for _ in range(2))
    device.unsettled = [0]
    engine.step([left, going])
    assert [session.session.num_output_tokens for session in (left, going)] == [1, 1]
    engine.step([])
    assert [session.session.num_output_tokens for session in (left, going)] == [1, 2]
    assert engine.plan(time.perf_counter()) == ([left, going], None)
    engine.step([left, going])
    assert rows[2] == [(7, False, 3, 1), (7, False, 4, 2)]
    assert [session.session.num_output_tokens for session in (left, going)] == [2, 3]


def test_while_others_wait_for_room_forwards_are_asked_for_ahead(
    engine: Engine, rows: list[list[tuple[object, ...]]]
) -> None:
    sessions = [add_session(engine, Method.OFF, 3, 2, SAMPLED) for _ in range(2)]
    engine.residency.preempt(sessions[1])
    engine.step(sessions[:1])
    assert engine.residency.waiting
    assert len(rows) == 2


@pytest.mark.parametrize("works_on", [True, False])
def test_a_gap_is_between_two_forwards_that_wait_for_nothing_else(
    engine: Engine, device: Asynchronous, monkeypatch: pytest.MonkeyPatch, *, works_on: bool
) -> None:
    monkeypatch.setattr(engine, "works_on", works_on)
    session = add_session(engine, Method.OFF, 3, 2)
    for num_gaps in (1, 2):
        engine.step([session])
        assert engine.plan(time.perf_counter()) == ([session], None)
        assert engine.counts.gaps.num_observations == num_gaps - (not works_on)


def test_a_device_that_was_asked_ahead_has_waited_since_it_had_done_all_that_it_was_asked_for(
    engine: Engine, late: list[str], device: Asynchronous, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=OPENED_AT)
    monkeypatch.setattr("outrider.verifier.engine.time", SimpleNamespace(perf_counter=lambda: clock.now))
    device.forward_ms = 10_000.0
    session = add_session(engine, Method.OFF, 3, 2)
    gaps_s = []
    # The first two forwards are asked for at once, and the second one is done after 20 seconds.
    for after_s in (0, 15, 35):
        clock.now = OPENED_AT + after_s
        engine.step([session])
        gaps_s.append(engine.counts.gaps.total)
    assert gaps_s == [0, 0, 5]


def test_there_is_no_gap_where_a_draft_a_request_or_a_prompt_was_waited_for(
    engine: Engine, device: Asynchronous
) -> None:
    drafting = add_session(engine, Method.SPECULATIVE, 3, 2)
    engine.step([drafting])
    assert engine.plan(drafting.deadline - 1e-4) == ([], pytest.approx(1e-4))
    engine.step([drafting])
    engine.close("0")
    engine.take_posted(0.0)
    assert engine.plan(OPENED_AT) == ([], None)
    reading = add_session(engine, Method.OFF, 900, 0)
    for _ in range(3):
        engine.step([reading])  # its prompt: these forwards have no draws
    assert engine.counts.gaps.num_observations == 0


def choose(session: VerifySession, strategy: Strategy) -> None:
    """Has a session choose this from now on."""
    cast(Any, session.choice).choose = lambda: setattr(session.choice, "strategy", strategy)
    session.choice.choose()


def test_who_has_chosen_plain_rounds_is_asked_for_ahead_as_well(engine: Engine, late: list[str]) -> None:
    session = add_session(engine, Method.AUTO, 3, 2)
    choose(session, PLAIN)
    for count in (1, 2, 3):
        engine.step([session])
        assert late[-6:] == ["start", "forward", "stop", "draws", "elapsed", "told of 1"]
        assert session.session.num_output_tokens == count
    (plain,) = session.choice.decisions()
    assert (plain.strategy, plain.num_rounds) == (PLAIN, 2)  # the first one has read the prompt


def test_what_is_chosen_while_a_plain_round_runs_is_judged_by_those_behind_it(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = add_session(engine, Method.AUTO, 3, 2)
    choose(session, PLAIN)
    engine.step([session])
    learnt: list[Strategy] = []
    monkeypatch.setattr(session.choice, "observe", lambda *_, **__: learnt.append(session.choice.strategy))
    found = Strategy(Method.RETRIEVAL, retrieval=True)
    cast(Any, session.choice).choose = lambda: setattr(session.choice, "strategy", found)
    engine.step([session])
    assert engine.plan(OPENED_AT) == ([session], None)
    engine.step([session])
    assert engine._ahead is None
    engine.step([session])
    # Of its rounds the third ran before it was chosen.
    assert learnt == [PLAIN, found]


def test_who_has_drafts_in_a_round_is_not_asked_for_ahead_if_its_drafter_has_left_since_they_came(
    engine: Engine, late: list[str]
) -> None:
    session = add_session(engine, Method.AUTO, 3, 2)
    session.add_draft(Draft(3, 1, [0], [7], [-0.1], Source.DRAFT), OPENED_AT)
    assert session.is_ready(OPENED_AT)
    assert session.nodes
    choose(session, PLAIN)
    engine.step([session])
    assert engine._ahead is None
    assert session.session.num_output_tokens == 2


@pytest.mark.parametrize("is_stop", [True, False], ids=["by a stop token", "by its length"])
def test_nobody_waits_for_a_row_of_a_text_that_has_ended(engine: Engine, late: list[str], *, is_stop: bool) -> None:
    going, ending = add_session(engine, Method.OFF, 3, 2), add_session(engine, Method.OFF, 3, 2)
    spec = ending.session.spec
    ending.session.spec = replace(spec, stop_token_ids=frozenset({7})) if is_stop else replace(spec, max_tokens=1)
    engine.step([going, ending])
    assert ending.session.finish_reason is not None
    assert engine.plan(OPENED_AT) == ([going], None)
    assert late[-1] == "told of 2"
    engine.close("0")
    engine.step([going])
    assert engine.plan(OPENED_AT) == ([], None)


def test_who_is_closed_while_its_next_row_is_computed_breaks_no_step(engine: Engine, late: list[str]) -> None:
    closed, other = (add_session(engine, Method.OFF, 3, 2) for _ in range(2))
    engine.step([closed, other])
    engine.close(closed.session.spec.session_id)
    engine.step([closed, other])
    assert (closed.session.num_output_tokens, other.session.num_output_tokens) == (1, 2)
    assert engine.plan(OPENED_AT) == ([other], None)


def test_who_is_paused_while_its_next_row_is_computed_has_no_row_behind_it(
    engine: Engine, rows: list[list[tuple[object, ...]]]
) -> None:
    paused, other = (add_session(engine, Method.OFF, 3, 2, SAMPLED) for _ in range(2))
    engine.post(paused.session.spec.session_id, lambda session: setattr(session, "is_paused", True))
    engine.step([paused, other])
    engine.step([])
    assert rows[2] == [(1, True, 4, 2)]
    assert paused.session.num_output_tokens == 2
    assert paused.num_missing == 1


@pytest.mark.parametrize(
    "kind",
    ["drafting", "retrieving", "penalised", "reading", "processed", "processed and over", "prompt", "no room"],
)
def test_a_forward_is_asked_for_ahead_only_if_it_is_known_to_be_the_next_one(
    engine: Engine, device: Asynchronous, late: list[str], kind: str
) -> None:
    plain = add_session(engine, Method.OFF, 3, 2)
    work = [plain]
    if kind == "no room":
        blocks = pool_of(engine).blocks
        plain.cache.append(range(2, 63))  # the row of now takes the last slot of its block
        plain.session.tree.commit(range(61))
        while blocks.num_free:
            blocks.allocate()
    elif kind == "reading":
        add_session(engine, Method.OFF, 300, 0)
    else:
        method = {"drafting": Method.BEST_FIRST, "retrieving": Method.RETRIEVAL}.get(kind, Method.OFF)
        other = add_session(engine, method, 3, 2, PENALISED if kind == "penalised" else GREEDY)
        work.append(other)
        device.logits = torch.zeros(2, 1000)
        if kind.startswith("processed"):
            max_tokens = 1 if "over" in kind else 9
            report = ReportParams(logprobs=1, logprobs_mode=LogprobsMode.PROCESSED_LOGPROBS)
            other.session.spec = replace(other.session.spec, report=report, max_tokens=max_tokens)
        elif kind == "prompt":
            # Its next row would be taken for the prompt's again.
            other.reports = SessionReports(
                replace(other.session.spec, report=ReportParams(prompt_logprobs=1)), stop_text=None
            )
            other.cache.truncate(0)
            device.logits = torch.zeros(4, 1000)
    engine.step(work)
    assert engine._ahead is None
    assert plain.session.num_output_tokens >= 1


def test_a_stop_has_no_log_probability_though_it_was_asked_for_with_the_draw(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts: list[Verdict] = []

    def tell(_action: object, deliveries: list[tuple[object, Verdict]]) -> None:
        verdicts.extend(each[1] for each in deliveries)

    monkeypatch.setattr(engine, "_loop", SimpleNamespace(call_soon_threadsafe=tell))
    found = TokenLogprobs(-0.5, 1, ())
    monkeypatch.setattr("outrider.verifier.engine.begin_logprobs", lambda *_: lambda: [found, found])
    going, ending = (add_session(engine, Method.OFF, 3, 2) for _ in range(2))
    spec = replace(going.session.spec, report=ReportParams(logprobs=0))
    going.session.spec, ending.session.spec = spec, replace(spec, stop_token_ids=frozenset({7}))
    engine.step([going, ending])
    engine.settle()
    assert [verdict.logprobs for verdict in verdicts] == [(found,), ()]


def test_a_processor_that_computes_itself_leaves_nothing_to_be_told_later(
    engine: Engine, device: Asynchronous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_loop", TellingLoop(device))
    engine.step([add_session(engine, Method.OFF, 3, 2)])
    assert device.happened[-1] == "told of 1"


def test_nothing_waits_for_a_piece_of_a_prompt(engine: Engine, device: Asynchronous) -> None:
    engine.step([add_session(engine, Method.OFF, 600, 0)])
    assert "elapsed" not in device.happened


@pytest.mark.parametrize(("num_cached", "is_learnt"), [(29, True), (0, False)], ids=["a round", "a whole prompt"])
def test_a_prompts_last_piece_is_no_measure_of_rounds(
    engine: Engine, device: Asynchronous, num_cached: int, is_learnt: bool
) -> None:
    session = add_session(engine, Method.OFF, 30, num_cached)
    device.forward_ms = 20.0
    engine.step([session])
    assert (engine._timings.forward_ms.get(0.0) > 10.0) == is_learnt


def test_what_a_drafter_slows_down_that_is_only_tried_is_no_measure_of_rounds(
    engine: Engine, device: Asynchronous
) -> None:
    session = add_session(engine, Method.AUTO, 30, 29)
    device.forward_ms = 20.0
    assert session.choice.is_probing
    engine.step([session])
    assert engine._timings.forward_ms.get(0.0) == 10.0


def test_who_shares_a_step_and_was_not_ready_counts_in_it_and_who_is_paused_does_not(
    engine: Engine, device: Asynchronous, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, late, paused = (add_session(engine, Method.AUTO, 30, 29) for _ in range(3))
    reading = add_session(engine, Method.AUTO, 300, 0)
    paused.is_paused = True
    told: list[int] = []
    monkeypatch.setattr(engine._timings, "end_step", lambda shares, *_, **__: told.append(len(shares)))
    assert not late.is_prefilling
    assert reading.is_prefilling
    engine.step([ready])
    assert told == [2]


def test_each_session_learns_from_its_own_rows_and_only_those_that_want_it(
    engine: Engine, device: Asynchronous
) -> None:
    recycled = {"sources": (Source.RECYCLED,)}
    one, other = add_session(engine, Method.RETRIEVAL, 8, 7, **recycled), add_session(engine, Method.OFF, 8, 7)
    third = add_session(engine, Method.RETRIEVAL, 8, 7, **recycled)
    device.logits = torch.zeros(3, 1000)
    for row in range(3):
        device.logits[row, 100 + row] = 5.0
    # The draw is 7, the last token of the prompts: so what is known behind that token is drafted next.
    engine.step([one, other, third])
    assert [list(each.session.tree.root.children) for each in (one, other, third)] == [[100], [], [102]]

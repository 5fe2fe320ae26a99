"""Two halves of a batch: when there are some, and that texts do not depend on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.costs import AttentionTimes, ForwardTimes
from outrider.core.params import Method, SamplingParams
from outrider.core.reports import ReportParams
from outrider.verifier.engine import Engine
from outrider.verifier.forward_planner import ForwardPlanner
from outrider.verifier.micro_batches import MAX_AGE, MIN_TIMES, HostTimes, MicroBatches
from outrider.verifier.session import VerifySession
from outrider_client.client import Client
from tests.support.crowded_pool import PROMPTS, crowded_model
from tests.support.services import running_verifier
from tests.support.stepped_engine import OPENED_AT, Asynchronous, add_session

TIMES = ForwardTimes({1: 5.0, 201: 7.0})
"""A device that takes 5 ms for a forward, and 10 us for each of its rows."""


def session_with(num_nodes: int = 5, *, length: int = 100, **fields: Any) -> VerifySession:
    generation = {"is_as_drawn": True, "decides_by_ratio": False, "report": ReportParams()} | fields
    return cast(
        Any,
        SimpleNamespace(
            is_prefilling=fields.get("is_prefilling", False),
            is_drafting=fields.get("is_drafting", False),
            takes_turns=fields.get("takes_turns", False),
            nodes=[None] * num_nodes,
            cache=SimpleNamespace(length=length),
            session=SimpleNamespace(
                is_as_drawn=generation["is_as_drawn"],
                decides_by_ratio=generation["decides_by_ratio"],
                spec=SimpleNamespace(report=generation["report"]),
            ),
        ),
    )


def after(*host_ms: tuple[float, int], times: ForwardTimes = TIMES) -> MicroBatches:
    """Micro-batches that know how long the host was at so many sessions, round after round."""
    micro_batches = MicroBatches(times)
    for time_ms, num_sessions in host_ms:
        add_rounds(micro_batches, time_ms, num_sessions)
    return micro_batches


def add_rounds(micro_batches: MicroBatches, time_ms: float, num_sessions: int, num_rounds: int = MIN_TIMES) -> None:
    for _ in range(num_rounds):
        micro_batches.begin_host_time(1.0, [session_with()] * num_sessions)
        micro_batches.end_host_time(1.0 + time_ms / 1e3)


def num_first(micro_batches: MicroBatches, sessions: list[VerifySession], max_num_nodes: int = 7) -> int:
    return len(micro_batches.first_of(sessions, max_num_nodes))


@pytest.mark.parametrize(("host_ms", "expected"), [(0.0, 24), (4.0, 24), (6.5, 12), (20.0, 12)])
def test_a_half_begins_where_the_host_takes_longer_than_another_forward(host_ms: float, expected: int) -> None:
    # 24 sessions of 6 rows: 6.43 ms together, 5.71 a half, and some more, as these times are only expected.
    sessions = [session_with() for _ in range(24)]
    micro_batches = after((host_ms, 24))
    assert micro_batches.first_of(sessions, 7) == sessions[:expected]


def test_all_begin_until_some_rounds_have_told_how_long_the_host_takes() -> None:
    micro_batches = after()
    for num_rounds in range(MIN_TIMES):
        assert num_first(micro_batches, [session_with()] * 24) == 24, num_rounds
        add_rounds(micro_batches, 20.0, 24, 1)
    assert num_first(micro_batches, [session_with()] * 24) == 12


def test_all_begin_again_when_it_is_long_ago_that_they_did() -> None:
    micro_batches = after((20.0, 24))
    add_rounds(micro_batches, 10.0, 12, MAX_AGE - MIN_TIMES)
    assert num_first(micro_batches, [session_with()] * 24) == 12
    add_rounds(micro_batches, 10.0, 12, 1)
    assert num_first(micro_batches, [session_with()] * 24) == 24
    add_rounds(micro_batches, 20.0, 24)
    assert num_first(micro_batches, [session_with()] * 24) == 12


def test_one_round_that_took_the_host_long_is_no_guide() -> None:
    micro_batches = after((1.0, 24))
    add_rounds(micro_batches, 100.0, 24, 2)
    assert num_first(micro_batches, [session_with()] * 24) == 24


def test_a_session_alone_is_no_batch() -> None:
    assert num_first(after((100.0, 1)), [session_with()]) == 1


def test_what_the_host_has_waited_for_is_no_work_of_its_own() -> None:
    micro_batches = after()
    for _ in range(MIN_TIMES):
        micro_batches.begin_host_time(1.0, [session_with()] * 24)
        micro_batches.forget_host_time()
        micro_batches.end_host_time(2.0)
    assert num_first(micro_batches, [session_with()] * 24) == 24


def test_rounds_without_drafts_say_nothing_of_those_with_some() -> None:
    micro_batches = after()
    for _ in range(MIN_TIMES):
        micro_batches.begin_host_time(1.0, [session_with(0)] * 24)
        micro_batches.end_host_time(2.0)
    assert num_first(micro_batches, [session_with()] * 24) == 24


def test_nodes_beyond_the_share_of_a_session_cost_nothing() -> None:
    # A forward of one row of each session takes 12.5 ms, and two halves 13; of 21 rows each, some 250 either way.
    steep = after((4.0, 24), times=ForwardTimes({1: 1.0, 201: 101.0}))
    assert num_first(steep, [session_with(20)] * 24, max_num_nodes=0) == 12
    assert num_first(steep, [session_with(20)] * 24, max_num_nodes=20) == 24


def test_a_half_attends_to_its_own_contexts_alone() -> None:
    times = ForwardTimes({1: 5.0, 201: 7.0}, attention=AttentionTimes(slot_ms=1e-4))
    # All contexts together take 24 ms, in one forward or in two.
    sessions = [session_with(length=10_000)] * 24
    assert num_first(after((6.5, 24), times=times), sessions) == 24
    assert num_first(after((9.5, 24), times=times), sessions) == 12


def test_one_session_beside_many_is_no_half() -> None:
    sessions = [session_with() for _ in range(24)]
    micro_batches = after((9.0, 24))
    assert micro_batches.go_on(sessions[:12], sessions[12:], 7)
    # While the device is at the one, the host cannot be done with the others.
    assert not micro_batches.go_on(sessions[:1], sessions[1:], 7)
    assert not micro_batches.go_on(sessions[1:], sessions[:1], 7)


def test_halves_that_have_shown_to_take_the_host_as_long_as_all_do_not_pay() -> None:
    # What is done once for all of them is done twice.
    assert num_first(after((8.0, 24)), [session_with()] * 24) == 12
    assert num_first(after((8.0, 24), (7.9, 12)), [session_with()] * 24) == 24


@pytest.mark.parametrize(
    "other",
    [
        {"is_prefilling": True},
        {"is_drafting": True},
        {"takes_turns": True},
        {"is_as_drawn": False},
        {"decides_by_ratio": True},
        {"report": ReportParams(logprobs=1)},
        {"report": ReportParams(prompt_logprobs=0)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_all_begin_where_one_reads_a_prompt_has_drafts_or_has_more_read_of_its_logits_than_draws(
    other: dict[str, Any],
) -> None:
    sessions = [session_with() for _ in range(23)]
    assert num_first(after((20.0, 24)), [*sessions, session_with()]) == 12
    assert num_first(after((20.0, 24)), [*sessions, session_with(**other)]) == 24


def test_all_begin_where_nobody_has_drafts() -> None:
    assert num_first(after((20.0, 24)), [session_with(0)] * 24) == 24
    assert num_first(after((20.0, 24)), [session_with(0)] * 23 + [session_with(1)]) == 12


@pytest.fixture
def shares(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Sessions of both halves and most nodes of each, whenever they are asked about. They are worth it."""
    asked: list[tuple[int, int, int]] = []

    def go_on(_self: object, first: list[VerifySession], second: list[VerifySession], max_num_nodes: int) -> bool:
        asked.append((len(first), len(second), max_num_nodes))
        return True

    monkeypatch.setattr(MicroBatches, "may_go_on", lambda *_: True)
    monkeypatch.setattr(MicroBatches, "go_on", go_on)
    return asked


PENALISED = SamplingParams(temperature=0.0, repetition_penalty=1.5)
ASKED = ["start", "forward", "stop"]
READ = ["draws", "elapsed"]


def test_a_device_is_asked_for_one_half_while_it_is_at_the_other_before_the_loop_is_told(
    engine: Engine, late: list[str], shares: list[tuple[int, int, int]]
) -> None:
    first, second, third = (add_session(engine, Method.OFF, 3, 2) for _ in range(3))
    engine.step([first, second, third])
    assert late == [*ASKED, *ASKED, *READ]
    late.clear()
    for half, num_told in (([second, third], 1), ([first], 2), ([second, third], 1)):
        assert engine.plan(OPENED_AT) == (half, None)
        engine.step(half)
        assert late == [*ASKED, f"told of {num_told}", *READ]
        late.clear()
    # All of them share the rows of a forward, by default 256.
    assert shares == [(1, 2, 84), (1, 2, 84), (2, 1, 84), (1, 2, 84), (2, 1, 84)]
    assert [session.session.num_output_tokens for session in (first, second, third)] == [2, 2, 2]


def test_a_processor_that_computes_itself_verifies_all_at_once(
    engine: Engine, device: Asynchronous, shares: list[tuple[int, int, int]]
) -> None:
    sessions = [add_session(engine, Method.OFF, 3, 2) for _ in range(2)]
    engine.step(sessions)
    assert device.happened == [*ASKED, *READ]
    device.happened.clear()
    engine.step(sessions[:1])
    assert device.happened == [*ASKED, *READ]
    assert not shares


def test_a_half_begins_only_if_all_of_it_are_ready_and_holds_nobody_back_otherwise(
    engine: Engine, late: list[str], shares: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verifier.forward_planner.time", SimpleNamespace(perf_counter=lambda: OPENED_AT))
    running, ready, held = (add_session(engine, Method.OFF, 3, 2) for _ in range(3))
    waiting = add_session(engine, Method.SPECULATIVE, 3, 2)
    held.ready_since = OPENED_AT - 1
    monkeypatch.setattr(MicroBatches, "first_of", lambda _, sessions, __: sessions)
    engine.step([running])
    assert late == [*ASKED, *READ]
    assert not shares
    assert (ready.ready_since, held.ready_since) == (None, OPENED_AT - 1)
    waiting.is_paused = True
    engine.step([running])
    assert shares == [(1, 2, 84)]


def test_who_is_ready_for_a_half_that_does_not_pay_holds_nobody_back(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MicroBatches, "may_go_on", lambda *_: True)
    running, ready = (add_session(engine, Method.OFF, 3, 2) for _ in range(2))
    engine.step([running])
    assert late == [*ASKED, *READ]
    assert ready.ready_since is None


def test_nobody_is_asked_if_ready_for_a_half_that_there_cannot_be(engine: Engine, late: list[str]) -> None:
    running, other = (add_session(engine, Method.OFF, 3, 2) for _ in range(2))
    cast(Any, other).is_ready = None  # would be called
    engine.step([running])
    assert late == [*ASKED, *READ]


def test_who_has_left_during_a_forward_keeps_no_half_from_going_on(
    engine: Engine, late: list[str], shares: list[tuple[int, int, int]]
) -> None:
    first, second, third, fourth = (add_session(engine, Method.OFF, 3, 2) for _ in range(4))
    engine.step([first, second, third, fourth])
    engine.remove("3")
    engine.step([third, fourth])
    assert shares[-1] == (1, 2, 84)


def test_a_forward_that_all_have_left_breaks_nobody_who_is_not_ready(
    engine: Engine, late: list[str], shares: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.verifier.forward_planner.time", SimpleNamespace(perf_counter=lambda: OPENED_AT))
    first, second, third = (add_session(engine, Method.OFF, 3, 2) for _ in range(3))
    engine.step([first, second, third])
    engine.remove("1")
    engine.remove("2")
    waiting = add_session(engine, Method.SPECULATIVE, 3, 2)
    first.is_paused = True
    engine.step([second, third])
    assert list(engine.sessions.values()) == [first, waiting]


def test_verdicts_of_a_half_are_told_at_once_where_nothing_is_asked_for(
    engine: Engine, late: list[str], shares: list[tuple[int, int, int]]
) -> None:
    # Of these, no forward is asked for before the draws are known.
    first, second = (add_session(engine, Method.OFF, 3, 2, PENALISED) for _ in range(2))
    first.session.spec = replace(first.session.spec, max_tokens=1)
    engine.step([first, second])
    late.clear()
    engine.step([second])
    # The first one has ended, and the second one is waited for.
    assert late == ["told of 1", *READ]


def test_the_host_works_from_the_draws_until_the_next_forward_is_asked_for(
    engine: Engine, late: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        MicroBatches, "begin_host_time", lambda _, __, drawing: late.append(f"works for {len(drawing)}")
    )
    monkeypatch.setattr(MicroBatches, "end_host_time", lambda _, __: late.append("has asked"))
    sessions = [add_session(engine, Method.RETRIEVAL, 3, 2) for _ in range(2)]
    for _ in range(2):
        late.clear()
        engine.step(sessions)
        assert [each for each in late if "told" not in each] == [*ASKED, "has asked", "draws", "works for 2", "elapsed"]


def test_while_drafts_are_waited_for_the_host_is_not_at_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(MicroBatches, "forget_host_time", lambda _: forgotten.append(True))
    plain = add_session(engine, Method.OFF, 3, 2)
    assert engine.plan(OPENED_AT) == ([plain], None)
    assert not forgotten
    waiting = add_session(engine, Method.SPECULATIVE, 3, 2)
    plain.is_paused = True
    assert engine.plan(OPENED_AT) == ([], pytest.approx(waiting.deadline - OPENED_AT))
    assert forgotten


@pytest.fixture
def num_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sessions of each forward that a device was asked for behind one of others, which always pays here."""
    counts: list[int] = []
    plan_of_others = ForwardPlanner.plan_of_others

    def counted(self: ForwardPlanner, forward: Any) -> Any:
        behind = plan_of_others(self, forward)
        if behind is not None:
            assert not set(behind.work) & set(forward.plan.work)
            counts.append(len(behind.work))
        return behind

    monkeypatch.setattr(ForwardPlanner, "plan_of_others", counted)
    monkeypatch.setattr(HostTimes, "of", lambda *_: 1.0)
    monkeypatch.setattr(MicroBatches, "_pays", lambda *_: True)
    return counts


RETRIEVED: dict[str, Any] = {"method": "retrieval", "temperature": 0.0, "max_tokens": 60}


async def texts(client: Client, work: list[dict[str, Any]]) -> list[tuple[list[int], str]]:
    async def complete(number: int, asked: dict[str, Any]) -> tuple[list[int], str]:
        done = await client.complete(PROMPTS[number % len(PROMPTS)], **({"seed": number} | asked))
        return list(done.token_ids), done.text

    return list(await asyncio.gather(*(complete(number, asked) for number, asked in enumerate(work))))


@pytest.mark.parametrize(
    "work",
    [
        [RETRIEVED] * 2,
        [RETRIEVED | {"temperature": 0.6, "max_tokens": 20 + 7 * number} for number in range(6)],
        [RETRIEVED | {"stop": ["return", ")"]}, RETRIEVED | {"stop_token_ids": [13, 199]}, RETRIEVED, RETRIEVED],
        [RETRIEVED, RETRIEVED | {"method": "off", "max_tokens": 90}, RETRIEVED | {"top_p": 0.8, "temperature": 1.0}],
        [RETRIEVED | {"max_tokens": 120}] * 9,
        [{"method": "auto", "temperature": 0.0, "max_tokens": 120}] * 5,
        [RETRIEVED | {"max_tokens": 150}, RETRIEVED, RETRIEVED | {"logprobs": 2, "max_tokens": 20}],
    ],
    ids=["two", "sampled", "stops", "with plain ones", "a crowded pool", "auto in company", "until one has logprobs"],
)
async def test_texts_are_those_of_an_engine_that_verifies_all_at_once(
    monkeypatch: pytest.MonkeyPatch, num_behind: list[int], work: list[dict[str, Any]]
) -> None:
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        expected = await texts(client, work)
        assert not num_behind
        monkeypatch.setattr(verifier.engine, "works_on", True)
        assert await texts(client, work) == expected
        # How often `auto` retrieves depends on what else the machine does.
        assert len(num_behind) > 5 or work[0]["method"] == "auto"


async def test_who_comes_and_who_leaves_in_the_middle_changes_no_text(
    monkeypatch: pytest.MonkeyPatch, num_behind: list[int]
) -> None:
    staying = [RETRIEVED | {"max_tokens": 150, "ignore_eos": True}] * 2
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        expected = await texts(client, staying)
        monkeypatch.setattr(verifier.engine, "works_on", True)
        going = asyncio.create_task(texts(client, staying))
        for number in range(4):
            leaving = client.generate(PROMPTS[2 + number], ignore_eos=True, **(RETRIEVED | {"max_tokens": 200}))
            for _ in range(3):
                await anext(leaving)
            await leaving.aclose()
        assert await going == expected
        assert max(num_behind) >= 1


async def test_a_forward_of_others_is_no_overhead_of_a_round(
    monkeypatch: pytest.MonkeyPatch, num_behind: list[int]
) -> None:
    told: list[tuple[int, int, float]] = []
    async with running_verifier(model=crowded_model()) as verifier, Client(verifier.address) as client:
        timings = verifier.engine._timings
        monkeypatch.setattr(verifier.engine, "works_on", True)
        monkeypatch.setattr(timings, "set_others", lambda *told_now: told.append(told_now))
        await texts(client, [RETRIEVED] * 2)
    assert sum(num_others > 0 for _, num_others, _ in told) == len(num_behind)
    rows = [num_rows for num_rows, _, _ in told]
    assert all(num_others in {0, before} for before, (_, num_others, _) in zip(rows, told[1:], strict=False))

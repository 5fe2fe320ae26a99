"""A server's load is estimated from its reports, and from what was begun and ended here since. It decides which of
several servers is asked next; `tests/wire/test_attempts.py` has more of that."""

from __future__ import annotations

import gc

from outrider.core.load import AVOID_S, MAX_AVOID_S, USUAL_MAX_NUM_SESSIONS, LoadEstimate, ReplicaLoads


class Session:
    """Anything that is begun."""


def test_what_was_begun_since_the_last_report_counts_beside_it() -> None:
    load, sessions = LoadEstimate(), [Session() for _ in range(3)]
    load.report(5, 10)
    for session in sessions:
        load.begin(session)
        load.begin(session)  # a stream that is opened again is the same session
    assert (load.num_sessions, load.num_own_sessions) == (8, 3)
    load.report(9, 10, session=sessions[0])
    assert load.num_sessions == 9 + 2  # the others may not be among the nine
    assert load.is_full
    load.opened(sessions[1])
    assert load.num_sessions == 11


def test_a_session_that_has_ended_counts_no_more_whether_it_was_reported_or_not() -> None:
    load, reported, unreported = LoadEstimate(), Session(), Session()
    load.begin(reported)
    load.report(4, 10, session=reported)
    load.begin(unreported)
    assert load.num_sessions == 5
    for session in (unreported, reported, reported):
        load.end(session)
    assert (load.num_sessions, load.num_own_sessions) == (3, 0)


def test_a_session_that_was_dropped_without_a_word_is_forgotten() -> None:
    load, session = LoadEstimate(), Session()
    load.begin(session)
    assert load.num_sessions == 1
    del session
    gc.collect()
    assert load.num_sessions == 0


def test_a_server_has_at_least_the_sessions_that_are_here() -> None:
    load, session = LoadEstimate(), Session()
    load.begin(session)
    load.report(0, 0, session=session)
    assert load.num_sessions == 1
    load.forget()
    assert load.num_sessions == 1


def test_of_equals_the_one_whose_engine_is_busy_is_the_fuller_one() -> None:
    busy, idle, larger = LoadEstimate(), LoadEstimate(), LoadEstimate()
    busy.report(4, 10, 0.9)
    idle.report(4, 10, 0.1)
    larger.report(6, 20, 0.9)
    assert idle.share_with() < busy.share_with() < idle.share_with(1)
    assert larger.share_with() < idle.share_with()


def test_impossible_reports_make_nothing_impossible() -> None:
    load = LoadEstimate()
    load.report(-5, -7, 40.0)
    assert (load.num_sessions, load.busy, load.is_full) == (0, 1.0, False)
    assert load.share_with(1) == 2 / USUAL_MAX_NUM_SESSIONS


def test_a_call_asks_nobody_twice_while_another_one_has_not_been_asked() -> None:
    loads, session = ReplicaLoads(3), Session()
    loads.begin(2, session)
    now, failures, asked = 0.0, [0, 0, 0], []
    for _ in range(3):
        number = loads.choose(now, failures)
        asked.append(number)
        failures[number] += 1
        now += 2 * AVOID_S  # they hang: each may be chosen again before the next one has failed
        loads.failed(number, now, AVOID_S)
        now += AVOID_S
    assert sorted(asked) == [0, 1, 2]


def test_a_session_may_go_where_there_is_more_to_do_and_counts_there() -> None:
    loads, sessions = ReplicaLoads(2), [Session() for _ in range(3)]
    loads.begin(0, sessions[0])
    loads.begin(0, sessions[1])
    assert [loads.choose(0.0, session=session) for session in sessions[2:]] == [1]
    loads.end(0, sessions[0])
    loads.end(0, sessions[1])
    assert loads.choose(0.0) == 0


def chosen(loads: ReplicaLoads, count: int, now: float = 0.0) -> list[int]:
    """The servers that so many short calls go to."""
    return [loads.choose(now) for _ in range(count)]


def test_servers_take_turns() -> None:
    assert chosen(ReplicaLoads(3), 7) == [0, 1, 2, 0, 1, 2, 0]


def test_one_that_has_failed_is_left_alone_as_long_as_it_kept_its_caller_waiting() -> None:
    loads = ReplicaLoads(3)
    loads.failed(1, 0.0, 0.0)
    assert chosen(loads, 4) == [0, 2, 0, 2]
    assert set(chosen(loads, 3, 1.1)) == {0, 1, 2}
    loads.failed(1, 0.0, 15.0)
    assert set(chosen(loads, 4, 14.9)) == {0, 2}
    assert 1 in chosen(loads, 3, 15.1)
    loads.failed(1, 0.0, 1e6)
    assert 1 in chosen(loads, 3, MAX_AVOID_S)


def test_if_all_have_failed_the_first_to_come_back_is_asked() -> None:
    loads = ReplicaLoads(2)
    loads.failed(0, 0.0, 5.0)
    assert loads.has_fresh(0.0)
    loads.failed(1, 0.0, 2.0)
    assert not loads.has_fresh(0.0)
    assert chosen(loads, 3) == [1, 1, 1]
    loads.answered(0)
    assert loads.has_fresh(0.0)
    assert chosen(loads, 1) == [0]


def test_a_lone_one_is_asked_whatever_happened() -> None:
    loads = ReplicaLoads(1)
    loads.failed(0, 0.0, 10.0)
    assert chosen(loads, 1) == [0]

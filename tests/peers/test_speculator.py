"""A speculator dies, hangs, lies and comes back: sessions are told, and draft with it again once it works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.core.load import MOST_SESSIONS
from outrider.core.methods import OFF, PEARL
from outrider.core.speculation import SpeculationParams, Steering
from outrider.core.statistics import Absence, RunningMean
from outrider.peers import speculator as speculator_peer
from outrider.peers.reconnecting import FIRST_ANSWER_S, MIN_SILENCE_S, AnswerDeadline
from outrider.v1 import speculator_pb2 as pb
from tests.support.forgetful_proxy import forgetful
from tests.support.scripted_speculator import Listener, ScriptedSpeculator, dialling, serving, speculate
from tests.support.waiting import until

RECOVERY_S = 2.0
NUM_SESSIONS = 10


@pytest.fixture
async def speculator() -> AsyncIterator[ScriptedSpeculator]:
    return ScriptedSpeculator()


async def test_a_silent_speculator_is_given_up_and_told_everything_anew(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listener, committed = Listener(), [1, 2]
        stream = speculate(peer, listener, committed)
        await until(lambda: listener.num_drafts)
        speculator.is_silent = True
        began = time.monotonic()
        for token in range(3, 20):
            committed.append(token)
            stream.send_commit()
            await until(lambda token=token: len(speculator.commits) > token - 3)
        await until(lambda: listener.num_detached == 1)
        assert MIN_SILENCE_S <= time.monotonic() - began < MIN_SILENCE_S + 1
        assert "said nothing" in peer.state.last_error
        speculator.is_silent = False
        await until(lambda: len(speculator.opened) == 2)
        assert list(speculator.opened[1].committed_token_ids) == list(range(1, 20))
        stream.close()
        await until(lambda: speculator.num_streams == 0)


async def test_bytes_are_counted_both_ways_over_all_streams(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address:
        pass  # an address that nobody else knows
    async with dialling(address) as peer:
        listener, committed = Listener(), [1, 2]
        stream = speculate(peer, listener, committed)
        async with serving(speculator, address):
            await until(lambda: listener.num_drafts)
        async with serving(speculator, address):
            await until(lambda: len(speculator.opened) == 2)
            committed.extend([3, 4, 5])
            stream.send_commit()
            await until(lambda: speculator.commits)
            await until(lambda: stream.traffic.num_bytes_received == speculator.num_bytes_said)
            await until(lambda: stream.traffic.num_bytes_sent == speculator.num_bytes_heard)
            assert stream.traffic.num_bytes_sent > 2 * speculator.opened[0].ByteSize()
            stream.close()


@pytest.mark.slow
async def test_nobody_is_given_up_who_is_told_nothing_or_to_pause(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listener, committed = Listener(), [1, 2]
        stream = speculate(peer, listener, committed)
        await until(lambda: listener.num_drafts)
        speculator.is_silent = True
        committed.append(3)
        stream.send_commit()
        await asyncio.sleep(MIN_SILENCE_S + 0.3)  # one commit may have no answer
        stream.send_steering(Steering(SpeculationParams(OFF, 8, 32)))
        await until(lambda: speculator.steerings)
        for num in range(2, 8):
            committed.extend([3] * speculator_peer.MAX_PAUSED_TOKENS)
            stream.send_commit()
            await until(lambda num=num: len(speculator.commits) == num)
        await asyncio.sleep(MIN_SILENCE_S + 0.3)
        assert listener.num_detached == 0
        stream.close()


async def test_a_speculator_that_pauses_is_told_what_was_said_before_it_is_to_go_on(
    speculator: ScriptedSpeculator,
) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listener, committed = Listener(), [1, 2]
        stream = speculate(peer, listener, committed)
        await until(lambda: listener.num_drafts)
        stream.send_steering(Steering(SpeculationParams(OFF, 8, 32)))
        await until(lambda: len(speculator.steerings) == 1)
        for token in range(3, 10):
            committed.append(token)
            stream.send_commit()
            await asyncio.sleep(0)
        stream.send_steering(Steering(SpeculationParams(PEARL, 8, 32)))
        await until(lambda: len(speculator.steerings) == 2)
        [commit] = speculator.commits
        assert (commit.base_len, list(commit.token_ids)) == (2, list(range(3, 10)))
        committed.append(10)
        stream.send_commit()
        await until(lambda: len(speculator.commits) == 2)
        stream.close()


async def test_a_connection_that_something_on_the_way_has_forgotten_is_replaced(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, forgetful(address) as proxy, dialling(proxy.address) as peer:
        listeners = [Listener() for _ in range(NUM_SESSIONS)]
        texts = [[1, 2] for _ in listeners]
        streams = [speculate(peer, listener, text) for listener, text in zip(listeners, texts, strict=True)]
        await until(lambda: all(listener.num_drafts for listener in listeners))
        proxy.forget()
        before = [listener.num_drafts for listener in listeners]
        began = time.monotonic()
        for stream, text in zip(streams, texts, strict=True):
            for token in range(3, 9):
                text.append(token)
                stream.send_commit()
                await asyncio.sleep(0.01)
        await until(lambda: all(one.num_drafts > num for one, num in zip(listeners, before, strict=True)))
        assert time.monotonic() - began < MIN_SILENCE_S + RECOVERY_S  # gRPC by itself: 30 s
        for stream in streams:
            stream.close()


async def test_one_that_knows_no_such_method_is_dialled_anew(
    speculator: ScriptedSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator_peer, "GARBAGE_RETRY_S", 0.05)
    async with serving(speculator) as address, dialling(address) as peer:
        speculator.refusal = grpc.StatusCode.UNIMPLEMENTED
        listener = Listener()
        stream = speculate(peer, listener)
        await until(lambda: len(speculator.callers) >= 3)
        speculator.refusal = None
        await until(lambda: listener.num_drafts)
        stream.close()


def test_a_slow_speculator_has_the_time_that_it_usually_takes() -> None:
    usual = RunningMean(0.1)
    silence = AnswerDeadline(usual, 0)
    for _ in range(5):
        silence.sent(0.0)
    assert silence.deadline == FIRST_ANSWER_S  # it reads the prompt
    silence.answered(4.0)
    assert (silence.deadline, usual.value) == (None, None)
    for _ in range(3):
        silence.sent(10.0)
    assert silence.deadline == 10.0 + MIN_SILENCE_S
    silence.answered(10.5)
    assert silence.limit_s == 20 * 0.5
    assert AnswerDeadline(usual, 2).limit_s == 4 * FIRST_ANSWER_S


@pytest.mark.slow
async def test_one_probe_asks_for_all_sessions_whether_a_dead_speculator_is_back(
    speculator: ScriptedSpeculator,
) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        speculator.health = health_pb2.HealthCheckResponse.NOT_SERVING
        peer.breaker.trip("as the test wants it")
        listeners = [Listener() for _ in range(NUM_SESSIONS)]
        streams = [speculate(peer, listener) for listener in listeners]
        await until(lambda: all(listener.num_detached == 1 for listener in listeners), 1.0)  # nobody waits for it
        began = time.monotonic()
        await until(lambda: speculator.num_checks >= 5)
        assert time.monotonic() - began > 1.0  # less and less often
        assert speculator.opened == []
        assert not peer.state.is_connected
        speculator.health = health_pb2.HealthCheckResponse.SERVING
        began = time.monotonic()
        await until(lambda: all(listener.num_drafts for listener in listeners))
        assert time.monotonic() - began < RECOVERY_S
        assert len(speculator.opened) == NUM_SESSIONS
        assert peer.state.is_connected
        for stream in streams:
            stream.close()


@pytest.mark.slow
async def test_all_sessions_draft_again_soon_after_the_speculator_is_back(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address:
        pass  # an address where nobody listens
    async with dialling(address) as peer:
        listeners = [Listener() for _ in range(NUM_SESSIONS)]
        streams = [speculate(peer, listener) for listener in listeners]
        for away_s in (0.3, 3.0):  # longer than the longest pause between two attempts to connect
            await until(lambda: all(listener.num_detached for listener in listeners))
            await asyncio.sleep(away_s)
            before = [listener.num_drafts for listener in listeners]
            async with serving(speculator, address):
                began = time.monotonic()
                await until(
                    lambda before=before: all(
                        listener.num_drafts > num for listener, num in zip(listeners, before, strict=True)
                    )
                )
                assert time.monotonic() - began < RECOVERY_S
        for stream in streams:
            stream.close()


@pytest.mark.parametrize("is_garbage", [True, False])
async def test_one_that_cannot_be_understood_or_refuses_is_asked_again_slowly_and_used_once_it_is_right(
    speculator: ScriptedSpeculator, is_garbage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator_peer, "GARBAGE_RETRY_S" if is_garbage else "REFUSED_RETRY_S", 0.6)
    speculator.is_garbage = is_garbage
    speculator.refusal = None if is_garbage else grpc.StatusCode.FAILED_PRECONDITION
    async with serving(speculator) as address, dialling(address) as peer:
        listeners = [Listener() for _ in range(NUM_SESSIONS)]
        streams = [speculate(peer, listener) for listener in listeners]
        await until(lambda: all(listener.num_detached == 1 for listener in listeners))
        assert ("cannot be parsed" if is_garbage else "FAILED_PRECONDITION") in peer.state.last_error
        began = time.monotonic()
        await until(lambda: len(speculator.opened) > NUM_SESSIONS)
        assert time.monotonic() - began > 0.3
        speculator.is_garbage, speculator.refusal = False, None
        await until(lambda: all(listener.num_drafts for listener in listeners))
        for stream in streams:
            stream.close()
        await until(lambda: speculator.num_streams == 0)


async def test_a_session_that_is_refused_for_itself_leaves_the_others_alone(
    speculator: ScriptedSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculator_peer, "REFUSED_RETRY_S", 0.5)
    async with serving(speculator) as address, dialling(address) as peer:
        well, refused = Listener(), Listener()
        committed = [1, 2]
        first = speculate(peer, well, committed)
        await until(lambda: well.num_drafts)
        speculator.refusal = grpc.StatusCode.OUT_OF_RANGE
        second = speculate(peer, refused)
        await until(lambda: refused.num_detached)
        assert peer.breaker.is_closed
        committed.append(3)
        first.send_commit()
        await until(lambda: well.num_drafts > 1)
        assert well.num_detached == 0
        speculator.refusal = None
        await until(lambda: refused.num_drafts)
        first.close()
        second.close()


async def test_a_full_speculator_is_asked_again_by_those_who_found_no_room(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        speculator.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
        listener = Listener()
        stream = speculate(peer, listener)
        await until(lambda: len(speculator.opened) == 3)
        assert (listener.num_attached, listener.num_detached) == (0, 1)
        speculator.refusal = None
        await until(lambda: listener.num_drafts)
        stream.close()


async def test_nothing_is_left_behind_by_sessions_and_lost_streams(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address:
        async with dialling(address) as peer:
            before = len(asyncio.all_tasks())
            speculator.refusal = grpc.StatusCode.UNAVAILABLE
            streams = [speculate(peer, Listener()) for _ in range(NUM_SESSIONS)]
            await until(lambda: len(speculator.opened) >= 3 * NUM_SESSIONS)
            for stream in streams:
                stream.close()
            await until(lambda: speculator.num_streams == 0)
            await until(lambda: len(asyncio.all_tasks()) <= before)
        assert not peer.state.is_connected


async def test_of_a_steering_only_what_is_new_is_sent(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listener = Listener()
        stream = speculate(peer, listener, [1, 2])
        await until(lambda: listener.num_drafts)
        stream.send_steering(Steering(SpeculationParams(PEARL, 8, 32)))
        await until(lambda: len(speculator.steerings) == 1)
        stream.send_steering(Steering(forward_us=7))
        await until(lambda: len(speculator.steerings) == 2)
        first, second = speculator.steerings
        assert first.HasField("speculation")
        # If parameters came again, a tree's growth would start over.
        assert (second.HasField("speculation"), second.forward_us) == (False, 7)
        stream.close()


async def test_a_steering_is_repeated_to_a_speculator_that_comes_back(speculator: ScriptedSpeculator) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listener, committed = Listener(), [1, 2]
        stream = speculate(peer, listener, committed)
        await until(lambda: listener.num_drafts)
        stream.send_steering(Steering(forward_us=7))
        await until(lambda: speculator.steerings)
        speculator.is_silent = True
        for token in range(3, 20):
            committed.append(token)
            stream.send_commit()
            await until(lambda token=token: len(speculator.commits) > token - 3)
        await until(lambda: listener.num_detached)
        speculator.is_silent = False
        await until(lambda: len(speculator.steerings) == 2)
        assert [steering.forward_us for steering in speculator.steerings] == [7, 7]
        stream.close()


async def test_sessions_learn_why_there_are_no_drafts(speculator: ScriptedSpeculator) -> None:
    speculator.is_loading, speculator.health = True, health_pb2.HealthCheckResponse.NOT_SERVING
    async with serving(speculator) as address, dialling(address) as peer:
        first, second = Listener(), Listener()
        streams = [speculate(peer, first, [1, 2])]
        await until(lambda: first.num_detached)
        streams.append(speculate(peer, second, [1, 2]))
        await until(lambda: second.num_detached)
        assert (first.absences, second.absences) == ([Absence.STARTING], [Absence.STARTING])
        speculator.is_loading, speculator.health = False, health_pb2.HealthCheckResponse.SERVING
        await until(lambda: first.num_drafts and second.num_drafts)
        for stream in streams:
            stream.close()


async def test_a_speculator_that_has_ended_was_lost_to_those_that_it_served_alone(
    speculator: ScriptedSpeculator,
) -> None:
    before, after = Listener(), Listener()
    async with serving(speculator) as address, dialling(address) as peer:
        stream = speculate(peer, before, [1, 2])
        await until(lambda: before.num_drafts)
        speculator.refusal = grpc.StatusCode.UNAVAILABLE
        peer.breaker.trip("as the test wants it")
        other = speculate(peer, after, [1, 2])
        await until(lambda: after.num_detached)
        assert after.absences == [Absence.UNREACHABLE]
        stream.close()
        other.close()
    async with dialling(address) as peer:
        nobody = Listener()
        stream = speculate(peer, nobody, [1, 2])
        await until(lambda: nobody.num_detached)
        assert nobody.absences == [Absence.UNREACHABLE]
        stream.close()


async def test_a_load_that_cannot_be_is_no_number_that_the_wire_cannot_hold() -> None:
    speculator = ScriptedSpeculator()
    speculator.load = pb.SpeculatorLoad(num_sessions=2**32 - 1, max_num_sessions=2**32 - 1, busy_percent=2**32 - 1)
    async with serving(speculator) as address, dialling(address) as peer:
        listener = Listener()
        stream = speculate(peer, listener)
        await until(lambda: listener.num_drafts)
        info = peer.info()
        assert (info.num_sessions, info.max_num_sessions, info.busy_percent) == (MOST_SESSIONS, MOST_SESSIONS, 100)
        stream.close()

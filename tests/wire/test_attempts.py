"""A call goes to the replica with the least load; equals take turns, and one that has just failed is avoided for a
while. A call that is refused tries the others, and comes back a few times."""

from __future__ import annotations

from collections import Counter

import grpc
import pytest

from outrider.core.load import AVOID_S, BELIEVED_S
from outrider.v1.verifier_pb2 import Chunk, Finished, GenerateRequest, GenerateResponse, Started, VerifierLoad
from outrider.wire import attempts
from outrider.wire.attempts import LAST_PAUSE_S, NUM_ROUNDS, Attempts, Replicas
from outrider.wire.errors import NotServing, ResourceExhausted
from outrider.wire.resumption import Phase, ResumableGeneration, Taken

Code = grpc.StatusCode
TWO, THREE = ["a:1", "b:2"], ["a:1", "b:2", "c:3"]
NOW = 100.0


@pytest.fixture(autouse=True)
def the_first_replica_is_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "first_turn", lambda num_replicas: 0)


def generation(replicas: Replicas) -> ResumableGeneration:
    """A generation that has not begun."""
    timeouts = {"resume_timeout_s": 30.0, "stall_timeout_s": 30.0, "wait_s": 30.0}
    return ResumableGeneration(GenerateRequest(), replicas, NOW, **timeouts)


def begun(replicas: Replicas, load: VerifierLoad | None = None, now: float = NOW) -> ResumableGeneration:
    """A generation that a replica has accepted; `load`: what the replica reported then."""
    call = generation(replicas)
    call.begin(now)
    call.on_message(now, GenerateResponse(started=Started(load=load)))
    return call


def finish(call: ResumableGeneration) -> None:
    call.on_message(NOW, GenerateResponse(finished=Finished()))


def test_generations_that_begin_at_once_are_spread_evenly_and_one_that_has_ended_makes_room() -> None:
    replicas = Replicas(THREE)
    calls = [generation(replicas) for _ in range(12)]
    assert Counter(call.begin(NOW) for call in calls) == {0: 4, 1: 4, 2: 4}
    gone = [call for call in calls if call.replica == 1]
    finish(gone[0])
    gone[1].end()
    later = [generation(replicas) for _ in range(3)]
    assert Counter(call.begin(NOW) for call in later)[1] >= 2


def test_one_that_was_dropped_in_the_middle_counts_no_more() -> None:
    replicas = Replicas(TWO)
    first, second = generation(replicas), generation(replicas)
    assert (first.begin(NOW), second.begin(NOW)) == (0, 1)
    del second
    assert generation(replicas).begin(NOW) == 1


def test_a_replica_that_others_keep_busy_is_left_to_them_for_as_long_as_its_word_is_believed() -> None:
    replicas = Replicas(TWO)
    busy = begun(replicas, VerifierLoad(num_sessions=9, max_num_sessions=64))
    assert busy.replica == 0
    finish(busy)
    mine = [begun(replicas, VerifierLoad(num_sessions=1 + number, max_num_sessions=64)) for number in range(6)]
    assert {call.replica for call in mine} == {1}
    for call in mine:
        finish(call)
    both = [begun(replicas, now=NOW + BELIEVED_S) for _ in range(2)]
    assert {call.replica for call in both} == {0, 1}


def test_the_share_counts_and_a_session_that_waits_counts_twice() -> None:
    replicas = Replicas(["small:1", "large:2"])
    small = begun(replicas, VerifierLoad(num_sessions=2, max_num_sessions=4))
    large = begun(replicas, VerifierLoad(num_sessions=16, max_num_sessions=64))
    assert (small.replica, large.replica) == (0, 1)
    assert generation(replicas).begin(NOW) == 1
    queued = begun(replicas, VerifierLoad(num_sessions=20, max_num_sessions=64, num_queued=20))
    assert queued.replica == 1
    assert generation(replicas).begin(NOW) == 0


def test_a_generation_that_breaks_goes_on_where_there_is_least_to_do() -> None:
    replicas = Replicas(THREE)
    broken, other = begun(replicas), begun(replicas)
    assert (broken.replica, other.replica) == (0, 1)
    assert broken.on_error(NOW, Code.UNAVAILABLE) == 0.0
    assert broken.begin(NOW) == 2
    # It counts at one replica only, so the one that it has left has the least load once it is no longer avoided.
    assert generation(replicas).begin(NOW + 2 * AVOID_S) == 0


def test_servers_that_say_nothing_of_their_load_get_their_turns() -> None:
    replicas = Replicas(TWO)
    for expected in (0, 1, 0, 1):
        call = begun(replicas)
        assert call.replica == expected
        finish(call)


def test_one_that_is_full_is_left_alone_for_as_long_as_it_says() -> None:
    replicas = Replicas(THREE)
    call = Attempts(replicas, NOW)
    assert call.begin(NOW) == 0
    full = ResourceExhausted("full", retry_after_s=7.0)
    assert call.on_error(NOW, full.code, full.details) == 0.0
    assert {Attempts(replicas, NOW).begin(NOW + 6.9) for _ in range(4)} == {1, 2}
    assert {Attempts(replicas, NOW).begin(NOW + 7.1) for _ in range(3)} == {0, 1, 2}


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.CANCELLED, Code.RESOURCE_EXHAUSTED])
def test_a_refused_call_asks_each_replica_some_times_within_about_a_second(code: grpc.StatusCode) -> None:
    call, now, asked = Attempts(Replicas(TWO), NOW), NOW, Counter[int]()
    while True:
        asked[call.begin(now)] += 1
        pause_s = call.on_error(now, code)
        if pause_s is None:
            break
        assert 0 <= pause_s <= 1.2 * LAST_PAUSE_S
        now += pause_s
    assert asked == {0: NUM_ROUNDS, 1: NUM_ROUNDS}
    assert 0.5 < now - NOW < 1.0


def test_a_call_that_may_not_wait_asks_each_replica_once() -> None:
    call = Attempts(Replicas(THREE), NOW, wait_s=0.0)
    asked = [call.begin(NOW)]
    while call.on_error(NOW, Code.UNAVAILABLE) is not None:
        asked.append(call.begin(NOW))
    assert asked == [0, 1, 2]


def test_a_call_is_not_repeated_after_its_deadline_nor_when_its_caller_has_stopped_nor_when_it_is_wrong() -> None:
    replicas = Replicas(TWO)
    late, stopped, wrong = (Attempts(replicas, NOW, timeout_s=2.0) for _ in range(3))
    assert late.remaining_s(NOW + 1.5) == 0.5
    assert late.on_error(NOW + 2.0, Code.UNAVAILABLE) is None
    assert wrong.on_error(NOW, Code.INVALID_ARGUMENT) is None
    replicas.is_closed = True
    assert stopped.on_error(NOW, Code.UNAVAILABLE) is None


def test_a_replica_that_has_answered_gets_calls_in_its_turn_again() -> None:
    replicas = Replicas(TWO)
    call = Attempts(replicas, NOW)
    call.begin(NOW)
    call.on_error(NOW, Code.UNAVAILABLE)
    assert {Attempts(replicas, NOW).begin(NOW) for _ in range(3)} == {1}
    call.on_answer(NOW)
    assert {Attempts(replicas, NOW).begin(NOW) for _ in range(3)} == {0, 1}


def test_there_is_no_pause_while_a_replica_has_not_just_failed() -> None:
    call = Attempts(Replicas(TWO), NOW)
    pauses = []
    for now in (NOW, NOW + 5.0, NOW + 5.0):
        call.begin(now)
        pauses.append(call.on_error(now, Code.UNAVAILABLE))
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2]


def test_pauses_grow_until_a_token_comes() -> None:
    call = begun(Replicas(["a:1"]))
    pauses = [call.on_error(NOW, Code.RESOURCE_EXHAUSTED) or 0.0 for _ in range(3)]
    assert 0.1 < pauses[1] < pauses[2]
    call.begin(NOW)
    call.on_message(NOW, GenerateResponse(chunk=Chunk(token_ids=[1])))
    assert 0 < (call.on_error(NOW, Code.UNAVAILABLE) or 0.0) < pauses[1]


def test_a_generation_that_has_not_begun_waits_where_there_will_be_a_server_before_long() -> None:
    promised = NotServing("draining").details
    for details, has_answered in (((), False), ((), True), (promised, False)):
        replicas = Replicas(["a:1"])
        replicas.has_answered = has_answered
        call = generation(replicas)
        for _ in range(NUM_ROUNDS - 1):
            assert call.on_error(NOW, Code.UNAVAILABLE, details) is not None
        waits = has_answered or details is promised
        assert (call.on_error(NOW, Code.UNAVAILABLE, details) is not None) is waits
        if waits:
            assert call.on_error(NOW + 30.0, Code.UNAVAILABLE, details) is None
        # If there is no other replica, a full one is reported at once.
        assert generation(replicas).on_error(NOW, Code.RESOURCE_EXHAUSTED) is None


def test_what_comes_after_the_end_is_not_for_the_application() -> None:
    call = begun(Replicas(["a:1"]))
    finish(call)
    assert call.on_message(NOW, GenerateResponse(chunk=Chunk(token_ids=[1]))) is Taken.SKIP
    assert call.phase is Phase.FINISHED

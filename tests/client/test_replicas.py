"""A generation goes to the replica with least to do; equals take turns, and one that has just failed is left alone for
a while."""

from __future__ import annotations

from collections import Counter

import pytest

from outrider.core.load import BELIEVED_S, MAX_AVOID_S
from outrider.security.addresses import addresses_of
from outrider.v1.verifier_pb2 import Finished, GenerateResponse, Started, VerifierLoad
from outrider_client.errors import Unavailable
from outrider_client.requests import generate_request
from outrider_client.retries import Replicas, ResumableCall


class Clock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("a:1", ("a:1",)),
        (" a:1, b:2,,a:1 ", ("a:1", "b:2")),
        (["a:1", "b:2"], ("a:1", "b:2")),
        ("ipv4:1.2.3.4:1,5.6.7.8:2", ("ipv4:1.2.3.4:1", "5.6.7.8:2")),
        ("dns:///verifier:1", ("dns:///verifier:1",)),
    ],
)
def test_addresses_are_told_apart_by_commas_and_each_counts_once(given: str | list[str], found: tuple[str]) -> None:
    assert addresses_of(given) == found


@pytest.mark.parametrize("nothing", ["", " , ", []])
def test_an_address_of_nobody_is_refused(nothing: str | list[str]) -> None:
    with pytest.raises(ValueError, match="address must name at least one server"):
        Replicas(nothing)


def test_replicas_take_turns() -> None:
    replicas = Replicas("a:1,b:2,c:3", Clock())
    assert [replicas.next() for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_one_that_has_failed_is_left_alone_as_long_as_it_kept_its_caller_waiting() -> None:
    clock = Clock()
    replicas = Replicas("a:1,b:2,c:3", clock)
    replicas.failed(1, 0.0)
    assert [replicas.next() for _ in range(4)] == [0, 2, 0, 2]
    clock.now += 1.1
    assert {replicas.next() for _ in range(3)} == {0, 1, 2}
    replicas.failed(1, 15.0)
    clock.now += 14.0
    assert {replicas.next() for _ in range(4)} == {0, 2}
    clock.now += 1.1
    assert 1 in {replicas.next() for _ in range(3)}
    replicas.failed(1, 1e6)
    clock.now += MAX_AVOID_S
    assert 1 in {replicas.next() for _ in range(3)}


def test_if_all_have_failed_the_first_to_come_back_is_asked() -> None:
    clock = Clock()
    replicas = Replicas("a:1,b:2", clock)
    replicas.failed(0, 5.0)
    assert replicas.has_fresh
    replicas.failed(1, 2.0)
    assert not replicas.has_fresh
    assert [replicas.next() for _ in range(3)] == [1, 1, 1]
    replicas.answered(0)
    assert replicas.has_fresh
    assert replicas.next() == 0


def test_a_lone_one_is_asked_whatever_happened() -> None:
    replicas = Replicas("a:1", Clock())
    replicas.failed(0, 10.0)
    assert replicas.next() == 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def generation(replicas: Replicas, clock: Clock) -> ResumableCall:
    """A generation that has not begun."""
    return ResumableCall(generate_request("x", {}), replicas, {}, clock)


def begun(replicas: Replicas, clock: Clock, load: VerifierLoad | None = None) -> ResumableCall:
    """A generation that a replica has taken; `load`: what it said then."""
    call = generation(replicas, clock)
    call.begin()
    call.on_message(GenerateResponse(started=Started(load=load)))
    return call


def finish(call: ResumableCall) -> None:
    call.on_message(GenerateResponse(finished=Finished()))


def test_generations_that_begin_at_once_are_spread_evenly_and_one_that_has_ended_makes_room(clock: Clock) -> None:
    replicas = Replicas("a:1,b:2,c:3", clock)
    calls = [generation(replicas, clock) for _ in range(12)]
    assert Counter(call.begin() for call in calls) == {0: 4, 1: 4, 2: 4}
    gone = [call for call in calls if call.replica == 1]
    finish(gone[0])
    gone[1].cancel()
    assert [generation(replicas, clock).begin()] == [1]
    later = [generation(replicas, clock) for _ in range(2)]
    assert [call.begin() for call in later] == [1, 1]


def test_one_that_was_dropped_in_the_middle_counts_no_more(clock: Clock) -> None:
    replicas = Replicas("a:1,b:2", clock)
    first, second = generation(replicas, clock), generation(replicas, clock)
    assert (first.begin(), second.begin()) == (0, 1)
    del second
    third = generation(replicas, clock)
    assert third.begin() == 1


def test_a_replica_that_others_keep_busy_is_left_to_them_for_as_long_as_its_word_is_believed(clock: Clock) -> None:
    replicas = Replicas("a:1,b:2", clock)
    busy = begun(replicas, clock, VerifierLoad(num_sessions=9, max_num_sessions=64))
    assert busy.replica == 0
    finish(busy)
    mine = [begun(replicas, clock, VerifierLoad(num_sessions=1 + number, max_num_sessions=64)) for number in range(6)]
    assert {call.replica for call in mine} == {1}
    for call in mine:
        finish(call)
    clock.now += BELIEVED_S
    assert {begun(replicas, clock).replica for _ in range(2)} == {0, 1}


def test_the_share_counts_and_who_waits_counts_twice(clock: Clock) -> None:
    replicas = Replicas("small:1,large:2", clock)
    small = begun(replicas, clock, VerifierLoad(num_sessions=2, max_num_sessions=4))
    large = begun(replicas, clock, VerifierLoad(num_sessions=16, max_num_sessions=64))
    assert (small.replica, large.replica) == (0, 1)
    assert generation(replicas, clock).begin() == 1
    queued = begun(replicas, clock, VerifierLoad(num_sessions=20, max_num_sessions=64, num_queued=20))
    assert queued.replica == 1
    assert generation(replicas, clock).begin() == 0


def test_a_generation_that_breaks_goes_on_where_there_is_least_to_do(clock: Clock) -> None:
    replicas = Replicas("a:1,b:2,c:3", clock)
    broken, other = begun(replicas, clock), begun(replicas, clock)
    assert (broken.replica, other.replica) == (0, 1)
    assert broken.after(Unavailable("gone")) == 0.0
    assert broken.begin() == 2
    # It counts at one replica only.
    assert [load.num_own_sessions for load in replicas._loads._loads] == [0, 1, 1]


def test_servers_that_say_nothing_of_their_load_get_their_turns(clock: Clock) -> None:
    replicas = Replicas("a:1,b:2", clock)
    for expected in (0, 1, 0, 1):
        call = begun(replicas, clock)
        assert call.replica == expected
        finish(call)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("127.0.0.1", "127.0.0.1:50051"),
        ("verifier", "verifier:50051"),
        ("::1", "[::1]:50051"),
        ("[::1]", "[::1]:50051"),
        ("[::1]:7", "[::1]:7"),
        ("verifier:7", "verifier:7"),
        ("unix:/run/outrider.sock", "unix:/run/outrider.sock"),
        ("dns:///verifier:7", "dns:///verifier:7"),
        ("dns:verifier", "dns:verifier"),
    ],
)
def test_an_address_without_a_port_gets_that_of_a_verifier(given: str, found: str) -> None:
    assert Replicas(f" {given},").addresses == (found,)


@pytest.mark.parametrize("address", ["127.0.0.1:no", "verifier:", "verifier:70000", "verifier:-1"])
def test_a_port_is_a_number(address: str) -> None:
    with pytest.raises(ValueError, match=f"address takes HOST:PORT, with a port up to 65535, got '{address}'"):
        Replicas(address)


@pytest.mark.parametrize("scheme", ["http", "https", "grpc"])
def test_a_url_is_no_address(scheme: str) -> None:
    with pytest.raises(ValueError, match=f"address takes HOST:PORT, without {scheme}://, got '{scheme}://x:1'"):
        Replicas(f"{scheme}://x:1")

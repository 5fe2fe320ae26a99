"""Several speculators: sessions go to the one with the least load, leave one that is lost, and move to one that has
joined; they see a stream that begins again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.core.methods import OFF
from outrider.core.speculation import SpeculationParams, Steering
from outrider.peers import fleet as fleets
from outrider.peers.fleet import FleetSession, SpeculatorFleet
from outrider.v1 import speculator_pb2 as pb
from tests.support.metric_values import values_of
from tests.support.scripted_speculator import SPEC, AModel, Listener, ScriptedSpeculator, serving
from tests.support.waiting import until

PAUSE = Steering(SpeculationParams(OFF, 8, 32))


@dataclass(eq=False)
class Session:
    """A session of a fleet, its text, and its callbacks."""

    stream: FleetSession
    text: list[int]
    listener: Listener = field(default_factory=Listener)

    def commit(self) -> None:
        self.text.append(len(self.text) + 1)
        self.stream.send_commit()


@dataclass
class Fleet:
    """A fleet of two scripted speculators, a and b, with addresses of their own. It is not started, so only the tests
    look up loads and names."""

    fleet: SpeculatorFleet
    a: ScriptedSpeculator
    b: ScriptedSpeculator
    stack_a: AsyncExitStack
    stack_b: AsyncExitStack
    addresses: tuple[str, str]
    sessions: list[Session] = field(default_factory=list)

    async def stop(self, name: str) -> None:
        await getattr(self, f"stack_{name}").aclose()

    async def start(self, name: str) -> None:
        number = "ab".index(name)
        stack = AsyncExitStack()
        await stack.enter_async_context(serving(getattr(self, name), self.addresses[number]))
        setattr(self, f"stack_{name}", stack)

    def begin(self, num_tokens: int = 2) -> Session:
        listener, text = Listener(), list(range(1, num_tokens + 1))
        spec = replace(SPEC, session_id=f"session {len(self.sessions)}")
        self.sessions.append(Session(self.fleet.speculate(spec, text, listener), text, listener))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.stream.close()

    async def begun(self, number: int) -> list[Session]:
        """So many sessions, begun at once, that all draft."""
        sessions = [self.begin() for _ in range(number)]
        await until(lambda: all(session.listener.num_drafts for session in sessions))
        return sessions

    @property
    def num_streams(self) -> tuple[int, int]:
        return self.a.num_streams, self.b.num_streams

    async def balanced(self) -> int:
        """Moves sessions until none is moved any more; returns how many were."""
        before = self.fleet.num_moves
        while True:
            num_moves = self.fleet.num_moves
            await self.fleet.refresh()
            self.fleet.balance()
            if not any(session.stream.tend() for session in self.sessions):
                return self.fleet.num_moves - before
            await until(lambda num_moves=num_moves: self.fleet.num_moves > num_moves)


@pytest.fixture
async def two() -> AsyncIterator[Fleet]:
    async with two_speculators() as fleet:
        yield fleet


@asynccontextmanager
async def two_speculators() -> AsyncIterator[Fleet]:
    a, b = ScriptedSpeculator(), ScriptedSpeculator()
    stack_a, stack_b = AsyncExitStack(), AsyncExitStack()
    addresses = (await stack_a.enter_async_context(serving(a)), await stack_b.enter_async_context(serving(b)))
    made = Fleet(SpeculatorFleet(addresses, AModel()), a, b, stack_a, stack_b, addresses)
    try:
        yield made
    finally:
        made.close()
        await made.fleet.close()
        await made.stop("a")
        await made.stop("b")


def load(num_sessions: int, max_num_sessions: int = 64, busy_percent: int = 0) -> pb.SpeculatorLoad:
    return pb.SpeculatorLoad(num_sessions=num_sessions, max_num_sessions=max_num_sessions, busy_percent=busy_percent)


def num_detached(sessions: list[Session]) -> int:
    return sum(session.listener.num_detached for session in sessions)


async def test_a_burst_of_sessions_is_spread_evenly_before_any_report_has_come(two: Fleet) -> None:
    await two.begun(16)
    assert two.num_streams == (8, 8)


async def test_sessions_go_where_others_have_least(two: Fleet) -> None:
    two.a.load, two.b.load = load(10), load(4)
    await two.fleet.refresh()
    sessions = await two.begun(8)
    assert two.num_streams == (1, 7)  # 4 + 6 equals 10: the last two go to one each
    for session in sessions:
        session.stream.close()


async def test_a_small_speculator_gets_its_share(two: Fleet) -> None:
    two.a.load, two.b.load = load(0, max_num_sessions=4), load(0, max_num_sessions=16)
    await two.fleet.refresh()
    two.a.load = two.b.load = None
    await two.begun(10)
    assert two.num_streams == (2, 8)


async def test_among_equals_the_one_whose_engine_is_idle_is_taken(two: Fleet) -> None:
    for busy, idle in ((two.a, two.b), (two.b, two.a)):
        busy.load, idle.load = load(3, busy_percent=90), load(3, busy_percent=10)
        await two.fleet.refresh()
        [session] = await two.begun(1)
        assert (busy.num_streams, idle.num_streams) == (0, 1)
        session.stream.close()
        await until(lambda: two.num_streams == (0, 0))


async def test_drafts_tell_how_much_there_is_to_do(two: Fleet) -> None:
    sessions = await two.begun(2)
    assert two.num_streams == (1, 1)
    two.a.load, two.b.load = load(9, busy_percent=40), load(2)
    for session in sessions:
        session.commit()

    def values(name: str) -> dict[str, float]:
        return values_of(two.fleet.metrics())[name]

    a, b = two.addresses
    await until(lambda: values("outrider_speculator_sessions") == {a: 9, b: 2})
    assert values("outrider_speculator_busy_ratio") == {a: 0.4, b: 0.0}
    assert values("outrider_speculator_own_sessions") == {a: 1, b: 1}
    assert values("outrider_speculator_up") == {a: 1, b: 1}


async def test_one_that_is_full_has_another_one_tried_at_once_and_nothing_is_lost(two: Fleet) -> None:
    two.a.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
    sessions = await two.begun(6)
    assert two.num_streams == (0, 6)
    assert num_detached(sessions) == 0
    assert two.fleet.peers[0].breaker.is_closed
    # The burst tried it before its first refusal came; after that nobody does for a while.
    num_tried = len(two.a.opened)
    await two.begun(3)
    assert len(two.a.opened) == num_tried


async def test_one_that_says_that_it_is_full_is_not_asked(two: Fleet) -> None:
    two.a.load, two.b.load = load(4, max_num_sessions=4), load(60)
    await two.fleet.refresh()
    await two.begun(2)
    assert two.num_streams == (0, 2)
    assert two.a.opened == []


async def test_if_all_are_full_a_session_waits_until_one_is_not(two: Fleet) -> None:
    two.a.refusal = two.b.refusal = grpc.StatusCode.RESOURCE_EXHAUSTED
    session = two.begin()
    await until(lambda: session.listener.num_detached)
    assert two.a.opened
    assert two.b.opened
    two.a.refusal = two.b.refusal = None
    await until(lambda: session.listener.num_drafts)
    assert (session.listener.num_attached, session.listener.num_detached) == (1, 1)


async def test_sessions_of_one_that_is_lost_go_on_at_the_other_at_once(two: Fleet) -> None:
    sessions = await two.begun(8)
    for session in sessions:
        session.commit()
    opened_before = len(two.b.opened)
    two.a.health = health_pb2.HealthCheckResponse.NOT_SERVING
    lost = [session for session in sessions if session.stream.peer is two.fleet.peers[0]]
    await two.stop("a")
    await until(lambda: len(two.b.opened) == opened_before + 4)
    await until(lambda: all(session.listener.num_attached == 2 for session in lost))
    assert two.num_streams == (0, 8)
    assert [list(each.committed_token_ids) for each in two.b.opened[opened_before:]] == [[1, 2, 3]] * 4
    assert num_detached(sessions) == len(lost) == 4
    assert all(session.listener.num_detached == 1 for session in lost)
    assert not two.fleet.peers[0].breaker.is_closed
    await two.begun(2)  # nobody tries it
    assert two.num_streams == (0, 10)


async def test_one_that_is_away_from_the_start_is_found_out_by_one_session(two: Fleet) -> None:
    await two.stop("a")
    sessions = await two.begun(8)
    assert two.num_streams == (0, 8)
    assert num_detached(sessions) == 0  # none of them had a stream before


async def test_when_all_are_lost_the_first_that_is_back_has_all_sessions(two: Fleet) -> None:
    sessions = await two.begun(4)
    await two.stop("a")
    await two.stop("b")
    await until(lambda: all(session.listener.num_detached for session in sessions))
    before = {session: session.listener.num_drafts for session in sessions}
    await two.start("b")
    await until(lambda: all(session.listener.num_drafts > before[session] for session in sessions))
    assert two.num_streams == (0, 4)


async def test_sessions_are_moved_to_one_that_comes_back_until_they_are_even_and_no_further(two: Fleet) -> None:
    await two.stop("b")
    sessions = await two.begun(8)
    for session in sessions:
        session.commit()
    num_lost = num_detached(sessions)
    await two.start("b")
    await until(lambda: two.fleet.peers[1].has_room)
    assert await two.balanced() == 3
    await until(lambda: two.num_streams == (5, 3))
    assert num_detached(sessions) == num_lost
    assert all(list(each.committed_token_ids) == [1, 2, 3] for each in two.b.opened)
    for _ in range(10):
        assert await two.balanced() == 0


async def test_a_lone_session_stays_and_of_two_one_goes_to_an_idle_speculator(two: Fleet) -> None:
    await two.stop("b")
    [first] = await two.begun(1)
    await two.start("b")
    await until(lambda: two.fleet.peers[1].has_room)
    assert await two.balanced() == 0
    two.fleet.peers[1].refuse()  # so that the second one goes to the first one's
    [second] = await two.begun(1)
    two.fleet.peers[1]._full_until = 0.0
    assert await two.balanced() == 1
    await until(lambda: two.num_streams == (1, 1))
    first.commit()
    second.commit()
    await until(lambda: len(two.a.commits) == len(two.b.commits) == 1)


async def uneven(two: Fleet, num_sessions: int = 3) -> tuple[list[Session], Session]:
    """Sessions at a, one of which is on its way to b, which still reads its text."""
    await two.stop("b")
    sessions = await two.begun(num_sessions)
    await two.start("b")
    await until(lambda: two.fleet.peers[1].has_room)
    two.b.is_reading = True
    two.fleet.balance()
    [moving] = [session for session in sessions if session.stream.tend()]
    await until(lambda: two.b.num_streams == 1)
    return sessions, moving


async def test_until_the_new_speculator_has_read_the_text_the_old_one_drafts(two: Fleet) -> None:
    sessions, moving = await uneven(two)
    before, num_attached = moving.listener.num_drafts, moving.listener.num_attached
    moving.commit()
    await until(lambda: moving.listener.num_drafts > before)
    assert moving.listener.num_attached == num_attached
    two.b.is_reading = False
    moving.commit()
    await until(lambda: two.num_streams == (2, 1))
    assert moving.listener.num_attached == num_attached + 1
    assert two.fleet.num_moves == 1
    assert num_detached(sessions) == 0


async def test_one_session_is_moved_at_a_time_however_uneven_the_loads_are(two: Fleet) -> None:
    sessions, moving = await uneven(two, 9)
    for _ in range(3):
        two.fleet.balance()
        assert [session for session in sessions if session.stream.tend()] == [moving]
        assert two.fleet.peers[1].load.num_own_sessions == 1


async def test_a_move_that_brings_no_draft_is_given_up_and_not_tried_again(two: Fleet) -> None:
    sessions, moving = await uneven(two)
    moving.stream._move_until = 0.0
    assert [session.stream.tend() for session in sessions] == [False] * 3
    await until(lambda: two.num_streams == (3, 0))
    two.b.is_reading = False
    assert await two.balanced() == 1
    assert moving.stream.peer is two.fleet.peers[0]
    await until(lambda: two.num_streams == (2, 1))
    assert num_detached(sessions) == 0


async def test_a_stream_that_is_lost_during_a_move_goes_on_where_it_moves_to(two: Fleet) -> None:
    _, moving = await uneven(two)
    num_opened = len(two.b.opened)
    await two.stop("a")
    await until(lambda: len(two.b.opened) == num_opened + 2)
    assert two.num_streams == (0, 3)  # no second stream for the one that was there already
    assert (moving.listener.num_detached, moving.listener.num_attached) == (1, 2)


async def test_a_target_that_is_lost_during_a_move_costs_nothing(two: Fleet) -> None:
    sessions, moving = await uneven(two)
    await two.stop("b")
    await until(lambda: not moving.stream.tend())
    before = moving.listener.num_drafts
    moving.commit()
    await until(lambda: moving.listener.num_drafts > before)
    assert num_detached(sessions) == 0


async def test_sessions_that_pause_are_not_moved(two: Fleet) -> None:
    sessions, moving = await uneven(two)
    for session in sessions:
        session.stream.send_steering(PAUSE)
    assert not moving.stream.tend()
    await until(lambda: two.num_streams == (3, 0))
    assert await two.balanced() == 0


async def test_what_was_steered_is_told_to_the_next_speculator(two: Fleet) -> None:
    [session] = await two.begun(1)
    origin, other, name = (two.a, two.b, "a") if two.a.num_streams else (two.b, two.a, "b")
    session.stream.send_steering(Steering(forward_us=7))
    session.stream.send_steering(Steering(round_trip_us=9))
    await until(lambda: sum(each.round_trip_us for each in origin.steerings) == 9)
    await two.stop(name)
    await until(lambda: other.steerings)
    [told] = other.steerings
    assert (told.forward_us, told.round_trip_us) == (7, 9)


async def test_a_session_that_both_refuse_asks_again_slowly_and_goes_where_it_is_taken(two: Fleet) -> None:
    two.a.refusal = two.b.refusal = grpc.StatusCode.OUT_OF_RANGE
    session = two.begin()
    await until(lambda: session.listener.num_detached)
    num_asked = len(two.a.opened) + len(two.b.opened)
    assert num_asked == 3  # each once, and the first one again
    assert not session.stream.tend()
    two.b.refusal = None
    session.stream._seek_at = 0.0
    await until(lambda: session.stream.tend() or session.listener.num_drafts)
    assert two.num_streams == (0, 1)


async def test_bytes_of_all_streams_of_a_session_are_counted(two: Fleet) -> None:
    [session] = await two.begun(1)
    name = "a" if two.a.num_streams else "b"
    await two.stop(name)
    await until(lambda: session.listener.num_attached == 2)
    heard = [two.a.num_bytes_heard, two.b.num_bytes_heard]
    assert min(heard) > 0
    assert session.stream.traffic.num_bytes_sent == sum(heard)


async def test_a_session_that_ends_during_a_move_leaves_no_stream(two: Fleet) -> None:
    sessions, _ = await uneven(two)
    for session in sessions:
        session.stream.close()
    await until(lambda: two.num_streams == (0, 0))
    assert [peer.load.num_sessions for peer in two.fleet.peers] == [0, 0]


class Resolver:
    """Resolves a name, in place of the system's resolver."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: list[str] = []
        monkeypatch.setattr(fleets, "addresses_behind", self._look_up)

    async def _look_up(self, target: str) -> list[str]:
        assert target == "localhost:1"
        return self.found


async def test_each_address_of_a_name_is_a_speculator_and_they_come_and_go(
    two: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolver = Resolver(monkeypatch)
    two.fleet = SpeculatorFleet(["localhost:1"], AModel())
    await two.fleet.look_up()
    assert [peer.state.address for peer in two.fleet.peers] == ["localhost:1"]  # gRPC may find what we do not
    resolver.found = list(two.addresses)
    await two.fleet.look_up()
    sessions = await two.begun(8)
    assert two.num_streams == (4, 4)
    assert all(peer.has_stand_ins for peer in two.fleet.peers)
    resolver.found = [two.addresses[1]]
    await two.fleet.look_up()
    await two.begun(2)
    assert two.num_streams == (4, 6)
    # Sessions at an address that the name has lost are moved, however busy the others are.
    assert await two.balanced() == 4
    await until(lambda: two.num_streams == (0, 10))
    assert num_detached(sessions) == 0
    resolver.found = []  # an unreachable resolver removes nothing
    await two.fleet.look_up()
    assert [peer.state.address for peer in two.fleet.peers] == [two.addresses[1]]
    two.close()
    await two.fleet.close()

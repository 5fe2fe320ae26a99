"""A speculator reports its load once on each connection, and again when it has changed."""

from __future__ import annotations

import grpc
import pytest

from outrider.speculator.load import WINDOW_S, LoadReports
from outrider.v1 import speculator_pb2, speculator_pb2_grpc
from tests.support.services import running_speculator
from tests.support.speculator_requests import PROMPT, Session, commit, opening


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reports(clock: Clock) -> LoadReports:
    return LoadReports(8, clock)


def test_a_connection_hears_of_a_change_once_whichever_of_its_streams_says_it(reports: LoadReports) -> None:
    for connection in ("a", "a", "b"):
        reports.open(connection, reports.current(3, 0.0))
    assert reports.news("a", reports.current(3, 0.0)) is None
    change = reports.current(4, 0.0)
    assert reports.news("a", change) == change
    assert reports.news("a", reports.current(4, 0.0)) is None
    assert reports.news("b", reports.current(4, 0.0)) == change


def test_when_one_stream_of_a_connection_ends_there_is_no_news(reports: LoadReports) -> None:
    for _ in range(2):
        reports.open("a", reports.current(1, 0.0))
    reports.close("a")
    assert reports.news("a", reports.current(1, 0.0)) is None


def test_the_use_of_the_engine_is_that_of_the_last_second_and_small_changes_are_no_news(
    reports: LoadReports, clock: Clock
) -> None:
    reports.open("a", reports.current(1, 0.0))
    clock.now += WINDOW_S / 2
    assert reports.current(1, 0.4).busy_percent == 0  # too short a time for a percentage
    clock.now += WINDOW_S / 2
    half = reports.current(1, 0.5)
    assert half.busy_percent == 50
    assert reports.news("a", half) == half
    clock.now += WINDOW_S
    more = reports.current(1, 0.5 + 0.62)
    assert (more.busy_percent, reports.news("a", more)) == (60, None)
    clock.now += 10 * WINDOW_S
    assert reports.current(1, 100.0).busy_percent == 100  # never more, whatever the clocks say


async def read_load(call: Session) -> speculator_pb2.SpeculatorLoad:
    """The next load that a stream reports."""
    while True:
        response = await call.read()
        event = getattr(response, response.WhichOneof("event"))
        if event.HasField("load"):
            load: speculator_pb2.SpeculatorLoad = event.load
            return load


async def test_streams_tell_how_many_sessions_there_are_when_that_changes() -> None:
    async with running_speculator(max_num_sessions=5) as speculator:
        async with grpc.aio.insecure_channel(speculator.address) as channel:
            stub = speculator_pb2_grpc.SpeculatorServiceStub(channel)
            first = Session(stub)
            await first.write(opening(speculator))
            load = await read_load(first)
            assert (load.num_sessions, load.max_num_sessions) == (1, 5)
            # Another caller, on its own connection: the first one hears of it with its next draft.
            async with grpc.aio.insecure_channel(speculator.address, [("grpc.use_local_subchannel_pool", 1)]) as other:
                second = Session(speculator_pb2_grpc.SpeculatorServiceStub(other))
                await second.write(opening(speculator))
                assert (await read_load(second)).num_sessions == 2
                await first.write(commit(len(PROMPT), [5]))
                while (await read_load(first)).num_sessions != 2:
                    pass
                info = await stub.GetInfo(speculator_pb2.SpeculatorServiceGetInfoRequest())
                assert (info.num_sessions, info.max_num_sessions) == (2, 5)
                second.cancel()
            first.cancel()
        assert await speculator.is_idle()

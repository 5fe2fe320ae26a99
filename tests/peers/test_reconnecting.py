"""A stream that is opened again whenever it is lost: how the loss is judged, and when the next one is opened."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from outrider.core.params import InvalidParameter
from outrider.core.statistics import Absence
from outrider.peers import reconnecting
from outrider.peers.channel import PeerState
from outrider.peers.reconnecting import Cause, Loss, ReconnectingStream, backoff_s
from tests.support.waiting import until

IMPOSSIBLE = -1
NOTHING = grpc.aio.Metadata()


def failure(code: grpc.StatusCode, details: str = "as the test wants it") -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, NOTHING, NOTHING, details)


class Call:
    """A call with scripted responses and a scripted end. Without an end it stays open.

    Nothing comes before the first request.
    """

    def __init__(self, *events: int | BaseException | None) -> None:
        self.written: list[int] = []
        self.is_cancelled = False
        self.write_error: Exception | None = None
        self._events = events
        self._has_requests = asyncio.Event()

    async def write(self, request: int) -> None:
        if self.write_error is not None:
            raise self.write_error
        self.written.append(request)
        self._has_requests.set()

    def cancel(self) -> None:
        self.is_cancelled = True

    async def __aiter__(self) -> AsyncIterator[int | None]:
        await self._has_requests.wait()
        for event in self._events:
            if isinstance(event, asyncio.CancelledError):
                with suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
                raise failure(grpc.StatusCode.UNAVAILABLE)
            if isinstance(event, StopAsyncIteration):
                return
            if isinstance(event, BaseException):
                raise event
            yield event
        await asyncio.Event().wait()


ENDED = StopAsyncIteration()
"""The peer ends the stream in order."""
ENDED_WHEN_CANCELLED = asyncio.CancelledError()
"""The call fails at the moment at which its reader is cancelled."""


class Stream(ReconnectingStream[int, int]):
    """Opens the calls of a test, one after another, then one that stays open."""

    def __init__(self, peer: PeerState, *calls: Call) -> None:
        super().__init__(peer)
        self.calls, self.opened_at = list(calls), list[float]()
        self.answer_within_s: float | None = None
        self.at_once: set[int] = set()
        """Numbers of the losses after which the stream is opened again without a pause."""
        self.losses: list[Loss] = []
        self.num_failures: list[int] = []
        self.has_closed_requests = False
        self.num_answers = 0

    def _open(self) -> Any:
        if len(self.opened_at) == len(self.calls):
            self.calls.append(Call())
        self.opened_at.append(asyncio.get_running_loop().time())
        return self.calls[len(self.opened_at) - 1]

    async def _requests(self) -> AsyncGenerator[int, None]:
        if self.answer_within_s is not None:
            self._expect_answer_by(asyncio.get_running_loop().time() + self.answer_within_s)
        try:
            for request in range(1, 4):
                yield request
            await asyncio.Event().wait()
        finally:
            self.has_closed_requests = True

    async def _receive(self, response: int) -> None:
        if response == IMPOSSIBLE:
            raise InvalidParameter("token_ids", ">= 0", response)
        self._answered()
        self.num_answers += 1

    def _lose(self, loss: Loss) -> float | None:
        self.losses.append(loss)
        self.num_failures.append(self._num_failures)
        return None if len(self.losses) in self.at_once else backoff_s(self._num_failures)


@pytest.fixture
async def peer() -> AsyncIterator[PeerState]:
    state = PeerState("datastore", "127.0.0.1:1")
    yield state
    await state.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconnecting, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(reconnecting, "LAST_RETRY_S", 0.04)


async def lost(stream: Stream, num_losses: int) -> list[Loss]:
    """The losses of a stream, once the one after them is open."""
    await until(lambda: len(stream.opened_at) == num_losses + 1)
    stream.stop()
    return stream.losses


async def test_pauses_grow_and_begin_again_after_an_answer(peer: PeerState) -> None:
    away = [Call(failure(grpc.StatusCode.UNAVAILABLE)) for _ in range(4)]
    stream = Stream(peer, *away, Call(7, failure(grpc.StatusCode.UNAVAILABLE)))
    await lost(stream, 5)
    assert stream.num_failures == [1, 2, 3, 4, 1]
    pauses = [after - before for before, after in zip(stream.opened_at, stream.opened_at[1:], strict=False)]
    shortest = [0.01, 0.02, 0.04, 0.04, 0.01]
    assert all(pause >= least - 0.001 for pause, least in zip(pauses, shortest, strict=True)), pauses
    assert peer.num_reconnects == 5


@pytest.mark.parametrize(
    ("end", "cause", "code", "reason"),
    [
        (ENDED, Cause.STATUS, grpc.StatusCode.OK, "the datastore ended the stream"),
        (failure(grpc.StatusCode.NOT_FOUND), Cause.STATUS, grpc.StatusCode.NOT_FOUND, "NOT_FOUND: as the test wants"),
        (None, Cause.GARBAGE, None, "cannot be parsed"),
        (IMPOSSIBLE, Cause.GARBAGE, None, "token_ids must be >= 0, got -1"),
    ],
)
async def test_a_loss_says_how_the_stream_ended(
    peer: PeerState, end: Any, cause: Cause, code: grpc.StatusCode | None, reason: str
) -> None:
    [loss] = await lost(Stream(peer, Call(end)), 1)
    assert (loss.cause, loss.code, loss.is_overwritten) == (cause, code, False)
    assert reason in loss.reason


async def test_a_status_that_grpc_has_lost_is_known_as_such(peer: PeerState) -> None:
    [loss] = await lost(Stream(peer, Call(failure(grpc.StatusCode.INTERNAL, "Internal error from Core"))), 1)
    assert loss.is_overwritten


async def test_a_peer_that_owes_an_answer_too_long_is_lost(peer: PeerState) -> None:
    stream = Stream(peer, Call())
    stream.answer_within_s = 0.01
    await until(lambda: stream.losses)
    assert stream.losses[0].cause is Cause.SILENCE
    stream.stop()


async def test_a_stream_that_moves_on_is_opened_at_once(peer: PeerState) -> None:
    stream = Stream(peer, Call(7, ENDED), Call(7, ENDED))
    stream.at_once = {1, 2}
    await lost(stream, 2)
    assert stream.num_failures == [1, 1]
    assert peer.num_reconnects == 0


async def test_a_failed_write_is_judged_where_the_stream_is_read(peer: PeerState) -> None:
    call = Call()
    call.write_error = asyncio.InvalidStateError()
    stream = Stream(peer, call)
    await until(lambda: stream.has_closed_requests)
    assert not stream.losses
    stream.stop()


async def test_a_lost_or_stopped_stream_leaves_nothing_open(peer: PeerState) -> None:
    before = asyncio.all_tasks()
    stream = Stream(peer, Call(7, failure(grpc.StatusCode.UNAVAILABLE)))
    await until(lambda: len(stream.calls) == 2 and stream.calls[1].written)
    assert stream.calls[0].is_cancelled
    stream.stop()
    await until(lambda: asyncio.all_tasks() <= before)
    assert stream.calls[1].is_cancelled
    assert stream.has_closed_requests


async def test_a_stream_stopped_as_its_call_ends_stays_stopped(peer: PeerState) -> None:
    before = asyncio.all_tasks()
    stream = Stream(peer, Call(7, ENDED_WHEN_CANCELLED))
    await until(lambda: stream.calls and stream.num_answers)
    stream.stop()
    await until(lambda: asyncio.all_tasks() <= before)
    assert (len(stream.opened_at), stream.losses) == (1, [])


async def test_nobody_dials_after_the_channel_was_closed(peer: PeerState) -> None:
    before = asyncio.all_tasks()
    stream = Stream(peer, Call(grpc.aio.UsageError("Channel is closed.")))
    await until(lambda: asyncio.all_tasks() <= before)
    assert (len(stream.opened_at), stream.losses) == (1, [])


@pytest.mark.parametrize(
    ("loss", "at_first", "later"),
    [
        (Loss(Cause.SILENCE, ""), Absence.SLOW, Absence.SLOW),
        (Loss(Cause.GARBAGE, ""), Absence.UNUSABLE, Absence.UNUSABLE),
        (Loss(Cause.STATUS, "", grpc.StatusCode.FAILED_PRECONDITION), Absence.UNUSABLE, Absence.UNUSABLE),
        (Loss(Cause.STATUS, "", grpc.StatusCode.UNAUTHENTICATED), Absence.UNUSABLE, Absence.UNUSABLE),
        (Loss(Cause.STATUS, "", grpc.StatusCode.RESOURCE_EXHAUSTED), Absence.FULL, Absence.FULL),
        (Loss(Cause.STATUS, "", grpc.StatusCode.UNAVAILABLE), Absence.UNREACHABLE, Absence.LOST),
        (Loss(Cause.STATUS, "", grpc.StatusCode.UNAVAILABLE, is_from_server=True), Absence.STARTING, Absence.LOST),
    ],
)
def test_a_loss_says_why_the_peer_is_missing(loss: Loss, at_first: Absence, later: Absence) -> None:
    assert (loss.absence(was_there=False), loss.absence(was_there=True)) == (at_first, later)

"""Sessions that share a call: one message carries everything that they send, and they share nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from outrider.models.structure import Grammars
from outrider.v1 import speculator_pb2 as pb
from outrider.v1 import speculator_pb2_grpc, types_pb2
from tests.support.services import RunningSpeculator, running_speculator
from tests.support.speculator_requests import PROMPT, Code, opening
from tests.support.waiting import until

WORDS = types_pb2.StructuredOutputs(regex="[a-z ]*")
NUM_SESSIONS = 4


@pytest.fixture
async def speculator() -> AsyncIterator[RunningSpeculator]:
    async with running_speculator(max_num_sessions=NUM_SESSIONS) as running:
        yield running


class Caller:
    """A call with sessions, and the responses to each of them."""

    def __init__(self, call: Any, speculator: RunningSpeculator) -> None:
        self.call, self._speculator = call, speculator
        self.num_messages = 0
        self.told: dict[int, list[pb.SessionResponse]] = {}

    def open(self, number: int, **changes: Any) -> pb.SessionRequest:
        return pb.SessionRequest(number=number, open=opening(self._speculator, **changes).open)

    async def write(self, *requests: pb.SessionRequest) -> None:
        await self.call.write(pb.SpeculateRequest(sessions=requests))

    async def read(self) -> pb.SpeculateResponse:
        message: pb.SpeculateResponse = await self.call.read()
        self.num_messages += 1
        for response in message.sessions:
            self.told.setdefault(response.number, []).append(response)
        return message

    async def drafts(self, number: int, base_len: int) -> list[types_pb2.Draft]:
        """Reads until a session has a draft after so many tokens; returns all its drafts."""
        while True:
            found = [each.draft.draft for each in self.told.get(number, ()) if each.WhichOneof("event") == "draft"]
            if any(draft.base_len >= base_len for draft in found):
                return found
            await self.read()

    async def end(self, number: int) -> pb.SpeculateEnded:
        """Reads until a session has ended; returns its end."""
        while True:
            for response in self.told.get(number, ()):
                if response.WhichOneof("event") == "ended":
                    return response.ended
            await self.read()


@pytest.fixture
async def caller(speculator: RunningSpeculator) -> AsyncIterator[Caller]:
    async with grpc.aio.insecure_channel(speculator.address) as channel:
        call = speculator_pb2_grpc.SpeculatorServiceStub(channel).Speculate()
        yield Caller(call, speculator)
        call.cancel()
    assert await speculator.is_idle()


def commit(number: int, base_len: int, *token_ids: int) -> pb.SessionRequest:
    return pb.SessionRequest(number=number, commit=types_pb2.Commit(base_len=base_len, token_ids=token_ids))


async def test_commits_of_one_message_are_answered_with_one_message(caller: Caller) -> None:
    numbers = range(1, NUM_SESSIONS + 1)
    await caller.write(*(caller.open(number) for number in numbers))
    for number in numbers:
        assert caller.told.get(number) is None or caller.told[number][0].WhichOneof("event") == "opened"
        await caller.drafts(number, len(PROMPT))
    before = caller.num_messages
    await caller.write(*(commit(number, len(PROMPT), 7) for number in numbers))
    drafts = [await caller.drafts(number, len(PROMPT) + 1) for number in numbers]
    # At most two: some nodes of a tree may not have needed a forward.
    assert caller.num_messages - before <= 2
    assert {tuple(of_session[-1].token_ids) for of_session in drafts} == {tuple(drafts[0][-1].token_ids)}


async def test_an_error_of_one_ends_no_other(caller: Caller) -> None:
    await caller.write(caller.open(1), caller.open(2, committed_token_ids=[]), caller.open(3))
    refused = await caller.end(2)
    assert (refused.code, refused.message) == (
        Code.INVALID_ARGUMENT.value[0],
        "open.committed_token_ids must hold at least one token",
    )
    await caller.write(commit(1, len(PROMPT) + 1, 7), commit(3, len(PROMPT), 7), commit(2, len(PROMPT), 7))
    gap = await caller.end(1)
    assert (gap.code, gap.message) == (
        Code.OUT_OF_RANGE.value[0],
        "commit.base_len must be at most 10, the tokens committed so far, got 11",
    )
    await caller.drafts(3, len(PROMPT) + 1)


async def test_a_bug_that_one_meets_ends_no_other(
    caller: Caller, speculator: RunningSpeculator, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_in = speculator.engine.commit

    def failing(session_id: str, token_ids: tuple[int, ...], acknowledged_node_id: int = 0) -> None:
        if token_ids == (13,):
            raise ValueError("a bug")
        take_in(session_id, token_ids, acknowledged_node_id)

    monkeypatch.setattr(speculator.engine, "commit", failing)
    await caller.write(caller.open(1), caller.open(2))
    await caller.write(commit(1, len(PROMPT), 13), commit(2, len(PROMPT), 7))
    ended = await caller.end(1)
    assert (ended.code, ended.message) == (
        Code.INTERNAL.value[0],
        "internal error; the server's log has the details",
    )
    await caller.drafts(2, len(PROMPT) + 1)


async def test_a_session_too_many_is_told_when_to_come_back(caller: Caller) -> None:
    await caller.write(*(caller.open(number) for number in range(1, NUM_SESSIONS + 2)))
    ended = await caller.end(NUM_SESSIONS + 1)
    assert ended.code == Code.RESOURCE_EXHAUSTED.value[0]
    assert b"RetryInfo" in ended.status
    await caller.write(pb.SessionRequest(number=1, close=pb.SpeculateClose()), caller.open(9))
    await caller.drafts(9, len(PROMPT))
    assert not any(each.WhichOneof("event") == "ended" for each in caller.told[9])


async def test_a_grammar_that_takes_long_holds_up_its_own_session_only(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, compile_matcher = threading.Event(), Grammars.matcher

    def slow(grammars: Grammars, structure: Any) -> Any:
        goes_on.wait(30)
        return compile_matcher(grammars, structure)

    monkeypatch.setattr(Grammars, "matcher", slow)
    await caller.write(caller.open(1, structured_outputs=WORDS), commit(1, len(PROMPT), 7), caller.open(2))
    await caller.drafts(2, len(PROMPT))
    await caller.write(commit(2, len(PROMPT), 7))
    await caller.drafts(2, len(PROMPT) + 1)
    assert 1 not in caller.told
    goes_on.set()
    await caller.drafts(1, len(PROMPT) + 1)  # with the commit that came while it was opened


async def test_a_session_that_was_closed_is_told_nothing_more(caller: Caller, speculator: RunningSpeculator) -> None:
    await caller.write(caller.open(1), caller.open(2))
    await caller.drafts(2, len(PROMPT))
    await caller.write(pb.SessionRequest(number=1, close=pb.SpeculateClose()), commit(1, len(PROMPT), 7))
    await until(lambda: speculator.servicer.num_sessions == 1)
    before = len(caller.told[1])
    await caller.write(commit(2, len(PROMPT), 7))
    await caller.drafts(2, len(PROMPT) + 1)
    assert len(caller.told[1]) == before


@pytest.mark.parametrize(
    ("numbers", "words"),
    [((1, 1), "sessions.number must be that of no open session"), ((0,), "sessions.number must be >= 1, got 0")],
)
async def test_numbers_that_cannot_be_end_the_call(caller: Caller, numbers: tuple[int, ...], words: str) -> None:
    await caller.write(*(caller.open(number) for number in numbers))
    async with asyncio.timeout(10):
        assert await caller.call.code() is Code.INVALID_ARGUMENT
    assert words in (await caller.call.details() or "")


async def test_half_closing_ends_all_sessions_in_order(caller: Caller) -> None:
    await caller.write(caller.open(1), caller.open(2))
    await caller.drafts(1, len(PROMPT))
    await caller.call.done_writing()
    async with asyncio.timeout(10):
        assert await caller.call.code() is Code.OK


async def test_a_speculator_that_drains_ends_the_call(caller: Caller, speculator: RunningSpeculator) -> None:
    await caller.write(caller.open(1))
    await caller.drafts(1, len(PROMPT))
    speculator.servicer.drain()
    async with asyncio.timeout(10):
        ended = await caller.call.code(), await caller.call.details()
    assert ended == (Code.UNAVAILABLE, "the speculator is draining")

"""The call that sessions share at a speculator: their common messages, and what happens to sessions if it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from outrider.core.statistics import Absence
from outrider.peers import shared_call
from outrider.peers.channel import is_balanced
from outrider.v1 import speculator_pb2 as pb
from tests.support.scripted_speculator import Context, Listener, ScriptedSpeculator, dialling, serving, speculate
from tests.support.waiting import until

NUM_SESSIONS = 10


class Counting(ScriptedSpeculator):
    """Records the events of each message, and the number of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[list[str]] = []
        self.num_calls = 0
        self.garbled: int | None = None
        """Number of a session that gets invalid answers."""

    async def Speculate(  # type: ignore[override]
        self, requests: AsyncIterator[pb.SpeculateRequest], context: Context
    ) -> AsyncIterator[pb.SpeculateResponse | bytes]:
        async def noted() -> AsyncIterator[pb.SpeculateRequest]:
            async for message in requests:
                self.messages.append([request.WhichOneof("event") or "" for request in message.sessions])
                yield message

        self.num_calls += 1
        try:
            async for response in super().Speculate(noted(), context):
                if isinstance(response, pb.SpeculateResponse) and response.sessions[0].number == self.garbled:
                    response.sessions[0].draft.draft.costs.extend([1] * 5000)
                yield response
        finally:
            self.num_calls -= 1


@pytest.fixture
def speculator() -> Counting:
    return Counting()


async def test_what_sessions_say_in_one_turn_of_the_loop_is_one_message(speculator: Counting) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listeners, texts = [Listener() for _ in range(NUM_SESSIONS)], [[1, 2] for _ in range(NUM_SESSIONS)]
        streams = [speculate(peer, *each) for each in zip([*listeners], texts, strict=True)]
        await until(lambda: all(listener.num_drafts for listener in listeners))
        assert speculator.num_calls == 1
        speculator.messages.clear()
        for stream, text in zip(streams, texts, strict=True):
            text.append(3)
            stream.send_commit()
        await until(lambda: len(speculator.commits) == NUM_SESSIONS)
        assert speculator.messages == [["commit"] * NUM_SESSIONS]
        for stream in streams[1:]:
            stream.close()
        await until(lambda: speculator.num_streams == 1)
        assert speculator.messages[1:] == [["close"] * (NUM_SESSIONS - 1)]
        streams[0].close()
        await until(lambda: speculator.num_calls == 0)


async def test_a_text_to_be_opened_holds_up_others_for_a_while_only(
    speculator: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_call, "MAX_MESSAGE_TOKENS", 3)
    async with serving(speculator) as address, dialling(address) as peer:
        streams = [speculate(peer, Listener()) for _ in range(4)]
        await until(lambda: len(speculator.opened) == 4)
        assert speculator.messages == [["open", "open"]] * 2
        for stream in streams:
            stream.close()


async def test_a_call_that_breaks_is_lost_to_all_and_each_goes_on_by_itself(speculator: Counting) -> None:
    async with serving(speculator) as address:
        pass  # an address that nobody else knows
    async with dialling(address) as peer:
        listeners = [Listener() for _ in range(NUM_SESSIONS)]
        async with serving(speculator, address):
            streams = [speculate(peer, listener) for listener in listeners]
            await until(lambda: all(listener.num_drafts for listener in listeners))
        await until(lambda: all(listener.absences == [Absence.LOST] for listener in listeners))
        before = [listener.num_drafts for listener in listeners]
        async with serving(speculator, address):
            await until(lambda: all(one.num_drafts > num for one, num in zip(listeners, before, strict=True)))
            for stream in streams:
                stream.close()


async def test_a_peer_that_is_closed_leaves_no_session_waiting(speculator: Counting) -> None:
    async with serving(speculator) as address:
        before = len(asyncio.all_tasks())
        async with dialling(address) as peer:
            listeners = [Listener() for _ in range(NUM_SESSIONS)]
            streams = [speculate(peer, listener) for listener in listeners]
            await until(lambda: all(listener.num_drafts for listener in listeners))
        await until(lambda: len(asyncio.all_tasks()) <= before)
        assert all(not listener.num_detached for listener in listeners)
        assert streams


async def test_contents_that_cannot_be_lose_their_own_session(speculator: Counting) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        speculator.garbled = 1
        bad, good, text = Listener(), Listener(), [1, 2]
        streams = [speculate(peer, bad), speculate(peer, good, text)]
        await until(lambda: bad.absences == [Absence.UNUSABLE])
        text.append(3)
        before = good.num_drafts
        streams[1].send_commit()
        await until(lambda: good.num_drafts > before)
        assert good.num_detached == 0
        for stream in streams:
            stream.close()


async def test_sessions_that_begin_later_or_after_a_redial_have_another_call(
    speculator: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(speculator) as address, dialling(address) as peer:
        listeners = [Listener() for _ in range(4)]
        streams = [speculate(peer, listeners[0])]
        await until(lambda: speculator.num_calls == 1)
        peer.state.dial_anew()
        streams.append(speculate(peer, listeners[1]))
        await until(lambda: speculator.num_calls == 2)
        monkeypatch.setattr(shared_call, "MAX_AGE_S", 0.0)
        streams.append(speculate(peer, listeners[2]))
        await until(lambda: speculator.num_calls == 3)
        await until(lambda: all(listener.num_drafts for listener in listeners[:3]))
        streams.pop().close()
        await until(lambda: speculator.num_calls == 2)
        for stream in streams:
            stream.close()
        await until(lambda: speculator.num_calls == 0)


@pytest.mark.parametrize(
    ("target", "is_chosen_by_grpc"),
    [
        ("a:1", False),
        ("dns:///a.b:1", False),
        ("127.0.0.1:1", False),
        ("[::1]:1", False),
        ("unix:/run/a", False),
        ("dns://127.0.0.1:53/a:1", True),
        ("ipv4:127.0.0.1:1,127.0.0.2:1", True),
    ],
)
def test_sessions_share_no_call_where_grpc_alone_chooses_the_replica(target: str, is_chosen_by_grpc: bool) -> None:
    assert is_balanced(target) is is_chosen_by_grpc

"""One call with mutated messages: what is sent, and its result."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from tests.fuzz.examples import Rpc, tamed
from tests.fuzz.mutations import mutated, serialized

MAX_LATER = 12
"""Maximum messages of a stream after the first."""
LATE_S = 10.0
"""A call that has not ended this long after its deadline will not end."""
BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNAVAILABLE)
"""Statuses that no message may cause: the server did not foresee the error, or has lost more than this call."""
LOST_STATUS = "Internal error from Core"
"""grpc.aio's message if the server has ended a stream while the client was writing."""
LOST_TRAILERS = "metadata size exceeds"
"""The server's own status was lost."""
SLOW_STORE = "did not answer in time"
"""Ignored: Redis may be slow on a busy machine."""


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent: a function of the RPC, the seed and the number alone."""

    rpc: Rpc
    seed: int
    number: int
    messages: tuple[bytes, ...]
    pause_s: float
    """Pause between the last message and the end of the requests."""

    @property
    def server(self) -> str:
        """The service that is called."""
        return self.rpc.servers[self.number % len(self.rpc.servers)]


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended."""

    code: grpc.StatusCode
    details: str
    seconds: float
    is_finding: bool


def make_call(rpc: Rpc, seed: int, number: int) -> Call:
    """The call with this number: good and mutated messages, at least one of them mutated."""
    random = Random(f"{seed} {rpc.name} {number}")
    first = rpc.first(random)
    if rpc.later is None:
        return Call(rpc, seed, number, (_mutated(first, random, []),), 0.0)
    later = [rpc.later(random, index) for index in range(1, random.randrange(MAX_LATER + 1))]
    # After a good beginning the mutations get further.
    is_good = bool(later) and random.random() < 0.8
    messages = [serialized(first) if is_good else _mutated(first, random, later)]
    share = random.choice((0.1, 0.3, 0.7))
    messages += [
        _mutated(message, random, [first, *later]) if random.random() < share else serialized(message)
        for message in later
    ]
    return Call(rpc, seed, number, tuple(messages), random.choice((0.0, 0.0, 0.01, 0.05)))


def _mutated(message: Message, random: Random, others: list[Message]) -> bytes:
    data = mutated(message, random, others)
    if random.random() < 0.97:
        parsed = type(message)()
        try:
            parsed.ParseFromString(data)
        except DecodeError:
            return data
        if tamed(parsed):
            return serialized(parsed)
    return data


async def send(call: Call, channel: grpc.aio.Channel, address: str) -> Outcome:
    """Makes the call with exactly these bytes, and reads it to its end. If its status is lost on the way, the call is
    made once more by the library's other client, on its own channel to the same address."""
    began = time.monotonic()
    multi: Any = getattr(channel, call.rpc.kind)(call.rpc.method)
    requests = _requests(call) if call.rpc.is_stream else call.messages[0]
    running = multi(requests, timeout=call.rpc.deadline_s)
    code, details = grpc.StatusCode.OK, ""
    try:
        async with asyncio.timeout(call.rpc.deadline_s + LATE_S):
            if call.rpc.kind.endswith("stream"):
                async for _ in running:
                    pass
            else:
                await running
    except grpc.aio.AioRpcError as error:
        code, details = error.code(), error.details() or ""
    except TimeoutError:
        running.cancel()
        return Outcome(grpc.StatusCode.UNKNOWN, "it did not end", time.monotonic() - began, True)
    if details == LOST_STATUS:
        code, details = await asyncio.to_thread(_send_blocking, call, address)
    return Outcome(code, details, time.monotonic() - began, _is_finding(call.rpc, code, details))


def _send_blocking(call: Call, address: str) -> tuple[grpc.StatusCode, str]:
    with grpc.insecure_channel(address) as channel:
        running: Any = getattr(channel, call.rpc.kind)(call.rpc.method)(
            iter(call.messages), timeout=call.rpc.deadline_s
        )
        with suppress(grpc.RpcError):
            for _ in running:
                pass
        return running.code(), running.details() or ""


def _is_finding(rpc: Rpc, code: grpc.StatusCode, details: str) -> bool:
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return not rpc.is_endless
    return (code in BROKEN and SLOW_STORE not in details) or LOST_TRAILERS in details


async def _requests(call: Call) -> AsyncIterator[bytes]:
    for message in call.messages:
        yield message
    if call.pause_s:
        await asyncio.sleep(call.pause_s)

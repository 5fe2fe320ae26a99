"""The datastore's streams, as those who measure use them: a question and its answer at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import grpc

from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc as pb_grpc
from outrider.v1 import types_pb2
from outrider_client.channel import open_aio

CONTINUATION_LEN = 10
"""Tokens that a lookup asks for."""
TOKENIZER_HASH = "benchmark"
"""Tokenizer hash that the made-up streams are recorded under."""
RETRY_S = 0.002
ANSWER_TIMEOUT_S = 20.0
"""Longest wait for anything that must come. A measurement that hangs is no measurement."""


class NoAnswer(RuntimeError):
    """A stream ended where an answer was due, or what must happen did not. The message says what."""


def session_scope(session_id: str = "") -> pb.Scope:
    """Make the scope of a session that does not share."""
    return pb.Scope(tokenizer_hash=TOKENIZER_HASH, session_id=session_id)


def tenant_scope(session_id: str = "", tenant: str = "") -> pb.Scope:
    """Make the scope of a session that shares with its tenant, and contributes; without a session it only asks."""
    return pb.Scope(
        tokenizer_hash=TOKENIZER_HASH,
        session_id=session_id,
        tenant=tenant,
        retrieval_scope=types_pb2.RETRIEVAL_SCOPE_TENANT,
        contribute=bool(session_id),
    )


def lookup_request(
    contexts: Iterable[Sequence[int]], scope: pb.Scope | None = None, tiers: Sequence[types_pb2.Source] = ()
) -> pb.LookupRequest:
    """Make a question; the scope is only needed on a stream's first one."""
    queries = [
        pb.Query(query_id=number, base_len=len(context), context_token_ids=context)
        for number, context in enumerate(contexts)
    ]
    return pb.LookupRequest(scope=scope, queries=queries, max_continuation_len=CONTINUATION_LEN, tiers=tiers)


class LookupStream:
    """An open Lookup stream."""

    def __init__(self, stub: pb_grpc.DatastoreServiceAsyncStub) -> None:
        self._call = stub.Lookup()

    async def ask(self, request: pb.LookupRequest) -> pb.LookupResponse:
        """Ask one question, and return its answer."""
        await self._call.write(request)
        return await self.answer()

    async def write(self, request: pb.LookupRequest) -> None:
        """Send a question whose answer is fetched later."""
        await self._call.write(request)

    async def answer(self) -> pb.LookupResponse:
        """Return the next answer. Raises NoAnswer, AioRpcError."""
        response = await self._call.read()
        # grpc.aio returns EOF at the end, and None for a message that it cannot parse.
        if not isinstance(response, pb.LookupResponse):
            raise NoAnswer("the lookup stream ended")
        return response

    async def ask_until_found(self, request: pb.LookupRequest) -> None:
        """Asks again and again until Redis, or the ring, has an answer. Raises NoAnswer if there never is one."""
        await self._ask_until(request, lambda response: response.results[0].match_len > 0 and not response.is_local)

    async def ask_until_shared(self, request: pb.LookupRequest) -> None:
        """Asks again and again until the answer is no longer a local one. Raises NoAnswer if it always is."""
        await self._ask_until(request, lambda response: not response.is_local)

    async def _ask_until(self, request: pb.LookupRequest, is_enough: Callable[[pb.LookupResponse], bool]) -> None:
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                while not is_enough(await self.ask(request)):
                    pass  # at once: how soon is the question
        except TimeoutError:
            raise NoAnswer(f"no lookup was answered as it should within {ANSWER_TIMEOUT_S:g} s") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.cancel()


class RecordStream:
    """An open Record stream."""

    def __init__(self, stub: pb_grpc.DatastoreServiceAsyncStub) -> None:
        self._call = stub.Record()

    async def write(self, request: pb.RecordRequest) -> None:
        """Sends a record."""
        await self._call.write(request)

    async def acknowledgement(self) -> int:
        """Tokens of the session that are stored, says the next answer. Raises NoAnswer, AioRpcError."""
        response = await self._call.read()
        if not isinstance(response, pb.RecordResponse):
            raise NoAnswer("the record stream ended")
        return response.num_tokens

    async def record(self, request: pb.RecordRequest) -> int:
        """Sends a record and waits until it is stored."""
        await self.write(request)
        return await self.acknowledgement()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call.cancel()


async def num_stored_tokens(stub: pb_grpc.DatastoreServiceAsyncStub, scope: pb.Scope, at_most: int) -> int:
    """Count the tokens of a session that are stored: an empty record beyond them is told where to go on."""
    async with asyncio.timeout(ANSWER_TIMEOUT_S):
        while True:
            try:
                with RecordStream(stub) as records:
                    return await records.record(pb.RecordRequest(scope=scope, base_len=at_most))
            except grpc.aio.AioRpcError as error:
                # Redis, or the datastore, has just been restarted: that is what this is called after.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(RETRY_S)


async def load_prior(
    stub: pb_grpc.DatastoreServiceAsyncStub, requests: Iterable[pb.LoadPriorRequest]
) -> pb.LoadPriorResponse:
    """Loads a prior; returns the last answer. Raises NoAnswer if that does not say that it is in use."""
    last = pb.LoadPriorResponse()

    async def sent() -> AsyncIterator[pb.LoadPriorRequest]:
        for request in requests:
            yield request

    async for response in stub.LoadPrior(sent()):
        last = response
    if not last.is_done:
        raise NoAnswer("the prior was not loaded")
    return last


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[pb_grpc.DatastoreServiceAsyncStub]:
    """Connect to a datastore, and yield a warm stub while the block runs."""
    async with open_aio(address, None) as channel:
        stub: pb_grpc.DatastoreServiceAsyncStub = pb_grpc.DatastoreServiceStub(channel)
        # Connects, so that no measurement has the handshake in it.
        await stub.GetInfo(pb.DatastoreServiceGetInfoRequest(), timeout=ANSWER_TIMEOUT_S, wait_for_ready=True)
        yield stub

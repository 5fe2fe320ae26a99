"""Questions to the datastore: one stream for all sessions of a process, answers in order.

Each session has at most one question on its way; one that comes meanwhile waits, and gives way to a newer one. A
datastore that does not answer in time is asked again, over another connection.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from outrider.core.params import TIERS, Source
from outrider.core.retrieval.ngrams import Continuation
from outrider.peers.channel import SENSELESS, SPOILT, PeerState, is_overwritten, reason_of, wait_before_retry
from outrider.telemetry.tracing import TraceBudget
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2
from outrider.wire.channels import require_message
from outrider.wire.convert import source_to_proto

ANSWER_TIMEOUT_S = 1.0


@dataclass(eq=False, slots=True)
class Asker:
    """A session that asks. `on_answer(base_len, continuation)` and `on_lost()` are called on the event loop."""

    scope: pb.Scope
    on_answer: Callable[[int, Continuation], None]
    on_lost: Callable[[], None]
    tiers: Sequence[types_pb2.Source] = ()
    """Which are asked; empty = all."""
    mentions: TraceBudget = field(default_factory=TraceBudget)
    """Of the trace that the session is part of."""
    next_query: pb.Query | None = None
    is_asking: bool = False
    is_closed: bool = False


class Lookups:
    """The lookup stream of a process. Lives on the event loop."""

    def __init__(self, state: PeerState) -> None:
        self._state = state
        self._due: dict[Asker, None] = {}
        self._asked: deque[tuple[Asker, pb.Query]] = deque()
        self._wake = asyncio.Event()
        self._is_down = False
        self._task = asyncio.create_task(self._run())

    def ask(self, asker: Asker, query: pb.Query) -> None:
        """Asks, or will ask when the last answer is there."""
        asker.next_query = query
        if self._is_down:
            asker.on_lost()  # asked all the same, to see whether it is back; but nobody should wait for it
        if not asker.is_asking:
            self._due[asker] = None
            self._wake.set()

    def close(self, asker: Asker) -> None:
        """The session wants nothing more."""
        asker.is_closed, asker.next_query = True, None
        self._due.pop(asker, None)

    def stop(self) -> None:
        """Ends the stream."""
        self._task.cancel()

    async def _run(self) -> None:
        attempt = 0
        while True:
            while not self._due:
                self._wake.clear()
                await self._wake.wait()
            call = self._state.stub(datastore_pb2_grpc.DatastoreServiceStub).Lookup()
            writer = asyncio.create_task(self._write(call))
            has_answered = False
            try:
                while True:
                    response = await self._answer(call)
                    has_answered, attempt, self._is_down = True, 0, False
                    self._state.up()
                    self._deliver(response)
            except TimeoutError:
                self._state.down(f"no answer within {ANSWER_TIMEOUT_S:g} s")
                self._state.dial_anew()
            except EOFError:
                if has_answered:
                    # In order, as by a replica that drains, or that would share with new ones: at once to another.
                    self._ask_again()
                    continue
                self._state.down("the datastore ended the stream")
            except grpc.aio.AioRpcError as error:
                if has_answered and is_overwritten(error):
                    self._ask_again()  # likewise, while a question was written
                    continue
                self._state.down(reason_of(error))
                if error.code() in SENSELESS or error.code() is grpc.StatusCode.NOT_FOUND:
                    attempt = max(attempt, 4)  # it will be refused for long: not worth asking often
                elif error.code() in SPOILT:
                    self._state.dial_anew()
            finally:
                writer.cancel()
                call.cancel()
            self._is_down = True
            self._lose()
            attempt += 1
            self._state.num_reconnects += 1
            await wait_before_retry(attempt)

    async def _answer(self, call: grpc.aio.StreamStreamCall[pb.LookupRequest, pb.LookupResponse]) -> pb.LookupResponse:
        """The next answer. TimeoutError: a question has waited too long; EOFError: the stream has ended."""
        reading = asyncio.ensure_future(call.read())
        try:
            while True:
                done, _ = await asyncio.wait((reading,), timeout=ANSWER_TIMEOUT_S)
                if done:
                    break
                if self._asked:
                    raise TimeoutError
            response = require_message(reading.result())
        finally:
            reading.cancel()
        if not isinstance(response, pb.LookupResponse):
            code, details = await call.code(), await call.details()
            if code is not grpc.StatusCode.OK:
                raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)
            raise EOFError
        return response

    async def _write(self, call: grpc.aio.StreamStreamCall[pb.LookupRequest, pb.LookupResponse]) -> None:
        scope: pb.Scope | None = None
        while True:
            while not self._due:
                self._wake.clear()
                await self._wake.wait()
            asker = next(iter(self._due))
            del self._due[asker]
            query, asker.next_query = asker.next_query, None
            if query is None:
                continue
            request = pb.LookupRequest(queries=[query], tiers=asker.tiers, traceparent=asker.mentions.next())
            if asker.scope is not scope:
                scope = asker.scope
                request.scope.CopyFrom(scope)
            asker.is_asking = True
            self._asked.append((asker, query))
            try:
                await call.write(request)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                return  # whoever reads the stream hears of it, too

    def _deliver(self, response: pb.LookupResponse) -> None:
        if not self._asked:
            return
        asker, _ = self._asked.popleft()
        asker.is_asking = False
        if asker.next_query is not None:
            self._due[asker] = None
            self._wake.set()
        for result in response.results:
            asker.on_answer(result.base_len, continuation_from_proto(result))

    def _ask_again(self) -> None:
        """What the stream that has ended did not take in."""
        for asker, query in self._asked:
            asker.is_asking = False
            if not asker.is_closed:
                asker.next_query = asker.next_query or query
                self._due[asker] = None
        self._asked.clear()

    def _lose(self) -> None:
        """The stream is lost, and all that was asked with it: late answers are worth nothing."""
        lost = dict.fromkeys([*(asker for asker, _ in self._asked), *self._due])
        self._asked.clear()
        self._due.clear()
        for asker in lost:
            asker.is_asking, asker.next_query = False, None
            asker.on_lost()


def tiers_to_proto(tiers: Sequence[Source]) -> tuple[types_pb2.Source, ...]:
    """Which tiers to ask; empty = all of them, as it is if all are named."""
    return () if set(tiers) == set(TIERS) else tuple(source_to_proto(tier) for tier in tiers)


def continuation_from_proto(result: pb.LookupResult) -> Continuation:
    """An answer as a value. Nodes whose parents do not stand before them end the continuation."""
    length = min(len(result.parent_offsets), len(result.token_ids), len(result.counts))
    for index, offset in enumerate(result.parent_offsets[:length]):
        if offset > index:
            length = index
            break
    tier = Source(result.tier) if result.tier in Source._value2member_map_ else None
    return Continuation(
        result.match_len,
        tier if length else None,
        tuple(result.parent_offsets[:length]),
        tuple(result.token_ids[:length]),
        tuple(result.counts[:length]),
    )

"""What the datastore has acknowledged is in Redis once, in order, whatever is killed or cut off in between."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from outrider.core.params import RetrievalScope
from outrider.datastore.redis import layout
from outrider.datastore.types import Scope
from outrider.v1 import datastore_pb2 as pb
from outrider.v1 import datastore_pb2_grpc, types_pb2
from outrider_cli.links.delay_proxy import DelayProxy
from outrider_cli.local.redis import LocalRedis, free_port, started_redis
from outrider_cli.local.stack import Service
from tests.support.datastores import restart
from tests.support.waiting import until

NUM_SESSIONS = 4
NUM_ROUNDS = 3
"""How often each fault happens."""
MAX_TOKENS = 150
"""Maximum tokens of a record: several calls of Redis."""
REPLY_TIMEOUT_S = 5.0

pytestmark = [pytest.mark.suite, pytest.mark.timeout(300)]


class Session:
    """Records a text of its own as a verifier does: what was not acknowledged is sent again."""

    def __init__(self, number: int) -> None:
        self.scope = Scope(
            "a tokenizer", f"session {number}", tenant=f"tenant {number}", retrieval_scope=RetrievalScope.TENANT
        )
        self._message = pb.Scope(
            tokenizer_hash=self.scope.tokenizer_hash,
            session_id=self.scope.session_id,
            tenant=self.scope.tenant,
            retrieval_scope=types_pb2.RETRIEVAL_SCOPE_TENANT,
            contribute=True,
        )
        self._random = random.Random(number)
        self.text: list[int] = []
        self.num_acknowledged = 0
        self.num_records = 0

    async def record(self, address: str) -> None:
        """Records until it is cancelled. Each stream is used until it fails."""
        while True:
            async with grpc.aio.insecure_channel(address) as channel:
                with suppress(grpc.aio.AioRpcError, TimeoutError):
                    await self._record_on(datastore_pb2_grpc.DatastoreServiceStub(channel).Record())
            await asyncio.sleep(0.02)

    async def _record_on(self, call: grpc.aio.StreamStreamCall[pb.RecordRequest, pb.RecordResponse]) -> None:
        while True:
            end = self.num_acknowledged + self._random.randint(1, MAX_TOKENS)
            while len(self.text) < end:
                self.text.append(self._random.randrange(1 << 20))
            request = pb.RecordRequest(
                scope=self._message,
                base_len=self.num_acknowledged,
                accepted_token_ids=self.text[self.num_acknowledged : end],
            )
            async with asyncio.timeout(REPLY_TIMEOUT_S):
                await call.write(request)
                response = await call.read()
            if response is grpc.aio.EOF:
                return
            assert isinstance(response, pb.RecordResponse)
            # Fewer tokens would be a loss, and more were never sent.
            assert self.num_acknowledged <= response.num_tokens <= len(self.text)
            self.num_acknowledged = response.num_tokens
            self.num_records += 1

    async def check(self, redis: Redis) -> None:
        """Compares what is stored with what was sent: the stream, and the tiers that others read."""
        shared = layout.shared_keys(self.scope)
        assert shared is not None
        # At one moment: the last record, of which nobody waits for the answer, may be under way.
        async with redis.pipeline(transaction=True) as transaction:
            transaction.get(layout.session_keys(self.scope).tokens).xrange(shared.changes)
            packed, entries = await transaction.execute()
        stored = layout.unpack(packed or b"").tolist()
        assert len(stored) >= self.num_acknowledged
        assert stored == self.text[: len(stored)]
        assert layout.unpack(b"".join(entry[b"tokens"] for _, entry in entries)).tolist() == stored


class Servers:
    """Redis, the datastore, and the link to it. Blocking calls run on one thread, because child processes die with
    it."""

    def __init__(self, redis: LocalRedis, datastore: Service, way: DelayProxy, hand: ThreadPoolExecutor) -> None:
        self.redis, self._datastore, self._way, self._hand = redis, datastore, way, hand

    async def kill_redis(self) -> None:
        """Kills it while it works; it reads its file again."""
        await self.do(self.redis.kill)
        await self.do(self.redis.start)

    async def kill_datastore(self) -> None:
        """Kills it, and starts another one."""
        await self.do(self._datastore.kill)
        await self.do(self._datastore.restart)

    async def cut(self) -> None:
        """Loses the replies in flight."""
        await self._way.cut()
        await self._way.heal()

    async def kill_both(self) -> None:
        """Acts like a machine that dies."""
        await self.do(self.redis.kill)
        await self.kill_datastore()
        await self.do(self.redis.start)

    async def do(self, action: Callable[[], object]) -> None:
        """Runs a blocking function."""
        await asyncio.get_running_loop().run_in_executor(self._hand, action)


async def test_no_acknowledged_token_is_lost_doubled_or_out_of_order(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as hand, started_redis(tmp_path) as redis:
        restart_durable = partial(restart, redis, "--appendonly", "yes", "--appendfsync", "always")
        await asyncio.get_running_loop().run_in_executor(hand, restart_durable)
        # Everything is kept, so that it can be compared.
        flags = ("--redis-url", redis.url, "--max-session-tokens", "100000000", "--max-num-shared-changes", "100000000")
        listen = f"127.0.0.1:{free_port()}"  # the same after each start
        datastore = Service("datastore", "outrider.datastore", flags, tmp_path / "datastore.log", listen=listen)
        try:
            await asyncio.get_running_loop().run_in_executor(
                hand, lambda: (datastore.start(), datastore.wait_serving())
            )
            way = DelayProxy(datastore.address)
            await way.start()
            try:
                await suffer_all(Servers(redis, datastore, way, hand), way.address)
            finally:
                await way.close()
        finally:
            await asyncio.get_running_loop().run_in_executor(hand, datastore.stop)


async def suffer_all(servers: Servers, address: str) -> None:
    sessions = [Session(number) for number in range(NUM_SESSIONS)]
    recording = [asyncio.create_task(session.record(address)) for session in sessions]
    faults: list[Callable[[], Awaitable[None]]] = [
        servers.kill_redis,
        servers.kill_datastore,
        servers.cut,
        servers.kill_both,
    ] * NUM_ROUNDS
    for fault in faults:
        await all_go_on(sessions, recording)
        await fault()
        await all_go_on(sessions, recording)
    for task in recording:
        task.cancel()
    await asyncio.gather(*recording, return_exceptions=True)
    async with Redis.from_url(servers.redis.url) as redis:
        for session in sessions:
            await session.check(redis)


async def all_go_on(sessions: list[Session], recording: list[asyncio.Task[None]]) -> None:
    """Returns when each session has since had a record acknowledged. Raises an error that a session has found."""
    before = [session.num_records for session in sessions]

    def is_so() -> bool:
        for task in recording:
            if task.done():
                task.result()
        return all(session.num_records > number for session, number in zip(sessions, before, strict=True))

    await until(is_so)

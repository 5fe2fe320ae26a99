"""python -m outrider.datastore: settings, then serve."""

from __future__ import annotations

import asyncio

import grpc

from outrider.datastore.redis_store import RedisStore
from outrider.datastore.servicer import DatastoreServicer
from outrider.datastore.settings import DatastoreSettings
from outrider.rpc.logs import configure_logs
from outrider.rpc.server import pin, serve
from outrider.rpc.settings import parse_settings
from outrider.v1 import datastore_pb2_grpc


class DatastoreService:
    """The datastore, as `serve` runs it. It serves while Redis is away, too: lookups say so, and it is tried anew
    each time."""

    name = "outrider.v1.DatastoreService"

    def __init__(self, settings: DatastoreSettings) -> None:
        self._settings = settings
        self._servicer: DatastoreServicer | None = None
        self._store: RedisStore | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        settings = self._settings
        self._store = RedisStore(
            settings.redis_url,
            max_match_len=settings.max_match_len,
            session_ttl_s=settings.session_ttl_s,
            timeout_s=settings.redis_timeout_s,
        )
        self._servicer = DatastoreServicer(self._store, settings)
        datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(self._servicer, server)

    async def load(self) -> None:
        """Nothing: Redis has it all."""

    def drain(self) -> None:
        """Refuses new calls."""

    async def close(self) -> None:
        """Lets go of Redis."""
        if self._store is not None:
            await self._store.close()


def main() -> None:
    """Runs the service until a signal ends it."""
    settings = parse_settings(DatastoreSettings)
    configure_logs(settings.log_level, settings.log_format, "datastore")
    pin(settings.cores)
    asyncio.run(serve(DatastoreService(settings), settings))


if __name__ == "__main__":
    main()

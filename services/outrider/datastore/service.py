"""The datastore as a service, which `outrider.server.run` runs."""

from __future__ import annotations

import grpc

from outrider.datastore.metrics import read_metrics
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.replica import Replica
from outrider.datastore.servicer import DatastoreServicer
from outrider.datastore.settings import DatastoreSettings
from outrider.telemetry.metrics import Metrics
from outrider.v1 import datastore_pb2_grpc


class DatastoreService:
    """Implements `outrider.server.run.Service` for one replica. It also serves while Redis is away."""

    name = "outrider.v1.DatastoreService"

    def __init__(self, settings: DatastoreSettings) -> None:
        self._settings = settings

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        self._store = RedisStore(self._settings)
        self._replica = Replica(self._store, self._settings)
        self._servicer = DatastoreServicer(self._replica, self._settings)
        datastore_pb2_grpc.add_DatastoreServiceServicer_to_server(self._servicer, server)

    async def load(self) -> None:
        """Connects to Redis, if it is reachable."""
        await self._store.start()
        self._replica.start()

    def metrics(self) -> Metrics:
        """Reads the metrics. See `outrider.datastore.metrics`."""
        return read_metrics(self._replica.statistics, self._replica.rings.held, self._store.num_errors)

    def drain(self) -> None:
        """Refuses new calls and ends those that would never end by themselves."""
        self._servicer.drain()

    def fault(self) -> str:
        """Always returns no fault: a restart of this process would not bring Redis back."""
        return ""

    async def close(self) -> None:
        """Closes the connections to Redis and drops what this replica holds."""
        await self._replica.close()
        await self._store.close()

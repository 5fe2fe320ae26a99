"""Tells a process that is slow from one that hangs: a slow one works, reads from a disk, or says something."""

from __future__ import annotations

import os
import time
from pathlib import Path

LEAST_SHARE = 0.1
"""Share of a core below which a process does nothing: what its event loop takes while it waits is less."""
BYTES_PER_S = 10e6
"""Bytes from a disk that count as a second of work: to read them is work that takes hardly any time of a core."""


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
        """Takes in that the process has said something."""
        self._work_s, self._since = _work_s(self._pid), time.monotonic()

    def is_over(self) -> bool:
        """Returns True if the process has been silent for the whole limit."""
        if _work_s(self._pid) - self._work_s >= LEAST_SHARE * self._limit_s:
            self.end()
        return time.monotonic() - self._since >= self._limit_s


def _work_s(pid: int) -> float:
    """Returns what a process has done so far, in seconds; 0 where the system does not tell, or it has ended."""
    try:
        # Behind the name, which may have spaces in it, the 12th and the 13th are times in user mode and in the kernel.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        read = next(line for line in Path(f"/proc/{pid}/io").read_text().splitlines() if "read_bytes" in line)
    except (OSError, StopIteration):
        return 0.0
    ticks = int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + int(read.partition(":")[2]) / BYTES_PER_S

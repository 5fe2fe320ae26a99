"""Runs a program tied to the process that starts it: when that one dies, however it dies, so does the program.

A `finally` cannot do that for SIGKILL; the kernel can, on Linux. This file is run as a script, so that the tie is made
in the new process before it becomes the program: a `preexec_fn` runs between fork and exec, in a process with threads.

Trap: the kernel watches the *thread* that starts the program, so it must live as long as the program shall.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Collection, Sequence

_PR_SET_PDEATHSIG = 1


def die_with_parent(command: Sequence[str], cores: Collection[int] = ()) -> list[str]:
    """Returns the command line that runs a command tied to this process, on these cores only (empty means all)."""
    # -S -E: the launcher needs nothing but the standard library, and starts in some 10 ms without the rest.
    launcher = [sys.executable, "-S", "-E", __file__, str(os.getpid()), ",".join(map(str, cores))]
    return [*launcher, *command]


def main() -> None:
    """Becomes the program of the command line, tied to its parent: PARENT_PID CORES PROGRAM ARGUMENT..."""
    parent, cores, *command = sys.argv[1:]
    if sys.platform == "linux":
        # It survives the exec below, as the cores do (but not the exec of a setuid program: see prctl(2)).
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # it died before the tie was made
            sys.exit(1)
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()

"""Heavy work beside the event loop: one piece at a time, in a thread that gives way to everything else."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import ParamSpec, TypeVar

from outrider.core.retrieval.ngrams import TokenId
from outrider.core.retrieval.prior import PriorTable

NICENESS = 10
"""Added for the thread: whoever answers lookups on the same core goes first."""

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """See the module. For functions that spend their time in numpy, without the GIL."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "background", initializer=_give_way)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the function returns, when its turn has come and it is done."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drops what waits. What runs goes on to its end, unheard."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _give_way() -> None:
    """Lowers the priority of the calling thread, where that can be done for a thread alone."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


SMALL_LEN = 8192
"""A corpus of fewer tokens is counted in a thread, within milliseconds: a process takes longer to start."""


class CountingFailed(Exception):
    """The process has died, as for want of memory."""


async def count(documents: Sequence[Sequence[TokenId]], max_match_len: int, gives_way: bool = False) -> PriorTable:
    """The table of some documents. With `gives_way` it has time: whoever answers lookups on the same core goes first.

    Raises CountingFailed.
    """
    if sum(map(len, documents)) < SMALL_LEN:
        return await asyncio.to_thread(PriorTable.build, documents, max_match_len)
    work = await asyncio.to_thread(pickle.dumps, (documents, max_match_len))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        if gives_way:
            with suppress(ProcessLookupError):  # it has died already; its status will say so
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        table, _ = await process.communicate(work)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()  # to the end of its pipes
    if process.returncode:
        raise CountingFailed(f"counting a corpus ended with status {process.returncode}")
    counted: PriorTable = await asyncio.to_thread(pickle.loads, table)
    return counted


def main() -> None:
    """The process."""
    documents, max_match_len = pickle.load(sys.stdin.buffer)
    pickle.dump(PriorTable.build(documents, max_match_len), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()

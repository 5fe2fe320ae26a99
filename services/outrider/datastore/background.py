"""Runs heavy work that must not delay lookups: in a thread of low priority, or in a process.

`Background` is for work in numpy, without the GIL. `count` starts a process for work that holds the GIL:

    python -m outrider.datastore.background < pickled (documents, max_match_len) > pickled PriorTable
"""

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
"""Added to the niceness of the process, so that lookups served on the same core go first."""
SMALL_CORPUS_TOKENS = 8192
"""A corpus of fewer tokens is counted in a thread, within milliseconds: a process takes longer to start."""

P = ParamSpec("P")
T = TypeVar("T")


class Background:
    """Runs functions one at a time in a thread of low priority."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "background", initializer=_lower_priority)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs the function after those before it, and returns its result."""
        loop = asyncio.get_running_loop()
        # run_in_executor passes no keyword arguments on.
        return await loop.run_in_executor(self._executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Drops waiting functions. A running one goes on to its end, and its result is lost."""
        self._executor.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    # Linux has a priority for each thread; on other systems this would slow the whole process down.
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class CountingFailed(Exception):
    """The counting process has died, for example out of memory."""


async def count(documents: Sequence[Sequence[TokenId]], max_match_len: int, *, gives_way: bool = False) -> PriorTable:
    """Counts the n-grams of a corpus.

    Args:
        documents: The corpus.
        max_match_len: Longest n-gram, in tokens.
        gives_way: True lowers the priority of the process, for work that no caller waits for.

    Raises:
        CountingFailed: The process has died.
    """
    if sum(map(len, documents)) < SMALL_CORPUS_TOKENS:
        return await asyncio.to_thread(PriorTable.build, documents, max_match_len)
    work = await asyncio.to_thread(pickle.dumps, (documents, max_match_len))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        # The import path of this process, which may run from a source tree that is not installed.
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        if gives_way:
            with suppress(ProcessLookupError):  # it has died already, as its status will show
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        # Ignores a broken pipe: a process that has died shows it by its status.
        table, _ = await process.communicate(work)
    finally:
        if process.returncode is None:  # the caller was cancelled
            process.kill()
            await process.communicate()  # closes its pipes: otherwise the transport would outlive the event loop
    if process.returncode:
        raise CountingFailed(f"counting a corpus ended with status {process.returncode}")
    counted: PriorTable = await asyncio.to_thread(pickle.loads, table)
    return counted


def main() -> None:
    """Runs the counting process."""
    documents, max_match_len = pickle.load(sys.stdin.buffer)
    pickle.dump(PriorTable.build(documents, max_match_len), sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)


if __name__ == "__main__":
    main()

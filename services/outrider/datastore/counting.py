"""Counts a corpus in a process of its own.

Building a `PriorTable` holds the GIL for up to 100 ms at a time: in a thread, all lookups would wait. The process reads
its work from stdin and writes the table to stdout, both pickled.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress

from outrider.core.ngrams import TokenId
from outrider.core.prior import PriorTable
from outrider.datastore.background import NICENESS

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

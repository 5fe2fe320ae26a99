"""A corpus counted in another process."""

from __future__ import annotations

import asyncio
from array import array

import numpy as np
import psutil
import pytest

from outrider.core.retrieval.prior import PriorTable
from outrider.datastore import background as counting
from outrider.datastore.background import CountingFailed, count
from tests.support.waiting import until

DOCUMENTS = [array("i", np.random.default_rng(seed).integers(0, 300, 5000).tolist()) for seed in range(2)]


@pytest.mark.slow
async def test_a_table_that_another_process_has_counted_is_the_same():
    assert sum(map(len, DOCUMENTS)) > counting.SMALL_CORPUS_TOKENS
    counted, built = await count(DOCUMENTS, 3, gives_way=True), PriorTable.build(DOCUMENTS, 3)
    assert dict(counted.entries()) == dict(built.entries())
    assert (counted.num_tokens, counted.num_ngrams, counted.max_match_len) == (10_000, built.num_ngrams, 3)
    for start in range(0, 4000, 50):
        ngram = tuple(DOCUMENTS[0][start : start + 3])
        assert counted.followers(ngram) == built.followers(ngram)


async def test_a_small_corpus_is_counted_where_it_is(monkeypatch):
    monkeypatch.setattr(counting.sys, "executable", "/nonexistent")
    assert (await count([[1, 2]], 3)).followers((1,)) == ((2, 1),)


@pytest.mark.slow
async def test_a_process_that_dies_is_an_error(monkeypatch):
    monkeypatch.setattr(counting, "__name__", "outrider.nonexistent")
    with pytest.raises(CountingFailed, match="ended with status 1"):
        await count(DOCUMENTS, 3)


@pytest.mark.slow
async def test_a_caller_who_stops_waiting_leaves_no_process():
    task = asyncio.create_task(count(DOCUMENTS * 50, 4))
    processes = []
    await until(lambda: processes.extend(_children()) or processes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not set(processes) & set(_children())


def _children() -> list[int]:
    """Processes that this one has started, and that are counting."""
    return [each.pid for each in psutil.Process().children() if "outrider.datastore.background" in each.cmdline()]

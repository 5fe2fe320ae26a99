"""A process that `outrider bench datastore` talks to: what can only be measured inside a process.

    python -m outrider_bench.workers.datastore [--core N]

One JSON object a line: requests on stdin, answers on stdout; the first line says that it is ready. It ends when its
stdin is closed. Token streams come as files of numpy (int32, one dimension). Times are microseconds if not said
otherwise, each of one call.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any, cast

import numpy as np

from outrider.core.params import RetrievalScope
from outrider.core.retrieval.prior import PriorTable
from outrider.core.retrieval.ring import TokenRing
from outrider.core.retrieval.suffix_index import ContextIndex, Sort, Tokens
from outrider.core.retrieval.tiers import LocalTiers
from outrider.datastore.background import NICENESS
from outrider.datastore.redis.store import RedisStore
from outrider.datastore.settings import DatastoreSettings
from outrider.datastore.types import TIERS, Limits, Scope
from outrider.server.settings import parse_settings
from outrider_bench.workers.replay import replay
from outrider_bench.workers.worker import Handler, serve

MAX_MATCH_LEN, MAX_RING_MATCH_LEN = 4, 10
CONTEXT_LEN = 16
COMMIT_LEN = 4
"""Tokens learned at a time, as rounds bring them."""
FRESH_PART, MAX_FRESH = 16, 1 << 17
"""A ring is searched with one token in FRESH_PART, at most MAX_FRESH, not indexed: new documents come all the time. It
is half the share at which the datastore builds again."""


def look_up_in_local_tiers(
    prior: str, heldout: str, document_len: int, num_lookups: int, max_continuation_len: int
) -> dict[str, Any]:
    """Time a session's lookups and learning, after each commit of COMMIT_LEN tokens of held-out documents."""
    began = time.perf_counter()
    table = PriorTable.build(_documents(np.load(prior), document_len))
    build_s = time.perf_counter() - began
    lookups: list[float] = []
    learned_s, num_learned, num_hits = 0.0, 0, 0
    # Garbage of the build would otherwise be collected while a lookup is timed.
    gc.collect()
    # Documents come again, each time in a new session, until there are enough lookups.
    for document in cycle(_documents(np.load(heldout), document_len)):
        tiers = LocalTiers(MAX_MATCH_LEN, table)
        for start in range(0, len(document), COMMIT_LEN):
            commit = document[start : start + COMMIT_LEN]
            began = time.perf_counter()
            tiers.record(commit)
            learned_s += time.perf_counter() - began
            num_learned += len(commit)
            context = document[max(0, start + len(commit) - CONTEXT_LEN) : start + len(commit)]
            began = time.perf_counter()
            found = tiers.lookup(context, MAX_MATCH_LEN, max_continuation_len)
            lookups.append(1e6 * (time.perf_counter() - began))
            num_hits += found.match_len > 0
        if len(lookups) >= num_lookups:
            break
    return {
        "build_s": build_s,
        "lookup_us": lookups,
        "hit_rate": num_hits / len(lookups),
        "learn_us_per_token": 1e6 * learned_s / num_learned,
    }


def build_and_search_ring(
    tokens: str,
    document_len: int,
    num_tokens: int,
    num_lookups: int,
    max_continuation_len: int,
    sort: str,
    rebuild: bool,
    cores: Sequence[int],
) -> dict[str, Any]:
    """Builds the index of a ring of `num_tokens` tokens in a background thread, then looks up.

    It looks up with all of it indexed; with new documents behind it, idle; and with `rebuild` also while it is built
    again. It runs on `cores`; empty means that the process stays on the cores it has.
    """
    if cores:
        os.sched_setaffinity(0, cores)
    stream: Tokens = np.load(tokens)
    num_fresh = min(num_tokens // FRESH_PART, MAX_FRESH)
    ring = TokenRing(num_tokens + num_tokens // document_len + 1, MAX_RING_MATCH_LEN)
    for start in range(0, num_tokens - num_fresh, document_len):
        ring.append(stream[start : min(start + document_len, num_tokens - num_fresh)])
    builder, sorter = ThreadPoolExecutor(1, initializer=_give_way), _sorter(sort)
    snapshot = ring.snapshot()
    began = time.perf_counter()
    index = builder.submit(ContextIndex.build, snapshot.tokens, sorter).result()
    build_s = time.perf_counter() - began
    ring.swap(snapshot, index)
    contexts = _contexts(stream[num_tokens:], num_lookups)
    gc.collect()
    indexed = [_timed_lookup(ring, context, max_continuation_len) for context in contexts]
    for start in range(num_tokens - num_fresh, num_tokens, document_len):
        ring.append(stream[start : start + document_len])
    idle = [_timed_lookup(ring, context, max_continuation_len) for context in contexts]
    busy, rebuild_s = list[float](), 0.0
    if rebuild:
        snapshot = ring.snapshot()
        began = time.perf_counter()
        building = builder.submit(ContextIndex.build, snapshot.tokens, sorter)
        # Looked up in this thread while the other one builds: what both share is the interpreter's lock.
        for context in cycle(contexts):
            busy.append(_timed_lookup(ring, context, max_continuation_len))
            if building.done():
                break
        ring.swap(snapshot, building.result())
        rebuild_s = time.perf_counter() - began
    builder.shutdown()
    return {"build_s": build_s, "rebuild_s": rebuild_s, "indexed_us": indexed, "idle_us": idle, "busy_us": busy}


def look_up_in_redis(
    redis_url: str, tokenizer_hash: str, session_id: str, contexts: Sequence[Sequence[int]], max_continuation_len: int
) -> dict[str, Any]:
    """Time lookups of one context each in Redis, by the datastore's own connection: no RPC."""
    # No deadline: how long it takes is the question.
    settings = parse_settings(DatastoreSettings, ["--redis-url", redis_url, "--lookup-timeout-ms", "10000"])
    limits = Limits(settings.max_match_len, max_continuation_len, frozenset(TIERS))
    scope = Scope(tokenizer_hash, session_id, retrieval_scope=RetrievalScope.TENANT)

    async def measure() -> list[float]:
        store = RedisStore(settings)
        await store.start()
        times = []
        for context in contexts:
            began = time.perf_counter()
            await store.lookup(scope, [context], limits)
            times.append(1e6 * (time.perf_counter() - began))
        await store.close()
        return times

    return {"lookup_us": asyncio.run(measure())}


def sorts() -> list[str]:
    """Name the ways to sort an index, as far as they are installed."""
    return [name for name in ("numpy", "pydivsufsort") if name == "numpy" or _is_installed(name)]


def _sorter(name: str) -> Sort | None:
    if name == "numpy":
        return None
    from pydivsufsort import divsufsort

    return cast(Sort, divsufsort)


def _is_installed(name: str) -> bool:
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def _give_way() -> None:
    """Lower the priority of this thread, as the datastore's own builder does."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _timed_lookup(ring: TokenRing, context: Sequence[int], max_continuation_len: int) -> float:
    began = time.perf_counter()
    ring.lookup(context, MAX_RING_MATCH_LEN, max_continuation_len)
    return 1e6 * (time.perf_counter() - began)


def _documents(tokens: Tokens, length: int) -> list[list[int]]:
    return [tokens[start : start + length].tolist() for start in range(0, len(tokens), length)]


def _contexts(tokens: Tokens, count: int) -> list[list[int]]:
    """Contexts of a stream that has at least one, in any order but the text's: nothing of one is of use to the next."""
    ends = np.random.default_rng(0).integers(CONTEXT_LEN, len(tokens) + 1, count)
    return [tokens[end - CONTEXT_LEN : end].tolist() for end in ends]


def _replay(documents: str, heldout: str, document_len: int, max_continuation_len: int) -> dict[str, Any]:
    finished, new = (_documents(np.load(path), document_len) for path in (documents, heldout))
    return replay(finished, new, max_continuation_len)


HANDLERS: Mapping[str, Handler] = {
    "local_tiers": look_up_in_local_tiers,
    "ring": build_and_search_ring,
    "redis": look_up_in_redis,
    "replay": _replay,
}


def main() -> None:
    """Runs the worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--core", type=int, help="Core to run on. Default: any.")
    core = parser.parse_args().core
    if core is not None:
        os.sched_setaffinity(0, {core})
    serve(lambda: ({"sorts": sorts()}, HANDLERS))


if __name__ == "__main__":
    main()

"""Print what laying out a round for a GPU costs the host: ``python -m outrider_bench.workers.packing_time``.

No GPU is needed: the layout goes to a buffer of this machine, and nothing is computed. A round has the same rows for
each session, behind texts of their own: a chain, or a tree as drafts are. A loop is of a draft model: a step for each
row but the first, with a row of its own, and what it finds is read. Medians, in milliseconds on one core.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from outrider.core.params import SamplingParams, Source
from outrider.core.tree import DraftTree, Node
from outrider.models.cuda.graphs import BUCKETS, Forwards, Results
from outrider.models.cuda.inputs import Packer, Shape
from outrider.models.cuda.loop import DraftLoop
from outrider.models.cuda.rows import MAX_NUM_BEST
from outrider.models.kv_cache import CacheShape, KVCache, KVPool
from outrider.models.packing import Segment

NUM_ROWS = 13
"""Rows of a session: the root of a tree and 12 nodes, or as long a chain."""
CONTEXT = 1000
QUERIES_PER_KEY = 4
"""That of Qwen3-8B."""
VOCAB_SIZE = 1000
FORMS = ("chain", "tree", "loop")


def a_tree(rng: random.Random, num_rows: int) -> list[Node]:
    """Grows a tree after a text, and returns its nodes except the root."""
    tree = DraftTree([0] * CONTEXT, VOCAB_SIZE)
    nodes = [tree.root]
    while len(nodes) < num_rows:
        # Late nodes more often than early ones: drafts are deeper than they are wide.
        parent = nodes[max(rng.randrange(len(nodes)), rng.randrange(len(nodes)))]
        node = tree.add(parent, rng.randrange(VOCAB_SIZE), -rng.random(), Source.DRAFT)
        nodes += [node] if node is not None and node not in nodes else []
    return nodes[1:]


class HostLoop(DraftLoop):
    """A draft model's loop that lays its steps out as for a GPU, and runs none: it finds only tokens 0."""

    def __init__(self, pool: KVPool, max_context_len: int, vocab_size: int) -> None:
        """
        Args:
            pool: The pool of the sessions' caches.
            max_context_len: Maximum tokens of a session.
            vocab_size: Token ids are below it.
        """
        shapes = [Shape(rows) for rows in BUCKETS]
        packer = Packer(pool, QUERIES_PER_KEY, shapes, max_context_len)
        forwards = SimpleNamespace(
            shapes=shapes, packer=packer, pool=pool, vocab_size=vocab_size, on_device=nullcontext, begin=packer.begin
        )
        super().__init__(cast(Forwards, forwards), best_tokens=_not_launched, capture=None)

    def _compute(self, shape: Shape, steps: Any) -> Results:
        return (torch.zeros(steps.length, 2, steps.num_rows, MAX_NUM_BEST, dtype=torch.int32),)


def _not_launched(*_arguments: object) -> Tensor:
    raise AssertionError("nothing is computed")


class Round:
    """Lays out the rows of some sessions repeatedly."""

    def __init__(self, form: str, num_sessions: int) -> None:
        rng = random.Random(1)
        shape = CacheShape(num_layers=1, num_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"))
        pool = KVPool(shape, num_sessions * (CONTEXT // 64 + 2), num_scratch_slots=1)
        self._shape = Shape(2048)
        self._packer = Packer(pool, QUERIES_PER_KEY, [self._shape], 2 * CONTEXT)
        self._is_tree = form == "tree"
        self._loop = HostLoop(pool, 2 * CONTEXT, VOCAB_SIZE) if form == "loop" else None
        self._params = [SamplingParams(seed=number, temperature=0.7) for number in range(num_sessions)]
        self._sessions: list[tuple[KVCache, list[Node]]] = []
        for _ in range(num_sessions):
            cache = pool.new_cache()
            cache.reserve(CONTEXT + NUM_ROWS)
            cache.append(range(CONTEXT - 1))
            self._sessions.append((cache, a_tree(rng, NUM_ROWS)))

    def segments(self) -> list[Segment]:
        """Makes the segments of a round."""
        if self._loop is not None:
            return [Segment(cache, [0], 1) for cache, _ in self._sessions]
        if not self._is_tree:
            return [Segment(cache, [0] * NUM_ROWS, NUM_ROWS) for cache, _ in self._sessions]
        return [Segment.of_tree(cache, [0], nodes, num_logits=NUM_ROWS) for cache, nodes in self._sessions]

    def pack(self, segments: Sequence[Segment]) -> None:
        """Lays them out."""
        if self._loop is not None:
            self._loop.run(segments, self._params, [0] * len(segments), NUM_ROWS - 1)
            for segment in segments:
                segment.cache.truncate(CONTEXT - 1)
            return
        self._packer.begin(self._shape)
        for segment in segments:
            num_rows, length = len(segment.token_ids), segment.cache.length
            assert self._packer.add(segment, segment.position_ids or range(length, length + num_rows), 0, num_rows)
        self._packer.finish(range(min(self._shape.wanted, self._packer.num_rows)))


def measure(form: str, num_sessions: int, num_repeats: int = 200) -> tuple[float, float]:
    """Returns the median times of making the segments and of laying them out, in milliseconds."""
    round_ = Round(form, num_sessions)
    made, packed = [], []
    for _ in range(num_repeats):
        started = time.perf_counter()
        segments = round_.segments()
        between = time.perf_counter()
        round_.pack(segments)
        packed.append(1e3 * (time.perf_counter() - between))
        made.append(1e3 * (between - started))
    return statistics.median(made), statistics.median(packed)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", default="1,8,32")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{'rows':8}{'sessions':>9}{'segments':>10}{'layout':>8}{'us/session':>12}")
    for form in FORMS:
        for num_sessions in map(int, options.sessions.split(",")):
            made, packed = measure(form, num_sessions)
            print(f"{form:8}{num_sessions:9}{made:10.3f}{packed:8.3f}{1e3 * (made + packed) / num_sessions:12.1f}")


if __name__ == "__main__":
    main()

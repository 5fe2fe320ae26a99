"""The self-test of exact rows: real forwards of the loaded model, compared bit by bit.

Rows are exact if the bits of a row's logits do not depend on how many rows run next to it, nor on their sessions, nor
on whether it runs in a chain, a tree or a prefill, nor on where its keys and values lie. Attention is built for that.
The rest is a property of the libraries and of the CPU, so it is tested each time that a model is loaded.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import structlog
import torch
from torch import Tensor

from outrider.core.params import Source
from outrider.core.tree import DraftTree, Node
from outrider.models.kv_cache import TILE, KVCache
from outrider.models.packing import Segment
from outrider.models.runner import Runner

log = structlog.get_logger(__name__)

BUDGET_S = 0.8
"""Time that the self-test may take. A model whose forwards take longer is tested with its first layers alone."""
NUM_READINGS = 8
"""About how many times as long as reading its text once a self-test takes."""
NUM_LATE = 8
"""Rows at the end of the context that are tested."""
LATE_SLOTS = 16 * TILE + 8
"""Slots of a long session. Attention adds them tile by tile, so more of them would test nothing new."""
ARITHMETIC = ("fusion", "packing", "rotary", "runner", "steps")
"""Modules that the bits of the logits depend on, besides `Runner.PACKAGES`. Replicas that differ in them do not
continue each other's texts."""
NUMBERS_OF_ROWS = (1, 2, 4, 6)
"""Rows that forwards may be padded to. The fastest number is chosen: libraries may compute a single row differently
than several."""
MIN_GAIN = 0.05
"""Share of a single row's time that more padding must save to be worth it where exactness does not need it."""


class NotExact(Exception):
    """Two ways to compute a row gave different bits. The message names them."""


@dataclass(frozen=True, slots=True)
class Exactness:
    """Says whether rows are exact here, and what their bits depend on."""

    numerics_id: str = ""
    """Hash of all that the bits of the logits depend on besides the model's name and number format: equal hashes mean
    equal bits. Empty means that rows are not exact."""
    reason: str = ""
    """Reason why rows are not exact; empty if they are."""

    @property
    def is_exact(self) -> bool:
        """True if rows are exact."""
        return bool(self.numerics_id)


def make_exact(runner: Runner, fingerprint: str) -> Exactness:
    """Finds a way to compute forwards in which rows are exact, and has the runner take it.

    Args:
        runner: Runner of the loaded model, with the threads that it will have.
        fingerprint: Hash of the weights.
    """
    started = time.perf_counter()
    reason = "no way to exact rows is left"
    for _ in runner.exact_ways():
        try:
            check_rows(runner)
        except NotExact as error:
            reason = str(error)
            log.info("model.not_exact_yet", graphs=runner.graphs, min_rows=runner.min_rows, reason=reason)
            continue
        _pad_to_the_fastest(runner)
        took_s = round(time.perf_counter() - started, 2)
        log.info("model.exact", graphs=runner.graphs, min_rows=runner.min_rows, took_s=took_s)
        return Exactness(numerics_id=numerics_id(runner, fingerprint))
    return Exactness(reason=reason)


def numerics_id(runner: Runner, fingerprint: str) -> str:
    """Computes the hash of what the bits of the logits depend on."""
    here = Path(__file__).parent
    sources = [here / f"{module}.py" for module in ARITHMETIC]
    sources += [source for package in runner.PACKAGES for source in sorted((here / package).glob("*.py"))]
    parts = [
        fingerprint,
        str(runner.dtype),
        str(TILE),
        torch.__version__,
        torch.__config__.show(),
        str(torch.get_num_threads()),
        *runner.arithmetic(),
        *(source.read_text() for source in sources),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def check_rows(runner: Runner, seed: int = 0) -> None:
    """Computes rows of one text in many ways and compares their logits, bit by bit. Takes about `BUDGET_S`.

    Raises:
        NotExact: The logits of two ways differ.
    """
    _SelfTest(runner, seed).run()


class _SelfTest:
    """Runs one text in many ways."""

    def __init__(self, runner: Runner, seed: int) -> None:
        self._runner = runner
        self._random = random.Random(seed)  # no secret: any text will do, if it is the same each time
        # Spans the ends of two tiles, if the context has room for that.
        self._length = min(2 * TILE + 8, runner.max_context_len)
        self._start = max(1, self._length - 24)
        self._token_ids = [self._random.randrange(runner.vocab_size) for _ in range(self._length)]
        self._cache = runner.new_cache()
        self._num_layers: int | None = None
        self._expected = torch.empty(0)

    def run(self) -> None:
        """Raises NotExact if rows are not exact."""
        # The time of one layer tells that of all. A model that is too slow is tested with as many layers as there is
        # time for.
        started = time.perf_counter()
        self._num_layers = 1
        self._read_prefix()
        layer_s = time.perf_counter() - started
        self._num_layers = max(1, min(self._runner.cache_shape.num_layers, int(BUDGET_S / (layer_s * NUM_READINGS))))
        self._read_prefix()
        self._expected = self._forward(self._token_ids[self._start :])
        self._cache.truncate(self._start)
        for size in (1, 2, 3, 4, 5, 7, 9, 12, 16, 20, 24):
            self._compare(f"chains of {size}", partial(self._in_chains, size))
        for depth in (1, 3, 7):
            self._compare(f"trees of depth {depth}", partial(self._in_trees, depth))
        self._compare("rows beside those of other sessions", self._beside_others)
        for num_rows in self._runner.buckets:
            # Smaller forwards are covered above.
            if num_rows > 2 * TILE and self._has_room(num_rows):
                self._compare(f"the last of {num_rows} rows", partial(self._behind_others, num_rows))
        for size in (13, 3 * TILE):
            self._read_prefix(size)
            self._compare(f"a prompt read in pieces of {size}", partial(self._in_chains, 4))
        self._cache.clear()
        self._check_lengths()
        # Tests few columns, and kernels for small matrices.
        self._start = 0
        self._expected = self._forward(self._token_ids[:8])
        for size in (1, 3):
            self._cache.clear()
            self._compare(f"the beginning in chains of {size}", partial(self._in_chains, size))
        self._cache.clear()

    def _compare(self, name: str, compute: Callable[[], Sequence[Tensor]]) -> None:
        rows = torch.cat(tuple(compute()))[: len(self._expected)]
        self._cache.truncate(self._start)
        _check_equal(name, rows, self._expected[: len(rows)])

    def _forward(self, token_ids: Sequence[int]) -> Tensor:
        return self._runner.forward([Segment(self._cache, token_ids, len(token_ids))], self._num_layers)

    def _read_prefix(self, size: int = 48) -> None:
        self._cache.clear()
        for first in range(0, self._start, size):
            piece = self._token_ids[first : min(self._start, first + size)]
            self._runner.forward([Segment(self._cache, piece, 0)], self._num_layers)

    def _in_chains(self, size: int) -> Sequence[Tensor]:
        # Few of the short chunks: each is a forward.
        ends = range(self._start, min(self._length, self._start + 4 * size), size)
        return [self._forward(self._token_ids[first : first + size]) for first in ends]

    def _beside_others(self) -> Sequence[Tensor]:
        others = [self._runner.new_cache(), self._runner.new_cache()]
        ids = self._token_ids
        self._runner.forward([Segment(others[0], ids[:20], 0)], self._num_layers)
        pieces = ids[self._start : self._start + 2], ids[20:21], ids[: TILE + 5]
        caches = self._cache, *others
        segments = [Segment(cache, piece, len(piece)) for cache, piece in zip(caches, pieces, strict=True)]
        found = self._runner.forward(segments, self._num_layers)[:2]
        for cache in others:
            cache.clear()
        return [found]

    def _has_room(self, num_rows: int) -> bool:
        pool = self._runner.pool
        num_blocks = -(-self._length // pool.block_size)
        return -(-num_rows // self._length) * num_blocks < pool.blocks.num_free

    def _behind_others(self, num_rows: int) -> Sequence[Tensor]:
        """Computes two rows of the text after so many rows of other sessions that the forward has `num_rows`."""
        lengths = [min(self._length, num_rows - 2 - first) for first in range(0, num_rows - 2, self._length)]
        others = [(self._runner.new_cache(), self._token_ids[:length]) for length in lengths]
        segments = [Segment(cache, piece, len(piece)) for cache, piece in others]
        segments.append(Segment(self._cache, self._token_ids[self._start : self._start + 2], 2))
        found = self._runner.forward(segments, self._num_layers)[-2:]
        for cache, _ in others:
            cache.clear()
        return [found]

    def _check_lengths(self) -> None:
        """Compares rows of a long session, at the last positions of the context if possible, and of one that has just
        begun: alone, one by one, and in one forward."""
        runner, ids = self._runner, self._token_ids[:NUM_LATE]
        late, early = runner.new_cache(), self._cache
        num_filled = self._fill(late, LATE_SLOTS)
        first = runner.max_context_len - len(ids) if runner.takes_gaps else num_filled
        last = range(first, first + len(ids))
        of_late, of_early = Segment(late, ids, len(ids), last), Segment(early, ids, len(ids))
        alone = []
        for segment in (of_late, of_early):
            alone.append(runner.forward([segment], self._num_layers))
            late.truncate(num_filled)
            early.clear()
        together = runner.forward([of_late, of_early], self._num_layers)
        _check_equal("a long session next to one that has just begun", together, torch.cat(alone))
        late.truncate(num_filled)
        early.clear()
        single = [
            runner.forward([Segment(late, [token_id], 1, [position])], self._num_layers)
            for token_id, position in zip(ids, last, strict=True)
        ]
        _check_equal("single rows of a long session", torch.cat(single), alone[0])
        late.clear()

    @torch.inference_mode()
    def _fill(self, cache: KVCache, num_slots: int) -> int:
        """Invents keys and values for the first slots, as many as there is room for, because computing them takes long.
        Returns how many."""
        pool, shape = self._runner.pool, self._runner.cache_shape
        room = (pool.blocks.num_free - 2) * pool.block_size
        num_slots = max(0, min(num_slots, self._runner.max_context_len - NUM_LATE, room))
        if num_slots:
            cache.reserve(num_slots)
            # The other layers are not run.
            data = pool.data[: self._num_layers] if self._runner.is_fused else pool.data
            chance = torch.Generator().manual_seed(0)
            made_up = torch.randn(2, shape.num_heads, num_slots, shape.head_dim, generator=chance)
            places = torch.from_numpy(cache.places(np.arange(num_slots))).to(data.device)
            data.index_copy_(3, places, made_up.to(data).expand(len(data), -1, -1, -1, -1))
            cache.append(range(num_slots))
        return num_slots

    def _in_trees(self, depth: int) -> Sequence[Tensor]:
        """Runs the text's own tokens as one path of a tree whose other nodes stand before, between and after them."""
        tree = DraftTree(self._token_ids[: self._start + 1], self._runner.vocab_size)
        nodes: list[Node] = []
        path: list[Node] = []
        parent = tree.root
        for token_id in self._token_ids[self._start + 1 : self._start + 1 + depth]:
            others = [self._random.randrange(self._runner.vocab_size) for _ in range(self._random.randint(1, 3))]
            added = [tree.add(parent, each, -1.0, Source.DRAFT) for each in (others[0], token_id, *others[1:])]
            nodes += [node for node in added if node is not None and node not in nodes]
            child = parent.children[token_id]
            path.append(child)
            below = tree.add(next(iter(parent.children.values())), others[0], -1.0, Source.DRAFT)
            nodes += [node for node in (below,) if node is not None and node not in nodes]
            parent = child
        cache = self._cache
        segment = Segment.of_tree(cache, [self._token_ids[self._start]], nodes, num_logits=1 + len(nodes))
        logits = self._runner.forward([segment], self._num_layers)
        rows = [1 + nodes.index(node) for node in path]
        # Moves the path's rows together; later reads find them there.
        cache.keep(self._start + 1, [self._start + row for row in rows])
        after = self._forward(self._token_ids[cache.length : cache.length + 2])
        return [logits[[0, *rows]], after]


def _check_equal(name: str, rows: Tensor, expected: Tensor) -> None:
    """Raises NotExact if rows do not have the expected bits."""
    differs = (rows != expected).any(-1)
    if bool(differs.any()):
        gap = float((rows - expected).abs().max())
        raise NotExact(f"{name}: {int(differs.sum())} of {len(rows)} rows have other bits, by at most {gap:.1e}")


def _pad_to_the_fastest(runner: Runner, num_repeats: int = 5) -> None:
    """Raises the runner's `min_rows` if a single row is faster among more."""
    if runner.buckets:
        return  # forwards are padded in any case
    least = runner.min_rows
    cache = runner.new_cache()
    runner.forward([Segment(cache, [0] * min(TILE, runner.max_context_len - 1), 0)])
    length = cache.length
    times: dict[int, list[float]] = {n: [] for n in NUMBERS_OF_ROWS if n >= least}
    for _ in range(num_repeats):
        for runner.min_rows, samples in times.items():
            started = time.perf_counter()
            runner.forward([Segment(cache, [0], 1)])[0, 0].item()  # waits for an accelerator
            samples.append(time.perf_counter() - started)
            cache.truncate(length)
    cache.clear()
    medians = {n: statistics.median(samples) for n, samples in times.items()}
    chosen = least
    for n, median in medians.items():
        # Each must gain over the one chosen before: of two that are about as fast, a busy moment must not choose the
        # larger.
        if median < (1 - MIN_GAIN) * medians[chosen]:
            chosen = n
    runner.min_rows = chosen

"""The inputs of a forward on a GPU: one buffer of whole numbers that one copy fills, and the layout of rows in it.

A forward reads nothing else that changes from call to call, so a graph that was captured once serves any mix of chains,
trees and prompts: their number and length are data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.cuda.rows import ROW_WORDS
from outrider.models.kv_cache import KVCache, KVPool, Move
from outrider.models.packing import Segment

TILES = (16, 64)
"""Lanes of a tile: rows times the query heads of a key-value head. Sixteen are the fewest that a GPU multiplies at a
time. A decoding session has a row or a few: more lanes would be wasted, and their registers would keep other programs
out."""
SPLIT = 256
"""Positions of a split."""
MAX_WANTED = 256
"""Most rows of a forward that the graph has room for logits of. Further wanted rows are computed after it."""
MAX_ITEMS = 2048
"""Most items of work of a forward whose splits are shared among programs: half a million positions, each counted once
for every tile that sees it."""
MAX_SPLIT_ROWS = 1 << 14
"""Most rows of all these items, whose results go through memory: with 32 query heads of 128 that is a quarter of a GiB.
Longer splits would need less, but add up in another order, and a row would have other bits."""
MANY_TILES = 64
"""From this many tiles on, one program computes all splits of a tile: there are enough tiles for all programs."""
MAX_PAIRS = 1024
"""Most rows that a forward moves before all else."""
MAX_SPANS = 256
"""Most sessions whose rows a forward moves before all else."""
MAX_DRAWS = 256
"""Most rows for which a forward tells the device how they are drawn from."""
LOOP_LENS = (4, 8, 12)
"""Steps of a loop (`outrider.models.cuda.loop`), ascending. Each number has graphs of its own. The last one is the
default for the longest chain of a round."""
MAX_LOOP_ROWS = 128
"""Most rows of a loop's forwards."""
Ints = npt.NDArray[np.int32]


def loop_lens(num_steps: int) -> list[int]:
    """Returns how many steps a loop may have if `num_steps` are wanted: fewer, or not many more; ascending."""
    # A quarter of the steps wasted costs less than what single steps after a shorter loop cost the host.
    return [each for each in LOOP_LENS if 3 * each <= 4 * num_steps]


@dataclass(frozen=True, slots=True)
class Shape:
    """Describes a forward of a fixed number of rows."""

    rows: int

    @property
    def wanted(self) -> int:
        """Rows whose logits are computed at a time."""
        return min(self.rows, MAX_WANTED)

    @property
    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the buffer's parts in their order, without the places at its end."""
        return {
            "num_work": (1,),
            "num_moved": (1,),
            "token_ids": (self.rows,),
            "positions": (self.rows,),
            "places": (self.rows,),
            "row_list": (self.rows,),
            "tiles": (self.rows, 6),
            "first_results": (self.rows,),
            "wanted": (-(-self.rows // self.wanted) * self.wanted,),
            "spans": (MAX_SPANS, 2),
            "moves": (MAX_PAIRS, 2),
            # If the splits of tiles are not shared, there are as many items as tiles.
            "work": (max(self.rows, MAX_ITEMS), 2),
            # The next part is aligned, because kernels read words of 16 bytes there.
            "unused": (2,),
        }

    @property
    def num_fixed(self) -> int:
        """Size of the part before the places. The number of places is data."""
        return _num_fixed(self)

    def num_loop(self, length: int) -> int:
        """Returns how many numbers a loop of `length` steps has in front of its first step's inputs: how the rows of
        all steps are drawn from, and the inputs of the other steps."""
        return length * self.rows * ROW_WORDS + (length - 1) * self.num_fixed


@cache
def _num_fixed(shape: Shape) -> int:
    return sum(math.prod(size) for size in shape.sizes.values())


def tile_of(queries_per_key: int) -> int:
    """Returns the lanes of a model's tiles: always the same, because the bits of rows depend on it."""
    return next(lanes for lanes in TILES if lanes >= queries_per_key)


class Inputs:
    """Holds the parts of the device's buffer for forwards of one shape, as views: all int32."""

    def __init__(self, buffer: Tensor, shape: Shape, tables: Tensor | None = None) -> None:
        """
        Args:
            buffer: int32 [numbers]: the buffer of all shapes, which use it one at a time.
            shape: That of the forwards.
            tables: int32 [numbers]: where tables and tails lie. None means in the buffer.
        """
        self.shape = shape
        sizes = shape.sizes
        counts = [int(np.prod(size)) for size in sizes.values()]
        parts = dict(zip(sizes, buffer[: sum(counts)].split_with_sizes(counts), strict=True))
        views = {name: parts[name].view(size) for name, size in sizes.items()}
        self.num_work, self.num_moved = views["num_work"], views["num_moved"]
        """[1] each: items of `work`, and sessions in `spans`."""
        self.token_ids, self.positions = views["token_ids"], views["positions"]
        """[rows] each; 0 for padding rows."""
        self.places = views["places"]
        """[rows]: where in the pool the keys and values of each row go; those of padding rows go to scratch slots."""
        self.row_list = views["row_list"]
        """[rows]: rows by path, and by position within a path."""
        self.tiles = views["tiles"]
        """[tiles, 6]: first row in `row_list`, number of rows, first of the table, root, first of the tail, end."""
        self.first_results = views["first_results"]
        """[tiles]: rows of all items before the first one of each tile."""
        self.wanted = views["wanted"]
        """[at least rows]: rows whose logits are computed, `Shape.wanted` at a time, filled up with row 0."""
        self.spans, self.moves = views["spans"], views["moves"]
        """[sessions, 2]: first pair, and the end of the pairs; and [pairs, 2]: source and target place."""
        self.work = views["work"]
        """[items, 2]: tile and split; -1 stands for all splits of a tile."""
        # A tile says where its table and its tail begin, counted from the beginning of the buffer.
        self.tables = self.tails = buffer if tables is None else tables
        """[numbers]: tables of sessions and places from the roots of paths on, somewhere in the buffer."""


class Path(NamedTuple):
    """Holds rows of one path in a forward, and the places of what they see from its root on."""

    rows: Sequence[int]
    """Rows of the segment that no earlier path has, ascending by position."""
    slots: npt.NDArray[np.int64]
    """Slots by position, from the root's on, up to that of the last row."""


def tree_paths(
    visible: npt.NDArray[np.bool_], positions: Sequence[int], trunk: int, own: int
) -> tuple[int, list[Path]]:
    """Takes a tree apart into paths, the heaviest child first.

    Args:
        visible: bool [rows, slots]: what each row sees.
        positions: Those of the rows.
        trunk: First slots, which hold their own positions.
        own: Slot of the first row.

    Returns:
        The number of first slots that all rows see without a gap, which hold their own positions; and the paths.

    Raises:
        ValueError: A row does not see exactly one slot for every position before its own.
    """
    num_rows, root = len(visible), trunk
    # Mostly all of the trunk is seen. Then the rest is a few slots: one look at the long part of the rows is enough.
    if not visible[:, :root].all():
        root = int(np.where(visible.all(1), visible.shape[1], visible.argmin(1)).min())
    lines, columns = visible[:, root:].nonzero()
    seen = columns.tolist()
    counts = np.bincount(lines, minlength=num_rows).tolist()
    if counts != [position + 1 - root for position in positions]:
        raise ValueError("a row must see exactly one slot for every position up to its own")
    stops = list(accumulate(counts))
    starts = [0, *stops[:-1]]
    parents = []
    for stop, count in zip(stops, counts, strict=True):
        # The slot before its own. A row that sees nothing from the root on stands right before the root, and is the
        # first row.
        parent = seen[stop - 2] if count > 1 else -1
        parents.append(parent + root - own if count else -1)
    slots = columns + root
    heavy, weights = [-1] * num_rows, [1] * num_rows
    for row in reversed(range(num_rows)):
        if (parent := parents[row]) >= 0:
            weights[parent] += weights[row]
            if heavy[parent] < 0 or weights[row] >= weights[heavy[parent]]:
                heavy[parent] = row
    paths = []
    for row in range(num_rows):
        if parents[row] >= 0 and heavy[parents[row]] == row:
            continue  # on the path of its parent
        rows = [row]
        while (row := heavy[rows[-1]]) >= 0:
            rows.append(row)
        paths.append(Path(rows, slots[starts[rows[-1]] : stops[rows[-1]]]))
    return root, paths


def parts_of(array: Ints, shape: Shape) -> dict[str, Ints]:
    """Returns the parts of a forward's buffer in host memory, as views. Leading dimensions, of several forwards,
    stay."""
    parts, start = {}, 0
    for name, size in shape.sizes.items():
        stop = start + int(np.prod(size))
        parts[name] = array[..., start:stop].reshape(*array.shape[:-1], *size)
        start = stop
    return parts


def share_work(parts: dict[str, Ints], num_tiles: int) -> None:
    """Writes the items of work of a forward's first tiles."""
    tiles = parts["tiles"][:num_tiles]
    splits = -(-tiles[:, 5] // SPLIT)
    results = splits * tiles[:, 1]
    last_results, last_items = results.cumsum(), splits.cumsum()
    num_items = int(last_items[-1]) if num_tiles else 0
    parts["first_results"][:num_tiles] = last_results - results
    work = parts["work"]
    # The bits are the same: kernels add up splits in the same order.
    if num_tiles >= MANY_TILES or num_items > MAX_ITEMS or (num_items and last_results[-1] > MAX_SPLIT_ROWS):
        work[:num_tiles, 0], work[:num_tiles, 1] = np.arange(num_tiles), -1
        num_items = num_tiles
    else:
        work[:num_items, 0] = np.arange(num_tiles).repeat(splits)
        work[:num_items, 1] = np.arange(num_items) - (last_items - splits).repeat(splits)
    parts["num_work"][0] = num_items


def share_work_of_steps(parts: dict[str, Ints], num_tiles: int) -> None:
    """Writes the items of work of several forwards that follow each other and whose tiles have the same rows. The first
    dimension of all parts is that of the forwards."""
    splits = -(-parts["tiles"][:, :num_tiles, 5] // SPLIT)
    # Most forwards have the same splits as the one before, which they are copied from.
    firsts = [0, *(np.flatnonzero((splits[1:] != splits[:-1]).any(1)) + 1).tolist()]
    for first, stop in zip(firsts, [*firsts[1:], len(splits)], strict=True):
        share_work({name: part[first] for name, part in parts.items()}, num_tiles)
        num_items = int(parts["num_work"][first, 0])
        for name, count in (("num_work", 1), ("first_results", num_tiles), ("work", num_items)):
            parts[name][first + 1 : stop, :count] = parts[name][first, :count]


class Packer:
    """Lays out the rows of one forward after the other in host memory, and copies them to the device in one go.

    Two buffers take turns: one is filled while the other may still be on its way. The room in front of the inputs is
    for other data that a round needs on the device and that is known before its forward runs: it goes there in the same
    copy.
    """

    def __init__(self, pool: KVPool, queries_per_key: int, shapes: Sequence[Shape], max_context_len: int) -> None:
        """
        Args:
            pool: Keys and values, with scratch slots behind those of sessions.
            queries_per_key: Query heads that share a key-value head.
            shapes: Those of the forwards.
            max_context_len: Most slots of a chain.
        """
        self._pool = pool
        self._rows_per_tile = tile_of(queries_per_key) // queries_per_key
        # One session of any length fits, with its table and all of its slots after a root; and so do many short ones.
        num_numbers = max(shape.num_fixed for shape in shapes) + max(1 << 16, 3 * max_context_len)
        loops = [shape.num_loop(max(LOOP_LENS)) for shape in shapes if shape.rows <= MAX_LOOP_ROWS]
        self._num_front = max([MAX_DRAWS * ROW_WORDS, *loops])
        device = pool.data.device
        is_pinned = device.type == "cuda"
        self._device = torch.zeros(self._num_front + num_numbers, dtype=torch.int32, device=device)
        self.buffer = self._device[self._num_front :]
        """int32 [numbers]: the device's buffer, always at the same address."""
        self._hosts = [torch.zeros(len(self._device), dtype=torch.int32, pin_memory=is_pinned) for _ in range(2)]
        self._host_arrays: list[Ints] = [host.numpy() for host in self._hosts]
        self._copied: list[Callable[[], object]] = [lambda: None] * 2
        self._turn = 0
        self._arrays: dict[tuple[int, Shape], dict[str, Ints]] = {}

    def begin(self, shape: Shape) -> None:
        """Begins a forward."""
        self._turn = 1 - self._turn
        self._copied[self._turn]()
        self._shape = shape
        self._host = self._host_arrays[self._turn]
        self._array: Ints = self._host[self._num_front :]
        self._begin = self._num_front
        key = self._turn, shape
        if key not in self._arrays:
            self._arrays[key] = parts_of(self._array, shape)
        self._parts = self._arrays[key]
        self.num_rows = 0
        """Rows that were added."""
        self._end = shape.num_fixed
        # Values of all segments, which `finish` writes at once: most segments have a single row.
        self._token_ids: list[int] = []
        self._positions: list[int] = []
        self._places: list[int] = []
        self._row_list: list[int] = []
        self._tiles: list[tuple[int, int, int, int, int, int]] = []
        self._numbers: list[int] = []
        self.tables: list[int] = []
        """Indices into the buffer at which tables begin, one for each segment, or piece of one, that was added."""
        for name in ("num_moved", "token_ids", "positions", "wanted"):
            self._parts[name].fill(0)
        self._parts["places"].fill(self._pool.num_slots)

    @property
    def turn(self) -> int:
        """Number of the buffer that is filled."""
        return self._turn

    def front(self, count: int) -> Tensor:
        """Returns the numbers in front of the inputs: int32 [count], on the device, always at the same address."""
        return self._device[self._num_front - count : self._num_front]

    def take_front(self, count: int) -> Ints:
        """Returns the same numbers in host memory, to be filled: they are copied to the device with the inputs."""
        self._begin = self._num_front - count
        return self._host[self._begin : self._num_front]

    def move(self, moves: Sequence[Move]) -> None:
        """Adds rows that are moved before all else, by session: at most `MAX_SPANS` sessions, and `MAX_PAIRS` rows in
        all."""
        start = 0
        for number, (old, new) in enumerate(moves):
            stop = start + len(old)
            self._parts["moves"][start:stop, 0] = old
            self._parts["moves"][start:stop, 1] = new
            self._parts["spans"][number] = start, stop
            start = stop
        self._parts["num_moved"][0] = len(moves)

    def add(self, segment: Segment, position_ids: Sequence[int], first: int, last: int, *, num_ahead: int = 0) -> bool:
        """Adds rows of a segment, whose slots are reserved.

        Args:
            segment: Segment of a session.
            position_ids: Positions of all of its rows.
            first: Number of the first row in the segment.
            last: Number after that of the last row.
            num_ahead: Slots after a chain's last row whose places the table holds too, for later steps.

        Returns:
            False if there is no room for them. Nothing has changed then.

        Raises:
            ValueError: A row does not see exactly one slot for every position before its own.
        """
        count = last - first
        start = segment.cache.length + first
        positions = position_ids[first:last]
        if segment.is_chain:
            has_room = self._add_chain(segment.cache, start, count, num_ahead)
        else:
            has_room = self._add_tree(segment, positions, first, last)
        if has_room:
            self._token_ids += segment.token_ids[first:last]
            self._positions += positions
            self.num_rows += count
        return has_room

    def _add_chain(self, cache: KVCache, start: int, count: int, num_ahead: int) -> bool:
        """Adds rows of a chain: a single path, whose root is after its last row."""
        stop, per_tile, num_listed = start + count, self._rows_per_tile, len(self._row_list)
        table = cache.table[: self._pool.num_blocks_for(stop + num_ahead)]
        if not self._has_room(count, len(table)):
            return False
        first_block = self._take_numbers(table)
        self.tables.append(first_block)
        for done in range(0, count, per_tile):
            num_rows = min(per_tile, count - done)
            self._tiles.append((num_listed + done, num_rows, first_block, stop, self._end, start + done + num_rows))
        self._row_list += range(self.num_rows, self.num_rows + count)
        self._places += cache.chain_places(start, count)
        return True

    def _add_tree(self, segment: Segment, positions: Sequence[int], first: int, last: int) -> bool:
        """Adds rows of a tree, path by path. The places that they see from the root on stand after its table."""
        cache, count = segment.cache, last - first
        start, trunk = cache.length + first, cache.length - len(cache.tail_positions)
        root, paths = tree_paths(segment.seen()[first:last], positions, trunk, start)
        table = cache.table[: self._pool.num_blocks_for(root)]
        if not self._has_room(count, len(table) + sum(len(path.slots) for path in paths)):
            return False
        first_block = self._take_numbers(table)
        self.tables.append(first_block)
        # One call for the rows and all paths, which have few slots each.
        places = cache.places(np.concatenate([np.arange(start, start + count), *(path.slots for path in paths)]))
        first_tail = self._take_numbers(places[count:].tolist())
        for path in paths:
            # A tile ends after its last row, wherever its path goes on to.
            for done in range(0, len(path.rows), self._rows_per_tile):
                rows = path.rows[done : done + self._rows_per_tile]
                stop = positions[rows[-1]] + 1
                self._tiles.append((len(self._row_list), len(rows), first_block, root, first_tail, stop))
                self._row_list += [self.num_rows + row for row in rows]
            first_tail += len(path.slots)
        self._places += places[:count].tolist()
        return True

    def _has_room(self, num_rows: int, num_numbers: int) -> bool:
        return self.num_rows + num_rows <= self._shape.rows and self._end + num_numbers <= len(self._array)

    def _take_numbers(self, numbers: Sequence[int]) -> int:
        """Takes the next numbers of the buffer; returns where they begin."""
        first = self._end
        self._numbers += numbers
        self._end += len(numbers)
        return first

    def finish(self, wanted: Sequence[int]) -> None:
        """Copies the forward's inputs to the device.

        Args:
            wanted: Rows whose logits are computed.
        """
        parts = self._parts
        if self._tiles:
            self._array[self._shape.num_fixed : self._end] = self._numbers
            parts["token_ids"][: self.num_rows], parts["positions"][: self.num_rows] = self._token_ids, self._positions
            parts["places"][: self.num_rows], parts["row_list"][: self.num_rows] = self._places, self._row_list
            parts["tiles"][: len(self._tiles)] = self._tiles
        share_work(parts, len(self._tiles))
        parts["wanted"][: len(wanted)] = wanted
        copied = slice(self._begin, self._num_front + self._end)
        self._device[copied].copy_(self._hosts[self._turn][copied], non_blocking=True)
        if self.buffer.device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied[self._turn] = event.synchronize

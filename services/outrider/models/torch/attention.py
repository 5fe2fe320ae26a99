"""Attention over a pool of keys and values, with sums in the order of positions.

A row's result is the same, bit by bit, whether it is computed alone, in a chain, in a tree or in a prefill, whatever
runs next to it, and wherever its keys and values lie. Three things make it so:

* Products of float32 matrices have the same bits for every number of rows from 4 on and every number of columns from 16
  on. They add along their inner dimension one by one if it is short. So queries are padded to 4 rows, and values are
  summed in *tiles* of 64 positions, one tile after the other.
* Tiles consist of positions, not of slots. A tree's slots are sorted into the tiles of their positions. The rows of
  other paths stand between them with weights of zero, and a zero changes nothing in a sum that goes one by one.
* The weights themselves are summed in the order of positions, too.

The first is a property of the libraries and of the CPU, which `outrider.models.exactness` checks when a model is
loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.kv_cache import TILE, KVCache, KVPool

MIN_QUERIES = 4
"""Least rows of a product whose bits do not depend on their number."""
MIN_ENTRIES = 200
"""Least product of queries and head width: torch has a separate kernel for the smallest products."""
MIN_COLUMNS = 16
"""Least columns of a product whose bits do not depend on their number."""
MAX_QUERIES = 64
"""Most queries of a part: scores of more do not fit into a core's cache, and late rows see more than early ones."""


@dataclass(slots=True)
class Part:
    """Holds rows of one session that attend together, and the columns of their scores.

    The first columns are those of the chain, one for each slot up to the end of its last tile. The gathered tiles
    follow. Each holds the slots whose positions lie in it.
    """

    first_row: int
    """Row of the packed forward."""
    num_rows: int
    extents: list[tuple[int, int]]
    """Places in the pool of the chain's columns, as runs of neighbours."""
    num_chain: int
    """Slots of the chain that any of the rows may see."""
    gathered: list[npt.NDArray[np.int64]]
    """For each gathered tile, the places of its columns in the pool."""
    visible: npt.NDArray[np.bool_]
    """bool [num_rows, num_columns]."""
    order: list[npt.NDArray[np.int64]] | None
    """For each row the columns that it sees, ordered by position. None means that columns are positions."""

    @property
    def num_columns(self) -> int:
        """Columns of the scores."""
        return int(self.visible.shape[1])


def parts_of_chain(cache: KVCache, first_row: int, num_rows: int, max_rows: int) -> list[Part]:
    """Lays out rows that continue a chain: each sees all slots up to its own."""
    parts = []
    for start in range(0, num_rows, max_rows):
        count = min(max_rows, num_rows - start)
        end = cache.length + start + count
        num_columns = -(-end // TILE) * TILE
        visible = np.arange(num_columns) <= np.arange(end - count, end)[:, None]
        parts.append(Part(first_row + start, count, cache.extents(num_columns), end, [], visible, None))
    return parts


def parts_of_tree(
    cache: KVCache,
    first_row: int,
    position_ids: Sequence[int],
    visible: npt.NDArray[np.bool_],
    max_rows: int,
) -> list[Part]:
    """Lays out rows that see what `visible` says: bool [rows, cache.length + rows], over slots."""
    num_slots = visible.shape[1]
    positions = np.concatenate((np.arange(cache.chain_len), cache.tail_positions, position_ids)).astype(np.int64)
    # Slots as in a chain: they hold their own positions, and every row from theirs on sees them.
    is_behind = np.tri(len(visible), num_slots, num_slots - len(visible), dtype=np.bool_)
    is_chain = (positions == np.arange(num_slots)) & (visible | ~is_behind).all(0)
    # Whole tiles of them are read in place. All other slots are gathered, including an incomplete last tile.
    num_chain = int(np.argmin(np.append(is_chain, False))) // TILE * TILE
    behind = np.arange(num_chain, num_slots)
    positions = positions[num_chain:]
    tiles = positions // TILE
    gathered, columns = [], [np.arange(num_chain)]
    for tile in np.unique(tiles):
        of_tile = behind[tiles == tile]
        # Too few columns are padded with the first one, which no row sees there.
        padded = np.pad(of_tile, (0, max(0, MIN_COLUMNS - len(of_tile))), mode="edge")
        gathered.append(cache.places(padded))
        columns.append(np.where(np.arange(len(padded)) < len(of_tile), padded, -1))
    slot_of = np.concatenate(columns)
    parts = []
    extents = cache.extents(num_chain)
    for start in range(0, len(visible), max_rows):
        seen = visible[start : start + max_rows, slot_of] & (slot_of >= 0)
        order = [np.flatnonzero(row) for row in seen]
        parts.append(Part(first_row + start, len(seen), extents, num_chain, gathered, seen, order))
    return parts


class PartGroup:
    """Computes the attention of several parts of one shape together, so that few operators are called.

    In the shapes, P stands for parts, K for key-value heads, R for the rows of a part (padded), G for queries per key
    and C for columns.
    """

    def __init__(self, parts: Sequence[Part], pool: KVPool, queries_per_key: int) -> None:
        shape, device = pool.shape, pool.data.device
        self._parts = parts
        self._num_rows = num_padded_rows(max(part.num_rows for part in parts), queries_per_key, shape.head_dim)
        # One column more than any part has. It stays hidden, and serves rows that see fewer positions than others.
        num_columns = -(-(max(part.num_columns for part in parts) + 1) // TILE) * TILE
        count, num_heads = len(parts), shape.num_heads
        sizes = (count, num_heads, self._num_rows, queries_per_key, shape.head_dim)
        self._queries = torch.zeros(sizes, dtype=shape.dtype, device=device)
        self._sums = torch.empty_like(self._queries)
        # Columns after a part's own are never written, and stay hidden.
        self._scores = torch.full((*sizes[:-1], num_columns), float("-inf"), dtype=shape.dtype, device=device)
        self._weights = torch.empty_like(self._scores)
        self._hidden = self._make_hidden(num_columns).to(device)
        order = self._make_order(num_columns, queries_per_key)
        self._order = None if order is None else order.to(device).expand(-1, num_heads, -1, -1, -1)
        self._reads = [_Reads(part, pool, number, self) for number, part in enumerate(parts)]
        rows = [part.first_row + min(row, part.num_rows - 1) for part in parts for row in range(self._num_rows)]
        self._rows = torch.tensor(rows, device=device)

    def flat(self, number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns a part's queries, scores, weights and sums as matrices: [K, R * G, ...] each."""
        tensors = self._queries, self._scores, self._weights, self._sums
        queries, scores, weights, sums = (tensor[number].flatten(1, 2) for tensor in tensors)
        return queries, scores, weights, sums

    def _make_hidden(self, num_columns: int) -> Tensor:
        """Returns the mask of columns that queries must not see: bool [P, 1, R, 1, C]."""
        hidden = np.ones((len(self._parts), 1, self._num_rows, 1, num_columns), dtype=np.bool_)
        for part, of_part in zip(self._parts, hidden, strict=True):
            of_part[0, : part.num_rows, 0, : part.num_columns] = ~part.visible
            of_part[0, part.num_rows :] = of_part[0, :1]  # padding sees what the first row sees
        return torch.from_numpy(hidden)

    def _make_order(self, num_columns: int, queries_per_key: int) -> Tensor | None:
        """Returns the columns that each query sees, by position, and then the hidden one: int64 [P, 1, R, G, C']."""
        if all(part.order is None for part in self._parts):
            return None
        most = max(part.num_columns if part.order is None else max(map(len, part.order)) for part in self._parts)
        order = np.full((len(self._parts), 1, self._num_rows, 1, -(-most // TILE) * TILE), num_columns - 1)
        for part, of_part in zip(self._parts, order, strict=True):
            for row in range(self._num_rows):
                # Padding is summed as the first row is.
                number = row if row < part.num_rows else 0
                seen = np.arange(part.num_columns) if part.order is None else part.order[number]
                of_part[0, row, 0, : len(seen)] = seen
        return torch.from_numpy(np.repeat(order, queries_per_key, 3))

    def attend(self, layer: int, queries: Tensor, data: Tensor, scale: float, out: Tensor) -> None:
        """Computes the attention of this group's rows in one layer.

        Args:
            layer: Index of the layer.
            queries: [rows of the forward, K, G, head_dim].
            data: [2, K, slots, head_dim]: the pool's keys and values of this layer, including those of these rows.
            scale: Factor of the scores.
            out: Like `queries`; the rows of this group are written.
        """
        part = self._parts[0]
        is_single = len(self._parts) == 1
        if is_single:
            rows = slice(part.first_row, part.first_row + part.num_rows)
            torch.mul(queries[rows].permute(1, 0, 2, 3), scale, out=self._queries[0, :, : part.num_rows])
        else:
            chosen = queries.index_select(0, self._rows).view(len(self._parts), self._num_rows, *queries.shape[1:])
            torch.mul(chosen.transpose(1, 2), scale, out=self._queries)
        for reads in self._reads:
            reads.score(layer, data)
        scores, weights, sums = self._scores, self._weights, self._sums
        scores.masked_fill_(self._hidden, float("-inf"))
        torch.sub(scores, scores.amax(-1, True), out=weights).exp_()
        # Values are summed tile by tile, and weights in the same order for all rows: by position.
        total = (weights if self._order is None else weights.gather(-1, self._order)).sum(-1, True)
        for reads in self._reads:
            reads.sum(layer)
        if is_single:
            shown = slice(0, part.num_rows)
            torch.div(sums[0, :, shown], total[0, :, shown], out=out[rows].permute(1, 0, 2, 3))
            return
        sums.div_(total)
        for number, part in enumerate(self._parts):
            out[part.first_row : part.first_row + part.num_rows] = sums[number, :, : part.num_rows].transpose(0, 1)


class _Reads:
    """Reads a part's keys and values: runs of neighbours in place, gathered tiles by a copy.

    The views are made here for all layers at once: at a few rows a view costs as much as the arithmetic on it.
    """

    def __init__(self, part: Part, pool: KVPool, number: int, group: PartGroup) -> None:
        self._queries, scores, weights, self._sums = group.flat(number)
        all_keys, all_values = pool.data.unbind(1)
        self._keys: list[tuple[Tensor, Sequence[Tensor]]] = []
        """For each run the scores, [K, queries, columns], and for each layer the keys, [K, head_dim, columns]."""
        self._values: list[tuple[Tensor, Sequence[Tensor]]] = []
        """For each tile of the chain the weights, [K, queries, columns], and for each layer the values."""
        column = 0
        for place, count in part.extents:
            keys = all_keys.narrow(2, place, count).transpose(2, 3).unbind(0)
            self._keys.append((scores.narrow(2, column, count), keys))
            for first in range(column, min(column + count, part.num_chain), TILE):
                # Values after the last slot may be anything, even NaN, which a weight of 0 does not remove.
                num_used = min(TILE, part.num_chain - first)
                values = all_values.narrow(2, place + first - column, num_used).unbind(0)
                self._values.append((weights.narrow(2, first, num_used), values))
            column += count
        self._places: Tensor | None = None
        if part.gathered:
            self._places = torch.from_numpy(np.concatenate(part.gathered)).to(pool.data.device)
            self._gathered_scores = scores.narrow(2, column, len(self._places))
            self._gathered_sizes = [len(places) for places in part.gathered]
            gathered = weights.narrow(2, column, len(self._places))
            self._gathered_weights = torch.split_with_sizes(gathered, self._gathered_sizes, 2)
            self._gathered_values: Sequence[Tensor] = ()

    def score(self, layer: int, data: Tensor) -> None:
        """Computes the scores of all columns, hidden ones too."""
        for scores, keys in self._keys:
            torch.bmm(self._queries, keys[layer], out=scores)
        if self._places is not None:
            gathered = data.index_select(2, self._places)
            torch.bmm(self._queries, gathered[0].transpose(1, 2), out=self._gathered_scores)
            self._gathered_values = torch.split_with_sizes(gathered[1], self._gathered_sizes, 1)

    def sum(self, layer: int) -> None:
        """Sums the weighted values, tile by tile."""
        is_first = True
        pieces = [(weights, values[layer]) for weights, values in self._values]
        if self._places is not None:
            pieces += zip(self._gathered_weights, self._gathered_values, strict=True)
        for weights, values in pieces:
            if is_first:
                torch.bmm(weights, values, out=self._sums)
            else:
                self._sums.baddbmm_(weights, values)
            is_first = False


def num_padded_rows(num_rows: int, queries_per_key: int, head_dim: int) -> int:
    """Returns the number of rows that a part is padded to: enough for exact products, and one of few numbers."""
    least = -(-max(MIN_QUERIES, -(-MIN_ENTRIES // head_dim)) // queries_per_key)
    return -(-num_rows // least) * least


def grouped(parts: Sequence[Part], pool: KVPool, queries_per_key: int) -> list[PartGroup]:
    """Puts parts of about one shape together."""
    by_shape: dict[tuple[int, int, bool], list[Part]] = {}
    for part in parts:
        # Their numbers of columns are within a factor of two, because padding is wasted work.
        size = (part.num_columns // TILE).bit_length()
        shape = num_padded_rows(part.num_rows, queries_per_key, pool.shape.head_dim), size, part.order is None
        by_shape.setdefault(shape, []).append(part)
    return [PartGroup(of_shape, pool, queries_per_key) for of_shape in by_shape.values()]

"""What the rows of a forward see, as tensors for a GPU's kernels, made from segments."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from outrider.models.cuda.inputs import SPLIT, tile_of
from outrider.models.packing import Segment


def paths_of(segments: Sequence[Segment], queries_per_key: int) -> SimpleNamespace:
    """Returns the tensors of `outrider.models.cuda.attention.Paths`, and `places`. The caches must have their blocks.

    Among nodes of the same depth, the first one's path comes first.
    """
    max_rows = tile_of(queries_per_key) // queries_per_key
    tables: list[int] = []
    tails: list[int] = []
    row_list: list[int] = []
    positions: list[int] = []
    places: list[int] = []
    tiles: list[tuple[int, ...]] = []
    for segment in segments:
        cache, num_rows, first_row = segment.cache, len(segment.token_ids), len(positions)
        size, length = cache.pool.block_size, cache.length
        own = list(segment.position_ids or range(length, length + num_rows))
        positions += own
        places += cache.places(np.arange(length, length + num_rows)).tolist()
        first_block = len(tables)
        tables += (cache.places(np.arange(cache.num_blocks) * size) // size).tolist()
        slots_of = [np.flatnonzero(seen) for seen in segment.seen()]
        left = set(range(num_rows))
        while left:
            leaf = max(left, key=lambda row: (own[row], -row))
            slots = slots_of[leaf]
            rows = [row for row in sorted(left) if length + row in slots]
            left -= set(rows)
            is_own = slots == np.arange(len(slots))
            root = len(slots) if is_own.all() else int(is_own.argmin())
            first_tail = len(tails)
            tails += cache.places(slots[root:]).tolist()
            for begin in range(0, len(rows), max_rows):
                some = rows[begin : begin + max_rows]
                tiles.append((len(row_list), len(some), first_block, root, first_tail, own[some[-1]] + 1))
                row_list += [first_row + row for row in some]
    work = [(number, split) for number, tile in enumerate(tiles) for split in range(-(-tile[5] // SPLIT))]
    first_results = [sum(tiles[tile][1] for tile, _ in work if tile < number) for number in range(len(tiles))]
    # After the work comes what must not be read.
    given = {
        "positions": positions,
        "places": places,
        "tables": tables,
        "tails": tails or [0],
        "row_list": row_list,
        "tiles": tiles,
        "work": [*work, (-(2**30), 2**30)],
        "num_work": [len(work)],
        "first_results": first_results,
    }
    return SimpleNamespace(**{name: torch.tensor(value, dtype=torch.int32) for name, value in given.items()})

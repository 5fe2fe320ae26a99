"""The layout of a packed forward: where the rows of each session stand, and what its attention reads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.kv_cache import KVPool
from outrider.models.packing import Segment, check_segments, filled_in
from outrider.models.torch.attention import MAX_QUERIES, Part, grouped, parts_of_chain, parts_of_tree


class Plan:
    """Lays out all segments of one packed forward, and computes the attention over them."""

    def __init__(
        self,
        segments: Sequence[Segment],
        queries_per_key: int,
        min_rows: int = 1,
        drawn: Tensor | None = None,
    ) -> None:
        """
        Args:
            segments: One for each session.
            queries_per_key: Query heads that share a key-value head.
            min_rows: Least rows of the forward. Fewer are padded.
            drawn: See `Runner.forward`.

        Raises:
            ValueError: A segment is malformed, or two segments share a cache.
            OutOfBlocks: The pool has no room for a segment that did not reserve it before.
        """
        self.segments = segments
        check_segments(segments)
        pool = segments[0].cache.pool
        self._data = pool.data
        self.cache_dtype = pool.shape.dtype
        """Type of keys and values, and of the arguments of `attend`."""
        self.slot_shape = pool.shape.num_heads, pool.shape.head_dim
        """Key-value heads of a layer, and the width of one."""
        self.heads = pool.shape.num_heads, queries_per_key
        """Key-value heads, and query heads that share one."""
        token_ids: list[int] = []
        self._position_ids: list[Sequence[int]] = []
        self.wanted_rows: list[int] = []
        """Rows whose logits are computed: the wanted ones, and then as many more as `min_rows` requires."""
        for segment in segments:
            length, num_rows = segment.cache.length, len(segment.token_ids)
            token_ids.extend(segment.token_ids)
            # `check` lets no empty list pass: only None is false here.
            self._position_ids.append(segment.position_ids or range(length, length + num_rows))
            self.wanted_rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
        self._num_used = len(token_ids)
        self.num_wanted = len(self.wanted_rows)
        """Rows whose logits are wanted."""
        self.num_rows = max(min_rows, self._num_used)
        """Rows of the forward, including padding."""
        if self.wanted_rows:
            # The head is a product like the others, so it gets as many rows. Padding rows are taken first: with them
            # all rows are wanted.
            fill = [*range(self._num_used, self.num_rows), *[0] * min_rows]
            self.wanted_rows += fill[: max(0, min_rows - self.num_wanted)]
        position_ids = [position for ids in self._position_ids for position in ids]
        # From the list: reading it from a tensor would wait for the accelerator.
        self.last_position = max(position_ids)
        padding = [0] * (self.num_rows - self._num_used)
        device = pool.data.device
        self.places = self._reserve()
        """Slots of the pool that take the new keys and values: int64 [rows without padding]."""
        self.lay_out(pool)
        self.num_attended = 0
        """Number of layers whose attention was computed; the runner checks once that it is all of them."""
        # One tensor for both is one copy to the device.
        rows = np.array([token_ids + padding, position_ids + padding])
        self.position_array: npt.NDArray[np.int64] = rows[1]
        """Position of each row, in host memory."""
        self.token_ids, self.position_ids = torch.from_numpy(rows).to(device).unbind(0)
        if drawn is not None:
            self.token_ids = filled_in(self.token_ids, drawn)

    def _reserve(self) -> npt.NDArray[np.int64]:
        """Makes room for the rows in their caches, and returns where they go."""
        places = []
        for segment in self.segments:
            cache, num_rows = segment.cache, len(segment.token_ids)
            cache.reserve(cache.length + num_rows)
            places.append(cache.places(np.arange(cache.length, cache.length + num_rows)))
        return np.concatenate(places)

    def lay_out(self, pool: KVPool) -> None:
        """Lays out the data that `attend` reads. Called once, when the rows have their places."""
        queries_per_key = self.heads[1]
        self._groups = grouped(self._parts(max(1, MAX_QUERIES // queries_per_key)), pool, queries_per_key)
        self._device_places = torch.from_numpy(self.places).to(pool.data.device)

    def _parts(self, max_rows: int) -> list[Part]:
        parts: list[Part] = []
        first_row = 0
        for segment, position_ids in zip(self.segments, self._position_ids, strict=True):
            num_rows = len(segment.token_ids)
            if segment.is_chain:
                parts += parts_of_chain(segment.cache, first_row, num_rows, max_rows)
            else:
                parts += parts_of_tree(segment.cache, first_row, position_ids, segment.seen(), max_rows)
            first_row += num_rows
        return parts

    @property
    def wants_all_rows(self) -> bool:
        """True if logits are computed for every row, in order."""
        return self.wanted_rows == list(range(self.num_rows))

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, scale: float) -> Tensor:
        """Appends the new keys and values of one layer to the caches, and attends over them.

        Args:
            layer: Index of the layer.
            queries: [rows, query heads, head_dim], after the rotary embedding.
            keys_values: [rows, 2, key-value heads, head_dim], likewise.
            scale: Factor of the scores.

        Returns:
            [rows, query heads * head_dim].
        """
        self.num_attended += 1
        data = self._data[layer]
        # Before the scores: rows see themselves and each other through the cache.
        data.index_copy_(2, self._device_places, self.kept(keys_values))
        queries = queries.view(len(queries), *self.heads, -1)
        out = self.empty(*queries.shape, dtype=queries.dtype)
        for group in self._groups:
            group.attend(layer, queries, data, scale, out)
        return out.flatten(1)

    def kept(self, keys_values: Tensor) -> Tensor:
        """Returns the keys and values of rows without padding, in the order of the pool's dimensions."""
        return keys_values[: self._num_used].permute(1, 2, 0, 3)

    def empty(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Makes a tensor for the attention's results. Padding rows attend to nothing, and stay zero."""
        make = torch.zeros if self._num_used < self.num_rows else torch.empty
        return make(sizes, dtype=dtype, device=self._data.device)

    def commit(self) -> None:
        """Counts the appended rows as used, once all layers ran: a forward that fails leaves no trace."""
        for segment, position_ids in zip(self.segments, self._position_ids, strict=True):
            segment.cache.append(position_ids)

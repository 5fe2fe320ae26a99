"""The layout of a packed forward: where the rows of each session stand, and what each of them sees.

Linear layers read their weights once for all rows of all sessions. Attention runs over each session's own slots
(`outrider.models.torch.attention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.core.tree import Node
from outrider.models.cpu.paths import Paths
from outrider.models.kv_cache import KVCache
from outrider.models.torch.attention import MAX_QUERIES, Part, grouped, parts_of_chain, parts_of_tree

TokensOnDevice: TypeAlias = Tensor
"""Whole numbers [draws]: tokens that a device draws, or has drawn, without the host having read them."""
NO_SLOTS: Mapping[Node, int] = MappingProxyType({})


class Segment(NamedTuple):
    """Holds the rows of one session in a packed forward. They are appended to the session's cache."""

    cache: KVCache
    token_ids: Sequence[int]
    num_logits: int
    """Logits are wanted for the last `num_logits` rows; 0 for a prefill chunk that is not the last."""
    position_ids: Sequence[int] | None = None
    """Position of each row. None means that the rows continue the cache, row i at `cache.length + i`."""
    visible: npt.NDArray[np.bool_] | None = None
    """bool [rows, cache.length + rows]: the slots that a row sees, itself among them. None means all up to itself."""

    @classmethod
    def of_tree(
        cls,
        cache: KVCache,
        pending: Sequence[int],
        nodes: Sequence[Node],
        slots: Mapping[Node, int] = NO_SLOTS,
        *,
        num_logits: int,
    ) -> Segment:
        """Lays out committed tokens and nodes below them, so that each node sees the committed tokens, its ancestors
        and itself.

        Args:
            cache: Holds the committed tokens before `pending`; or all of them, and then the nodes in `slots`.
            pending: Committed tokens that are not in the cache. Must be empty if there are nodes in `slots`.
            nodes: Nodes that are not in the cache, parents before children. Their other ancestors are in `slots`.
            slots: Where in the cache the nodes stand that have been through a forward.
            num_logits: Number of rows, the last ones, whose logits are wanted.
        """
        if not nodes:
            return cls(cache, pending, num_logits)
        token_ids = [*pending, *(node.token_id for node in nodes)]
        first = cache.length + len(pending)
        # A node has as many ancestors as its position says. Where that is its slot too, everything before it is one:
        # the rows are one chain and need no mask, which attention computes faster.
        if all(node.position == slot for slot, node in enumerate(nodes, first)):
            return cls(cache, token_ids, num_logits)
        # Nodes that are in the cache stand behind all committed tokens, and then nothing is pending.
        num_committed = first - len(slots)
        slots = {**slots, **{node: slot for slot, node in enumerate(nodes, first)}}
        visible = np.zeros((len(token_ids), cache.length + len(token_ids)), dtype=np.bool_)
        # Pending row i sees the slots up to `cache.length` + i, where it stands itself.
        visible[: len(pending)] = np.tri(len(pending), visible.shape[1], cache.length, dtype=np.bool_)
        visible[len(pending) :, :num_committed] = True
        # Ancestors, and neither siblings nor cousins: the two principles of CARD, section 2.3.
        rows: list[int] = []
        columns: list[int] = []
        for row, node in enumerate(nodes, len(pending)):
            path = _path_slots(node, slots)
            columns += path
            rows += [row] * len(path)
        visible[rows, columns] = True
        positions = [*range(cache.length, first), *(node.position for node in nodes)]
        return cls(cache, token_ids, num_logits, positions, visible)

    @property
    def is_chain(self) -> bool:
        """True if all slots up to the last row hold their own positions, and rows see all slots up to their own."""
        return self.visible is None and self.position_ids is None and not self.cache.tail_positions

    def seen(self) -> npt.NDArray[np.bool_]:
        """Returns `visible`, made where it is None."""
        if self.visible is not None:
            return self.visible
        num_rows = len(self.token_ids)
        return np.tri(num_rows, self.cache.length + num_rows, self.cache.length, dtype=np.bool_)

    def check(self) -> None:
        """Raises ValueError if the parts do not fit together."""
        rows = len(self.token_ids)
        if rows == 0:
            raise ValueError("a segment needs at least one row")
        if not 0 <= self.num_logits <= rows:
            raise ValueError(f"num_logits must be in [0, {rows}], got {self.num_logits}")
        if self.position_ids is not None and len(self.position_ids) != rows:
            raise ValueError(f"position_ids must have {rows} entries, got {len(self.position_ids)}")
        if self.visible is not None and self.visible.shape != (rows, self.cache.length + rows):
            raise ValueError(f"visible must be {(rows, self.cache.length + rows)}, got {self.visible.shape}")


def placeholder(place: int) -> int:
    """Returns the token id that stands for the token at a place of those that a device draws; see `filled_in`."""
    return ~place


def filled_in(token_ids: Tensor, drawn: TokensOnDevice) -> Tensor:
    """Returns token ids with the tokens that their placeholders stand for, which only the device may know.

    Args:
        token_ids: Whole numbers [rows]: token ids and placeholders.
        drawn: Whole numbers [draws]: token ids, below 0 where the device has none. Those count as 0: there must be some
            embedding, and nothing is made of it.
    """
    drawn = drawn.to(token_ids.device, token_ids.dtype)
    places = (~token_ids).clamp_min_(0)  # some place for the others
    return torch.where(token_ids < 0, drawn.index_select(0, places), token_ids).clamp_min_(0)


def check_segments(segments: Sequence[Segment]) -> None:
    """Raises ValueError if a segment of a forward is malformed, or two of them share a cache."""
    # Both would be given the same slots.
    if len({id(segment.cache) for segment in segments}) < len(segments):
        raise ValueError("two segments of a forward share a cache")
    for segment in segments:
        segment.check()


def _path_slots(node: Node | None, slots: Mapping[Node, int]) -> list[int]:
    """Slots of a node and of those of its ancestors that have one."""
    path = []
    while node is not None and node in slots:
        path.append(slots[node])
        node = node.parent
    return path


class Plan:
    """Lays out all segments of one packed forward, and computes the attention over them."""

    def __init__(
        self,
        segments: Sequence[Segment],
        queries_per_key: int,
        min_rows: int = 1,
        *,
        use_kernels: bool = False,
        drawn: Tensor | None = None,
    ) -> None:
        """
        Args:
            segments: One for each session.
            queries_per_key: Query heads that share a key-value head.
            min_rows: Least rows of the forward. Fewer are filled up with rows that belong to nobody.
            use_kernels: True if attention runs by `outrider.models.cpu.kernels`.
            drawn: See `Runner.forward`.

        Raises:
            ValueError: A segment is malformed, or two segments share a cache.
            OutOfBlocks: The pool has no room for a segment that did not reserve it before.
        """
        self._segments = segments
        check_segments(segments)
        pool = segments[0].cache.pool
        self._data = pool.data
        self.cache_dtype = pool.shape.dtype
        """Type of keys and values, and of what `attend` takes."""
        self.slot_shape = pool.shape.num_heads, pool.shape.head_dim
        """Key-value heads of a layer, and the width of one."""
        self._heads = pool.shape.num_heads, queries_per_key
        token_ids: list[int] = []
        self._position_ids: list[Sequence[int]] = []
        self.wanted_rows: list[int] = []
        """Rows whose logits are computed: those that are wanted, and behind them as many as `min_rows` asks for."""
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
        """Rows of the forward, those that belong to nobody included."""
        if self.wanted_rows:
            # The head is a product like the others. The rows of nobody come first: with them all rows are wanted.
            fill = [*range(self._num_used, self.num_rows), *[0] * min_rows]
            self.wanted_rows += fill[: max(0, min_rows - self.num_wanted)]
        position_ids = [position for ids in self._position_ids for position in ids]
        # Of the list: to read it from a tensor would be to wait for the accelerator.
        self.last_position = max(position_ids)
        padding = [0] * (self.num_rows - self._num_used)
        device = pool.data.device
        self.paths = Paths(pool) if use_kernels else None
        """Blocks that each row sees, for the kernels of a CPU; None if they are not used."""
        self.places = self._reserve()
        """Slots of the pool that take the new keys and values: int64 [rows that are somebody's]."""
        if self.paths is None:
            parts = self._parts(max(1, MAX_QUERIES // queries_per_key))
            self._groups = grouped(parts, pool, queries_per_key)
            self._device_places = torch.from_numpy(self.places).to(device)
        else:
            self._add_paths(self.paths)
        self.num_attended = 0
        """Layers whose attention was computed; the runner checks once that all are."""
        # One tensor for both is one copy to the device.
        rows = np.array([token_ids + padding, position_ids + padding])
        self.position_array: npt.NDArray[np.int64] = rows[1]
        """Position of each row, for the kernels of a CPU."""
        self.token_ids, self.position_ids = torch.from_numpy(rows).to(device).unbind(0)
        if drawn is not None:
            self.token_ids = filled_in(self.token_ids, drawn)

    def _reserve(self) -> npt.NDArray[np.int64]:
        """Makes room for the rows in their caches, and returns where they go."""
        places = []
        for segment in self._segments:
            cache, num_rows = segment.cache, len(segment.token_ids)
            cache.reserve(cache.length + num_rows)
            places.append(cache.places(np.arange(cache.length, cache.length + num_rows)))
        return np.concatenate(places)

    def _parts(self, max_rows: int) -> list[Part]:
        parts: list[Part] = []
        first_row = 0
        for segment, position_ids in zip(self._segments, self._position_ids, strict=True):
            num_rows = len(segment.token_ids)
            if segment.is_chain:
                parts += parts_of_chain(segment.cache, first_row, num_rows, max_rows)
            else:
                parts += parts_of_tree(segment.cache, first_row, position_ids, segment.seen(), max_rows)
            first_row += num_rows
        return parts

    def _add_paths(self, paths: Paths) -> None:
        for segment in self._segments:
            if segment.is_chain:
                paths.add_chain(segment.cache, len(segment.token_ids))
            else:
                paths.add_tree(segment.cache, segment.seen())
        paths.finish()

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
        kept = keys_values[: self._num_used].permute(1, 2, 0, 3)
        if self.paths is not None:
            data.index_copy_(2, torch.from_numpy(self.places), kept)
            scaled = (queries * scale).view(len(queries), *self._heads, -1)
            found = self.empty(len(queries), queries[0].numel(), dtype=queries.dtype)
            self.paths.attend(self.paths.data[layer], scaled.numpy(), found.numpy())
            return found
        data.index_copy_(2, self._device_places, kept)
        queries = queries.view(len(queries), *self._heads, -1)
        out = self.empty(*queries.shape, dtype=queries.dtype)
        for group in self._groups:
            group.attend(layer, queries, data, scale, out)
        return out.flatten(1)

    def empty(self, *sizes: int, dtype: torch.dtype) -> Tensor:
        """Makes a tensor for what rows attend to. Those that belong to nobody attend to nothing, and stay zero."""
        make = torch.zeros if self._num_used < self.num_rows else torch.empty
        return make(sizes, dtype=dtype, device=self._data.device)

    def commit(self) -> None:
        """Counts the appended rows as used, once all layers ran: a forward that fails leaves no trace."""
        for segment, position_ids in zip(self._segments, self._position_ids, strict=True):
            segment.cache.append(position_ids)

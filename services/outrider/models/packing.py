"""The layout of a packed forward: where the rows of each session stand, and what each of them sees.

Linear layers read their weights once for all rows of all sessions. Attention runs for each segment over that
session's own cache. The views into the caches are made here for all layers at once, because at a few rows an
operator call costs as much as its arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from outrider.core.tree import Node

NO_SLOTS: Mapping[Node, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Segment:
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
        for row, node in enumerate(nodes, len(pending)):
            visible[row, _path_slots(node, slots)] = True
        positions = [*range(cache.length, first), *(node.position for node in nodes)]
        return cls(cache, token_ids, num_logits, positions, visible)

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


def _path_slots(node: Node | None, slots: Mapping[Node, int]) -> list[int]:
    """Slots of a node and of those of its ancestors that have one."""
    path = []
    while node is not None and node in slots:
        path.append(slots[node])
        node = node.parent
    return path


@dataclass(slots=True)
class SegmentPlan:
    """Holds a segment's views into its cache, one for each layer, and its mask."""

    rows: slice
    num_rows: int
    new_slots: Sequence[Tensor]
    """[rows, 2, heads, head_dim] a layer: where the new keys and values go."""
    keys_values: Sequence[Tensor]
    """[1, heads, slots, head_dim]: for each layer its keys, then its values."""
    mask: Tensor | None
    """Added to the scores: [rows * queries per key, slots]. None means that all rows see all slots, or `is_causal`."""
    is_causal: bool


class Plan:
    """Lays out all segments of one packed forward, and computes the attention over them."""

    def __init__(self, segments: Sequence[Segment], queries_per_key: int) -> None:
        """
        Args:
            segments: One for each session.
            queries_per_key: Query heads that share a key-value head.

        Raises:
            ValueError: A segment is malformed, or two segments share a cache.
        """
        self._queries_per_key = queries_per_key
        self._caches = [segment.cache for segment in segments]
        # Both would be given the same slots.
        if len({id(cache) for cache in self._caches}) < len(segments):
            raise ValueError("two segments of a forward share a cache")
        self.segments: list[SegmentPlan] = []
        token_ids: list[int] = []
        position_ids: list[int] = []
        self.wanted_rows: list[int] = []
        """Rows whose logits are wanted."""
        for segment in segments:
            segment.check()
            start, length = len(token_ids), segment.cache.length
            token_ids.extend(segment.token_ids)
            # `check` lets no empty list pass: only None is false here.
            position_ids.extend(segment.position_ids or range(length, length + len(segment.token_ids)))
            self.segments.append(self._plan(segment, start))
            self.wanted_rows.extend(range(len(token_ids) - segment.num_logits, len(token_ids)))
        self.num_rows = len(token_ids)
        self._sizes = [segment.num_rows for segment in self.segments]
        # Of the list: to read it from a tensor would be to wait for the accelerator.
        self.last_position = max(position_ids)
        self.num_attended = 0
        """Layers whose attention came here; the runner checks once that all do."""
        device = self._caches[0].shape.device
        # One tensor for both is one copy to the device.
        self.token_ids, self.position_ids = torch.tensor([token_ids, position_ids], device=device).unbind(0)

    def _plan(self, segment: Segment, start: int) -> SegmentPlan:
        cache, num_rows = segment.cache, len(segment.token_ids)
        end = cache.length + num_rows
        cache.reserve(end)  # before any view of it is taken: a cache that grows moves
        # With `is_causal` attention skips the upper half instead of adding minus infinity to it. It counts rows from
        # the first slot, so it is right for an empty cache only; and where query heads are folded into rows, never.
        is_causal = cache.length == 0 and num_rows > 1 and segment.visible is None and self._queries_per_key == 1
        return SegmentPlan(
            rows=slice(start, start + num_rows),
            num_rows=num_rows,
            new_slots=cache.slots.narrow(1, cache.length, num_rows).unbind(0),
            keys_values=cache.heads.narrow(3, 0, end).unbind(0),
            mask=None if is_causal else self._mask(segment),
            is_causal=is_causal,
        )

    def _mask(self, segment: Segment) -> Tensor | None:
        cache, num_rows = segment.cache, len(segment.token_ids)
        # Torch wants an additive mask in the type of the queries, and those come in the type of the cache.
        dtype, device = cache.shape.dtype, cache.shape.device
        if segment.visible is not None:
            hidden = torch.from_numpy(~segment.visible).to(device)
            mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
        elif num_rows == 1:
            return None  # the row stands in the last slot, and sees them all
        else:
            mask = torch.full((num_rows, cache.length + num_rows), float("-inf"), dtype=dtype, device=device)
            mask.triu_(cache.length + 1)
        # The query heads of one key-value head are further rows: a mask repeated is cheaper than keys repeated.
        return mask if self._queries_per_key == 1 else mask.repeat_interleave(self._queries_per_key, 0)

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
        if len(self.segments) == 1:  # neither a split nor a copy of the outputs
            return self._attend(self.segments[0], layer, queries, keys_values, scale)
        parts = zip(
            self.segments,
            torch.split_with_sizes(queries, self._sizes),
            torch.split_with_sizes(keys_values, self._sizes),
            strict=True,
        )
        return torch.cat([self._attend(segment, layer, q, kv, scale) for segment, q, kv in parts])

    def _attend(self, segment: SegmentPlan, layer: int, queries: Tensor, keys_values: Tensor, scale: float) -> Tensor:
        # Before the scores: rows see themselves and each other through the cache.
        segment.new_slots[layer].copy_(keys_values)
        num_rows, group = segment.num_rows, self._queries_per_key
        if group == 1:
            folded = queries.transpose(0, 1).unsqueeze(0)
        else:
            num_keys, head_dim = keys_values.shape[2:]
            # Row r of the group's head g becomes row r * group + g, in the order of the repeated mask.
            folded = queries.reshape(num_rows, num_keys, group, head_dim).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        out = functional.scaled_dot_product_attention(
            folded,
            segment.keys_values[2 * layer],
            segment.keys_values[2 * layer + 1],
            attn_mask=segment.mask,
            is_causal=segment.is_causal,
            scale=scale,
        )
        if group == 1:
            return out.transpose(1, 2).reshape(num_rows, -1)
        # A view whatever the kernel's layout: one dimension is split, and one of size 1 dropped.
        return out.view(num_keys, num_rows, group, head_dim).transpose(0, 1).reshape(num_rows, -1)

    def commit(self) -> None:
        """Counts the appended rows as used, once all layers ran: a forward that fails leaves no trace."""
        for cache, segment in zip(self._caches, self.segments, strict=True):
            cache.length += segment.num_rows


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Describes a slot of a cache, which holds a key and a value for every layer and every key-value head."""

    num_layers: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_slot(self) -> int:
        """Size of one slot, in bytes."""
        return self.num_layers * 2 * self.num_heads * self.head_dim * self.dtype.itemsize


class KVCache:
    """Holds one session's keys and values of one model, in a preallocated tensor that grows by doubling.

    Slot i of a chain holds position i. The slots of a tree follow those of the trunk, in the order of their rows.
    """

    def __init__(self, shape: CacheShape, capacity: int) -> None:
        self.length = 0
        """Slots used."""
        self.shape = shape
        self._data = self._allocate(max(1, capacity))
        self._set_views()

    def _set_views(self) -> None:
        self.slots = self._data.transpose(1, 2)
        """[layers, capacity, 2, heads, head_dim]: key and value of every slot."""
        self.heads = self._data.flatten(0, 1).transpose(1, 2).unsqueeze(1)
        """[2 * layers, 1, heads, capacity, head_dim]: for each layer its keys, then its values. The same memory."""

    @property
    def capacity(self) -> int:
        """Slots that fit without growing."""
        return self._data.shape[2]

    @property
    def num_bytes(self) -> int:
        """Memory held, in bytes."""
        return self.capacity * self.shape.bytes_per_slot

    def truncate(self, length: int) -> None:
        """Forgets everything from slot `length` on. Takes constant time.

        Raises:
            ValueError: `length` is negative or more than the slots used.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        self.length = length

    # A cache that has grown during a forward is an inference tensor, which torch lets be written to in this mode only.
    @torch.inference_mode()
    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Moves the rows at `slots` together behind slot `start`, and forgets all others from `start` on.

        Args:
            start: Slots before it stay as they are.
            slots: Ascending, none below `start`: the path that was accepted, out of a tree that began at `start`.

        Raises:
            ValueError: `slots` are not ascending or not all in [start, length).
        """
        # Ascending pairs check both ends and the order in one go; without slots, that `start` is at most `length`.
        bounds = [start - 1, *slots, self.length]
        if start < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"slots must be ascending and in [{start}, {self.length}), got {list(slots)}")
        # A path that begins with the first rows of the tree, as the best one often does, is in its place already.
        first = next((i for i, slot in enumerate(slots) if slot != start + i), len(slots))
        moved = slots[first:]
        if moved:
            # Indexing by a tensor copies, so the two ranges may overlap.
            rows = self.slots[:, torch.tensor(moved, device=self.shape.device)]
            self.slots[:, start + first : start + len(slots)] = rows
        self.length = start + len(slots)

    @torch.inference_mode()
    def reserve(self, num_slots: int) -> None:
        """Makes room for `num_slots` slots in total."""
        if num_slots > self.capacity:
            grown = self._allocate(max(num_slots, 2 * self.capacity))
            grown[:, :, : self.length] = self._data[:, :, : self.length]
            self._data = grown
            self._set_views()

    def _allocate(self, capacity: int) -> Tensor:
        # Not zeroed: a slot is never read before it was written.
        s = self.shape
        return torch.empty(s.num_layers, 2, capacity, s.num_heads, s.head_dim, dtype=s.dtype, device=s.device)

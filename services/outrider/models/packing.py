"""The rows of sessions in a packed forward, and what each of them sees.

Linear layers read their weights once for all rows of all sessions. Attention runs over each session's own slots.
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
from outrider.models.kv_cache import KVCache

TokensOnDevice: TypeAlias = Tensor
"""Whole numbers [draws]: tokens that a device draws, or has drawn, and that the host has not read."""
NO_SLOTS: Mapping[Node, int] = MappingProxyType({})


class Segment(NamedTuple):
    """Holds the rows of one session in a packed forward. They are appended to the session's cache."""

    cache: KVCache
    token_ids: Sequence[int]
    num_logits: int
    """Number of rows, the last ones, whose logits are wanted; 0 for a prefill chunk that is not the last."""
    position_ids: Sequence[int] | None = None
    """Position of each row. None means that the rows continue the cache, row i at `cache.length + i`."""
    visible: npt.NDArray[np.bool_] | None = None
    """bool [rows, cache.length + rows]: the slots that each row sees, its own among them. None means all up to its
    own."""

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
            slots: Slots of the nodes that have been through a forward.
            num_logits: Number of rows, the last ones, whose logits are wanted.
        """
        if not nodes:
            return cls(cache, pending, num_logits)
        token_ids = [*pending, *(node.token_id for node in nodes)]
        first = cache.length + len(pending)
        # A node's position is the number of its ancestors. If its slot is the same number, every slot before it is an
        # ancestor: the rows are one chain and need no mask, which attention computes faster.
        if all(node.position == slot for slot, node in enumerate(nodes, first)):
            return cls(cache, token_ids, num_logits)
        # Nodes in the cache stand after all committed tokens, and then nothing is pending.
        num_committed = first - len(slots)
        slots = {**slots, **{node: slot for slot, node in enumerate(nodes, first)}}
        visible = np.zeros((len(token_ids), cache.length + len(token_ids)), dtype=np.bool_)
        # Pending row i sees the slots up to `cache.length` + i, where it stands itself.
        visible[: len(pending)] = np.tri(len(pending), visible.shape[1], cache.length, dtype=np.bool_)
        visible[len(pending) :, :num_committed] = True
        # A node sees its ancestors, but neither siblings nor cousins: the two principles of CARD, section 2.3.
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
        """True if all slots up to the last row's hold their own positions, and each row sees all slots up to its
        own."""
        return self.visible is None and self.position_ids is None and not self.cache.tail_positions

    def seen(self) -> npt.NDArray[np.bool_]:
        """Returns `visible`, or makes it if it is None."""
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
    """Returns the token id that stands for the token at an index of those that a device draws; see `filled_in`."""
    return ~place


def filled_in(token_ids: Tensor, drawn: TokensOnDevice) -> Tensor:
    """Replaces placeholders by the tokens that they stand for, which only the device may know.

    Args:
        token_ids: Whole numbers [rows]: token ids and placeholders.
        drawn: Whole numbers [draws]: token ids, below 0 where the device has none. Those count as 0: some embedding is
            needed, and its row is ignored.
    """
    drawn = drawn.to(token_ids.device, token_ids.dtype)
    places = (~token_ids).clamp_min_(0)  # any place for rows without a placeholder
    return torch.where(token_ids < 0, drawn.index_select(0, places), token_ids).clamp_min_(0)


def check_segments(segments: Sequence[Segment]) -> None:
    """Raises ValueError if a segment of a forward is malformed, or two of them share a cache."""
    # Two segments of one cache would be given the same slots.
    if len({id(segment.cache) for segment in segments}) < len(segments):
        raise ValueError("two segments of a forward share a cache")
    for segment in segments:
        segment.check()


def _path_slots(node: Node | None, slots: Mapping[Node, int]) -> list[int]:
    """Returns the slots of a node and its ancestors, of those that have one."""
    path = []
    while node is not None and node in slots:
        path.append(slots[node])
        node = node.parent
    return path

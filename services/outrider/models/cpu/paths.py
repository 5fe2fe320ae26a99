"""Lays out the paths that the rows of a forward see, for the kernels of a CPU: places in the pool, by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from outrider.models.cpu import kernels
from outrider.models.kv_cache import KVCache, KVPool
from outrider.models.torch.plan import Plan


class CpuPlan(Plan):
    """Lays out a packed forward for the kernels of a CPU."""

    def lay_out(self, pool: KVPool) -> None:
        """See `Plan`."""
        self.paths = Paths(pool)
        """Places that each row sees."""
        for segment in self.segments:
            if segment.is_chain:
                self.paths.add_chain(segment.cache, len(segment.token_ids))
            else:
                self.paths.add_tree(segment.cache, segment.seen())
        self.paths.finish()

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, scale: float) -> Tensor:
        """See `Plan`."""
        self.num_attended += 1
        pool = self.segments[0].cache.pool
        pool.data[layer].index_copy_(2, torch.from_numpy(self.places), self.kept(keys_values))
        scaled = (queries * scale).view(len(queries), *self.heads, -1)
        found = self.empty(len(queries), queries[0].numel(), dtype=queries.dtype)
        self.paths.attend(self.paths.data[layer], scaled.numpy(), found.numpy())
        return found


class Paths:
    """Holds the path of every row: where the keys and values of all tokens before it lie, and its own.

    A row of a chain and a row of a tree are alike here: both are a list of places, in the order of positions, so they
    go through the same arithmetic. Rows of a chain share one list, and each sees its beginning.
    """

    def __init__(self, pool: KVPool) -> None:
        """
        Args:
            pool: Holds the keys and values, in float32.
        """
        self.data = kernels.as_array(pool.data)
        """float32 [layers, 2, key-value heads, slots, head_dim]."""
        self._head_dim = pool.shape.head_dim
        self._lists: list[npt.NDArray[np.int64]] = []
        self._starts: list[npt.NDArray[np.int64]] = []
        self._counts: list[npt.NDArray[np.int64]] = []
        self._leads: list[npt.NDArray[np.int64]] = []
        self._length = 0
        self._queries: npt.NDArray[np.float32] | None = None

    def add_chain(self, cache: KVCache, num_rows: int) -> None:
        """Adds rows that continue a chain: each sees all slots up to its own."""
        end = cache.length + num_rows
        counts = np.arange(cache.length + 1, end + 1)
        self._add(cache.places(np.arange(end)), np.zeros(num_rows, dtype=np.int64), counts, counts)

    def add_tree(self, cache: KVCache, visible: npt.NDArray[np.bool_]) -> None:
        """Adds rows that see what `visible` says: bool [rows, cache.length + rows], over slots."""
        # Row by row, and within a row by slot. That is also the order of positions: parents stand before their
        # children.
        slots = np.nonzero(visible)[1]
        counts = visible.sum(1)
        # Up to the first slot that a row does not see. That includes at least all committed tokens.
        leads = np.where(visible.all(1), visible.shape[1], visible.argmin(1))
        self._add(cache.places(slots), np.cumsum(counts) - counts, counts, leads)

    def _add(
        self,
        places: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        leads: npt.NDArray[np.int64],
    ) -> None:
        """Adds the rows of a session. `leads` says how many of its first slots each row sees without a gap."""
        self._leads.append(leads)
        self._lists.append(places)
        self._starts.append(starts + self._length)
        self._counts.append(counts)
        self._length += len(places)

    def finish(self) -> None:
        """Joins the rows, after all were added."""
        self._slots = np.concatenate(self._lists)
        self._all_starts, self._all_counts = np.concatenate(self._starts), np.concatenate(self._counts)
        self._groups, self._shared = self._grouped()
        most = int(self._all_counts.max())
        # After the scores there is room for a worker's sums, one for each dimension of a head.
        num_workers = torch.get_num_threads()
        self._scores = np.empty((num_workers, kernels.GROUP, most + self._head_dim), dtype=np.float32)

    def _grouped(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Puts rows of the same session together; returns where each group begins and how many places it shares."""
        groups, shared, first = [0], [], 0
        for leads in self._leads:
            for begin in range(0, len(leads), kernels.GROUP):
                some = leads[begin : begin + kernels.GROUP]
                groups.append(first + begin + len(some))
                shared.append(int(some.min()))
            first += len(leads)
        return np.array(groups), np.array(shared)

    def queries(self, num_rows: int, num_heads: int, queries_per_key: int) -> npt.NDArray[np.float32]:
        """Returns room for the queries of a layer: [rows, key-value heads, queries per key, head_dim]."""
        if self._queries is None:
            self._queries = np.zeros((num_rows, num_heads, queries_per_key, self._head_dim), dtype=np.float32)
        return self._queries

    def attend(
        self, data: npt.NDArray[np.float32], queries: npt.NDArray[np.float32], out: npt.NDArray[np.generic]
    ) -> None:
        """Computes the attention of one layer. All keys and values must be in their places.

        Args:
            data: [2, key-value heads, slots, head_dim]: the layer's keys and values.
            queries: [rows, key-value heads, queries per key, head_dim], scaled.
            out: [rows, query heads * head_dim], written. Rows after those that were added are left as they are.
        """
        found = out.reshape(queries.shape)
        kernels.attend(
            queries,
            data,
            self._slots,
            self._all_starts,
            self._all_counts,
            self._groups,
            self._shared,
            self._scores,
            found,
        )

"""Keys and values of all sessions of a model: one pool of memory, and each session's view into it.

The pool is allocated once. Its memory is handed out in blocks of consecutive slots (`outrider.core.blocks`), so a
session holds memory for the tokens that it has, not for those that it may get. A slot is the place of one token's keys
and values in all layers.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from outrider.core.blocks import BlockPool, first_key, next_key
from outrider.core.tree import TokenId

TILE = 64
"""Positions over which attention sums in one go (`outrider.models.torch.attention`). Blocks consist of whole tiles."""


Move = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Places in the pool, and as many places that their rows are moved to. Ascending: no pair's source is an earlier
target."""


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


class KVPool:
    """Holds the keys and values of all sessions of one model."""

    def __init__(
        self, shape: CacheShape, num_blocks: int, block_size: int = TILE, *, num_scratch_slots: int = 0
    ) -> None:
        """
        Args:
            shape: A slot.
            num_blocks: Blocks in all.
            block_size: Slots of a block.
            num_scratch_slots: Slots behind those of all blocks, for padding rows.

        Raises:
            ValueError: There is no block, or `block_size` is not a positive multiple of 64.
        """
        if block_size < TILE or block_size % TILE:
            raise ValueError(f"block_size must be a positive multiple of {TILE}, got {block_size}")
        self.shape = shape
        self.block_size = block_size
        self.blocks = BlockPool(num_blocks)
        # Not zeroed: a slot is never read before it was written. On a CPU the system allocates a page when it is
        # touched.
        self.data = torch.empty(
            shape.num_layers,
            2,
            shape.num_heads,
            num_blocks * block_size + num_scratch_slots,
            shape.head_dim,
            dtype=shape.dtype,
            device=shape.device,
        )
        """[layers, 2, heads, slots, head_dim]: for each layer its keys, then its values."""
        self.dropped: deque[list[int]] = deque()
        """Tables of caches that were dropped with blocks in them."""
        self.defers_moves = False
        """True if the next forward begins by moving the rows that caches keep. If False, caches move them at once."""
        self.moves: dict[int, Move] = {}
        """Moves that were deferred, by the identity of the cache. No two share a place."""

    def move_now(self) -> None:
        """Carries out the deferred moves."""
        for old, new in self.moves.values():
            self.move(old, new)
        self.moves.clear()

    @torch.inference_mode()
    def move(self, old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> None:
        """Copies the rows at some places to others, which may overlap with them."""
        # Indexing by a tensor copies.
        rows = self.data.index_select(3, torch.from_numpy(old).to(self.data.device))
        self.data.index_copy_(3, torch.from_numpy(new).to(self.data.device), rows)

    def take_back(self) -> None:
        """Gives the blocks of dropped caches back. Called before blocks are taken: the garbage collector drops caches
        in any thread, and in the middle of anything."""
        while self.dropped:
            _release_all(self.blocks, self.dropped.popleft())

    @property
    def num_slots(self) -> int:
        """Slots of all blocks."""
        return self.blocks.num_blocks * self.block_size

    def num_blocks_for(self, num_slots: int) -> int:
        """Returns how many blocks hold so many slots."""
        return -(-num_slots // self.block_size)

    def new_cache(self, salt: str | None = None) -> KVCache:
        """Makes an empty cache.

        Args:
            salt: Caches with the same salt find each other's prefixes. None means that this one shares nothing.
        """
        return KVCache(self, salt)


class KVCache:
    """Holds one session's keys and values: a table of blocks, and what is in their slots.

    Slot i of a chain holds position i. The slots of a tree follow those of the trunk, in the order of their rows.
    """

    def __init__(self, pool: KVPool, salt: str | None = None) -> None:
        self.pool = pool
        self.length = 0
        """Slots used."""
        self.tail_positions: list[int] = []
        """Positions of the last slots, from the first one that does not hold its own position."""
        self.finds = True
        """False if the text is to be run as a whole: it finds no prefix, but others find its blocks."""
        self._salt = salt
        self._table: list[int] = []
        # A cache that is dropped without `clear` loses no blocks. The list is changed in place, never replaced.
        weakref.finalize(self, pool.dropped.append, self._table)
        self._keys: list[bytes] = []
        """Keys of the first blocks, those that were found or published: the others have not been computed."""

    @property
    def capacity(self) -> int:
        """Slots that fit into the blocks held."""
        return len(self._table) * self.pool.block_size

    @property
    def table(self) -> Sequence[int]:
        """Blocks held, in the order of slots."""
        return self._table

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        return len(self._table)

    @property
    def chain_len(self) -> int:
        """Slots, from the first, that hold their own position."""
        return self.length - len(self.tail_positions)

    # Its blocks.

    def reserve(self, num_slots: int, *, may_evict: bool = True) -> None:
        """Makes room for `num_slots` slots in total. Those from `length` on may then be written to.

        Args:
            num_slots: Slots in total.
            may_evict: True if cached prefixes may be given up for it.

        Raises:
            OutOfBlocks: There is no room. The blocks that were taken by then are kept.
        """
        pool = self.pool
        if pool.dropped:
            pool.take_back()
        blocks, size = pool.blocks, pool.block_size
        first = self.length // size
        # A block that others hold, or can find, stays as it is: this cache writes to a copy.
        if first < len(self._table) and num_slots > self.length and not blocks.is_writable(self._table[first]):
            self._copy_block(first, may_evict=may_evict)
        while len(self._table) * size < num_slots:
            self._table.append(blocks.allocate(self._table[-1] if self._table else None, may_evict=may_evict))

    def _copy_block(self, index: int, *, may_evict: bool) -> None:
        size, old = self.pool.block_size, self._table[index]
        new = self.pool.blocks.allocate(may_evict=may_evict)
        # Some of its rows may still be on their way there.
        self.pool.move_now()
        data = self.pool.data
        with torch.inference_mode():
            data[:, :, :, new * size : (new + 1) * size] = data[:, :, :, old * size : (old + 1) * size]
        self._table[index] = new
        self.pool.blocks.release(old)
        del self._keys[index:]

    def clear(self) -> None:
        """Forgets everything and gives all blocks back."""
        self.length = 0
        self.tail_positions = []
        self.shrink()

    def shrink(self) -> None:
        """Gives back the blocks after the one that the next slot goes to."""
        num_kept = self.length // self.pool.block_size + 1 if self.length else 0
        if len(self._table) > num_kept:
            _release_all(self.pool.blocks, self._table, num_kept)
            del self._keys[num_kept:]

    def places(self, slots: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns the places in the pool of some of this cache's slots: int64, one for each."""
        size = self.pool.block_size
        return np.asarray(self._table, dtype=np.int64)[slots // size] * size + slots % size

    def chain_places(self, first: int, count: int) -> list[int]:
        """Returns the places of `count` slots from the `first` one on. For a few slots it is faster than `places`."""
        size, last = self.pool.block_size, first + count
        found: list[int] = []
        for index in range(first // size, -(-last // size)):
            shift = (self._table[index] - index) * size
            found += range(max(first, index * size) + shift, min(last, (index + 1) * size) + shift)
        return found

    def extents(self, num_slots: int) -> list[tuple[int, int]]:
        """Returns where the first `num_slots` slots lie: (first place in the pool, slots) of each run of neighbours."""
        size = self.pool.block_size
        found: list[tuple[int, int]] = []
        for index in range(self.pool.num_blocks_for(num_slots)):
            count = min(size, num_slots - index * size)
            if index and self._table[index] == self._table[index - 1] + 1:
                found[-1] = (found[-1][0], found[-1][1] + count)
            else:
                found.append((self._table[index] * size, count))
        return found

    # Its slots.

    def append(self, position_ids: Sequence[int]) -> None:
        """Counts the slots as used that a forward has written for rows at these positions."""
        count = len(position_ids)
        # Most rows go on with a chain.
        if self.tail_positions or position_ids[0] != self.length or position_ids[-1] != self.length + count - 1:
            self.tail_positions.extend(position_ids)
            self.length += count
            self._settle()
        else:
            self.length += count

    def _settle(self) -> None:
        """Counts the first slots of the tail to the chain if they hold their own positions."""
        start = self.chain_len
        is_own = (position == slot for slot, position in enumerate(self.tail_positions, start))
        num_own = next((i for i, own in enumerate(is_own) if not own), len(self.tail_positions))
        del self.tail_positions[:num_own]

    def truncate(self, length: int) -> None:
        """Forgets everything from slot `length` on.

        Raises:
            ValueError: `length` is negative or more than the slots used.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be in [0, {self.length}], got {length}")
        if length < self.length:
            del self.tail_positions[max(0, length - self.chain_len) :]
            self.length = length
            self.shrink()

    def keep(self, start: int, slots: Sequence[int]) -> None:
        """Moves the rows at `slots` together, from slot `start` on, and forgets all others there.

        Args:
            start: Slots before it stay as they are.
            slots: Ascending, none below `start`: the accepted path of a tree that began at `start`.

        Raises:
            ValueError: `slots` are not ascending or not all in [start, length).
        """
        if not slots and start == self.length:
            self.shrink()  # a round without drafts: nothing is moved or forgotten
            return
        # Ascending pairs check both ends and the order in one go. Without slots they check that `start` is at most
        # `length`.
        bounds = [start - 1, *slots, self.length]
        if start < 0 or any(a >= b for a, b in pairwise(bounds)):
            raise ValueError(f"slots must be ascending and in [{start}, {self.length}), got {list(slots)}")
        # A path that begins with the first rows of the tree is in its place already. The best path often does.
        first = next((i for i, slot in enumerate(slots) if slot != start + i), len(slots))
        if first < len(slots):
            old = self.places(np.asarray(slots[first:], dtype=np.int64))
            new = self.places(np.arange(start + first, start + len(slots), dtype=np.int64))
            if self.pool.defers_moves:
                if id(self) in self.pool.moves:
                    self.pool.move_now()  # one after the other
                self.pool.moves[id(self)] = old, new
            else:
                self.pool.move(old, new)
        if self.tail_positions or start + len(slots) < self.length:
            chain_len, tail = self.chain_len, self.tail_positions
            positions = [slot if slot < chain_len else tail[slot - chain_len] for slot in slots]
            kept_tail = tail[: max(0, start - chain_len)]
            self.length = start + len(slots)
            # Treats all slots after the chain as tail, and then counts as many of them to the chain as possible.
            self.tail_positions = [*kept_tail, *positions]
            self._settle()
        self.shrink()

    # Its prefix.

    def find_prefix(self, token_ids: Sequence[TokenId]) -> int:
        """Takes over blocks that hold the beginning of a text. Call it while the cache is empty.

        Args:
            token_ids: The text. Its last token is never found: it must be run for its logits.

        Returns:
            How many tokens were found. That is the cache's length then.
        """
        if self._salt is None or self._table or not self.finds:
            return 0
        size, key = self.pool.block_size, first_key(self._salt)
        for start in range(0, len(token_ids) - size, size):
            tokens = token_ids[start : start + size]
            key = next_key(key, tokens)
            block = self.pool.blocks.find(key, tokens)
            if block is None:
                break
            self._table.append(block)
            self._keys.append(key)
        self.length = len(self._table) * size
        return self.length

    def join(self, other: KVCache, num_slots: int) -> None:
        """Takes over blocks of another cache, full or not, so that this one holds the first `num_slots` slots of the
        same text. Does nothing if it holds as many already, or if the other one holds fewer.

        Args:
            other: A cache whose text begins with the same tokens.
            num_slots: Slots in total.
        """
        if not self.length < num_slots <= other.chain_len:
            return
        # A cache that continues in the last block writes to a copy (`reserve`).
        for block in other._table[len(self._table) : self.pool.num_blocks_for(num_slots)]:
            self.pool.blocks.share(block)
            self._table.append(block)
        self.length = num_slots

    def publish(self, token_ids: Sequence[TokenId]) -> None:
        """Lets others find the full blocks of a text. This cache must hold its first tokens as a chain."""
        if self._salt is None:
            return
        size = self.pool.block_size
        for index in range(len(self._keys), min(len(token_ids), self.chain_len) // size):
            tokens = token_ids[index * size : (index + 1) * size]
            key = next_key(self._keys[-1] if self._keys else first_key(self._salt), tokens)
            self._keys.append(key)
            self.pool.blocks.publish(self._table[index], key, tokens)


def _release_all(blocks: BlockPool, table: list[int], num_kept: int = 0) -> None:
    """Releases the blocks of a table after the first `num_kept`, the last one first: extents are taken from the
    front."""
    while len(table) > num_kept:
        blocks.release(table.pop())

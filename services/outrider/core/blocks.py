"""The blocks of a pool of keys and values: which sessions hold them, and which prefixes can be found again.

A block holds the keys and values of `block_size` consecutive positions of one text. Sessions hold blocks; a block that
several sessions hold, or that may be found again, is never written to. Only ids are handled here: the memory itself is
`outrider.models.kv_cache`.

**Prefixes.** A full block of committed tokens can be published under a key that names all tokens up to its end: the key
of the block before it, hashed together with its own tokens. A session whose text begins with these tokens takes the
block over instead of computing it. Keys begin with a salt: texts of different salts never find each other's blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import blake2b

import numpy as np

from outrider.core.tree import TokenId


@dataclass(frozen=True, slots=True)
class PoolState:
    """Describes a pool of keys and values at a moment, with its counts since the start."""

    num_tokens: int
    """Tokens whose keys and values sessions hold. Tokens of a shared prefix count once for each session."""
    num_bytes: int
    """Memory of the blocks that they hold."""
    num_blocks: dict[str, int]
    """Blocks: `free`, `held` by sessions, or `cached` prefixes that no session holds."""
    num_evictions: int
    """Cached blocks that were evicted because no block was free."""
    num_preemptions: int
    """Times that a session lost its blocks to an older one."""
    num_waiting: int
    """Sessions that wait for blocks now."""
    num_queried_tokens: int
    """Tokens of the texts that came in."""
    num_found_tokens: int
    """Number of them whose keys and values were found."""


class OutOfBlocks(Exception):
    """No block is free."""


class PrefixScope(Enum):
    """The sessions that may find the keys and values of a text's beginning again."""

    TENANT = "tenant"
    GLOBAL = "global"
    OFF = "off"

    def salt(self, tenant: str | None) -> str | None:
        """Returns the salt that a tenant's texts share with exactly those texts that may find their prefixes. None if
        no text may."""
        # A faster answer reveals that another session had the same text, so the tenant's name is a part of the salt.
        return {"tenant": f"tenant {tenant or ''}", "global": "global", "off": None}[self.value]


def first_key(salt: str) -> bytes:
    """Computes the key before the first block of a text."""
    return blake2b(salt.encode(), digest_size=16).digest()


def next_key(parent: bytes, token_ids: Sequence[TokenId]) -> bytes:
    """Computes the key of a block from that of the block before it and its own tokens."""
    return blake2b(np.asarray(token_ids, dtype="<i4").tobytes(), digest_size=16, key=parent).digest()


class BlockPool:
    """Hands out the blocks of a pool, counts their holders, and keeps published ones until they are needed.

    A block is free, held (by one or more sessions), or cached: published, and held by none. Cached blocks are evicted
    when none is free, the least recently used first.
    """

    def __init__(self, num_blocks: int) -> None:
        """
        Args:
            num_blocks: Blocks in all, numbered from 0.

        Raises:
            ValueError: There are none.
        """
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free = FreeExtents(num_blocks)
        self._num_holders = [0] * num_blocks
        self._published: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tokens_of: dict[int, tuple[TokenId, ...]] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Published blocks that no session holds, the least recently used first."""
        self.num_evictions = 0
        """Cached blocks that were evicted because no block was free, since the start."""

    @property
    def num_free(self) -> int:
        """Blocks without useful content."""
        return self._free.num_blocks

    @property
    def num_cached(self) -> int:
        """Blocks with a published prefix that no session holds."""
        return len(self._cached)

    @property
    def num_held(self) -> int:
        """Blocks that sessions hold."""
        return self.num_blocks - self.num_free - self.num_cached

    def allocate(self, after: int | None = None, *, may_evict: bool = True) -> int:
        """Hands out a block without another holder.

        Args:
            after: Block after which it should lie, if that is free: neighbours in memory are read in one go.
            may_evict: True if a cached prefix may be evicted for it.

        Raises:
            OutOfBlocks: There is none.
        """
        if not self._free.num_blocks:
            if not may_evict or not self._cached:
                raise OutOfBlocks(f"all {self.num_blocks} blocks of keys and values are in use")
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
            self.num_evictions += 1
        else:
            block = self._free.take(after)
        self._num_holders[block] = 1
        return block

    def share(self, block: int) -> None:
        """Holds a block that another session holds, too."""
        self._num_holders[block] += 1

    def release(self, block: int) -> None:
        """Lets go of a held block. A published one is kept until its place is needed."""
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if block in self._key_of:
            self._cached[block] = None
        else:
            self._free.put(block)

    def is_writable(self, block: int) -> bool:
        """Returns True if the block's holder may write to it: it has no other holder, and is not published."""
        return self._num_holders[block] == 1 and block not in self._key_of

    def publish(self, block: int, key: bytes, token_ids: Sequence[TokenId]) -> None:
        """Publishes a full block. Does nothing if the key belongs to another block, or the block has another key."""
        if key not in self._published and block not in self._key_of:
            self._published[key] = block
            self._key_of[block] = key
            self._tokens_of[block] = tuple(token_ids)

    def find(self, key: bytes, token_ids: Sequence[TokenId]) -> int | None:
        """Finds a published block and holds it. None if there is none with exactly these tokens."""
        block = self._published.get(key)
        # Hashes may collide, so the tokens are compared, too.
        if block is None or self._tokens_of[block] != tuple(token_ids):
            return None
        self._cached.pop(block, None)
        self._num_holders[block] += 1
        return block

    def _forget(self, block: int) -> None:
        del self._published[self._key_of.pop(block)]
        del self._tokens_of[block]


class FreeExtents:
    """Holds the free blocks as extents of neighbours, in ascending order."""

    def __init__(self, num_blocks: int) -> None:
        self._starts = [0]
        self._ends = [num_blocks]
        self.num_blocks = num_blocks

    def take(self, after: int | None) -> int:
        """Takes the block after `after` if it is free; otherwise one with much room after it. A block must be free."""
        index = bisect_left(self._starts, 0 if after is None else after + 1)
        if after is None or index == len(self._starts) or self._starts[index] != after + 1:
            index = max(range(len(self._starts)), key=lambda i: self._ends[i] - self._starts[i])
            start, end = self._starts[index], self._ends[index]
            # The holder of the blocks before this extent may grow into it. From its middle, both have room.
            if start and end - start > 1:
                middle = (start + end) // 2
                self._ends[index] = middle
                self._starts.insert(index + 1, middle)
                self._ends.insert(index + 1, end)
                index += 1
        block = self._starts[index]
        self._starts[index] += 1
        if self._starts[index] == self._ends[index]:
            del self._starts[index], self._ends[index]
        self.num_blocks -= 1
        return block

    def put(self, block: int) -> None:
        """Gives a block back."""
        index = bisect_left(self._starts, block)
        joins_left = index > 0 and self._ends[index - 1] == block
        joins_right = index < len(self._starts) and self._starts[index] == block + 1
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends[index]
            del self._starts[index], self._ends[index]
        elif joins_left:
            self._ends[index - 1] = block + 1
        elif joins_right:
            self._starts[index] = block
        else:
            self._starts.insert(index, block)
            self._ends.insert(index, block + 1)
        self.num_blocks += 1

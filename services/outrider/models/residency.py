"""The sessions of an engine that hold blocks of the pool, and those that wait for them.

Sessions come in by age. One that waits comes in when the rest of its text fits, with one more block for each session
that is in, so that these can grow. When no block is left, cached prefixes are given up, and then the youngest session.
It loses its blocks, waits, and later reads its text again; most of it is still cached. The oldest session always goes
on, so every session finishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from outrider.core.blocks import OutOfBlocks, PoolState
from outrider.core.tree import TokenId
from outrider.models.kv_cache import KVCache, KVPool


class Resident(Protocol):
    """A session, as far as its blocks go."""

    cache: KVCache

    @property
    def known_token_ids(self) -> Sequence[TokenId]:
        """Committed tokens, whose keys and values the session needs."""


Member = TypeVar("Member", bound=Resident)


class Residency(Generic[Member]):
    """Keeps the sessions of an engine by age. Owned by the engine's thread."""

    def __init__(self, pool: KVPool, max_num_residents: int) -> None:
        """
        Args:
            pool: Keys and values.
            max_num_residents: Most sessions that hold blocks at a time.
        """
        self._pool = pool
        self._max_num_residents = max_num_residents
        # Dictionaries as ordered sets, the oldest first.
        self._waiting: dict[Member, None] = {}
        self._residents: dict[Member, None] = {}
        self._ages: dict[Member, int] = {}
        self._num_seen = 0
        self.num_preemptions = 0
        """Times that a session lost its blocks to an older one, since the start."""
        self.num_queried_tokens = 0
        """Tokens of texts that came in."""
        self.num_found_tokens = 0
        """Queried tokens whose keys and values were found in the cache of prefixes."""

    @property
    def residents(self) -> list[Member]:
        """Sessions that hold blocks, the oldest first."""
        return list(self._residents)

    @property
    def waiting(self) -> list[Member]:
        """Sessions that wait for blocks, the oldest first."""
        return list(self._waiting)

    def state(self) -> PoolState:
        """Describes the pool now. May be called in any thread: the numbers are of about the same moment."""
        blocks = self._pool.blocks
        num_held = blocks.num_held
        return PoolState(
            # A copy made in one go: the engine's thread may change the dictionary during an iteration.
            num_tokens=sum(member.cache.length for member in list(self._residents)),
            num_bytes=num_held * self._pool.block_size * self._pool.shape.bytes_per_slot,
            num_blocks={"free": blocks.num_free, "held": num_held, "cached": blocks.num_cached},
            num_evictions=blocks.num_evictions,
            num_preemptions=self.num_preemptions,
            num_waiting=len(self._waiting),
            num_queried_tokens=self.num_queried_tokens,
            num_found_tokens=self.num_found_tokens,
        )

    def has(self, member: Member) -> bool:
        """Returns True if a session holds blocks."""
        return member in self._residents

    def add(self, member: Member) -> None:
        """Adds a new session to those that wait."""
        self._num_seen += 1
        self._ages[member] = self._num_seen
        self._waiting[member] = None

    def discard(self, member: Member, *, has_failed: bool) -> None:
        """Removes a session and takes its blocks back. Its text can be found again unless it has failed."""
        if self._ages.pop(member, None) is None:
            return
        self._waiting.pop(member, None)
        self._residents.pop(member, None)
        if not has_failed:
            member.cache.publish(member.known_token_ids)
        member.cache.clear()

    def admit(self) -> list[Member]:
        """Lets in the sessions that there is room for, by age, and returns them."""
        admitted = []
        for member in self.waiting:
            if len(self._residents) >= self._max_num_residents or not self._enter(member):
                break  # a younger one may not overtake it, or it might wait for ever
            del self._waiting[member]
            self._residents[member] = None
            admitted.append(member)
        if admitted:
            self._residents = dict.fromkeys(sorted(self._residents, key=self._ages.__getitem__))
        return admitted

    def _enter(self, member: Member) -> bool:
        """Takes over cached blocks of a session's text. Returns False and changes nothing if the rest does not fit."""
        blocks, token_ids = self._pool.blocks, member.known_token_ids
        self._pool.take_back()
        num_found = member.cache.find_prefix(token_ids)
        # After the found blocks are held: until then they count as room.
        room = blocks.num_free + blocks.num_cached
        needed = self._pool.num_blocks_for(len(token_ids) + 1) - member.cache.num_blocks
        if self._residents and needed + len(self._residents) > room:
            member.cache.clear()
            return False
        self.num_queried_tokens += len(token_ids)
        self.num_found_tokens += num_found
        return True

    def reserve(self, member: Member, num_rows: int) -> bool:
        """Makes room for `num_rows` more rows of a session, at the cost of younger ones.

        Returns:
            False if the session is the youngest itself; it waits from here on.
        """
        while True:
            try:
                member.cache.reserve(member.cache.length + num_rows)
            except OutOfBlocks:
                youngest = next(reversed(self._residents))
                # Alone it has all blocks. Its text was checked to fit into them when it came.
                if len(self._residents) == 1:
                    raise
                self.preempt(youngest)
                if youngest is member:
                    return False
            else:
                return True

    def preempt(self, member: Member) -> None:
        """Takes a session's blocks; it waits for new ones."""
        member.cache.publish(member.known_token_ids)
        member.cache.clear()
        del self._residents[member]
        self._waiting = dict.fromkeys(sorted([*self._waiting, member], key=self._ages.__getitem__))
        self.num_preemptions += 1

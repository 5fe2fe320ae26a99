"""A pool's blocks are never handed out twice, never lost, and prefixes are found only by their own tokens."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.core.blocks import BlockPool, FreeExtents, OutOfBlocks, first_key, next_key

NUM_BLOCKS = 12


class AnyUse(RuleBasedStateMachine):
    """Holders that take, share, publish and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        """Each block once for each of its holders."""
        self.said: dict[bytes, tuple[int, tuple[int, ...]]] = {}

    @rule(after=st.integers(-1, NUM_BLOCKS), may_evict=st.booleans())
    def allocate(self, after: int, may_evict: bool) -> None:
        room = self.pool.num_free + (self.pool.num_cached if may_evict else 0)
        if not room:
            with pytest.raises(OutOfBlocks):
                self.pool.allocate(after, may_evict=may_evict)
            return
        block = self.pool.allocate(after, may_evict=may_evict)
        assert block not in self.held
        self.held.append(block)
        self.said = {key: said for key, said in self.said.items() if said[0] != block}

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.release(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), token_ids=st.tuples(st.integers(0, 3), st.integers(0, 1)))
    def publish(self, data: st.DataObject, token_ids: tuple[int, ...]) -> None:
        block = data.draw(st.sampled_from(self.held))
        key = next_key(first_key(""), token_ids)
        self.pool.publish(block, key, token_ids)
        if key not in self.said and block not in {known for known, _ in self.said.values()}:
            self.said[key] = block, token_ids

    @rule(token_ids=st.tuples(st.integers(0, 3), st.integers(0, 1)))
    def find(self, token_ids: tuple[int, ...]) -> None:
        key = next_key(first_key(""), token_ids)
        found = self.pool.find(key, token_ids)
        assert found == (self.said[key][0] if key in self.said else None)
        if found is not None:
            self.held.append(found)

    @invariant()
    def counts_add_up(self) -> None:
        pool = self.pool
        assert pool.num_held == len(set(self.held))
        assert pool.num_free + pool.num_held + pool.num_cached == NUM_BLOCKS
        assert pool.num_cached == len({block for block, _ in self.said.values()} - set(self.held))

    @invariant()
    def only_what_one_alone_holds_and_nobody_can_find_is_writable(self) -> None:
        published = {block for block, _ in self.said.values()}
        for block in set(self.held):
            assert self.pool.is_writable(block) == (self.held.count(block) == 1 and block not in published)


AnyUse.TestCase.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)
TestAnyUse = AnyUse.TestCase


def test_the_prefix_used_longest_ago_is_given_up_first() -> None:
    pool = BlockPool(2)
    keys = [next_key(first_key("a"), [n]) for n in range(2)]
    blocks = [pool.allocate(), pool.allocate()]
    for n in range(2):
        pool.publish(blocks[n], keys[n], [n])
        pool.release(blocks[n])
    assert pool.find(keys[0], [0]) == blocks[0]
    pool.release(blocks[0])
    assert pool.allocate() == blocks[1]
    assert pool.num_evictions == 1


def test_tokens_are_compared_not_only_their_hash() -> None:
    pool = BlockPool(2)
    key = first_key("a")
    pool.publish(pool.allocate(), key, [1, 2])
    assert pool.find(key, [1, 3]) is None


def test_keys_name_all_tokens_before_and_the_salt() -> None:
    keys = {
        next_key(next_key(first_key(salt), before), [5, 6])
        for salt in ("", "a")
        for before in ([1, 2], [2, 1], [1, 2, 3])
    }
    assert len(keys) == 6


def test_blocks_of_one_holder_are_neighbours_while_there_is_room() -> None:
    extents = FreeExtents(64)
    first, second = [extents.take(None)], [extents.take(None)]
    for _ in range(10):
        first.append(extents.take(first[-1]))
        second.append(extents.take(second[-1]))
    for blocks in (first, second):
        assert blocks == list(range(blocks[0], blocks[0] + 11))


def test_what_is_given_back_joins_its_neighbours() -> None:
    extents = FreeExtents(8)
    taken = [extents.take(block) for block in (None, *range(7))]
    for block in (3, 1, 2, 7, 0):
        extents.put(taken[block])
    assert [extents.take(block) for block in (-1, 0, 1, 2)] == [0, 1, 2, 3]

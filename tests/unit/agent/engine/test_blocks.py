# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvferry.agent.block_hashes import hash_blocks, hash_prompt
from kvferry.agent.engine.blocks import (
    BlockAllocator,
    BlockCounts,
    IntegrityError,
    OutOfBlocks,
)


def remembered(allocator: BlockAllocator, tokens: list[int]) -> list[int]:
    """Blocks of two tokens each that hold `tokens` and are back in the cache."""
    hashes = hash_blocks(tokens, 2)
    blocks = allocator.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        allocator.remember(block, block_hash)
    allocator.release(reversed(blocks))
    return blocks


def test_every_block_is_in_one_state() -> None:
    allocator = BlockAllocator(8)
    used, leased, quarantined = (allocator.allocate(count) for count in (1, 2, 3))
    allocator.lease(leased)
    allocator.quarantine(quarantined)
    allocator.check_integrity([used, leased, leased])
    assert allocator.counts() == BlockCounts(free=2, used=1, leased=2, quarantined=3)


def test_a_leased_block_outlives_its_sequence() -> None:
    allocator = BlockAllocator(2)
    blocks = allocator.allocate(2)
    allocator.lease(blocks)
    allocator.release(blocks)
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    allocator.end_lease(blocks)
    assert allocator.counts().free == 2
    allocator.check_integrity([])


def test_no_path_frees_twice() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(3)
    allocator.quarantine(blocks[:1])
    allocator.release(blocks[1:])
    for again in (allocator.release, allocator.end_lease, allocator.quarantine):
        with pytest.raises(IntegrityError):
            again(blocks[1:2])
    with pytest.raises(IntegrityError):
        allocator.release(blocks[:1])
    allocator.end_quarantine(blocks[:1])
    with pytest.raises(IntegrityError):
        allocator.end_quarantine(blocks[:1])
    allocator.check_integrity([])


def test_a_failed_allocation_takes_nothing() -> None:
    allocator = BlockAllocator(2)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2


def test_a_prefix_is_found_and_shared_from_the_cache() -> None:
    allocator = BlockAllocator(4)
    blocks = remembered(allocator, [1, 2, 3, 4])
    assert allocator.num_free == 4
    found = allocator.find_prefix(hash_blocks([1, 2, 3, 4, 9, 9], 2))
    assert found == blocks
    assert allocator.num_cached(found) == 2
    allocator.share(found)
    assert allocator.num_free == 2
    allocator.check_integrity([found])


def test_equal_blocks_after_different_beginnings_are_different() -> None:
    allocator = BlockAllocator(4)
    remembered(allocator, [1, 2, 3, 4])
    assert allocator.find_prefix(hash_blocks([8, 8, 3, 4], 2)) == []
    assert hash_prompt([1, 2]) != hash_prompt([2, 1])


def test_a_block_s_hash_covers_every_block_before_it() -> None:
    """D8: a hash of the block alone would find KV that was computed after another beginning."""
    allocator = BlockAllocator(6)
    blocks = remembered(allocator, [1, 2, 3, 4])
    remembered(allocator, [5, 6, 7, 8])
    assert allocator.find_prefix(hash_blocks([1, 2, 7, 8], 2)) == blocks[:1]
    same_end = [hash_blocks([*start, 3, 4, 9, 9], 2) for start in ([1, 2], [2, 1])]
    assert not set(same_end[0]) & set(same_end[1])
    assert hash_blocks([1, 2, 3, 4], 2, hash_blocks([1, 2], 2)) == hash_blocks([1, 2, 3, 4], 2)


def test_a_block_that_others_can_find_or_read_cannot_be_quarantined() -> None:
    """A write may still come into a quarantined block: the prefix cache must not name it, nor a reader."""
    allocator = BlockAllocator(3)
    cached, shared, leased = allocator.allocate(3)
    allocator.remember(cached, hash_blocks([1, 2], 2)[0])
    allocator.share([shared])
    allocator.lease([leased])
    for block in (cached, shared, leased):
        with pytest.raises(IntegrityError, match="not the caller's alone"):
            allocator.quarantine([block])
    assert allocator.counts().quarantined == 0


def test_blank_blocks_go_first_then_the_oldest_prefix_from_its_end() -> None:
    allocator = BlockAllocator(5)
    old, new = remembered(allocator, [1, 2, 3, 4]), remembered(allocator, [5, 6, 7, 8])
    blank = ({0, 1, 2, 3, 4} - set(old) - set(new)).pop()
    assert allocator.allocate(2) == [blank, old[1]]
    assert allocator.find_prefix(hash_blocks([1, 2, 3, 4], 2)) == old[:1]
    assert allocator.find_prefix(hash_blocks([5, 6, 7, 8], 2)) == new


def test_the_audit_sees_a_reference_that_nobody_holds() -> None:
    allocator = BlockAllocator(3)
    blocks = allocator.allocate(2)
    with pytest.raises(IntegrityError, match="do not match"):
        allocator.check_integrity([blocks[:1]])


@pytest.mark.parametrize("damage", ["_blank", "_cached", "_hash_of", "_leases", "_quarantined"])
def test_the_audit_sees_damaged_books(damage: str) -> None:
    allocator = BlockAllocator(4)
    (block,) = remembered(allocator, [1, 2])
    books = {
        "_blank": lambda book: book.append(block),
        "_cached": lambda book: book.clear(),
        "_hash_of": lambda book: book.clear(),
        "_leases": lambda book: book.update([block]),
        "_quarantined": lambda book: book.add(block),
    }
    books[damage](getattr(allocator, damage))
    with pytest.raises(IntegrityError):
        allocator.check_integrity()


def test_prefixes_are_shared_only_among_those_with_one_salt() -> None:
    ids = list(range(64))
    plain, one, other = (hash_blocks(ids, 16, salt=salt) for salt in ("", "a", "b"))
    assert not {*plain} & {*one} and not {*one} & {*other} and not {*plain} & {*other}
    assert hash_blocks(ids, 16, one[:2], "a") == one == hash_blocks(ids, 16, salt="a")

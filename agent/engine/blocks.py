# SPDX-License-Identifier: Apache-2.0
"""The KV blocks of one agent: reference counts, states, and a prefix cache by hash.

A block is in exactly one state. It is *quarantined* while a cancelled transfer may still write into it,
*leased* while a reader may come for it, *used* while a sequence holds it, and *free* otherwise. A free block
may keep the KV of a prompt prefix (it is then *cached*): it can be shared again, or evicted, oldest first.

Nothing here waits or does I/O; every method either changes the state completely or raises.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.agent.block_hashes import BlockHash


class OutOfBlocks(RuntimeError):
    """Fewer blocks are free than were asked for."""


class IntegrityError(RuntimeError):
    """The allocator's books contradict each other, or those of its users."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; their sum is the size of the pool. `free` counts cached blocks too."""

    free: int
    used: int
    leased: int
    quarantined: int


class BlockAllocator:
    """Reference counts, free list and prefix cache of a pool of `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._leases: Counter[int] = Counter()
        self._quarantined: set[int] = set()
        self._blank: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, BlockHash] = {}
        self._block_of: dict[BlockHash, int] = {}

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    def counts(self) -> BlockCounts:
        """How many blocks are in each state."""
        leased = len(self._leases)
        held = self.num_blocks - self.num_free
        return BlockCounts(
            free=self.num_free,
            used=held - leased - len(self._quarantined),
            leased=leased,
            quarantined=len(self._quarantined),
        )

    def allocate(self, count: int) -> list[int]:
        """Return `count` blocks with one reference each, evicting cached prefixes if need be.

        Raises:
            OutOfBlocks: too few are free; nothing changed.
        """
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks wanted, {self.num_free} free")
        blocks = [self._pop_free() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add one reference to each block; a cached block leaves the free ones."""
        for block in blocks:
            if not self._references[block] and block not in self._cached:
                raise IntegrityError(f"block {block} has nothing to share")
            self._cached.pop(block, None)
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one reference from each block; the last one frees it."""
        for block in blocks:
            if self._references[block] <= 0 or block in self._quarantined:
                raise IntegrityError(f"block {block} released more often than allocated or shared")
            self._references[block] -= 1
            if not self._references[block]:
                self._push_free(block)

    def num_references(self, block: int) -> int:
        """Return how many holders a block has; one that has several must not be written to."""
        return self._references[block]

    def lease(self, blocks: Iterable[int]) -> None:
        """Pin blocks for a reader, with references of their own."""
        blocks = list(blocks)
        self.share(blocks)
        self._leases.update(blocks)

    def end_lease(self, blocks: Iterable[int]) -> None:
        """Undo `lease`."""
        blocks = list(blocks)
        for block in blocks:
            if self._leases[block] <= 0:
                raise IntegrityError(f"block {block} is not leased")
            self._leases[block] -= 1
            if not self._leases[block]:
                del self._leases[block]
        self.release(blocks)

    def quarantine(self, blocks: Iterable[int]) -> None:
        """Set aside blocks that a failed transfer may still write to. Consumes the caller's reference."""
        for block in blocks:
            if self._references[block] != 1 or block in self._hash_of or self._leases[block]:
                raise IntegrityError(f"block {block} is not the caller's alone")
            self._references[block] = 0
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Free quarantined blocks: no write can come any more."""
        for block in blocks:
            if block not in self._quarantined:
                raise IntegrityError(f"block {block} is not in quarantine")
            self._quarantined.remove(block)
            self._push_free(block)

    def remember(self, block: int, block_hash: BlockHash) -> None:
        """Offer a held block, whose KV is complete and proven, for sharing under its prefix's hash.

        The first block remembered under a hash stays; a second one with the same content is left alone.
        """
        if not self._references[block]:
            raise IntegrityError(f"block {block} is not held")
        if block_hash not in self._block_of and block not in self._hash_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def find_prefix(self, hashes: Iterable[BlockHash]) -> list[int]:
        """Return the blocks of the longest known prefix, without a reference: `share` them at once."""
        found = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_cached(self, blocks: Iterable[int]) -> int:
        """Count the blocks that are free now and would not be once shared."""
        return sum(1 for block in blocks if block in self._cached)

    def check_integrity(self, holders: Iterable[Iterable[int]] | None = None) -> None:
        """Recount everything and raise `IntegrityError` on a contradiction.

        Args:
            holders: What each user believes to hold, one reference per mention (quarantine excluded); when
                given, the reference counts must equal it.
        """
        blank, cached = set(self._blank), set(self._cached)
        held = {block for block, count in enumerate(self._references) if count}
        parts = (blank, cached, held, self._quarantined)
        if len(blank) != len(self._blank) or sum(map(len, parts)) != self.num_blocks:
            raise IntegrityError("some block is in two states, or in none")
        if set().union(*parts) != set(range(self.num_blocks)):
            raise IntegrityError("some block is in no state")
        if any(leases > self._references[block] for block, leases in self._leases.items()):
            raise IntegrityError("a leased block is not held")
        named = {block: key for key, block in self._block_of.items()}
        if named != self._hash_of or not cached <= set(named):
            raise IntegrityError("the prefix cache names the wrong blocks")
        if holders is not None:
            self._check_holders(holders)

    def _check_holders(self, holders: Iterable[Iterable[int]]) -> None:
        counted = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counted[block] += 1
        wrong = [block for block in range(self.num_blocks) if counted[block] != self._references[block]]
        if wrong:
            raise IntegrityError(f"reference counts of blocks {wrong[:8]} do not match their holders")

    def _pop_free(self) -> int:
        if self._blank:
            return self._blank.popleft()
        block, _ = self._cached.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        return block

    def _push_free(self, block: int) -> None:
        if block in self._hash_of:
            self._cached[block] = None
        else:
            self._blank.append(block)

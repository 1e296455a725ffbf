# SPDX-License-Identifier: Apache-2.0
"""The sequences' block tables: cached prefixes, allocation, growth, copy on write, and what is freed."""

from __future__ import annotations

from kvferry.agent.engine.admission import Limits
from kvferry.agent.engine.blocks import BlockAllocator
from kvferry.agent.engine.sequence import Sequence


class KVCacheManager:
    """Gives sequences blocks of the allocator, and offers their full blocks for reuse by prefix."""

    def __init__(self, limits: Limits, allocator: BlockAllocator) -> None:
        self._limits = limits
        self._allocator = allocator

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self._limits.block_size)

    def allocate(self, sequence: Sequence, reserve: int) -> bool:
        """Give a sequence blocks for all its known tokens, those of a cached prefix first.

        Before the fork only the prompt gets blocks, which the siblings will share. The prefix counts as
        computed and as remembered. Returns False, changing nothing, if fewer than `reserve` blocks would stay
        free for running sequences to grow into.
        """
        shared = self._cached_prefix(sequence)
        num_tokens = len(sequence.tokens) if sequence.request.forked else sequence.request.prompt_len
        total = self.num_blocks(num_tokens)
        available = self._allocator.num_free - self._allocator.num_cached(shared)
        if total - len(shared) + reserve > available:
            return False
        self._allocator.share(shared)
        sequence.blocks = [*shared, *self._allocator.allocate(total - len(shared))]
        sequence.num_computed = len(shared) * self._limits.block_size
        sequence.num_remembered = len(shared)
        return True

    def ensure_writable(self, sequence: Sequence, copies: list[tuple[int, int]]) -> None:
        """Make the block of the next token the sequence's own: allocate it, or copy a shared one.

        A copy (source, destination) is appended to `copies`, those of the step under way. Its source keeps
        its reference until the caller releases it after the step: it must not be reused before it was read.

        Raises:
            OutOfBlocks: nothing changed.
        """
        index = sequence.num_computed // self._limits.block_size
        if index == len(sequence.blocks):
            sequence.blocks += self._allocator.allocate(1)
            return
        block = sequence.blocks[index]
        # The last holder may write to a copy's source all the same, since ranks copy before they compute.
        copied = sum(1 for source, _ in copies if source == block)
        if self._allocator.num_references(block) - copied > 1:
            (copy,) = self._allocator.allocate(1)
            copies.append((block, copy))
            sequence.blocks[index] = copy

    def remember(self, sequence: Sequence) -> None:
        """Offer the full blocks computed so far to requests that begin alike."""
        if not self._limits.prefix_cache:
            return
        size = self._limits.block_size
        full = sequence.num_computed // size
        if full > sequence.num_remembered:
            hashes = sequence.full_block_hashes(size, full * size)
            for index in range(sequence.num_remembered, full):
                self._allocator.remember(sequence.blocks[index], hashes[index])
            sequence.num_remembered = full

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence."""
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_computed = 0
        sequence.num_remembered = 0
        # Last block first: the cache evicts in this order, and no prefix is found without its beginning.
        self._allocator.release(reversed(blocks))

    def _cached_prefix(self, sequence: Sequence) -> list[int]:
        """Return cached blocks from which the sequence may start."""
        limits, request = self._limits, sequence.request
        if not limits.prefix_cache or request.scores_prompt:
            return []
        # The last token's logits are wanted, so it must be computed; unless the prompt's are not.
        tokens = request.prompt_len if sequence.knows_first_token else len(sequence.tokens) - 1
        hashes = sequence.full_block_hashes(limits.block_size, tokens)
        found = self._allocator.find_prefix(hashes)
        if request.preempted and len(found) * limits.block_size < request.prompt_len:
            # Recompute in the chunks of the first time, so that the tokens sent so far stay the right ones.
            per_chunk = limits.prefill_chunk // limits.block_size
            found = found[: len(found) // per_chunk * per_chunk]
        return found

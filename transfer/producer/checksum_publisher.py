# SPDX-License-Identifier: Apache-2.0
"""Checksums of what a verifying producer lends: every rank's, before a reader hears of the blocks.

What the scheduler says about a prompt is passed on to the lease table in the same order, but only once the
blocks in question are summed. Sums that come after the lease has ended belong to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.transfer.checksum import SumTable, pack_sums
from kvferry.transfer.ids import TransferId
from kvferry.transfer.ranks.group import RankGroup


@dataclass(slots=True)
class _Prompt:
    """Blocks summed and computed, and whether the prompt is ready; `summing` while the ranks are at it."""

    block_ids: tuple[int, ...]
    summed: int = 0
    computed: int = 0
    ready: bool = False
    summing: bool = False


class ChecksumPublisher:
    """Passes `advance(transfer_id, readable, checksums)` and `ready(transfer_id, checksums)` on."""

    def __init__(
        self,
        ranks: RankGroup,
        advance: Callable[[TransferId, int, Sequence[bytes]], None],
        ready: Callable[[TransferId, Sequence[bytes]], None],
    ) -> None:
        self._ranks = ranks
        self._advance = advance
        self._ready = ready
        self._prompts: dict[TransferId, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def register(self, transfer_id: TransferId, block_ids: Sequence[int]) -> None:
        """A lease over these blocks has begun; they hold still until `forget`."""
        self._prompts[transfer_id] = _Prompt(tuple(block_ids))

    def advance(self, transfer_id: TransferId, readable: int) -> None:
        """The first blocks are computed on every rank."""
        prompt = self._prompts.get(transfer_id)
        if prompt is not None:
            prompt.computed = readable
            self._go_on(transfer_id, prompt)

    def ready(self, transfer_id: TransferId) -> None:
        """All of them are, and the first tokens are drawn."""
        prompt = self._prompts.get(transfer_id)
        if prompt is not None:
            prompt.computed = len(prompt.block_ids)
            prompt.ready = True
            self._go_on(transfer_id, prompt)

    def forget(self, transfer_id: TransferId) -> None:
        """The lease is over."""
        self._prompts.pop(transfer_id, None)

    def _go_on(self, transfer_id: TransferId, prompt: _Prompt) -> None:
        if prompt.summing:
            return
        if prompt.summed < prompt.computed:
            prompt.summing = True
            blocks = prompt.block_ids[prompt.summed : prompt.computed]
            self._ranks.sum_blocks(blocks, partial(self._summed, transfer_id))
        elif prompt.ready:
            self._ready(transfer_id, ())

    def _summed(self, transfer_id: TransferId, table: SumTable) -> None:
        prompt = self._prompts.get(transfer_id)
        if prompt is None:
            return
        prompt.summing = False
        prompt.summed += len(table)
        rows = [pack_sums(row) for row in table]
        if prompt.ready and prompt.summed == len(prompt.block_ids):
            self._ready(transfer_id, rows)
        else:
            self._advance(transfer_id, prompt.summed, rows)
            self._go_on(transfer_id, prompt)

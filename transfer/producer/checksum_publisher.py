# SPDX-License-Identifier: Apache-2.0
"""Publishes blocks to readers with their checksums, as a verifying producer must.

The scheduler's calls for a prompt go on to the lease table in the same order, but only once every rank has
summed the blocks in question. Checksums that come after the lease has ended are dropped.
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
    """Blocks summed and computed, and whether the prompt is ready; `summing` while the ranks compute."""

    block_ids: tuple[int, ...]
    summed: int = 0
    computed: int = 0
    ready: bool = False
    summing: bool = False


class ChecksumPublisher:
    """Calls `advance(transfer_id, readable, checksums)` and `ready(transfer_id, checksums)` in turn."""

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
        """Begin a lease over these blocks, which do not change until `forget`."""
        self._prompts[transfer_id] = _Prompt(tuple(block_ids))

    def advance(self, transfer_id: TransferId, readable: int) -> None:
        """The first `readable` blocks are computed on every rank."""
        prompt = self._prompts.get(transfer_id)
        if prompt is not None:
            prompt.computed = readable
            self._continue(transfer_id, prompt)

    def ready(self, transfer_id: TransferId) -> None:
        """All blocks are computed on every rank."""
        prompt = self._prompts.get(transfer_id)
        if prompt is not None:
            prompt.computed = len(prompt.block_ids)
            prompt.ready = True
            self._continue(transfer_id, prompt)

    def forget(self, transfer_id: TransferId) -> None:
        self._prompts.pop(transfer_id, None)

    def _continue(self, transfer_id: TransferId, prompt: _Prompt) -> None:
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
            self._continue(transfer_id, prompt)

# SPDX-License-Identifier: Apache-2.0
"""Publishes blocks to readers with their checksums, as a verifying producer must.

The scheduler's calls for a prompt go on to the lease table in the same order, but, for a prompt that is
sampled, only once every rank has summed the blocks in question. Checksums that come after the lease has ended
are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from kvferry.transfer.checksum import SumTable, pack_sums
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import BlockRun, all_blocks, blocks_by_group, is_sampled
from kvferry.transfer.ranks.group import RankGroup


@dataclass(slots=True)
class _Prompt:
    """Blocks summed and computed, and whether the prompt is ready; `summing` while the ranks compute."""

    runs: tuple[BlockRun, ...]
    is_sampled: bool
    num_blocks: int
    summed: int = 0
    computed: int = 0
    ready: bool = False
    summing: bool = False


class ChecksumPublisher:
    """Calls `advance(transfer_id, readable, checksums)` and `ready(transfer_id, checksums)` in turn.

    Args:
        share: Of the prompts, how many are sampled: they have checksums.
    """

    def __init__(
        self,
        ranks: RankGroup,
        share: float,
        advance: Callable[[TransferId, int, Sequence[bytes]], None],
        ready: Callable[[TransferId, Sequence[bytes]], None],
    ) -> None:
        self._ranks = ranks
        self._share = share
        self._advance = advance
        self._ready = ready
        self._prompts: dict[TransferId, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    def register(self, transfer_id: TransferId, runs: Sequence[BlockRun]) -> None:
        """Begin a lease over these blocks, which do not change until `forget`."""
        sampled = is_sampled(transfer_id, self._share)
        self._prompts[transfer_id] = _Prompt(tuple(runs), sampled, len(all_blocks(runs)))

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
            prompt.computed = prompt.num_blocks
            prompt.ready = True
            self._continue(transfer_id, prompt)

    def forget(self, transfer_id: TransferId) -> None:
        self._prompts.pop(transfer_id, None)

    def _continue(self, transfer_id: TransferId, prompt: _Prompt) -> None:
        if prompt.summing:
            return
        if prompt.is_sampled and prompt.summed < prompt.computed:
            prompt.summing = True
            blocks = blocks_by_group(prompt.runs, prompt.summed, prompt.computed)
            self._ranks.sum_blocks(blocks, partial(self._summed, transfer_id))
        elif prompt.ready:
            self._ready(transfer_id, ())
        elif not prompt.is_sampled:
            self._advance(transfer_id, prompt.computed, ())

    def _summed(self, transfer_id: TransferId, tables: Sequence[SumTable]) -> None:
        prompt = self._prompts.get(transfer_id)
        if prompt is None:
            return
        prompt.summing = False
        rows = [pack_sums(row) for table in tables for row in table]
        prompt.summed += len(rows)
        if prompt.ready and prompt.summed == prompt.num_blocks:
            self._ready(transfer_id, rows)
        else:
            self._advance(transfer_id, prompt.summed, rows)
            self._continue(transfer_id, prompt)

# SPDX-License-Identifier: Apache-2.0
"""Prompts and answers whose KV an engine keeps for a while after it has ended them, and lends to those who
compute what comes next in the conversation.

The plane's thread answers for what is kept, so that an engine without work, whose scheduler does not run,
lends as well. The engine must not write to the blocks until `KeptEnded`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import LeaseEnded, LoanRequested


class KeptEnded(msgspec.Struct, frozen=True, kw_only=True):
    """Nothing reads what was kept under this key, and its blocks may be freed."""

    key: str


@dataclass(eq=False, slots=True)
class _Kept:
    """`blocks[i]` holds the KV that `hashes[i]` stands for."""

    key: str
    blocks: tuple[int, ...]
    hashes: tuple[bytes, ...]
    timer: asyncio.TimerHandle
    loans: set[str] = field(default_factory=set)


class KeptPrompts:
    """Called on the plane's loop.

    Args:
        block_size: Tokens of a block.
        ended: Called with each key once.
    """

    def __init__(self, plane: SchedulerConnector, block_size: int, ended: Callable[[str], None]) -> None:
        self._plane = plane
        self._block_size = block_size
        self._ended = ended
        self._kept: dict[str, _Kept] = {}
        self._ending: dict[str, _Kept] = {}
        """They are lent to no one else."""
        self._holders: dict[bytes, tuple[_Kept, int]] = {}
        """By hash: who was the last to be kept with it, and at which position."""
        self._loans: dict[str, _Kept] = {}

    def keep(self, key: str, blocks: Sequence[int], hashes: Sequence[bytes], limit_s: float) -> None:
        """Lend these blocks of a prompt's beginning for so many seconds."""
        timer = asyncio.get_running_loop().call_later(limit_s, self.end, key)
        self._kept[key] = kept = _Kept(key, tuple(blocks), tuple(hashes), timer)
        self._holders.update((each, (kept, position)) for position, each in enumerate(hashes))

    def end(self, key: str) -> None:
        """Lend it to no one else. It has ended when no one reads it any more."""
        kept = self._kept.pop(key, None)
        if kept is None:
            return
        kept.timer.cancel()
        for each in kept.hashes:
            if each in self._holders and self._holders[each][0] is kept:
                del self._holders[each]
        self._ending[key] = kept
        self._end_unless_lent(kept)

    def drop(self, keys: Iterable[str]) -> None:
        """End them at once: what is being read must not be proven right."""
        for key in keys:
            self.end(key)
            if key in self._ending:
                for transfer_id in list(self._ending[key].loans):
                    self._plane.drop(transfer_id)

    def requested(self, event: LoanRequested) -> None:
        """Lend the longest beginning that one conversation has."""
        for last in range(len(event.hashes) - 1, -1, -1):
            kept, position = self._holders.get(event.hashes[last], (None, 0))
            if kept is None or position < last:
                continue
            # A hash stands for all tokens before it, so the blocks before are those that were asked for.
            blocks = kept.blocks[position - last : position + 1]
            num_tokens, ids_hash = len(blocks) * self._block_size, event.hashes[last].hex()
            if self._plane.grant_prefix(event.transfer_id, blocks, num_tokens, ids_hash):
                kept.loans.add(event.transfer_id)
                self._loans[event.transfer_id] = kept
            return
        self._plane.grant_prefix(event.transfer_id, (), 0, "")

    def lease_ended(self, event: LeaseEnded) -> bool:
        """Whether the lease was a loan of what is kept."""
        kept = self._loans.pop(event.transfer_id, None)
        if kept is None:
            return False
        kept.loans.discard(event.transfer_id)
        self._end_unless_lent(kept)
        return True

    def _end_unless_lent(self, kept: _Kept) -> None:
        if not kept.loans and self._ending.get(kept.key) is kept:
            del self._ending[kept.key]
            self._ended(kept.key)

# SPDX-License-Identifier: Apache-2.0
"""Turns of conversations whose KV a decode server keeps, and lends to the prefill server of the next turn.

vLLM does not free a request's blocks while they are kept. So they are at most `_MOST` of all. What has to go
for a new turn, or because vLLM has few free blocks, is the oldest turn of the client that has most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from kvferry.agent.vllm.identity import has_plain_ids, prefix_hashes
from kvferry.agent.vllm.params import FetchPrompt

_MOST = 0.25
_FEW_FREE = 0.1
"""Of all blocks."""


class Keeper(Protocol):
    """Of the plane (`PlaneThread`)."""

    def keep(self, key: str, blocks: Sequence[int], hashes: Sequence[bytes], limit_s: float) -> None: ...

    def end_kept(self, key: str) -> None: ...

    def drop_kept(self, keys: Sequence[str]) -> None: ...


class _Turn(NamedTuple):
    num_blocks: int
    client: str


class KeptTurns:
    """Called by the scheduler's thread.

    Args:
        block_size: Tokens of a block; None: nothing is kept, since not all layers keep all tokens.
        free_blocks: How many of `num_blocks` are free.
    """

    def __init__(
        self, plane: Keeper, block_size: int | None, num_blocks: int, free_blocks: Callable[[], int]
    ) -> None:
        self._plane = plane
        self._block_size = block_size
        self._num_blocks = num_blocks
        self._free_blocks = free_blocks
        self._kept: dict[str, _Turn] = {}
        """By request, the oldest first, until the plane says that it has ended."""
        self._blocks = Counter[str]()
        """By client, of turns that are not about to be freed."""
        self._ending: set[str] = set()

    def keep(self, request: Any, blocks: Sequence[int], task: FetchPrompt) -> bool:
        """Keep what a request that ends has computed. False where it cannot be kept; else vLLM must not free
        its blocks until `ended`.
        """
        if self._block_size is None or not task.keep_s or not has_plain_ids(request):
            return False
        # The last token has no KV, and vLLM may have scheduled steps that it does not need any more.
        computed = min(request.num_computed_tokens, len(request.all_token_ids) - 1)
        count, most = computed // self._block_size, int(_MOST * self._num_blocks)
        if not 0 < count <= len(blocks) <= most:
            return False
        turn = _Turn(len(blocks), task.keep_for)
        while self.num_blocks + turn.num_blocks > most:
            self._end_one(turn)
        hashes = prefix_hashes(request, request.all_token_ids[: count * self._block_size], self._block_size)
        self._kept[request.request_id] = turn
        self._blocks[turn.client] += turn.num_blocks
        self._plane.keep(request.request_id, blocks[:count], hashes, task.keep_s)
        return True

    @property
    def num_blocks(self) -> int:
        """Those that are kept and not about to be freed; one that two turns share counts twice."""
        return self._blocks.total()

    def make_room(self) -> None:
        """Free a turn if vLLM has few free blocks."""
        if self._kept and not self._ending and self._free_blocks() < _FEW_FREE * self._num_blocks:
            self._end_one()

    def ended(self, key: str) -> None:
        """Note that the blocks of a request may be freed."""
        turn = self._kept.pop(key)
        if key in self._ending:
            self._ending.discard(key)
        else:  # its time is over
            self._blocks -= Counter({turn.client: turn.num_blocks})

    def drop(self) -> None:
        """End all of them at once: the weights may have changed."""
        self._ending.update(self._kept)
        self._blocks.clear()
        self._plane.drop_kept(list(self._kept))

    def _end_one(self, new: _Turn | None = None) -> None:
        """End the oldest turn of the client that has most, with the new one."""
        blocks = self._blocks.copy()
        if new is not None and new.client in blocks:
            blocks[new.client] += new.num_blocks
        client = max(blocks, key=lambda each: (blocks[each], new is not None and each == new.client))
        key = next(
            key for key, turn in self._kept.items() if turn.client == client and key not in self._ending
        )
        self._ending.add(key)
        self._blocks -= Counter({client: self._kept[key].num_blocks})
        self._plane.end_kept(key)

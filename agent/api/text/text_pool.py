# SPDX-License-Identifier: Apache-2.0
"""Threads for the long work on texts: decoding large bodies, templates and tokenizing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvferry.agent.errors import unavailable
from kvferry.common.work_pool import PoolBusy, WorkPool

SHORT_BYTES = 64 * 1024
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Most bytes of all texts that wait or are being worked on."""
TEXT_TIMEOUT_S = 30.0
"""How long a request waits for its text, the work included."""

_T = TypeVar("_T")


class TextPool:
    """A `WorkPool` whose refusals are errors of the request."""

    def __init__(self) -> None:
        self._pool = WorkPool(
            "texts", short_bytes=SHORT_BYTES, max_bytes=MAX_QUEUED_BYTES, timeout_s=TEXT_TIMEOUT_S
        )

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return what `work` on a text of `size` bytes returns, or raise what it raises.

        Raises:
            ApiError: 503, too much text waits, or it did not get its turn in time.
        """
        try:
            return await self._pool.run(size, work)
        except PoolBusy as busy:
            raise unavailable("tokenizer_busy", f"long texts wait for the tokenizer: {busy}") from None

# SPDX-License-Identifier: Apache-2.0
"""A limit on what many holders keep in memory together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

H = TypeVar("H")


def oldest(held: Mapping[H, int], _: H) -> H:
    """The holder that began to hold first."""
    return next(iter(held))


def largest(held: Mapping[H, int], _: H) -> H:
    """The holder of most bytes: what takes much ends itself first, and others with little go on."""
    return max(held, key=held.__getitem__)


class MemoryBudget(Generic[H]):
    """Counts the bytes of each holder. Beyond the limit some are evicted, one after the other.

    Args:
        choose: Returns whom to evict, of all holders and the one that was counted last.
        evict: Has a holder free its bytes, which do not count any more.
    """

    def __init__(
        self, max_bytes: int, choose: Callable[[Mapping[H, int], H], H], evict: Callable[[H], object]
    ) -> None:
        self.left = max_bytes
        """How many bytes may be held yet."""
        self._choose = choose
        self._evict = evict
        self.held: dict[H, int] = {}
        """How many bytes by each holder; in the order in which they began."""

    def hold(self, holder: H, size: int) -> None:
        """Record how many bytes a holder has by now; to be released."""
        self.left -= size - self.held.get(holder, 0)
        self.held[holder] = size
        while self.left < 0:
            chosen = self._choose(self.held, holder)
            self.release(chosen)
            self._evict(chosen)

    def release(self, holder: H) -> None:
        """Record that a holder has nothing any more. Idempotent."""
        self.left += self.held.pop(holder, 0)

# SPDX-License-Identifier: Apache-2.0
"""When a backend's engine is opened anew because some of its connections cannot be mended otherwise.

Pure: the clock is the argument `now`. A new engine ends every read of the old one and every connection of our
readers', so it waits for a moment in which nothing is read over that backend, within limits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Wish:
    earliest: float
    latest: float


class Mending:
    """Backends to be mended: each once in `patience_s` seconds at most, and then within as many."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._wishes: dict[str, _Wish] = {}
        self._mended_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._wishes)

    def ask(self, now: float, backend: str) -> None:
        """A connection of this backend was refused until its engine is a new one."""
        if backend not in self._wishes:
            earliest = max(now, self._mended_at.get(backend, float("-inf")) + self._patience_s)
            self._wishes[backend] = _Wish(earliest, earliest + self._patience_s)

    def take_due(self, now: float, reading: Collection[str]) -> list[str]:
        """The backends to mend now, given those over which something is being read."""
        due = [
            backend
            for backend, wish in self._wishes.items()
            if wish.earliest <= now and (backend not in reading or wish.latest <= now)
        ]
        for backend in due:
            del self._wishes[backend]
            self._mended_at[backend] = now
        return due

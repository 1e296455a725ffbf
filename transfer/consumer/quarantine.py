# SPDX-License-Identifier: Apache-2.0
"""Quarantined destinations, and when a backend's engine must be rebuilt (I3, docs/architecture.md).

Pure: the clock is the argument `now`. A quarantine normally ends by itself, when the peer continues or dies.
One that is too old or holds too much of the pool is ended by destroying the local engine that could still
write. A backend whose engine cannot reach a peer any more is rebuilt as well, when nothing is being read
over it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kvferry.transfer.ids import TransferId

MAX_SHARE = 0.25
"""Largest share of the pool that is in quarantine at once."""
GRACE_S = 0.25
"""How long an entry does not count towards the share. Most transfers are quiescent as soon as the ranks have
cancelled them, and a new engine ends all other transfers of the backend."""


@dataclass(slots=True)
class _QuarantineEntry:
    backend: str
    num_blocks: int
    since: float
    until: float
    ordered: bool = False
    """A rebuild that will end it has been ordered."""


class Quarantine:
    """Failed transfers whose destination may still be written to, and the backends that may write."""

    def __init__(self, limit_s: float, pool_blocks: int) -> None:
        self._limit_s = limit_s
        self._max_blocks = pool_blocks * MAX_SHARE
        self._entries: dict[TransferId, _QuarantineEntry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, now: float, transfer_id: TransferId, backend: str, num_blocks: int) -> None:
        """Add a failed transfer into `num_blocks` of our blocks that is not quiescent."""
        self._entries[transfer_id] = _QuarantineEntry(backend, num_blocks, now, now + self._limit_s)

    def remove(self, transfer_id: TransferId) -> None:
        """Remove a transfer that is quiescent."""
        self._entries.pop(transfer_id, None)

    def pop_due(self, now: float) -> list[str]:
        """Return the backends to rebuild now. Each entry orders at most one rebuild."""
        crowded_at = self._crowded_at()
        crowded = crowded_at is not None and crowded_at <= now
        due = {
            entry.backend
            for entry in self._waiting()
            if entry.until <= now or (crowded and entry.since + GRACE_S <= now)
        }
        for entry in self._waiting():
            entry.ordered = entry.backend in due
        return sorted(due)

    def delay(self, now: float) -> float | None:
        """Return the seconds until `pop_due` may return a backend, unless another entry is added first."""
        crowded_at = self._crowded_at()
        times = [entry.until for entry in self._waiting()] + ([] if crowded_at is None else [crowded_at])
        return min((max(each - now, 0.0) for each in times), default=None)

    def _crowded_at(self) -> float | None:
        """When the share will have been exceeded for `GRACE_S`, unless an entry is removed; None: never."""
        num_blocks = 0
        for entry in sorted(self._waiting(), key=lambda each: each.since):
            num_blocks += entry.num_blocks
            if num_blocks > self._max_blocks:
                return entry.since + GRACE_S
        return None

    def _waiting(self) -> list[_QuarantineEntry]:
        return [entry for entry in self._entries.values() if not entry.ordered]


@dataclass(frozen=True, slots=True)
class _RebuildRequest:
    earliest: float
    latest: float


class RebuildScheduler:
    """Backends to rebuild because a peer is out of their reach: each at most once per `interval_s`.

    A new engine ends every read and connection of the old one, so a rebuild waits until nothing is read over
    the backend, at most `interval_s`.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._requests: dict[str, _RebuildRequest] = {}
        self._rebuilt_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def request(self, now: float, backend: str) -> None:
        """Request a rebuild: a connection fails until the backend's engine is a new one. Idempotent."""
        if backend not in self._requests:
            earliest = max(now, self._rebuilt_at.get(backend, float("-inf")) + self._interval_s)
            self._requests[backend] = _RebuildRequest(earliest, earliest + self._interval_s)

    def pop_due(self, now: float, reading: Collection[str]) -> list[str]:
        """Return the backends to rebuild now, given those with a read in flight."""
        due = [
            backend
            for backend, request in self._requests.items()
            if request.earliest <= now and (backend not in reading or request.latest <= now)
        ]
        for backend in due:
            del self._requests[backend]
            self._rebuilt_at[backend] = now
        return due

# SPDX-License-Identifier: Apache-2.0
"""When waiting for a failed transfer to become quiescent costs too much (design I3).

Pure: the clock is the argument `now`. Normally a quarantine ends by itself, when the peer goes on or dies.
What is old, or holds too much of the pool, is ended by destroying the local engine that could still write.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.transfer.ids import TransferId

MAX_SHARE = 0.25
"""Of the pool, in quarantine at once."""
GRACE_S = 0.25
"""How long a stay does not count for that. Most transfers are quiescent as soon as the ranks have heard of
their end, and a new engine ends everybody else's."""


@dataclass(slots=True)
class _Stay:
    backend: str
    num_blocks: int
    since: float
    until: float
    ordered: bool = False
    """A rebuild that will end it is on its way."""


class Quarantine:
    """Failed transfers whose destination may still be written to, and the backends that would do it."""

    def __init__(self, limit_s: float, pool_blocks: int) -> None:
        self._limit_s = limit_s
        self._max_blocks = pool_blocks * MAX_SHARE
        self._stays: dict[TransferId, _Stay] = {}

    def __len__(self) -> int:
        return len(self._stays)

    def enter(self, now: float, transfer_id: TransferId, backend: str, num_blocks: int) -> None:
        """A transfer into `num_blocks` of our blocks failed, and is not quiescent."""
        self._stays[transfer_id] = _Stay(backend, num_blocks, now, now + self._limit_s)

    def leave(self, transfer_id: TransferId) -> None:
        """It is quiescent."""
        self._stays.pop(transfer_id, None)

    def take_due(self, now: float) -> list[str]:
        """The backends whose engines must be rebuilt now. Each stay asks for that at most once."""
        crowded_at = self._crowded_at()
        crowded = crowded_at is not None and crowded_at <= now
        due = {
            stay.backend
            for stay in self._waiting()
            if stay.until <= now or (crowded and stay.since + GRACE_S <= now)
        }
        for stay in self._waiting():
            stay.ordered = stay.backend in due
        return sorted(due)

    def delay(self, now: float) -> float | None:
        """Seconds until `take_due` has something to say, unless another transfer enters first."""
        crowded_at = self._crowded_at()
        times = [stay.until for stay in self._waiting()] + ([] if crowded_at is None else [crowded_at])
        return min((max(each - now, 0.0) for each in times), default=None)

    def _crowded_at(self) -> float | None:
        """When too much of the pool will have stayed for `GRACE_S`, unless somebody leaves; None: never."""
        num_blocks = 0
        for stay in sorted(self._waiting(), key=lambda each: each.since):
            num_blocks += stay.num_blocks
            if num_blocks > self._max_blocks:
                return stay.since + GRACE_S
        return None

    def _waiting(self) -> list[_Stay]:
        return [stay for stay in self._stays.values() if not stay.ordered]

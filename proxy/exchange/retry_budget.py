# SPDX-License-Identifier: Apache-2.0
"""A bound on what retries add to the load, so that they do not make an outage worse."""

from __future__ import annotations

RATIO = 0.1
RESERVE = 64.0
MAX_SAVED = 1024.0


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    In the long run retries are at most a tenth of the requests. `RESERVE` lets a small fleet, or one that has
    just started, survive the death of an agent under load; `MAX_SAVED` bounds what is saved up. Retries of
    what an agent that is down would have done (`AgentLost.is_down`) add no load, and are not counted.
    """

    def __init__(self, reserve: float = RESERVE) -> None:
        self._tokens = reserve

    def deposit(self) -> None:
        """Count a client's request."""
        self._tokens = min(self._tokens + RATIO, MAX_SAVED)

    def try_withdraw(self) -> bool:
        """Return whether a retry may be made, and count it as made."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True

# SPDX-License-Identifier: Apache-2.0
"""Whether KV that lies at a prefill server under a lease was still there when it was read.

vLLM's decode servers read KV by block numbers and do not notice that the blocks have gone to another prompt
meanwhile; the response is then wrong, with HTTP 200 (vLLM #52234). How long a lease is, no server says, and
the number that an operator gives may be wrong. So a response is proven in one of two ways:

- Its first tokens have come before any lease can have ended: vLLM counts leases in whole seconds, and this
  one began when the prefill leg was sent, or later.
- Otherwise by the prefill server's count of expired leases, if it has not risen from before this lease can
  have ended until after the first tokens came. They were sampled from KV that had been read by then.

Where a server does not count them, the operator's number is all there is. A lease is then taken to have begun
a sixth of its length before the response arrived (not before the leg was sent), and to last five sixths;
tokens in time are *vouched* for, which is no proof.
"""

from __future__ import annotations

import asyncio
import enum
from types import TracebackType

from kvferry.proxy.clock import now
from kvferry.proxy.exchange.expiry_counts import ExpiryCount, ExpiryCounts
from kvferry.proxy.wire.registration import Register

SHORTEST_LEASE_S = 1.0
"""vLLM's `kv_lease_duration` is an integer, and with 0 nothing could ever be read."""
SURE_S = SHORTEST_LEASE_S / 2
FRESH_S = 1.0
"""A count that is older is read again with the next prefill leg, so that few expired leases lie between."""


class Verdict(enum.Enum):
    """What is known of the KV behind a response's first tokens."""

    PROVEN = "the KV was read before its lease could end, or no lease has ended since"
    VOUCHED = "the KV was read before its lease ended, if the operator's number is right"
    UNPROVEN = "the prefill server's count of expired leases cannot be read"
    SUSPECT = "a lease expired at the prefill server meanwhile, maybe this one"
    CONTRADICTED = "a lease expired at the prefill server before the proxy's setting says that it could"

    @property
    def is_accepted(self) -> bool:
        """Whether the response may go to the client."""
        return self in (Verdict.PROVEN, Verdict.VOUCHED)


class LeaseCheck:
    """Watches one lease, from the prefill leg to the first token; an async context, entered as the leg is
    sent.

    Args:
        counter: Name of the server's Prometheus counter of expired leases; None if it has none.
        lease_s: How long a lease is, as the operator says; None if unknown.
    """

    def __init__(
        self, counts: ExpiryCounts, server: Register, counter: str | None, lease_s: float | None
    ) -> None:
        self._counts = counts
        self._server = server
        self._counter = counter
        self._lease_s = lease_s
        self._sent_at = now()
        self._before: ExpiryCount | None = None
        self._reading: asyncio.Task[ExpiryCount | None] | None = None
        self.deadline = float("inf")
        """When the lease may be over, as the operator says: tokens that come later are not waited for."""

    @property
    def is_over(self) -> bool:
        """Whether the lease may be over, as the operator says."""
        return now() >= self.deadline

    async def __aenter__(self) -> LeaseCheck:
        if self._counter is not None and not self._counts.is_absent(self._server):
            self._before = self._counts.latest(self._server)
            if self._before is None or self._sent_at - self._before.asked_at > FRESH_S:
                reading = self._counts.read(self._server, self._counter)
                self._reading = asyncio.get_running_loop().create_task(reading)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])

    def answered(self) -> None:
        """The prefill's response has arrived: the lease runs."""
        if self._lease_s is not None:
            began_at = max(self._sent_at, now() - self._lease_s / 6)
            self.deadline = began_at + self._lease_s * 5 / 6

    async def judge(self) -> Verdict:
        """Judge the first tokens, which have arrived and have not been passed on."""
        if now() < self._sent_at + SURE_S:
            return Verdict.PROVEN
        if self._counter is None:
            return Verdict.UNPROVEN if self._lease_s is None or self.is_over else Verdict.VOUCHED
        in_time = not self.is_over
        before, after = self._count_before(), await self._counts.read(self._server, self._counter)
        if before is None or after is None:
            return Verdict.UNPROVEN
        if before.same(after):
            return Verdict.PROVEN
        if self._lease_s is None or not in_time:
            return Verdict.SUSPECT
        self._counts.note_contradiction(self._server, self._lease_s)
        return Verdict.CONTRADICTED

    def _count_before(self) -> ExpiryCount | None:
        """The newest count that was read before this lease can have ended."""
        if self._reading is None or not self._reading.done():
            return self._before
        count = self._reading.result()
        in_time = count is not None and count.came_at < self._sent_at + SURE_S
        return count if in_time else self._before

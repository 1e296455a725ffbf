# SPDX-License-Identifier: Apache-2.0
"""Whether KV that lies at a prefill server under a lease was still there when it was read.

vLLM's decode servers read KV by block numbers and do not notice that the blocks have gone to another prompt
meanwhile; the response is then wrong, with HTTP 200 (vLLM #52234). A router sees only times and counters:

- A decode leg is sent only while the lease is surely alive, and must have been accepted by then.
- Tokens that come before its end were sampled from KV read before its end: that is a proof.
- Tokens that come later are proven by the prefill server's count of expired leases, if that has not risen
  since before the lease could end.

The lease began when the prefill ended, which is not reported. It is assumed to have begun a sixth of its
length before the response arrived (not before the leg was sent), and to last five sixths.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from types import TracebackType

from kvferry.proxy.errors import ProxyError
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.telemetry import prometheus_text
from kvferry.proxy.wire.messages import Register

logger = logging.getLogger(__name__)

SCRAPE_TIMEOUT_S = 2.0


class Verdict(enum.Enum):
    """What is known of the KV behind a response's first tokens."""

    PROVEN = "the KV was read before its lease could end, or no lease has ended since"
    UNPROVEN = "the prefill server does not report how many leases have expired"
    SUSPECT = "a lease expired at the prefill server meanwhile, maybe this one"


class LeaseCheck:
    """Watches one lease, from the prefill's response to the first token; an async context.

    Args:
        counter: Name of the server's Prometheus counter of expired leases; None if it has none.
        sent_at, answered_at: When the prefill leg was sent, and when its response came (the loop's clock).
    """

    def __init__(
        self,
        upstream: UpstreamPool,
        server: Register,
        counter: str | None,
        *,
        sent_at: float,
        answered_at: float,
        lease_s: float,
    ) -> None:
        self._upstream = upstream
        self._server = server
        self._counter = counter
        self._lease_s = lease_s
        self._task: asyncio.Task[float | None] | None = None
        self.sure_until = max(sent_at, answered_at - lease_s / 6) + lease_s * 5 / 6
        """On the event loop's clock."""

    @property
    def is_sure(self) -> bool:
        """Whether the lease is alive beyond doubt."""
        return asyncio.get_running_loop().time() < self.sure_until

    async def __aenter__(self) -> LeaseCheck:
        if self._counter is not None:
            self._task = asyncio.get_running_loop().create_task(self._count_before())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def judge(self) -> Verdict:
        """Judge the first tokens, which have arrived and have not been passed on."""
        if self.is_sure:
            return Verdict.PROVEN
        before = None if self._task is None else await self._task
        after = None if before is None else await self._count()
        if before is None or after is None:
            return Verdict.UNPROVEN
        return Verdict.PROVEN if before == after else Verdict.SUSPECT

    async def _count_before(self) -> float | None:
        """The count while the lease is surely alive; most requests have ended before it is scraped."""
        await asyncio.sleep(self.sure_until - self._lease_s / 2 - asyncio.get_running_loop().time())
        count = await self._count()
        return count if self.is_sure else None

    async def _count(self) -> float | None:
        by = asyncio.get_running_loop().time() + SCRAPE_TIMEOUT_S
        try:
            exposition = await self._upstream.get(
                self._server, f"{self._server.address}/metrics", deadline=by
            )
        except ProxyError as error:
            logger.info("expired leases cannot be counted: %s", error)
            return None
        return prometheus_text.total(exposition, self._counter or "")

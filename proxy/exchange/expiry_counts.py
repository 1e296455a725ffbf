# SPDX-License-Identifier: Apache-2.0
"""How many leases have expired at other engines' prefill servers, as their metrics pages say."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass, field

from kvferry.proxy.clock import now
from kvferry.proxy.errors import AgentRejected, ProxyError
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.telemetry import prometheus_text
from kvferry.proxy.wire.registration import Register

logger = logging.getLogger(__name__)

READ_TIMEOUT_S = 2.0
ABSENT_S = 10.0
"""How long a server is taken to have no such counter once its metrics have come without."""
MAX_SERVERS = 4096
COMPLAINT_INTERVAL_S = 60.0
STARTED = "process_start_time_seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpiryCount:
    """One reading of a server's counter.

    `expired` and `started_at` are equal in two readings if no lease has expired between them, in the same run
    of the server. `started_at` is None where the page does not say it. `asked_at` and `came_at` are on the
    event loop's clock.
    """

    expired: float
    started_at: float | None
    asked_at: float
    came_at: float

    def same(self, other: ExpiryCount) -> bool:
        """Whether no lease has expired between the two."""
        return (self.expired, self.started_at) == (other.expired, other.started_at)


@dataclass(slots=True)
class _Server:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_at: float = -math.inf
    """When the last reading was asked for, read or not."""
    read: ExpiryCount | None = None
    """What it said, if it could be read."""
    latest: ExpiryCount | None = None
    """The last one that could be read."""
    absent_until: float = -math.inf
    """Until when it is taken to have no counter."""
    problem: str = ""
    complained_at: float = -math.inf


class ExpiryCounts:
    """Reads the counters; requests that want to know at the same time share one reading."""

    def __init__(self, upstream: UpstreamPool) -> None:
        self._upstream = upstream
        self._servers: OrderedDict[str, _Server] = OrderedDict()

    def latest(self, server: Register) -> ExpiryCount | None:
        """The last reading that there is, however old."""
        known = self._servers.get(server.incarnation)
        return None if known is None else known.latest

    def is_absent(self, server: Register) -> bool:
        """Whether the server's metrics have just come without the counter: there is nothing to read."""
        known = self._servers.get(server.incarnation)
        return known is not None and now() < known.absent_until

    async def read(self, server: Register, counter: str) -> ExpiryCount | None:
        """Read the counter, no earlier than now; None when it cannot be read, which is logged once.

        A server without it (`is_absent`) is not asked.
        """
        if self.is_absent(server):
            return None
        known, since = self._server(server), now()
        try:
            # One reading may be under way, and one that others wait for may come before this one.
            async with asyncio.timeout(2 * READ_TIMEOUT_S), known.lock:
                if known.asked_at < since:
                    known.asked_at, known.read = now(), None
                    try:
                        known.read = await self._read(server, counter, known)
                    except BaseException:
                        known.asked_at = -math.inf  # the next that waits for this reading makes its own
                        raise
                    known.latest = known.read or known.latest
                return known.read
        except TimeoutError:
            return None

    def note_contradiction(self, server: Register, lease_s: float) -> None:
        """Log that leases end before the operator's number says so, once in `COMPLAINT_INTERVAL_S`."""
        known = self._server(server)
        if now() - known.complained_at >= COMPLAINT_INTERVAL_S:
            known.complained_at = now()
            logger.error(
                "a lease expired at %s although by this proxy's setting (%g s) it should have lasted: unless "
                "it was another router's, the server's own lease is shorter; correct the setting, or leave "
                "it out",
                server.address,
                lease_s,
            )

    def _server(self, server: Register) -> _Server:
        known = self._servers.get(server.incarnation)
        if known is None:
            known = self._servers[server.incarnation] = _Server()
            if len(self._servers) > MAX_SERVERS:
                self._servers.popitem(last=False)
        else:
            self._servers.move_to_end(server.incarnation)
        return known

    async def _read(self, server: Register, counter: str, known: _Server) -> ExpiryCount | None:
        asked_at = now()
        try:
            page = await self._upstream.get(
                server, f"{server.address}/metrics", deadline=asked_at + READ_TIMEOUT_S
            )
        except AgentRejected as error:
            known.absent_until = now() + ABSENT_S
            _note_problem(known, f"{server.address}/metrics cannot be read: {error}")
            return None
        except ProxyError as error:
            _note_problem(known, f"expired leases cannot be counted: {error}")
            return None
        expired = prometheus_text.total(page, counter)
        if expired is None:
            known.absent_until = now() + ABSENT_S
            _note_problem(known, f"{server.address}/metrics does not say how many leases have expired")
            return None
        known.problem = ""
        return ExpiryCount(
            expired=expired,
            started_at=prometheus_text.total(page, STARTED),
            asked_at=asked_at,
            came_at=now(),
        )


def _note_problem(known: _Server, problem: str) -> None:
    """Log it, unless it was logged the last time."""
    if problem != known.problem:
        known.problem = problem
        logger.warning("%s", problem)

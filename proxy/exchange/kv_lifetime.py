# SPDX-License-Identifier: Apache-2.0
"""KV that lies at a prefill server: where it is fetched, whether it was still there when it was read, and
drops of what will not be read.

`LeaseCheck`: vLLM's decode servers read KV by block numbers and do not notice that the blocks have gone to
another prompt meanwhile; the response is then wrong, with HTTP 200 (vLLM #52234). How long a lease is, no
server says, and the number that an operator gives may be wrong. So a response is proven in one of two ways:

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
import logging
import math
from collections import OrderedDict
from dataclasses import dataclass, field
from types import TracebackType

from kvferry.common.telemetry import prometheus_text
from kvferry.proxy.dialects.base import Endpoints, KvEndpoint, LegRequest
from kvferry.proxy.errors import AgentRejected, ProxyError
from kvferry.proxy.http.pool import UpstreamPool, now
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Incarnation, Register

logger = logging.getLogger(__name__)

SHORTEST_LEASE_S = 1.0
"""vLLM's `kv_lease_duration` is an integer, and with 0 nothing could ever be read."""
SURE_S = SHORTEST_LEASE_S / 2
FRESH_S = 1.0
"""A count that is older is read again with the next prefill leg, so that few expired leases lie between."""
READ_TIMEOUT_S = 2.0
ABSENT_S = 10.0
"""How long a server is taken to have no such counter once its metrics have come without."""
MAX_SERVERS = 4096
COMPLAINT_INTERVAL_S = 60.0
STARTED = "process_start_time_seconds"
DROP_TIMEOUT_S = 5.0
MAX_PENDING = 1024
MAX_KV_ENDPOINTS = 4096


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


class KvDrops:
    """Owns the drops in flight, so that a cancelled request need not wait for its own.

    A drop that fails is only counted: the lease expires by itself.
    """

    def __init__(self, upstream: UpstreamPool, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._pending: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> int:
        """Drops in flight."""
        return len(self._pending)

    def send(self, agent: Register, leg: LegRequest, *, delivered_by: int = 200) -> None:
        """Send a drop in the background, which is answered with the status `delivered_by`. Past `MAX_PENDING`
        it is left to the lease.
        """
        if len(self._pending) >= MAX_PENDING:
            self._metrics.drops.labels("overflow").inc()
            return
        task = asyncio.get_running_loop().create_task(self._send(agent, leg, delivered_by))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def settle(self) -> None:
        """Wait until no drop is in flight (each has a deadline); the pool must stay open."""
        while self._pending:
            await asyncio.wait(self._pending)

    async def _send(self, agent: Register, leg: LegRequest, delivered_by: int) -> None:
        by = now() + DROP_TIMEOUT_S
        try:
            async with self._upstream.post(
                agent, leg.path, leg.body, leg.headers, headers_deadline=by, deadline=by
            ) as response:
                await response.read()
        except ProxyError as error:
            if isinstance(error, AgentRejected) and error.status == delivered_by:
                self._metrics.drops.labels("delivered").inc()
                return
            logger.info("a transfer was not dropped: %s", error)
            self._metrics.drops.labels("failed").inc()
        else:
            self._metrics.drops.labels("delivered").inc()


class KvEndpointCache:
    """Bounded, by server and rank. A server that fails is forgotten: it may have restarted."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, int], tuple[KvEndpoint, float]] = OrderedDict()

    def find(self, endpoints: Endpoints, *, since: float = float("-inf")) -> KvEndpoint | None:
        """Return where a sub-request's KV is fetched, if that was learned at `since` or later."""
        kv_endpoint, learned_at = self._known.get(_key(endpoints), (None, 0.0))
        return kv_endpoint if learned_at >= since else None

    def learn(self, endpoints: Endpoints, kv_endpoint: KvEndpoint, now: float) -> None:
        """Remember it, and forget the one learned longest ago past `MAX_KV_ENDPOINTS`."""
        self._known[_key(endpoints)] = (kv_endpoint, now)
        self._known.move_to_end(_key(endpoints))
        if len(self._known) > MAX_KV_ENDPOINTS:
            self._known.popitem(last=False)

    def forget(self, server: Incarnation) -> None:
        """Forget all ranks of a server."""
        for key in [key for key in self._known if key[0] == server]:
            del self._known[key]


def _key(endpoints: Endpoints) -> tuple[str, int]:
    return endpoints.prefill.incarnation, endpoints.prefill_rank or 0

# SPDX-License-Identifier: Apache-2.0
"""Drops: asking prefill agents to free KV that will not be read, without waiting for its lease to expire."""

from __future__ import annotations

import asyncio
import logging

from kvferry.proxy.clock import now
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.errors import AgentRejected, ProxyError
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.ids import TransferId
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Register

logger = logging.getLogger(__name__)

DROP_TIMEOUT_S = 5.0
MAX_PENDING = 1024


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

    def drop(self, agent: Register, transfer_id: TransferId) -> None:
        """Send a drop in the background. Past `MAX_PENDING` it is left to the lease."""
        body = native.drop_body(transfer_id, agent.incarnation)
        headers = {"Content-Type": "application/json"}
        self.send(agent, LegRequest(path=native.DROP_PATH, headers=headers, body=body))

    def send(self, agent: Register, leg: LegRequest, *, delivered_by: int = 200) -> None:
        """`drop` by a request of another engine's dialect, to which it responds with the status
        `delivered_by`.
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

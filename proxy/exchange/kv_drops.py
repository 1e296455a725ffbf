# SPDX-License-Identifier: Apache-2.0
"""Tells prefill agents that a transfer's KV will not be read, so that they need not wait for its lease."""

from __future__ import annotations

import asyncio
import logging

from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.errors import ProxyError
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.ids import TransferId
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Register

logger = logging.getLogger(__name__)

DROP_TIMEOUT_S = 5.0
MAX_PENDING = 1024


class KvDrops:
    """Owns the drops on their way, so that a cancelled request need not stay to see its own through.

    A drop that fails is only counted: the lease ends by itself.
    """

    def __init__(self, upstream: UpstreamPool, metrics: Metrics) -> None:
        self._upstream = upstream
        self._metrics = metrics
        self._pending: set[asyncio.Task[None]] = set()

    @property
    def pending(self) -> int:
        """Drops that have not been answered yet."""
        return len(self._pending)

    def drop(self, agent: Register, transfer_id: TransferId) -> None:
        """Send a drop in the background. Returns at once; past `MAX_PENDING` it is left to the lease."""
        body = native.drop_body(transfer_id, agent.incarnation)
        headers = {"Content-Type": "application/json"}
        self.send(agent, LegRequest(path=native.DROP_PATH, headers=headers, body=body))

    def send(self, agent: Register, leg: LegRequest) -> None:
        """The same by whatever request it is that makes another engine free its KV."""
        if len(self._pending) >= MAX_PENDING:
            self._metrics.drops.labels("overflow").inc()
            return
        task = asyncio.get_running_loop().create_task(self._send(agent, leg))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def settle(self) -> None:
        """Wait until every drop was answered or gave up (each has a deadline); connections must stay open."""
        while self._pending:
            await asyncio.wait(self._pending)

    async def _send(self, agent: Register, leg: LegRequest) -> None:
        by = asyncio.get_running_loop().time() + DROP_TIMEOUT_S
        try:
            async with self._upstream.post(
                agent, leg.path, leg.body, leg.headers, headers_deadline=by, deadline=by
            ) as answer:
                await answer.read()
        except ProxyError as error:
            logger.info("a transfer was not dropped: %s", error)
            self._metrics.drops.labels("failed").inc()
        else:
            self._metrics.drops.labels("delivered").inc()

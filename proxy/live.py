# SPDX-License-Identifier: Apache-2.0
"""What the operator's page shows, once a second, to everybody who looks: the page's SSE feed.

Nothing is computed while nobody looks, and once a second however many do. A viewer that reads slowly is
sent the newest snapshot when it reads again, never a backlog.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from proxy import sse
from proxy.history import History
from proxy.metrics import Metrics
from proxy.pages import nodes_page, readiness
from proxy.registry import Registry
from proxy.slots import Slots

INTERVAL_S = 1.0
MAX_VIEWERS = 32
MAX_SHOWN = 200
RECONNECT = b"retry: 2000\n\n"


class Live:
    """Snapshots of one proxy for the viewers of its page.

    Args:
        clock: Monotonic seconds: the clock that the registry and the history were told.
    """

    def __init__(
        self, registry: Registry, slots: Slots, metrics: Metrics, history: History, clock: Callable[[], float]
    ) -> None:
        self._registry = registry
        self._slots = slots
        self._metrics = metrics
        self._history = history
        self._clock = clock
        self._closed = asyncio.Event()
        self._viewers = 0
        self._event = b""
        self._made_at = float("-inf")

    @property
    def full(self) -> bool:
        """Whether there is no room for another viewer."""
        return self._viewers >= MAX_VIEWERS

    def close(self) -> None:
        """End every feed, so that a stopping proxy need not wait for its viewers."""
        self._closed.set()

    async def feed(self) -> AsyncGenerator[bytes, None]:
        """One event a second until the viewer leaves (which closes the generator) or the proxy stops."""
        self._viewers += 1
        try:
            yield RECONNECT
            while not self._closed.is_set():
                yield self._latest()
                try:
                    async with asyncio.timeout(INTERVAL_S):
                        await self._closed.wait()
                except TimeoutError:
                    continue
        finally:
            self._viewers -= 1

    def snapshot(self, now: float) -> dict[str, Any]:
        """Everything on the page. Of each list the first `MAX_SHOWN` entries, beside their full number."""
        known = self._registry.snapshot(now)
        fleet = nodes_page(known, self._slots, now)
        nodes, refused = fleet["nodes"], fleet["refused_pairings"]
        failures = [
            {**msgspec.to_builtins(failure.last), "count": failure.count, "age_s": round(now - failure.at, 1)}
            for failure in self._history.failures()
        ]
        return {
            "time": time.time(),
            "readiness": readiness(known),
            "nodes": nodes[:MAX_SHOWN],
            "num_nodes": len(nodes),
            "refused_pairings": refused[:MAX_SHOWN],
            "num_refused_pairings": len(refused),
            "refused_agents": fleet["refused_agents"],
            "in_flight": self._metrics.requests_in_flight(),
            "charts": self._history.charts(now),
            "failures": failures,
        }

    def _latest(self) -> bytes:
        """The event that every viewer of this second gets."""
        now = self._clock()
        if now - self._made_at >= INTERVAL_S / 2:
            self._event = sse.event(self.snapshot(now))
            self._made_at = now
        return self._event

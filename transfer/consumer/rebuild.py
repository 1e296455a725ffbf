# SPDX-License-Identifier: Apache-2.0
"""Rebuilds a backend's engines on every rank: the last resort for reads that do not end."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from kvferry.transfer.consumer.link_pool import LinkPool
from kvferry.transfer.consumer.pull import Pull
from kvferry.transfer.consumer.quarantine import Quarantine, RebuildScheduler
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import PlaneConfig
from kvferry.transfer.ranks.group import RankGroup
from kvferry.transfer.ranks.messages import Rebuild

_CHECK_S = 0.25
"""How often to check whether a backend that is to be rebuilt has become idle."""

_log = logging.getLogger(__name__)


class Rebuilder:
    """Keeps the quarantine and the requested rebuilds, and runs both by timer.

    A rebuild is never ordered from within a transfer's own events, as it ends other transfers. `reading`
    returns the backends with a read in flight.
    """

    def __init__(
        self,
        config: PlaneConfig,
        ranks: RankGroup,
        links: LinkPool,
        reading: Callable[[], Collection[str]],
    ) -> None:
        self._ranks = ranks
        self._links = links
        self._reading = reading
        self._quarantine = Quarantine(config.quarantine_s, config.num_blocks)
        self._quarantine_timer: asyncio.TimerHandle | None = None
        self._requests = RebuildScheduler(config.quarantine_s)
        self._request_timer: asyncio.TimerHandle | None = None
        self.rebuilds = 0

    def close(self) -> None:
        for timer in (self._quarantine_timer, self._request_timer):
            if timer is not None:
                timer.cancel()

    @property
    def quarantined(self) -> int:
        """Failed transfers whose destination may still be written to."""
        return len(self._quarantine)

    def quarantine(self, pull: Pull) -> None:
        """Add a pull that failed and is not quiescent."""
        self._quarantine.add(time.monotonic(), pull.transfer_id, pull.backend, pull.num_written)
        self._arm_quarantine()

    def quiescent(self, transfer_id: TransferId) -> None:
        """Remove a pull from the quarantine."""
        self._quarantine.remove(transfer_id)
        self._arm_quarantine()

    def request(self, transfer: str) -> None:
        """Rebuild a backend's engines, which cannot reach some peer any more, when they are idle."""
        self._requests.request(time.monotonic(), transfer)
        if self._request_timer is None:
            self._request_timer = asyncio.get_running_loop().call_later(_CHECK_S, self._rebuild_requested)

    def _arm_quarantine(self) -> None:
        if self._quarantine_timer is not None:
            self._quarantine_timer.cancel()
            self._quarantine_timer = None
        delay = self._quarantine.delay(time.monotonic())
        if delay is not None:
            loop = asyncio.get_running_loop()
            self._quarantine_timer = loop.call_later(delay, self._rebuild_due)

    def _rebuild_due(self) -> None:
        self._quarantine_timer = None
        for transfer in self._quarantine.pop_due(time.monotonic()):
            self._rebuild(transfer, "a quarantine is too old or too large")
        self._arm_quarantine()

    def _rebuild_requested(self) -> None:
        self._request_timer = None
        for transfer in self._requests.pop_due(time.monotonic(), self._reading()):
            self._rebuild(transfer, "a peer is out of reach")
        if self._requests:
            self._request_timer = asyncio.get_running_loop().call_later(_CHECK_S, self._rebuild_requested)

    def _rebuild(self, transfer: str, why: str) -> None:
        _log.warning("rebuilding the %s engines: %s", transfer, why)
        self.rebuilds += 1
        for link in self._links.over(transfer):
            link.lose("unreachable", f"our {transfer} engines are being rebuilt")
        self._ranks.broadcast(Rebuild(transfer=transfer))

# SPDX-License-Identifier: Apache-2.0
"""Warnings about the fleet: agents that were lost, and pairs of agents that cannot serve together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice

from kvferry.common.telemetry.recurring_warnings import RecurringWarnings
from kvferry.proxy.fleet.pairing import Mismatch
from kvferry.proxy.fleet.registry import MODEL_MEMORY_S, Registry
from kvferry.proxy.fleet.snapshot import MAX_PAIRINGS, IncompatiblePair, incompatible_pairs
from kvferry.proxy.telemetry.event_log import EventKind

logger = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0
LOST_S = MODEL_MEMORY_S
"""For so long a lost agent is missed."""


class FleetWarnings:
    """Looks at the fleet of one registry, and warns of what an operator should see to.

    Args:
        clock: That of the registry: monotonic seconds.
    """

    def __init__(self, registry: Registry, clock: Callable[[], float]) -> None:
        self._registry = registry
        self._clock = clock
        self._warnings = RecurringWarnings(logger, clock)
        self._checked_at = clock()

    async def run(self) -> None:
        """Check once per interval, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()

    def check(self) -> None:
        """Warn of what is wrong now."""
        snapshot = self._registry.snapshot()
        self._check_lost({node.info.location for node in snapshot.nodes})
        misfits: dict[Mismatch, list[IncompatiblePair]] = {}
        for pair in islice(incompatible_pairs(snapshot), MAX_PAIRINGS):
            misfits.setdefault(pair.why, []).append(pair)
        for why, pairs in misfits.items():
            self._check_misfits(why, pairs)

    def _check_lost(self, present: set[str]) -> None:
        since, self._checked_at = self._checked_at, self._clock()
        events = self._registry.events
        new = [each for each in events.of_kinds({EventKind.LOST, EventKind.REPLACED}) if each.at > since]
        lasting = [each for each in events.lost(present) if self._checked_at - each.at < LOST_S]
        for event in (*new, *lasting):
            why = "another one took its address" if event.kind is EventKind.REPLACED else "its pings stopped"
            called = _called(event.name, event.address)
            message = "the %s agent %s was lost: %s"
            self._warnings.warn(EventKind.LOST, event.agent, message, event.role, called, why)

    def _check_misfits(self, why: Mismatch, pairs: list[IncompatiblePair]) -> None:
        """Warn of each agent of the side with fewer: one that fits no other is one warning, not many."""
        prefills = {each.prefill.location for each in pairs}
        decodes = {each.decode.location for each in pairs}
        of_agent: dict[str, list[IncompatiblePair]] = {}
        for pair in pairs:
            agent = pair.decode if len(decodes) <= len(prefills) else pair.prefill
            of_agent.setdefault(agent.location, []).append(pair)
        for address, (pair, *others) in of_agent.items():
            self._warnings.warn(
                why.name,
                address,
                "the prefill agent %s and the decode agent %s cannot serve together: %s%s",
                _called(pair.prefill.name, pair.prefill.location),
                _called(pair.decode.name, pair.decode.location),
                pair.text,
                f" ({len(others)} more such pairs)" if others else "",
            )


def _called(name: str, address: str) -> str:
    """The agent by its name, if it has one, and address."""
    location = address.partition("//")[2]
    return f"{name} at {location}" if name else location

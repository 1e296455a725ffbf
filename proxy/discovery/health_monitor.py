# SPDX-License-Identifier: Apache-2.0
"""Speaks for a server of another engine: registrations while it is up, with a new incarnation per start.

| state | a look shows it healthy | a look fails | the look was refused |
|---|---|---|---|
| down | → up, as a new incarnation | – | – |
| up | a ping; after a restart goodbye, → up as another | the last ping again; the third → down | → down |

A look is refused when nobody listens or the server says itself that it cannot serve. Going down is a goodbye,
which is final for an incarnation: whatever comes up there again is another one, and nothing that was known
about KV of the old one holds for it. A restart between two looks shows in the process's start time, where the
engine tells it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable

import aiohttp
import msgspec

from kvferry.proxy.dialects.base import foreign_registration
from kvferry.proxy.discovery.health_probe import EngineDown, ProbeResult, look
from kvferry.proxy.discovery.static_nodes import StaticNode
from kvferry.proxy.wire.messages import PING_INTERVAL_S, Bye, Register

logger = logging.getLogger(__name__)

MAX_MISSED = 3
SAME_START_S = 1.0
"""Start times that are nearer to each other than this are one start."""

Say = Callable[[Register | Bye], None]


class HealthMonitor:
    """Watches one server and says of it, by `say`, what its own pings would.

    Args:
        at: Base URL to look at, where that is not the one that others must dial.
    """

    def __init__(self, server: StaticNode, say: Say, at: str | None = None) -> None:
        self.server = server
        self._at = (at or server.address).rstrip("/")
        self.why_down: str | None = "not looked at yet"
        """Why it is down, or None while it is up."""
        self._say = say
        self._last: Register | None = None
        """What was said last of the incarnation that is up; None while it is down."""
        self._started_at: float | None = None
        self._index = 0
        self._missed = 0

    async def run(self, http: aiohttp.ClientSession, interval_s: float = PING_INTERVAL_S) -> None:
        """Look once per interval (seconds), for ever; a look that takes longer is followed by the next."""
        clock = asyncio.get_running_loop().time
        while True:
            next_at = clock() + interval_s
            try:
                self.seen(await look(http, self._at, self.server.model, self.server.max_running))
            except EngineDown as down:
                self.missed(down)
            except Exception as error:
                logger.exception("%s could not be looked at, by a defect of ours", self.server.address)
                self.missed(EngineDown(f"it could not be looked at: {type(error).__name__}: {error}"))
            await asyncio.sleep(max(0.0, next_at - clock()))

    def seen(self, sighting: ProbeResult) -> None:
        """A look has shown it healthy."""
        if self._last is not None and self._restarted(sighting):
            self.leave("was restarted")
        if self._last is None:
            incarnation = secrets.token_hex(8)
            logger.info("%s is up: %s, incarnation %s", self.server.address, sighting.model, incarnation)
        else:
            incarnation = self._last.incarnation
        self._missed = 0
        self.why_down = None
        self._started_at = sighting.started_at
        self._ping(self._registration(incarnation, sighting))

    def missed(self, down: EngineDown) -> None:
        """A look has failed. A server that is merely slow is vouched for a while: under load, many are."""
        self._missed += 1
        if down.refused or self._missed >= MAX_MISSED:
            self.leave(f"is down: {down}")
        if self._last is None:
            self.why_down = str(down)
        else:
            self._ping(self._last)

    def leave(self, why: str) -> None:
        """Say goodbye for it, if it is up."""
        if self._last is not None:
            logger.warning("%s %s", self.server.address, why)
            self._say(Bye(incarnation=self._last.incarnation))
            self._last = None

    def _ping(self, registration: Register) -> None:
        self._index += 1
        self._last = msgspec.structs.replace(registration, index=self._index)
        self._say(self._last)

    def _restarted(self, sighting: ProbeResult) -> bool:
        before, now = self._started_at, sighting.started_at
        return before is not None and now is not None and abs(now - before) > SAME_START_S

    def _registration(self, incarnation: str, sighting: ProbeResult) -> Register:
        server = self.server
        return foreign_registration(
            role=server.role,
            incarnation=incarnation,
            address=server.address,
            control=server.control,
            dialect=server.dialect,
            model=sighting.model,
            max_model_len=sighting.max_model_len,
            tp_size=server.tp_size,
            dp_size=server.dp_size,
            transfer_mode=server.mode,
            # One that does not tell its steps is never taken for stalled.
            steps=self._index + 1 if sighting.steps is None else sighting.steps,
            load=sighting.load,
        )

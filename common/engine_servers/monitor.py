# SPDX-License-Identifier: Apache-2.0
"""Polls a server of another engine that an operator has named, and which does not ping.

It is up, under a new incarnation per start, or down:

| state | a probe succeeds | a probe fails | a probe is refused |
|---|---|---|---|
| down | up as a new incarnation | – | – |
| up | up again; after a restart down, and up as another | up again; the third: down | down |

The end of an incarnation is final: what comes up there again is another one, and nothing that was known about
KV of the old one holds for it. A restart between two probes shows in the process's start time, if the engine
reports it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace

import aiohttp
import msgspec

from kvferry.common.engine_servers import atom
from kvferry.common.engine_servers.description import StaticNode
from kvferry.common.engine_servers.probe import EngineDown, ProbeResult, probe
from kvferry.common.telemetry.recurring_warnings import RecurringWarnings

logger = logging.getLogger(__name__)

MAX_FAILED_PROBES = 3
SAME_START_S = 1.0
"""Start times that are nearer to each other than this are one start."""
PROBE_INTERVAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUp:
    """A probe has succeeded, or the server counts as up although this one has not.

    `server` is completed by what it reports itself. `index` counts these of all incarnations.
    """

    server: StaticNode
    incarnation: str
    index: int
    steps: int
    result: ProbeResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerDown:
    """An incarnation has ended."""

    incarnation: str


class HealthMonitor:
    """Polls one server and publishes what is found, as often as it is probed.

    Args:
        probe_url: Base URL to probe, where that is not the one that others must dial.
    """

    def __init__(
        self,
        server: StaticNode,
        publish: Callable[[ServerUp | ServerDown], None],
        probe_url: str | None = None,
    ) -> None:
        self.server = server
        self._url = (probe_url or server.address).rstrip("/")
        self.down_reason: str | None = "not probed yet"
        """Why it is down, or None while it is up."""
        self._publish = publish
        self._warnings = RecurringWarnings(logger)
        self._latest: ServerUp | None = None
        """Of the incarnation that is up; None while it is down."""
        self._started_at: float | None = None
        self._index = 0
        self._num_failed = 0

    @property
    def responds(self) -> bool:
        """Whether the latest probe has succeeded; else what is published is what an earlier one found."""
        return self._num_failed == 0

    async def run(self, http: aiohttp.ClientSession, interval_s: float = PROBE_INTERVAL_S) -> None:
        """Probe once per interval (seconds) until cancelled; at once again after a probe that took longer."""
        clock = asyncio.get_running_loop().time
        while True:
            next_at = clock() + interval_s
            try:
                self.succeeded(await self._probe(http))
            except EngineDown as down:
                self.failed(down)
            await asyncio.sleep(max(0.0, next_at - clock()))

    def succeeded(self, result: ProbeResult) -> None:
        """Publish the server as a probe has shown it. Raises `EngineDown` if it is not the one described."""
        server = described(self.server, result.info)
        if self._latest is not None and self._was_restarted(result):
            logger.warning("%s was restarted", self.server.address)
            self._end()
        if self._latest is None:
            incarnation = secrets.token_hex(8)
            logger.info("%s is up: %s, incarnation %s", self.server.address, result.model, incarnation)
            self._warnings.over("down", self.server.address)
        else:
            incarnation = self._latest.incarnation
        self._num_failed = 0
        self.down_reason = None
        self._started_at = result.started_at
        # One that does not report its steps never counts as stalled.
        steps = self._index + 1 if result.steps is None else result.steps
        self._found(ServerUp(server=server, incarnation=incarnation, index=0, steps=steps, result=result))

    def failed(self, down: EngineDown) -> None:
        """Count a failed probe. The server stays up for a while: under load, many are slow."""
        self._num_failed += 1
        if down.refused or self._num_failed >= MAX_FAILED_PROBES:
            self._end()
        if self._latest is None:
            self.down_reason = str(down)
            address, role = self.server.address, self.server.role
            self._warnings.warn("down", address, "the %s server %s is down: %s", role, address, down)
        else:
            self._found(self._latest)

    def _end(self) -> None:
        """Publish the end of the incarnation that is up, if one is."""
        if self._latest is not None:
            self._publish(ServerDown(incarnation=self._latest.incarnation))
            self._latest = None

    def _found(self, found: ServerUp) -> None:
        self._index += 1
        self._latest = replace(found, index=self._index)
        self._publish(self._latest)

    def _was_restarted(self, result: ProbeResult) -> bool:
        before, now = self._started_at, result.started_at
        return before is not None and now is not None and abs(now - before) > SAME_START_S

    async def _probe(self, http: aiohttp.ClientSession) -> ProbeResult:
        server = self.server
        return await probe(http, self._url, server.model, server.max_running, server.info_path)


def described(server: StaticNode, info: bytes | None) -> StaticNode:
    """Complete what an operator has said of a server by what it says itself; None: it says nothing.

    Raises `EngineDown` where the two do not fit: with other ranks than the real ones KV would be read from
    another rank's memory.
    """
    if info is None:
        return server
    try:
        learned = atom.read_info(info)
    except ValueError as error:
        raise EngineDown(str(error), refused=True) from error
    if server.role != "both" and learned.role != server.role:
        kv_role = f"its kv_role is {learned.kv_role}" if learned.kv_role else "it has no kv_role"
        raise EngineDown(f"{kv_role}, so it cannot be a {server.role} server", refused=True)
    for name in ("tp_size", "dp_size", "handshake_port"):
        named, real = getattr(server, name), getattr(learned, name)
        if named not in (None, real):
            raise EngineDown(f"its {name} is {real}, not {named}", refused=True)
    return msgspec.structs.replace(
        server,
        role=learned.role or server.role,
        tp_size=learned.tp_size,
        dp_size=learned.dp_size,
        handshake_port=learned.handshake_port,
    )

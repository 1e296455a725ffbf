# SPDX-License-Identifier: Apache-2.0
"""Keep a registry up to date: agents that announce themselves, and servers that an operator has named."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import aiohttp

from kvferry.common.curve import ClusterKey
from kvferry.common.engine_servers.description import StaticNode
from kvferry.common.engine_servers.monitor import HealthMonitor, ServerDown, ServerUp
from kvferry.common.http.tls import client_context
from kvferry.common.telemetry.recurring_warnings import RecurringWarnings
from kvferry.proxy.discovery.fleet_warnings import FleetWarnings
from kvferry.proxy.discovery.ping_listener import PingListener
from kvferry.proxy.discovery.pinged_servers import PingedServers
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.engine_servers import registration_of
from kvferry.proxy.wire.registration import Bye, Incarnation

logger = logging.getLogger(__name__)


class DownServer(TypedDict):
    """A server named by flags or a file that is down."""

    address: str
    role: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoverySettings:
    """Where agents announce themselves, which servers do not, and who signs these servers' certificates."""

    host: str
    port: int
    servers: Sequence[StaticNode] = ()
    cluster_key: ClusterKey | None = None
    agent_ca: Path | None = None


class Discovery:
    """Keeps `registry` up to date while `running`."""

    def __init__(
        self, settings: DiscoverySettings, registry: Registry, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._metrics = metrics
        self._clock = clock
        self.port = settings.port
        """Where agents announce themselves; while `running` never 0."""
        self._monitors = [HealthMonitor(server, _Updates(registry)) for server in settings.servers]

    def down(self) -> list[DownServer]:
        """Return the named servers that are down."""
        return [
            {"address": each.server.address, "role": each.server.role, "reason": each.down_reason}
            for each in self._monitors
            if each.down_reason is not None
        ]

    @asynccontextmanager
    async def running(self, in_flight: Callable[[Incarnation], int]) -> AsyncIterator[int]:
        """Listen to agents, and probe named servers, while the context is open; yield `port`.

        `in_flight` returns how many sequences this proxy has in flight at an agent.

        Raises `OSError` when the port is taken, and `BadCertificate`.
        """
        async with _http(self._settings.agent_ca) as http:
            pinged_servers = PingedServers(http, self._clock)
            listener = PingListener(
                self._registry,
                self._metrics,
                proxy_id=secrets.token_hex(8),
                in_flight=in_flight,
                key=self._settings.cluster_key,
                complete=pinged_servers.complete,
            )
            try:
                self.port = listener.bind(self._settings.host, self._settings.port)
                async with asyncio.TaskGroup() as tasks:
                    warnings = FleetWarnings(self._registry, self._clock)
                    running = [tasks.create_task(listener.run()), tasks.create_task(warnings.run())]
                    running += [tasks.create_task(monitor.run(http)) for monitor in self._monitors]
                    try:
                        yield self.port
                    finally:
                        for task in running:
                            task.cancel()
            finally:
                await pinged_servers.close()
                listener.close()


class _Updates:
    """Applies what one monitor reports to the registry, as the listener applies pings."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._warnings = RecurringWarnings(logger)

    def __call__(self, found: ServerUp | ServerDown) -> None:
        message = registration_of(found)
        if isinstance(message, Bye):
            self._registry.bye(message.incarnation)
            return
        rejected = self._registry.register(message, reads_acks=False)
        if rejected is not None:
            text = "the named server %s is rejected: %s"
            self._warnings.warn(rejected.name, message.address, text, message.address, rejected.value)


def _http(agent_ca: Path | None) -> aiohttp.ClientSession:
    """Return the client for health probes, which have deadlines of their own. Raises `BadCertificate`."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=True if agent_ca is None else client_context(agent_ca)),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )

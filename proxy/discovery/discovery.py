# SPDX-License-Identifier: Apache-2.0
"""Who belongs to the fleet: agents that announce themselves, and servers that an operator has named."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.discovery.health_monitor import HealthMonitor
from kvferry.proxy.discovery.introductions import PingedServers
from kvferry.proxy.discovery.ping_listener import Discovery
from kvferry.proxy.discovery.static_nodes import StaticNode, check_distinct, servers_from_file
from kvferry.proxy.fleet.fleet import LocalFleet
from kvferry.proxy.fleet.refusals import Refusal
from kvferry.proxy.wire.cluster_key import ClusterKey
from kvferry.proxy.wire.messages import Bye, Incarnation, Register
from kvferry.proxy.wire.tls import client_context

logger = logging.getLogger(__name__)


@asynccontextmanager
async def membership(
    config: ProxyConfig, servers: Sequence[StaticNode], fleet: LocalFleet, key: ClusterKey | None
) -> AsyncIterator[int]:
    """Listen to agents, and watch `servers`, for as long as the context is open; yields the discovery port.

    Raises `OSError` when the port is taken, and `BadCertificate`.
    """
    async with _http(config) as http:
        introductions = PingedServers(http, fleet.clock)
        discovery = Discovery(
            fleet.registry,
            fleet.metrics,
            proxy_id=secrets.token_hex(8),
            clock=fleet.clock,
            key=key,
            heard=fleet.admission.pump,
            complete=introductions.complete,
        )
        watches = [HealthMonitor(server, _Teller(fleet)) for server in servers]
        fleet.watches = tuple(watches)
        try:
            port = discovery.bind(config.host, config.discovery_port)
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(discovery.run())]
                running += [tasks.create_task(watch.run(http)) for watch in watches]
                try:
                    yield port
                finally:
                    for task in running:
                        task.cancel()
        finally:
            await introductions.close()
            discovery.close()


def all_servers(config: ProxyConfig) -> tuple[StaticNode, ...]:
    """The servers that flags and the file of nodes name. Raises `OSError` and `BadEngineServer`."""
    servers = config.named_servers()
    if config.nodes is not None:
        servers += servers_from_file(config.nodes)
    check_distinct(servers)
    return servers


class _Teller:
    """Tells the registry what a watch says, as discovery tells it what a ping says."""

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self._refusal: Refusal | None = None

    def __call__(self, message: Register | Bye) -> None:
        if isinstance(message, Bye):
            self._fleet.registry.bye(Incarnation(message.incarnation))
        else:
            self._heard(message, self._fleet.registry.register(message, self._fleet.clock()))
        self._fleet.admission.pump()

    def _heard(self, message: Register, refusal: Refusal | None) -> None:
        """Log a refusal once, not at every ping."""
        if refusal is not None and refusal != self._refusal:
            logger.warning("%s is named, but refused: %s", message.address, refusal.value)
        self._refusal = refusal


def _http(config: ProxyConfig) -> aiohttp.ClientSession:
    """For looking at servers; each look has a deadline of its own. Raises `BadCertificate`."""
    tls = True if config.agent_ca is None else client_context(config.agent_ca)
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=tls),
        timeout=aiohttp.ClientTimeout(total=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        trust_env=False,
    )

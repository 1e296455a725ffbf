# SPDX-License-Identifier: Apache-2.0
"""Who belongs to the fleet: the sockets and tasks that keep the registry told."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from proxy.config import ProxyConfig
from proxy.discovery import Discovery
from proxy.local_fleet import LocalFleet
from proxy.wire import ClusterKey


@asynccontextmanager
async def membership(config: ProxyConfig, fleet: LocalFleet, key: ClusterKey | None) -> AsyncIterator[int]:
    """Listen to agents for as long as the context is open; yields the discovery port.

    Raises `OSError` when the port is taken.
    """
    discovery = Discovery(
        fleet.registry,
        fleet.metrics,
        proxy_id=secrets.token_hex(8),
        clock=fleet.clock,
        key=key,
        heard=fleet.admission.pump,
    )
    try:
        port = discovery.bind(config.host, config.discovery_port)
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(discovery.run())
            try:
                yield port
            finally:
                listening.cancel()
    finally:
        discovery.close()

# SPDX-License-Identifier: Apache-2.0
"""Completes the pings of servers of other engines that say too little, by health probes."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvferry.common.engine_servers.probe import EngineDown, ProbeResult, probe
from kvferry.common.telemetry.recurring_warnings import RecurringWarnings
from kvferry.proxy.wire.engine_servers import load_of
from kvferry.proxy.wire.registration import Register

logger = logging.getLogger(__name__)

PINGED_INTERVAL_S = 2.0
"""Between two probes of a server that pings."""
MAX_PINGED = 4096
MAX_PROBES = 64
"""Probes under way at once of servers that ping."""


@dataclass(slots=True)
class _Pinged:
    probed_at: float
    result: ProbeResult | None = None
    steps: int = 0


class PingedServers:
    """Completes the pings of ATOM and MoRIIO, which leave out model, context and load.

    Such pings come from a process or thread of their own and prove little, so a server is ready only while
    probes succeed.

    Args:
        clock: Monotonic seconds.
    """

    def __init__(self, http: aiohttp.ClientSession, clock: Callable[[], float]) -> None:
        self._http = http
        self._clock = clock
        self._servers: OrderedDict[str, _Pinged] = OrderedDict()
        self._probes: set[asyncio.Task[None]] = set()
        self._warnings = RecurringWarnings(logger, clock)

    def complete(self, info: Register) -> Register:
        """Return the registration with the result of the last probe; `starting` unless that succeeded.

        Starts a probe when one is due. Never waits; needs a running event loop.
        """
        server = self._servers.get(info.address)
        if server is None or self._clock() - server.probed_at >= PINGED_INTERVAL_S:
            self._start_probe(info.address)
        if server is None or server.result is None:
            return msgspec.structs.replace(info, state="starting")
        result = server.result
        return msgspec.structs.replace(
            info,
            model=result.model,
            max_model_len=result.max_model_len,
            load=load_of(result.load),
            steps=server.steps,
        )

    async def close(self) -> None:
        """Cancel the probes that are under way."""
        for task in self._probes:
            task.cancel()
        if self._probes:
            await asyncio.wait(self._probes)

    def _start_probe(self, address: str) -> None:
        if len(self._probes) >= MAX_PROBES:
            return
        server = self._servers.setdefault(address, _Pinged(0.0))
        server.probed_at = self._clock()
        self._servers.move_to_end(address)
        if len(self._servers) > MAX_PINGED:
            self._servers.popitem(last=False)
        task = asyncio.get_running_loop().create_task(self._probe(address, server))
        self._probes.add(task)
        task.add_done_callback(self._probes.discard)

    async def _probe(self, address: str, server: _Pinged) -> None:
        try:
            server.result = await probe(self._http, address)
        except EngineDown as down:
            self._warnings.warn("down", address, "%s pings, but is down: %s", address, down)
            server.result = None
        else:
            self._warnings.over("down", address)
            # One that does not report its steps never counts as stalled.
            server.steps = server.steps + 1 if server.result.steps is None else server.result.steps

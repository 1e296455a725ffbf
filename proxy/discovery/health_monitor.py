# SPDX-License-Identifier: Apache-2.0
"""Polls servers of other engines: named ones, which do not ping, and those whose pings say too little.

A server that an operator has named is registered while it is up, with a new incarnation per start:

| state | a probe succeeds | a probe fails | a probe is refused |
|---|---|---|---|
| down | register a new incarnation → up | – | – |
| up | register again; after a restart bye and another | register again; the third: bye → down | bye → down |

A bye is final for an incarnation: what comes up there again is another one, and nothing that was known about
KV of the old one holds for it. A restart between two probes shows in the process's start time, if the engine
reports it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import msgspec

from kvferry.proxy.dialects import atom
from kvferry.proxy.dialects.base import foreign_registration
from kvferry.proxy.discovery.health_probe import EngineDown, ProbeResult, probe
from kvferry.proxy.discovery.static_nodes import StaticNode
from kvferry.proxy.errors import BadResponse
from kvferry.proxy.wire.registration import PING_INTERVAL_S, Bye, Register

logger = logging.getLogger(__name__)

MAX_FAILED_PROBES = 3
SAME_START_S = 1.0
"""Start times that are nearer to each other than this are one start."""
PINGED_INTERVAL_S = 2.0
"""Between two probes of a server that pings."""
MAX_PINGED = 4096
MAX_PROBES = 64
"""Probes under way at once of servers that ping."""


class HealthMonitor:
    """Polls one server and publishes what its own pings would say.

    Args:
        probe_url: Base URL to probe, where that is not the one that others must dial.
    """

    def __init__(
        self, server: StaticNode, publish: Callable[[Register | Bye], None], probe_url: str | None = None
    ) -> None:
        self.server = server
        self._url = (probe_url or server.address).rstrip("/")
        self.down_reason: str | None = "not probed yet"
        """Why it is down, or None while it is up."""
        self._publish = publish
        self._latest: Register | None = None
        """The latest registration of the incarnation that is up; None while it is down."""
        self._started_at: float | None = None
        self._index = 0
        self._num_failed = 0

    @property
    def responds(self) -> bool:
        """Whether the latest probe has succeeded; else what is published is what an earlier one found."""
        return self._num_failed == 0

    async def run(self, http: aiohttp.ClientSession, interval_s: float = PING_INTERVAL_S) -> None:
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
        """Register the server as a probe has shown it. Raises `EngineDown` if it is not the one described."""
        server = described(self.server, result.info)
        if self._latest is not None and self._was_restarted(result):
            self.deregister("was restarted")
        if self._latest is None:
            incarnation = secrets.token_hex(8)
            logger.info("%s is up: %s, incarnation %s", self.server.address, result.model, incarnation)
        else:
            incarnation = self._latest.incarnation
        self._num_failed = 0
        self.down_reason = None
        self._started_at = result.started_at
        self._register(self._registration(server, incarnation, result))

    def failed(self, down: EngineDown) -> None:
        """Count a failed probe. The server stays registered for a while: under load, many are slow."""
        self._num_failed += 1
        if down.refused or self._num_failed >= MAX_FAILED_PROBES:
            self.deregister(f"is down: {down}")
        if self._latest is None:
            self.down_reason = str(down)
        else:
            self._register(self._latest)

    def deregister(self, reason: str) -> None:
        """Publish a bye, if the server is up."""
        if self._latest is not None:
            logger.warning("%s %s", self.server.address, reason)
            self._publish(Bye(incarnation=self._latest.incarnation))
            self._latest = None

    def _register(self, registration: Register) -> None:
        self._index += 1
        self._latest = msgspec.structs.replace(registration, index=self._index)
        self._publish(self._latest)

    def _was_restarted(self, result: ProbeResult) -> bool:
        before, now = self._started_at, result.started_at
        return before is not None and now is not None and abs(now - before) > SAME_START_S

    async def _probe(self, http: aiohttp.ClientSession) -> ProbeResult:
        server = self.server
        return await probe(http, self._url, server.model, server.max_running, server.info_path)

    def _registration(self, server: StaticNode, incarnation: str, result: ProbeResult) -> Register:
        return foreign_registration(
            role=server.role,
            incarnation=incarnation,
            address=server.address,
            control=server.control,
            dialect=server.dialect,
            model=result.model,
            max_model_len=result.max_model_len,
            version=atom.WITHOUT_INFO if server.info_path and result.info is None else "",
            tp_size=server.tp_size or 1,
            dp_size=server.dp_size or 1,
            transfer_mode=server.mode,
            # One that does not report its steps never counts as stalled.
            steps=self._index + 1 if result.steps is None else result.steps,
            load=result.load,
        )


def described(server: StaticNode, info: bytes | None) -> StaticNode:
    """Complete what an operator has said of a server by what it says itself; None: it says nothing.

    Raises `EngineDown` where the two do not fit: with other ranks than the real ones KV would be read from
    another rank's memory.
    """
    if info is None:
        return server
    try:
        learned = atom.read_info(info)
    except BadResponse as error:
        raise EngineDown(error.message, refused=True) from error
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
            info, model=result.model, max_model_len=result.max_model_len, load=result.load, steps=server.steps
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
            logger.info("%s pings, but is down: %s", address, down)
            server.result = None
        else:
            # One that does not report its steps never counts as stalled.
            server.steps = server.steps + 1 if server.result.steps is None else server.result.steps

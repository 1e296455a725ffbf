# SPDX-License-Identifier: Apache-2.0
"""`kvferry agent --attach URL`: announces a running vLLM, SGLang or ATOM server, which does not ping itself.

It watches the server's health, load and restarts, announces it to proxies every second like any agent, and
deregisters it when it goes down, with the same cluster key as all agents. It serves nothing itself:
requests go to the server directly.

Asked to end, it drains the server first: it is announced as draining, and the process ends when its proxies
have nothing for it, it runs nothing, and the KV that it lends has been read or has lapsed. Then the server
itself may be ended.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec
import uvloop

from kvferry.agent.announce.membership import Membership
from kvferry.agent.announce.options import AnnounceOptions
from kvferry.common.curve import BadClusterKey, ClusterKey
from kvferry.common.engine_servers.description import EngineDialect, StaticNode
from kvferry.common.engine_servers.monitor import HealthMonitor, ServerDown, ServerUp
from kvferry.common.options import check_files, parse_flags
from kvferry.common.shared_options import LogOptions, check_not_negative
from kvferry.common.stop import StopRequest
from kvferry.common.telemetry.logs import configure_logging
from kvferry.proxy.wire.engine_servers import registration_of
from kvferry.proxy.wire.registration import Bye, Load, NodeState, Register, TransferMode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig(AnnounceOptions, LogOptions):
    """The options of `kvferry agent --attach`.

    Model:
        model: Which of the models that the server lists is served. Default: the first.
        tp_size: Tensor-parallel size. Default: what the server reports (ATOM), or 1.
        dp_size: Data-parallel size. Default: what the server reports (ATOM), or 1.

    Network:
        attach: Base URL of the server's OpenAI API, as this process reaches it.
        advertise_url: The same, as proxies reach it. Default: the URL of --attach.
        dialect: The protocol between its engine and a router.

    KV transfer:
        kv_host: Host at which its peers reach it for KV. Default: the advertised URL's host.
        bootstrap_port: Port of its bootstrap server (SGLang, Mooncake). Default: 8998.
        handshake_port: Port for handshakes of KV transfers (MoRIIO, ATOM); ATOM servers report theirs.
        notify_port: Port for notifications of KV transfers (MoRIIO).
        transfer_mode: Which side transfers the KV (MoRIIO, ATOM). Default: read.

    Limits:
        max_running: Maximum number of sequences that it runs at once. Default: unlimited.

    Timeouts:
        drain_s: Seconds that the server has to finish its requests when this process gets SIGTERM.
        lease_s: Seconds after its last request for which another server may still read KV from it; not waited
            for if its role is decode.
    """

    attach: str = ""
    advertise_url: str | None = None
    dialect: EngineDialect | None = None
    kv_host: str | None = None
    bootstrap_port: int | None = None
    handshake_port: int | None = None
    notify_port: int | None = None
    tp_size: int | None = None
    dp_size: int | None = None
    transfer_mode: TransferMode | None = None
    model: str | None = None
    max_running: int | None = None
    lease_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("attach", "dialect", "proxy"):
            if not getattr(self, name):
                raise ValueError(f"--{name} must be given")
        self.check_announcement()
        check_not_negative(lease_s=self.lease_s)
        self.server()

    def server(self) -> StaticNode:
        """Return the server as it is announced. Raises `ValueError` that names the wrong option."""
        fields = {name: getattr(self, name) for name in StaticNode.__struct_fields__ if name != "url"}
        return msgspec.convert({**fields, "url": self.advertise_url or self.attach}, StaticNode)


class Sidecar:
    """Passes what the health monitor finds on to proxies. While the server is down nothing is sent."""

    def __init__(self, config: SidecarConfig, key: ClusterKey | None, stop: StopRequest) -> None:
        self._config = config
        self._stop = stop
        # Published by the event loop, taken by the thread that pings.
        self._latest: deque[Register] = deque(maxlen=1)
        self._known: Register | None = None
        """The last one published; None while the server is down."""
        self._num_steps = 0
        self._lent_until = -math.inf
        """When the KV of its last step lapses, on the monotonic clock."""
        self._published = asyncio.Event()
        self._down = asyncio.Event()
        self._down.set()
        self._membership = Membership(config.proxy, self._describe, key=key, asked_to_drain=stop.make)
        self._monitor = HealthMonitor(config.server(), self._publish, probe_url=config.attach)

    async def run(self) -> None:
        """Watch and announce until asked to stop, then let the server drain, and deregister it."""
        async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self._monitor.run(http)),
                tasks.create_task(self._membership.run()),
            ]
            await self._stop.made.wait()
            self._membership.start_draining()
            if not await self._stop.drain(self._drain()):
                log.warning("not drained: %s %s", self._config.attach, self._left())
            for task in running:
                task.cancel()

    def _publish(self, found: ServerUp | ServerDown) -> None:
        message = registration_of(found)
        if isinstance(message, Bye):
            self._latest.clear()
            self._known = None
            self._down.set()
            self._membership.withdraw()
        else:
            self._latest.append(message)
            self._known = message
            self._note_work(message)
            self._down.clear()
            self._published.set()
            self._membership.become_ready()
            self._membership.ping()

    def _note_work(self, message: Register) -> None:
        """Note until when KV is lent. A server that does not count its steps, or does not respond, may always
        just have ended a request.
        """
        is_busy = message.load.running + message.load.waiting > 0
        if is_busy or message.steps != self._num_steps or not self._monitor.responds:
            self._num_steps = message.steps
            if self._config.role != "decode":
                self._lent_until = time.monotonic() + self._config.lease_s

    def _left(self) -> str:
        """Return what was not waited for."""
        if self._known is not None and self._known.load.running + self._known.load.waiting:
            return "has requests"
        if time.monotonic() < self._lent_until:
            return "may lend KV of its last requests"
        return "may have requests on their way to it"

    def _describe(self, index: int, state: NodeState) -> Register | None:
        """The next ping: none without news, for the monitor may hang. Called in the thread that pings."""
        latest = self._known if state == "draining" else None
        with suppress(IndexError):
            latest = self._latest.pop()
        if latest is None:
            return None
        return msgspec.structs.replace(latest, index=index, state=state)

    async def _drain(self) -> None:
        """Wait until the server is not needed, or is down."""
        waits = [asyncio.ensure_future(each) for each in (self._wait_unneeded(), self._down.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _wait_unneeded(self) -> None:
        await self._membership.wait_released()
        await self._next_probe()  # which may have begun before
        while (load := await self._next_probe()) is None or load.running + load.waiting:
            pass
        # Once: without a count of steps every probe sets it anew, and proxies send nothing more.
        await asyncio.sleep(max(0.0, self._lent_until - time.monotonic()))

    async def _next_probe(self) -> Load | None:
        """Wait for the next finding of the monitor; None if the server is down."""
        self._published.clear()
        await self._published.wait()
        return None if self._known is None else self._known.load


def main(argv: Sequence[str]) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status; a wrong command line exits with 2."""
    config = parse_flags(
        SidecarConfig,
        argv,
        prog="kvferry agent",
        description="Announce a running server of another engine to proxies, and watch it.",
        check=_checked,
    )
    configure_logging("sidecar", config.log_level, config.log_format)
    try:
        key = ClusterKey.read(Path(config.cluster_key)) if config.cluster_key is not None else None
        uvloop.run(_run(config, key))
    except (OSError, BadClusterKey) as error:
        print(f"kvferry agent: {error}", file=sys.stderr)
        return 1
    return 0


def _checked(config: SidecarConfig) -> SidecarConfig:
    check_files(config, ("cluster_key",))
    return config


async def _run(config: SidecarConfig, key: ClusterKey | None) -> None:
    stop = StopRequest(config.drain_s)
    stop.on_signals()
    await Sidecar(config, key, stop).run()

# SPDX-License-Identifier: Apache-2.0
"""Announces a vLLM server to the proxies, from the engine's process: no sidecar is needed."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Protocol

import msgspec

from kvferry.agent.announce.ping import Announcer
from kvferry.agent.ids import host_id
from kvferry.agent.vllm.settings import DRAIN, DRAINED, ConnectorSettings
from kvferry.common.addresses import host_port
from kvferry.common.curve import ClusterKey
from kvferry.proxy.wire.registration import Capacity, Incarnation, Load, NodeState, Register, Role, WorkReport
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.control.messages import VERSIONS as CONTROL_VERSIONS
from kvferry.transfer.layout import KVGeometry

DIALECT = "vllm-kvferry"
_PROBE_S = 0.5
_POLL_S = 0.1

log = logging.getLogger(__name__)


class EngineLoad(Protocol):
    """What is reported of an engine's work, as `SchedulerHalf` counts it."""

    requests: int
    running: int
    steps: int

    @property
    def leased_blocks(self) -> int: ...

    @property
    def work(self) -> WorkReport | None: ...

    @property
    def capacity(self) -> Capacity | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What does not change while a server runs."""

    role: Role
    incarnation: Incarnation
    model: str
    max_model_len: int
    tp_size: int
    geometry: KVGeometry
    weights: str
    tokenizer: str
    num_blocks: int
    max_running: int


class Announcement:
    """Pings the proxies while `run` runs, and says bye at its end.

    Asked to drain, by a proxy or on the drain socket, it announces that, until no proxy has a request for the
    server, none runs, and no KV is leased. Then it says so on the socket: the process that has started the
    server ends it, and vLLM gives this one no time for a bye then, so it is said before. Without such a
    process the server goes on, and so do the pings.

    Args:
        free_blocks: How many of the engine's KV blocks are free.
    """

    def __init__(
        self,
        settings: ConnectorSettings,
        key: ClusterKey | None,
        server: Server,
        load: EngineLoad,
        free_blocks: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._server = server
        # Made once, not with each ping: this thread shares the interpreter with vLLM's scheduler.
        self._host_id = host_id()
        self._geometry = {name: str(value) for name, value in msgspec.structs.asdict(server.geometry).items()}
        self._layout = server.geometry.fingerprint()
        self._version = version("kvferry")
        self._load = load
        self._free_blocks = free_blocks
        self._state: NodeState = "starting"
        self._changed = threading.Event()
        self._asked = asyncio.Event()
        self._announcer = Announcer(
            settings.proxy, self._changed, self._describe, key=key, drain=self._asked.set
        )
        self._plane: SchedulerConnector | None = None

    async def run(self, plane: SchedulerConnector) -> None:
        """Ping until cancelled."""
        self._plane = plane
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._ping())
            tasks.create_task(self._drain_when_asked(plane, pinging))

    async def _ping(self) -> None:
        try:
            await self._announcer.run()
        finally:
            self._announcer.send_bye(self._server.incarnation)
            self._announcer.close()

    async def _drain_when_asked(self, plane: SchedulerConnector, pinging: asyncio.Task[None]) -> None:
        reader, writer = None, None
        try:
            if self._settings.drain_socket:
                reader, writer = await asyncio.open_unix_connection(self._settings.drain_socket)
            async with asyncio.TaskGroup() as tasks:
                reading = None if reader is None else tasks.create_task(self._wait_for_word(reader))
                await self._asked.wait()
                if reading is not None:
                    reading.cancel()
            log.info("drains: it takes nothing new, and finishes what it has")
            self._state = "draining"
            self._changed.set()
            await self._announcer.wait_released()
            await self._wait_unneeded(plane)
            log.info("has drained")
            if writer is not None:
                pinging.cancel()
                await asyncio.wait([pinging])
                writer.write(DRAINED)
                await writer.drain()
        except OSError as error:  # its end ends this process too, in a moment
            log.warning("the drain socket failed: %s", error)
        finally:
            if writer is not None:
                writer.close()

    async def _wait_for_word(self, reader: asyncio.StreamReader) -> None:
        if await reader.readline() == DRAIN:
            self._asked.set()

    async def _wait_unneeded(self, plane: SchedulerConnector) -> None:
        """Wait until nothing runs and nothing is leased. Looked at twice: in between a lease begins."""
        idle = 0
        while idle < 2:
            is_idle = not self._load.requests and not plane.stats().leased
            idle = idle + 1 if is_idle else 0
            await asyncio.sleep(_POLL_S)

    def _describe(self, index: int) -> Register | None:
        """The next ping. Called in the thread that pings."""
        server, plane = self._server, self._plane
        if plane is None:
            return None
        if self._state == "starting" and self._api_listens():
            self._state = "ready"
        running = min(self._load.running, self._load.requests)
        return Register(
            role=server.role,
            incarnation=server.incarnation,
            index=index,
            address=self._settings.advertise_url.rstrip("/"),
            control=f"tcp://{host_port(self._settings.advertised_host, plane.control_port)}",
            dialect=DIALECT,
            name=self._settings.name,
            model=server.model,
            max_model_len=server.max_model_len,
            tp_size=server.tp_size,
            dp_size=1,
            transfers=plane.transfers,
            host_id=self._host_id,
            geometry=self._geometry,
            layout=self._layout,
            weights=server.weights,
            tokenizer=server.tokenizer,
            transfer_mode="read",
            version=self._version,
            state=self._state,
            steps=self._load.steps,
            load=Load(
                running=running,
                waiting=self._load.requests - running,
                kv_blocks_free=self._free_blocks(),
                kv_blocks_total=server.num_blocks,
                kv_blocks_leased=self._load.leased_blocks,
                max_running=server.max_running,
            ),
            control_versions=CONTROL_VERSIONS,
            work=self._load.work,
            capacity=self._load.capacity,
        )

    def _api_listens(self) -> bool:
        """Whether the API accepts connections, which it does once the engine has started."""
        try:
            socket.create_connection(self._settings.api_address, _PROBE_S).close()
        except OSError:
            return False
        return True

# SPDX-License-Identifier: Apache-2.0
"""Announces a server of another engine with our plane inside, from the engine's own process."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from kvferry.agent.announce.drain_socket import DrainConnection
from kvferry.agent.announce.membership import Membership
from kvferry.common.addresses import host_port
from kvferry.common.curve import ClusterKey
from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.wire.registration import Capacity, Incarnation, Load, NodeState, Register, Role, WorkReport
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.control.messages import VERSIONS as CONTROL_VERSIONS
from kvferry.transfer.layout import KVGeometry

_PROBE_S = 0.5
_POLL_S = 0.1

log = logging.getLogger(__name__)


class EngineLoad(Protocol):
    """What is reported of an engine's work, as the connector's scheduler side counts it."""

    @property
    def requests(self) -> int: ...

    @property
    def running(self) -> int: ...

    @property
    def steps(self) -> int: ...

    @property
    def leased_blocks(self) -> int: ...

    @property
    def work(self) -> WorkReport | None: ...

    @property
    def capacity(self) -> Capacity | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What does not change while a server runs.

    Attributes:
        address: URL of its API; `host`: at which other engines reach its plane.
        api: Host and port at which this process finds the API.
        host_id, dp_rank: As in `Register`.
        control: As in `Register`; the plane's control channel when not given.
    """

    dialect: str
    address: str
    host: str
    api: tuple[str, int]
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
    device: str
    host_id: str
    prefill_chunk: int | None = None
    name: str = ""
    dp_rank: int | None = None
    control: str = ""


class Announcement:
    """Pings the proxies while `run` runs, and says bye at its end.

    Asked to drain, by a proxy or on the drain socket, it announces that, until no proxy has a request for the
    server, none runs, and no KV is leased. Then it says so on the socket: the process that has started the
    server ends it, and gives this one no time for a bye then, so it is said before. Without such a process
    the server goes on, and so do the pings.

    Args:
        drain_socket: Path of the socket of the process that has started the server (`drain_socket`); empty
            where there is none.
        free_blocks: How many of the engine's KV blocks are free.
    """

    def __init__(
        self,
        server: Server,
        load: EngineLoad,
        free_blocks: Callable[[], int],
        *,
        proxies: Sequence[str],
        key: ClusterKey | None = None,
        drain_socket: str = "",
    ) -> None:
        self._server = server
        # Made once, not with each ping: this thread shares the interpreter with the engine's scheduler.
        self._geometry = {name: str(value) for name, value in msgspec.structs.asdict(server.geometry).items()}
        self._layout = server.geometry.fingerprint()
        self._version = VERSION
        self._started_at = time.monotonic()
        self._load = load
        self._free_blocks = free_blocks
        self._drain_socket = drain_socket
        self._asked = asyncio.Event()
        self._membership = Membership(
            proxies, self._describe, key=key, asked_to_drain=self._asked.set, is_ready=self._api_listens
        )
        self._plane: SchedulerConnector | None = None

    async def run(self, plane: SchedulerConnector) -> None:
        """Ping until cancelled."""
        self._plane = plane
        async with asyncio.TaskGroup() as tasks:
            pinging = tasks.create_task(self._membership.run())
            tasks.create_task(self._drain_when_asked(plane, pinging))

    async def _drain_when_asked(self, plane: SchedulerConnector, pinging: asyncio.Task[None]) -> None:
        starter: DrainConnection | None = None
        try:
            if self._drain_socket:
                starter = await DrainConnection.open(self._drain_socket)
            await self._wait_asked(starter)
            log.info("drains: it takes nothing new, and finishes what it has")
            self._membership.start_draining()
            await self._membership.wait_released()
            await self._wait_unneeded(plane)
            log.info("has drained")
            if starter is not None:
                pinging.cancel()
                await asyncio.wait([pinging])
                await starter.say_drained()
        except OSError as error:  # its end ends this process too, in a moment
            log.warning("the drain socket failed: %s", error)
        finally:
            if starter is not None:
                starter.close()

    async def _wait_asked(self, starter: DrainConnection | None) -> None:
        async with asyncio.TaskGroup() as tasks:
            reading = None if starter is None else tasks.create_task(starter.read(self._asked.set))
            await self._asked.wait()
            if reading is not None:
                reading.cancel()

    async def _wait_unneeded(self, plane: SchedulerConnector) -> None:
        """Wait until nothing runs and nothing is leased. Looked at twice: in between a lease begins."""
        idle = 0
        while idle < 2:
            is_idle = not self._load.requests and not plane.stats().leased
            idle = idle + 1 if is_idle else 0
            await asyncio.sleep(_POLL_S)

    def _describe(self, index: int, state: NodeState) -> Register | None:
        """The next ping. Called in the thread that pings."""
        server, plane = self._server, self._plane
        if plane is None:
            return None
        running = min(self._load.running, self._load.requests)
        return Register(
            role=server.role,
            incarnation=server.incarnation,
            index=index,
            address=server.address,
            control=server.control or f"tcp://{host_port(server.host, plane.control_port)}",
            dialect=server.dialect,
            name=server.name,
            model=server.model,
            max_model_len=server.max_model_len,
            prefill_chunk=server.prefill_chunk,
            tp_size=server.tp_size,
            dp_size=1,
            dp_rank=server.dp_rank,
            transfers=plane.transfers,
            host_id=server.host_id,
            geometry=self._geometry,
            layout=self._layout,
            weights=server.weights,
            tokenizer=server.tokenizer,
            transfer_mode="read",
            version=self._version,
            state=state,
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
            device=server.device,
            uptime_s=time.monotonic() - self._started_at,
        )

    def _api_listens(self) -> bool:
        """Whether the API accepts connections, which it does once the engine has started."""
        try:
            socket.create_connection(self._server.api, _PROBE_S).close()
        except OSError:
            return False
        return True

# SPDX-License-Identifier: Apache-2.0
"""A proxy of several processes (`--workers`): this one is the hub, and keeps the others running.

    agents ── pings ──▶ hub: discovery, registry, limits, queues, breakers
                         ▲ ▲ a link each (`link`): who may go where, what came of it, what was counted
    clients ── HTTP ──▶ workers, all on one port (SO_REUSEPORT) ── HTTP ──▶ agents

A worker that ends is replaced: the streams of the others go on, and what it held at agents is free at once.
When workers end again and again, the whole proxy does. When the hub ends, its workers do: they finish what
they have, within `drain_s`, and accept nothing more.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import msgspec

from kvferry.proxy.config import ProxyConfig, config_to_json
from kvferry.proxy.discovery.discovery import all_servers, membership
from kvferry.proxy.fleet.fleet import LocalFleet
from kvferry.proxy.server import Keys, base_url, listening_socket
from kvferry.proxy.telemetry.history import History
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.workers.hub import Hub, WorkerLink
from kvferry.proxy.workers.link import Link
from kvferry.proxy.workers.link_messages import Begin, ToHub

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
END_TIMEOUT_S = 5.0
"""For a worker to exit once its link has ended, or its requests were cut."""
PAUSE_S = 0.2
MAX_DEATHS = 5
DEATHS_WITHIN_S = 60.0


class WorkersFailed(RuntimeError):
    """Workers do not start, or end too often."""


@dataclass(frozen=True, slots=True)
class RunningWorkers:
    """A proxy of several processes, and where it serves."""

    config: ProxyConfig
    port: int
    discovery_port: int

    @property
    def url(self) -> str:
        """Base URL for clients."""
        return base_url(self.config, self.port)


@asynccontextmanager
async def running_workers(config: ProxyConfig) -> AsyncIterator[RunningWorkers]:
    """Serve for as long as the context is open; it ends as that of `server.running_proxy` does.

    Raises what that one raises, and `WorkersFailed`, maybe in an exception group.
    """
    keys, servers = Keys.read(config), all_servers(config)
    fleet = LocalFleet(config, Metrics(), History(), asyncio.get_running_loop().time)
    with reserved_port(config.host, config.port) as port:
        async with (
            membership(config, servers, fleet, keys.cluster) as discovery_port,
            asyncio.TaskGroup() as tasks,
        ):
            crew = Crew(config, Hub(fleet), port)
            kept = [tasks.create_task(crew.keep_one()) for _ in range(config.workers)]
            try:
                await crew.complete()
                yield RunningWorkers(config, port, discovery_port)
            finally:
                crew.stop()
                await asyncio.wait(kept, timeout=config.drain_s + 2 * END_TIMEOUT_S)
                for task in kept:
                    task.cancel()


class Crew:
    """The workers of one proxy, as processes."""

    def __init__(self, config: ProxyConfig, hub: Hub, port: int) -> None:
        self._config = config
        self._begin = Begin(config=config_to_json(config), port=port)
        self._hub = hub
        self._deaths: deque[float] = deque()
        self._stopping = False
        self._to_come = asyncio.Semaphore(0)
        """Released by every worker once it listens."""

    async def complete(self) -> None:
        """Wait until as many workers as there are to be have begun to listen. Raises `WorkersFailed`."""
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                for _ in range(self._config.workers):
                    await self._to_come.acquire()
        except TimeoutError:
            raise WorkersFailed(f"the workers did not start within {START_TIMEOUT_S:.0f} s") from None

    def stop(self) -> None:
        """Tell all to end, and replace none from now on."""
        self._stopping = True
        self._hub.stop()

    async def keep_one(self) -> None:
        """Keep one worker running until the crew is stopped. Raises `WorkersFailed`."""
        while not self._stopping:
            status = await self._run_one()
            if self._stopping:
                return
            logger.error("a worker ended with status %d and is replaced", status)
            self._count_death()
            await asyncio.sleep(PAUSE_S)

    async def _run_one(self) -> int:
        """The life of one process; returns its exit status (negative: the signal it died of)."""
        ours, theirs = socket.socketpair()
        with theirs:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "kvferry.proxy.workers.worker", str(theirs.fileno())),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,  # stdout is for the line that says where the proxy listens
                start_new_session=True,
            )
        try:
            link: WorkerLink = await Link.over(ours, msgspec.msgpack.Decoder(ToHub))
            link.send(self._begin)
            listening = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                starting = tasks.create_task(self._await_start(listening, link))
                await self._hub.serve(link, listening)
                starting.cancel()
        finally:
            await _reap(child)
        assert child.returncode is not None
        return child.returncode

    async def _await_start(self, listening: asyncio.Event, link: WorkerLink) -> None:
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await listening.wait()
        except TimeoutError:
            logger.error("a worker did not start within %.0f s", START_TIMEOUT_S)
            link.close()
            return
        self._to_come.release()

    def _count_death(self) -> None:
        now = asyncio.get_running_loop().time()
        self._deaths.append(now)
        while self._deaths[0] < now - DEATHS_WITHIN_S:
            self._deaths.popleft()
        if len(self._deaths) > MAX_DEATHS:
            raise WorkersFailed(f"{len(self._deaths)} workers have ended within {DEATHS_WITHIN_S:.0f} s")


@contextmanager
def reserved_port(host: str, port: int) -> Iterator[int]:
    """Hold a TCP port on which this process's workers may listen; 0 lets the OS choose.

    Raises `OSError` when somebody else listens there: sharing the port with a stranger would be silent.
    """
    with listening_socket(host, port) as alone:
        port = alone.getsockname()[1]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        holder.bind((host, port))
        yield port


async def _reap(child: asyncio.subprocess.Process) -> None:
    """Wait for a process whose link has ended, and kill it when it does not exit."""
    try:
        async with asyncio.timeout(END_TIMEOUT_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()

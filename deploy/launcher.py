# SPDX-License-Identifier: Apache-2.0
"""Start a proxy and its agents as local processes, watch them, and stop them.

`kvferry up`, `make demo` and the system tests all start the product through this module.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

import msgspec

from kvferry.agent.config import START_TIMEOUT_S
from kvferry.common.addresses import WILDCARDS
from kvferry.common.child_process import WAS_KILLED, ChildProcess
from kvferry.common.exceptions import message_of, system_reason
from kvferry.common.options import as_json
from kvferry.common.roles import Role
from kvferry.deploy.http_client import StatusFailed, client_session, fetch_nodes

LISTENING_TIMEOUT_S = 180.0
PROGRESS_S = 10.0
"""What is waited for is said again this often."""
MAX_PROGRESS_CHARS = 200
STOP_GRACE_S = 10.0
POLL_INTERVAL_S = 0.2
MIN_RESTART_PAUSE_S = 1.0
MAX_RESTART_PAUSE_S = 30.0
STABLE_S = 60.0
PIPE_CLOSE_S = 5.0
LISTENING_LINE_LIMIT = 4096
READ_SETTINGS = ("--config", "-")
"""What has a process read its settings, as JSON, from its standard input."""
MAX_LOG_BYTES = 16 * 1024 * 1024
"""A log that is larger is moved to a file beside it, which is overwritten."""
LOG_CHECK_S = 10.0
MAX_REASON_LINES = 1000
"""The last lines of a log in which the reason of an end is looked for."""
_ERROR_LINE = re.compile(r"\S+ \S+ ERROR \S+ (.*)")


class LaunchError(RuntimeError):
    """A process of the cluster ended, or did not become ready; the message says which and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSpec:
    """One agent to start.

    `settings` are its options by the names of their fields; `args` are words after them, as on its command
    line. `module` is run as the agent, with `environment` beside the variables that there are.
    `listening_timeout_s`: how long it may take until it listens.
    """

    name: str
    role: Role
    settings: dict[str, Any] = field(default_factory=dict)
    args: tuple[str, ...] = ()
    module: str = "kvferry.agent"
    environment: dict[str, str] = field(default_factory=dict)
    listening_timeout_s: float = LISTENING_TIMEOUT_S


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """A proxy and its agents on this machine. Port 0 lets the OS choose.

    `proxy_settings` and `proxy_args` are as those of an agent. `trust`: how the proxy's certificate is
    checked, where they make it serve https. `admin_key`: the key for its list of agents, where they make it
    need one.
    """

    model: str
    agents: tuple[AgentSpec, ...]
    log_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    discovery_port: int = 0
    proxy_settings: dict[str, Any] = field(default_factory=dict)
    proxy_args: tuple[str, ...] = ()
    trust: ssl.SSLContext | None = None
    admin_key: str | None = None


def agent_command(agent: AgentSpec, model: str, host: str, proxy: str) -> tuple[tuple[str, ...], bytes]:
    """Return the words after `python` that start an agent on free ports of `host`, and what it reads then.

    `proxy`: HOST:PORT of the proxy that it announces itself to.
    """
    chosen = {
        "role": agent.role, "model": model, "host": host, "port": 0, "control_port": 0, "proxy": [proxy],
    }  # fmt: skip
    return ("-m", agent.module, *READ_SETTINGS, *agent.args), as_json(chosen | agent.settings)


class RunLog(Protocol):
    """What one run of a process has written to its log."""

    def tail(self, lines: int) -> str: ...


@dataclass(frozen=True, slots=True)
class LogFile:
    """The log of a process that writes to a file. What precedes `start`, in bytes, is of another run."""

    path: Path
    start: int = 0

    def tail(self, lines: int) -> str:
        with self.path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(self.start if self.start <= size else 0)  # else it was rotated since
            written = log.read().decode(errors="replace")
        return "\n".join(written.splitlines()[-lines:])

    def read_text(self) -> str:
        return self.path.read_text()

    def append(self, lines: Sequence[str]) -> None:
        """Add lines of a process that runs elsewhere. Raises OSError."""
        with self.path.open("a") as log:
            log.writelines(f"{line}\n" for line in lines)
        self.rotate()

    def rotate(self) -> None:
        """Move the content to `NAME.log.1` if there is much of it. Lines written meanwhile may be lost: the
        process keeps its file.
        """
        with suppress(OSError):  # a full disk, or a file that was removed, is no reason to end
            if self.path.stat().st_size > MAX_LOG_BYTES:
                with suppress(OSError):
                    shutil.copyfile(self.path, f"{self.path}.1")
                os.truncate(self.path, 0)


class _JsonLine(msgspec.Struct):
    """A line of a log in JSON (`kvferry.common.telemetry.logs`)."""

    level: str
    message: str
    exception: str = ""


def reason_in(lines: Sequence[str]) -> str:
    """Return why a process has ended, by its log in either format: the first error, or else the last line."""
    errors = (error for line in lines if (error := _error_of(line)))
    return next(errors, lines[-1] if lines else "its log is empty")


def how_it_ended(status: int, log: RunLog) -> str:
    """Return a process's exit status and why: its last line, but of one that was killed, which has not
    written why, and of one that ended well."""
    if status == 0:
        return "0"
    if status == -signal.SIGKILL:
        return f"{status}: {WAS_KILLED}"
    return f"{status}: {log.tail(1) or 'its log is empty'}"


def _error_of(line: str) -> str:
    """Return what a line says if it is an error; else an empty string."""
    if not line.startswith("{"):
        found = _ERROR_LINE.fullmatch(line)
        return found[1] if found else ""
    try:
        record = msgspec.json.decode(line, type=_JsonLine)
    except (msgspec.DecodeError, UnicodeError):
        return ""
    if record.level not in ("ERROR", "CRITICAL"):
        return ""
    return ": ".join([record.message, *record.exception.splitlines()[-1:]])


@dataclass(slots=True)
class Process:
    """One started process. `listening`: the addresses that it printed when it was ready to accept."""

    process: ChildProcess
    log: RunLog
    listening: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def url(self) -> str:
        return str(self.listening["url"])

    def log_tail(self, lines: int = 8) -> str:
        """Return the last lines of its log."""
        return self.log.tail(lines)

    def log_reason(self) -> str:
        """Return why it ended, in one line."""
        return reason_in(self.log_tail(MAX_REASON_LINES).splitlines())

    async def wait_listening(
        self, timeout_s: float = LISTENING_TIMEOUT_S, progress: Callable[[str], None] = lambda _: None
    ) -> None:
        """Wait for the line on stdout with the addresses that it listens at.

        Raises `LaunchError` when it ends or prints nothing in time; then, and when cancelled, it is stopped.
        """
        try:
            line = await asyncio.wait_for(self._first_line(progress), timeout_s)
            self.listening = json.loads(line)["listening"]
        except (TimeoutError, ValueError, KeyError) as error:
            await self.stop()
            raise LaunchError(f"{self.name} did not start: {self.log_reason()}") from error
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def _first_line(self, progress: Callable[[str], None]) -> bytes:
        reading = asyncio.ensure_future(self.process.stdout.readline())
        began = asyncio.get_running_loop().time()
        try:
            while not (await asyncio.wait({reading}, timeout=PROGRESS_S))[0]:
                waited_s = asyncio.get_running_loop().time() - began
                words = f"{self.name} has been starting for {waited_s:.0f} s: {self.log_tail(1)}"
                progress(words[:MAX_PROGRESS_CHARS])
            return await reading
        finally:
            reading.cancel()

    async def stop(self, grace_s: float = STOP_GRACE_S, signum: signal.Signals = signal.SIGTERM) -> None:
        """Ask it to end, and kill it after `grace_s`. Returns once it is reaped."""
        await self.process.stop(grace_s, signum)
        await asyncio.wait_for(self.process.stdout.read(), PIPE_CLOSE_S)


async def start_process(
    name: str,
    argv: Sequence[str],
    log_dir: Path,
    timeout_s: float = LISTENING_TIMEOUT_S,
    environment: Mapping[str, str] = MappingProxyType({}),
    progress: Callable[[str], None] = lambda _: None,
    stdin: bytes = b"",
) -> Process:
    """Start `python argv…` and wait for the line on stdout with the addresses that it listens at.

    Its stderr goes to `log_dir/name.log`; meanwhile `progress` is called with its last line now and then.
    Raises `LaunchError` when it ends or prints nothing in time.
    """
    path = log_dir / f"{name}.log"
    with _open_log(path) as stderr:
        log = LogFile(path, stderr.seek(0, os.SEEK_END))
        child = await ChildProcess.start(
            argv,
            name,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            environment=environment,
            max_line_bytes=LISTENING_LINE_LIMIT,
            ends_with_us=signal.SIGTERM,
        )
    process = Process(child, log)
    await process.wait_listening(timeout_s, progress)
    return process


def _open_log(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def listen_error(host: str, port: int) -> str | None:
    """Return why this port cannot be listened at now, or None."""
    try:
        with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
            return None
    except OSError as error:
        # Of a name that has no address the number is not the system's.
        return system_reason(error)


class Backoff:
    """Pauses between restarts: each twice the one before, unless the process ran for `STABLE_S` meanwhile."""

    def __init__(self) -> None:
        self._pause_s = MIN_RESTART_PAUSE_S

    def after(self, ran_s: float) -> float:
        """Return the pause before the next start, after a run of `ran_s`."""
        pause_s = MIN_RESTART_PAUSE_S if ran_s > STABLE_S else self._pause_s
        self._pause_s = min(2 * pause_s, MAX_RESTART_PAUSE_S)
        return pause_s


class Cluster:
    """A running cluster: an async context that starts every process and stops them all.

    `progress` is called with what happens, in a line.
    """

    def __init__(self, spec: ClusterSpec, progress: Callable[[str], None] = lambda _: None) -> None:
        self.spec = spec
        self._progress = progress
        self.agents: dict[str, Process] = {}
        self.proxy: Process
        self._stack = AsyncExitStack()
        self._started: list[Process] = []

    async def __aenter__(self) -> Cluster:
        try:
            await self._start_proxy(self.spec.port, self.spec.discovery_port)
            if self.spec.agents:
                names = ", ".join(agent.name for agent in self.spec.agents)
                self._progress(f"the proxy listens at {self.url}; starting {names}")
            starts = [self.start_agent(agent) for agent in self.spec.agents]
            await asyncio.gather(*starts)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for agent in self.agents.values():
            agent.process.ask_to_end(signal.SIGINT)  # all at once; the proxy is stopped after them
        await self._stack.aclose()

    def kill(self) -> None:
        """End every process at once; leaving the context reaps them."""
        for process in self._started:
            process.process.kill()

    @property
    def url(self) -> str:
        """Base URL of the proxy."""
        return self.proxy.url

    @property
    def processes(self) -> list[Process]:
        return [self.proxy, *self.agents.values()]

    async def start_agent(self, agent: AgentSpec) -> Process:
        """Start one agent, or restart one that has ended."""
        proxy = f"{self._agent_host}:{self.proxy.listening['discovery_port']}"
        words, stdin = agent_command(agent, self.spec.model, self._agent_host, proxy)
        process = await self._start(
            agent.name, words, stdin, timeout_s=agent.listening_timeout_s, environment=agent.environment
        )
        self.agents[agent.name] = process
        return process

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait until the proxy sees every agent ready, and return what clients call their model.

        Raises `LaunchError` on a death or on the deadline.
        """

        async def urls() -> Mapping[str, str]:
            return {name: agent.url for name, agent in self.agents.items()}

        return await self.wait_listed(urls, timeout_s)

    async def wait_listed(self, urls: Callable[[], Awaitable[Mapping[str, str]]], timeout_s: float) -> str:
        """As `wait_ready`, for agents that may run elsewhere.

        `urls` returns where each of them listens, empty for those that have not started, or raises
        `LaunchError`.
        """
        last, clock = "", asyncio.get_running_loop().time
        begun = said = clock()
        try:
            async with (
                asyncio.timeout(timeout_s),
                client_session(self.spec.trust, self.spec.admin_key, timeout_s) as http,
            ):
                while True:
                    self.check_alive()
                    agents = await urls()
                    nodes = (await fetch_nodes(http, self.url)).nodes
                    ready = {node.address: node.model for node in nodes if node.state == "ready"}
                    waiting = [name for name, url in agents.items() if url not in ready]
                    words = f"{len(agents) - len(waiting)} of {len(agents)} agents ready"
                    if waiting:
                        words += f", waiting for {', '.join(sorted(waiting))}"
                    if words != last or clock() - said > PROGRESS_S:
                        seconds = f" for {clock() - begun:.0f} s" if words == last else ""
                        self._progress(words + seconds)
                        last, said = words, clock()
                    if not waiting:
                        return ", ".join(sorted({ready[url] for url in agents.values()}))
                    await asyncio.sleep(POLL_INTERVAL_S)
        except StatusFailed as error:
            raise LaunchError(str(error)) from error
        except TimeoutError as error:
            raise LaunchError(f"not ready after {timeout_s:.0f} s: {last}") from error

    def check_alive(self) -> None:
        """Raise `LaunchError`, with the reason by its log, if any process has ended."""
        for process in self.processes:
            if process.process.returncode is not None:
                status = process.process.returncode
                raise LaunchError(f"{process.name} ended with {status}: {process.log_reason()}")

    async def keep_running(self) -> None:
        """Restart every process that ends, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._rotate_logs())
            tasks.create_task(self._keep("proxy", lambda: self.proxy, self._restart_proxy))
            for agent in self.spec.agents:
                current, restart = (
                    partial(self.agents.__getitem__, agent.name),
                    partial(self._restart_agent, agent),
                )
                tasks.create_task(self._keep(agent.name, current, restart))

    async def _rotate_logs(self) -> None:
        while True:
            for process in self.processes:
                if isinstance(process.log, LogFile):
                    await asyncio.to_thread(process.log.rotate)
            await asyncio.sleep(LOG_CHECK_S)

    async def _keep(
        self,
        name: str,
        current: Callable[[], Process],
        restart: Callable[[], Awaitable[Process]],
    ) -> None:
        backoff, clock = Backoff(), asyncio.get_running_loop().time
        while True:
            process, since = current(), clock()
            status = await process.process.wait()
            why = f"{name} ended with {how_it_ended(status, process.log)}"
            ran_s, again = clock() - since, None
            while again is None:
                pause_s = backoff.after(ran_s)
                self._progress(f"{why}; it is started again in {pause_s:.0f} s")
                await asyncio.sleep(pause_s)
                try:
                    again = await restart()
                except (LaunchError, OSError) as error:
                    why, ran_s = message_of(error), 0.0
            self._progress(f"{name} is started again: process {again.pid}, {again.url}")

    @property
    def _agent_host(self) -> str:
        """Where agents listen, and find the proxy: on this machine."""
        return "127.0.0.1" if self.spec.host in WILDCARDS else self.spec.host

    async def _restart_agent(self, agent: AgentSpec) -> Process:
        """Start an agent that has ended, at its address if that is still free: this is how it is known."""
        port = urlsplit(self.agents[agent.name].url).port
        if port and listen_error(self._agent_host, port) is None:
            agent = replace(agent, settings={"port": port} | agent.settings)
        return await self.start_agent(agent)

    async def _restart_proxy(self) -> Process:
        ports = self.proxy.listening
        return await self._start_proxy(ports["port"], ports["discovery_port"])

    async def _start_proxy(self, port: int, discovery_port: int) -> Process:
        chosen = {"host": self.spec.host, "port": port, "discovery_port": discovery_port}
        words = ("-m", "kvferry.proxy", *READ_SETTINGS, *self.spec.proxy_args)
        self.proxy = await self._start("proxy", words, as_json(chosen | self.spec.proxy_settings))
        return self.proxy

    async def _start(
        self,
        name: str,
        words: Sequence[str],
        stdin: bytes,
        *,
        timeout_s: float = LISTENING_TIMEOUT_S,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Process:
        process = await start_process(
            name, words, self.spec.log_dir, timeout_s, environment, self._progress, stdin
        )
        self._started = [each for each in self._started if each.process.returncode is None] + [process]
        # As Ctrl-C does: draining may take a minute.
        self._stack.push_async_callback(process.stop, signum=signal.SIGINT)
        return process

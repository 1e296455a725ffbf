# SPDX-License-Identifier: Apache-2.0
"""The Ray actor that supervises one agent: it runs its ordinary process where Ray has placed it.

Nothing of a request passes through Ray: clients, proxy and agents speak to each other as they do without it.
This module can be imported without Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import secrets
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator

import msgspec

from kvferry.common.child_process import ChildProcess
from kvferry.common.state_machine import transition, transitions
from kvferry.deploy.launcher import PIPE_CLOSE_S, AgentSpec, Backoff, LaunchError, Process, agent_command

MAX_KEPT_LINES = 2_000
MAX_REPORTED_LINES = 500
MAX_LINE_BYTES = 64 << 10


class SupervisionState(enum.Enum):
    """What an actor is doing about its agent."""

    STARTING = "starting"
    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"


SUPERVISION_TRANSITIONS = transitions(
    {
        SupervisionState.STARTING: {
            SupervisionState.RUNNING,
            SupervisionState.PAUSED,
            SupervisionState.STOPPED,
        },
        SupervisionState.RUNNING: {SupervisionState.PAUSED, SupervisionState.STOPPED},
        SupervisionState.PAUSED: {SupervisionState.STARTING, SupervisionState.STOPPED},
    }
)


class AgentOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor runs. `proxy`: HOST:PORT where the agent announces itself."""

    agent: AgentSpec
    model: str
    proxy: str


class AgentReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an actor says of its agent.

    `actor_run`: differs when Ray has constructed the actor again. `node`: the address of its node. `starts`:
    how often it was started by this run. `note`: how its last run ended. `lines`: of its log, those up to
    number `last_line` that were asked for.
    """

    name: str
    actor_run: str
    node: str
    state: SupervisionState
    url: str = ""
    pid: int | None = None
    starts: int = 0
    note: str = ""
    lines: list[str] = []
    last_line: int = 0


class RelayedLog:
    """The last lines of an agent's log, numbered from 1; each is also written to Ray's log of the actor."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=MAX_KEPT_LINES)
        self.last = 0
        self._run_start = 0

    def begin_run(self) -> None:
        """What follows is of another run: `tail` returns nothing older."""
        self._run_start = self.last

    def add(self, line: str) -> None:
        self._lines.append(line)
        self.last += 1

    def tail(self, lines: int) -> str:
        count = min(lines, self.last - self._run_start, len(self._lines))
        return "\n".join(list(self._lines)[len(self._lines) - count :])

    def after(self, number: int) -> tuple[list[str], int]:
        """Return lines that follow line `number`, as far as they are kept, and the number of their last."""
        first = max(number, self.last - len(self._lines))
        skipped = len(self._lines) - (self.last - first)
        lines = list(self._lines)[skipped : skipped + MAX_REPORTED_LINES]
        return lines, first + len(lines)

    async def relay(self, pipe: asyncio.StreamReader) -> None:
        """Read a pipe until it is closed by all who write to it."""
        while True:
            try:
                read = await pipe.readline()
            except ValueError:
                read = b"(a line that is too long is left out)\n"
            if not read:
                return
            line = read.decode(errors="replace").rstrip("\n")
            self.add(line)
            print(line, file=sys.stderr, flush=True)


class AgentActor:
    """Runs one agent on this node, and again when it ends, until `stop`.

    When the node dies Ray constructs the actor again on another one, with the same arguments.

    Args:
        order: An `AgentOrder` as JSON.
    """

    def __init__(self, order: bytes) -> None:
        from ray.util import get_node_ip_address

        self._order = msgspec.json.decode(order, type=AgentOrder)
        self._actor_run = secrets.token_hex(8)
        self._node = get_node_ip_address()
        self._log = RelayedLog()
        self._state = SupervisionState.STARTING
        self._process: Process | None = None
        self._starts = 0
        self._note = ""
        self._supervising = asyncio.get_running_loop().create_task(self._supervise())

    def __repr__(self) -> str:
        return self._order.agent.name

    async def report(self, after: int) -> bytes:
        """Return an `AgentReport` as JSON, with lines of the log that follow line number `after`."""
        process = self._process if self._state is SupervisionState.RUNNING else None
        lines, last = self._log.after(after)
        report = AgentReport(
            name=self._order.agent.name,
            actor_run=self._actor_run,
            node=self._node,
            state=self._state,
            url="" if process is None else process.url,
            pid=None if process is None else process.pid,
            starts=self._starts,
            note=self._note,
            lines=lines,
            last_line=last,
        )
        return msgspec.json.encode(report)

    async def stop(self) -> None:
        """End the agent, as Ctrl-C does. Returns when it has ended."""
        if self._state is not SupervisionState.STOPPED:
            self._transition(SupervisionState.STOPPED)
            self._supervising.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervising

    async def _supervise(self) -> None:
        backoff, clock = Backoff(), asyncio.get_running_loop().time
        while True:
            began = clock()
            self._note = await self._run_once()
            self._transition(SupervisionState.PAUSED)
            await asyncio.sleep(backoff.after(clock() - began))
            self._transition(SupervisionState.STARTING)

    async def _run_once(self) -> str:
        """Start the agent and wait for its end; when cancelled, end it. Returns how it ended, in one line."""
        self._starts += 1
        self._log.begin_run()
        try:
            async with self._started() as process:
                self._process = process
                self._transition(SupervisionState.RUNNING)
                ended = f"ended with {await process.process.wait()}"
        except (LaunchError, OSError):
            ended = "did not start"
        return f"{ended}: {self._log.tail(1) or 'its log is empty'}"

    @contextlib.asynccontextmanager
    async def _started(self) -> AsyncIterator[Process]:
        """A process of the agent that listens. Raises `LaunchError`, and OSError if none can be made."""
        order = self._order
        words, stdin = agent_command(order.agent, order.model, self._node, order.proxy)
        child = await ChildProcess.start(
            ("-m", "kvferry.deploy.ray.child", *words),
            order.agent.name,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            environment=order.agent.environment,
            max_line_bytes=MAX_LINE_BYTES,
        )
        process = Process(child, self._log)
        relaying = asyncio.ensure_future(self._log.relay(child.stderr))
        try:
            await process.wait_listening(order.agent.listening_timeout_s)
            yield process
        finally:
            await process.stop(signum=signal.SIGINT)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(relaying, PIPE_CLOSE_S)

    def _transition(self, to: SupervisionState) -> None:
        self._state = transition(self._order.agent.name, SUPERVISION_TRANSITIONS, self._state, to)

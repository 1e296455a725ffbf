# SPDX-License-Identifier: Apache-2.0
"""Starts one process per tensor-parallel rank, sends every step to all of them, and gathers their replies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvferry.agent.architectures import REFUSED_STATUS
from kvferry.agent.messages.steps import (
    Boot,
    FromRank,
    RankReady,
    Step,
    StepOutputs,
    StepWritten,
    StopRank,
    ToRank,
    step_address,
)
from kvferry.common.child_process import ChildProcess
from kvferry.transfer.ranks.channel import RankConnection, RankGone, RankListener

RANK_MODULE = "kvferry.agent.worker.process"

log = logging.getLogger(__name__)


class BrokenRank(RuntimeError):
    """A rank process ended or sent an unexpected message; its group cannot go on.

    `status` is the exit status that this agent's other processes end with.
    """

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


class Executor:
    """The rank processes of one agent. `run` is called by one task at a time; `watch` runs beside it.

    Both sides of the channel use one address in the agent's private directory. A step is sent to each rank
    and is over when each has replied; the engine's event loop only waits.
    """

    def __init__(self, boot: Boot, run_dir: Path, rank_module: str = RANK_MODULE) -> None:
        """`rank_module` is run as each rank process."""
        self._boot = boot
        self._rank_module = rank_module
        self._run_dir = run_dir
        self._size = boot.config.tp
        self._children: list[ChildProcess] = []
        # Two frames a rank at most: its step is written, and done.
        self._received: asyncio.Queue[tuple[RankConnection, bytes]] = asyncio.Queue()
        self._listener = RankListener(
            lambda connection, frame: self._received.put_nowait((connection, frame))
        )
        self._ranks: dict[int, RankConnection] = {}
        self._decoder = msgspec.msgpack.Decoder(FromRank)

    async def start(self, timeout_s: float) -> RankReady:
        """Start the ranks and wait until each has its weights and its pool.

        Raises:
            BrokenRank: a rank ended, or was not ready within `timeout_s`; the caller must `close`.
        """
        await self._listener.start(step_address(self._run_dir))
        stdin = msgspec.json.encode(msgspec.structs.replace(self._boot, curve_secret=None))
        for rank in range(self._size):
            argv = [
                "-m",
                self._rank_module,
                "--run-dir",
                str(self._run_dir),
                "--rank",
                str(rank),
            ]
            self._children.append(await ChildProcess.start(argv, f"rank {rank}", stdin=stdin))
        watch = asyncio.ensure_future(self.watch())
        ready = asyncio.ensure_future(self._all_ready())
        try:
            done, _ = await asyncio.wait(
                {watch, ready}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise BrokenRank(f"the ranks were not ready within {timeout_s:.0f} s")
            return ready.result() if ready in done else watch.result()
        finally:
            for task in (watch, ready):
                task.cancel()
            await asyncio.gather(watch, ready, return_exceptions=True)

    async def run(self, step: Step, on_written: Callable[[], None]) -> StepOutputs:
        """Run one step on every rank.

        The step's writes to the pool are complete on every rank when this returns; if the step asks for it,
        `on_written` is called as soon as they are. A rank's death raises in `watch`, not here.
        """
        self._broadcast(step)
        outputs: StepOutputs | None = None
        unwritten, unfinished = set(range(self._size)), set(range(self._size))
        while unfinished:
            _, reply = await self._receive()
            if isinstance(reply, RankReady) or reply.number != step.number:
                raise BrokenRank(f"a rank replied to step {step.number} with {reply}")
            if isinstance(reply, StepWritten):
                unwritten.discard(reply.rank)
                if not unwritten:
                    on_written()
                continue
            unfinished.discard(reply.rank)
            outputs = reply.outputs if reply.rank == 0 else outputs
        if outputs is None:
            raise BrokenRank("rank 0 sent no tokens")
        return outputs

    async def watch(self) -> RankReady:
        """Wait until a rank process ends, and raise `BrokenRank`."""
        waits = {asyncio.ensure_future(child.wait()): child for child in self._children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        ended = [f"{waits[wait].name} ended with status {waits[wait].returncode}" for wait in done]
        refused = any(waits[wait].returncode == REFUSED_STATUS for wait in done)
        raise BrokenRank("; ".join(ended), REFUSED_STATUS if refused else 1)

    async def close(self, *, grace_s: float) -> None:
        """Send `StopRank`, kill the ranks still alive after `grace_s` seconds, and reap all of them."""
        try:
            if grace_s:
                await self._request_stop(grace_s)
        finally:
            await asyncio.gather(*(child.stop(grace_s=0.0) for child in self._children))
            self._listener.close()

    async def _request_stop(self, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                self._broadcast(StopRank())
                for child in self._children:
                    await child.wait()
        except TimeoutError:  # a rank that hangs, or one that never connected
            return

    async def _all_ready(self) -> RankReady:
        reports: dict[int, RankReady] = {}
        while len(reports) < self._size:
            connection, report = await self._receive()
            if not isinstance(report, RankReady):
                raise BrokenRank(f"a rank's first message was {report}")
            reports[report.rank] = report
            self._ranks[report.rank] = connection
        return reports[0]

    def _broadcast(self, message: ToRank) -> None:
        frame = msgspec.msgpack.encode(message)
        for rank, connection in self._ranks.items():
            try:
                connection.send(frame)
            except RankGone as error:  # `watch` sees it too
                log.debug("rank %d: message not sent: %s", rank, error)

    async def _receive(self) -> tuple[RankConnection, FromRank]:
        connection, frame = await self._received.get()
        message: FromRank = self._decoder.decode(frame)
        return connection, message

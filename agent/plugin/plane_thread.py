# SPDX-License-Identifier: Apache-2.0
"""The transfer plane on an event loop and thread of its own, beside a scheduler that has neither.

Calls are posted and return at once; what comes of them are events. So a scheduler's step never waits for the
plane, and renewals and responses never wait for a step.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from kvferry.agent.plugin.kept_prompts import KeptEnded, KeptPrompts
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.events import LeaseEnded, LoanRequested, PlaneEvent, PullFailed
from kvferry.transfer.ids import DuplicateTransfer
from kvferry.transfer.plane import BlockRun, PlaneConfig, RemotePrompt
from kvferry.transfer.sampled_tokens import SampledTokens

_CLOSE_S = 5.0
_WITHDRAW_S = 30.0
_PARENT_POLL_S = 0.25
"""Where the kernel (or a sandbox in its place) has no process descriptors."""

log = logging.getLogger(__name__)


class LeaseRefused(msgspec.Struct, frozen=True, kw_only=True):
    """Producer: there is no lease, since the transfer id was used before; the blocks may be freed."""

    transfer_id: str


Event = PlaneEvent | LeaseRefused | KeptEnded
Background = Callable[[SchedulerConnector], Awaitable[None]]
"""What else runs on the loop, from start to close."""


def api_process() -> int | None:
    """The id of the API's process, if this one was made for the engine.

    Not what `os.getppid` says: when the API was killed while the model was loading, that is another process.
    """
    parent = multiprocessing.parent_process()
    return None if parent is None else parent.pid


class PlaneThread:
    """A `SchedulerConnector` for an engine whose scheduler is not on an event loop.

    Args:
        parent: The process without which this one must not go on (I8), by its id; None: there is none.
    """

    def __init__(self, config: PlaneConfig, *, start_timeout_s: float, parent: int | None) -> None:
        self._config = config
        self._start_timeout_s = start_timeout_s
        self._parent = parent
        self._background: Background | None = None
        self._events: deque[Event] = deque()
        self._started = threading.Event()
        self._error: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._plane: SchedulerConnector | None = None
        self._kept: KeptPrompts | None = None
        self._thread = threading.Thread(target=self._run, name="kv-plane", daemon=True)
        self.transfers: tuple[str, ...] = ()
        self.control_port = config.control_port

    def start(self, background: Background | None = None) -> None:
        """Wait until every rank has reported and the control channel is bound.

        `background` runs beside the plane until `close`; its failure ends the process, as the plane's does.

        Raises TimeoutError, and what `SchedulerConnector.start` raises.
        """
        self._background = background
        self._thread.start()
        if not self._started.wait(self._start_timeout_s + _CLOSE_S):
            raise TimeoutError(f"the transfer plane did not start within {self._start_timeout_s:.0f} s")
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Close the plane and end the thread. Idempotent; no event follows."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_CLOSE_S)

    # Producer.

    def register_lease(
        self,
        transfer_id: str,
        runs: Sequence[BlockRun],
        num_tokens: int,
        ids_hash: str,
        limit_s: float,
        first_tokens: SampledTokens | None = None,
    ) -> None:
        """Lease a prompt's blocks, which are computed on every rank, for at most `limit_s` seconds.

        Comes to exactly one `LeaseEnded` or `LeaseRefused`; until then the blocks must stay as they are.
        """

        def call(plane: SchedulerConnector) -> None:
            try:
                plane.register(transfer_id, runs, num_tokens, ids_hash, limit_s)
            except DuplicateTransfer:
                self._events.append(LeaseRefused(transfer_id=transfer_id))
            else:
                plane.ready(transfer_id, first_tokens)

        self._post(call)

    def withdraw(self, transfer_id: str) -> None:
        """See `SchedulerConnector.withdraw`; a `LeaseEnded` of before may still follow.

        Waits for the plane's thread, and ends the process if that does not answer: nothing else keeps it from
        proving right what the caller is about to overwrite.
        """
        done = threading.Event()

        def call(plane: SchedulerConnector) -> None:
            plane.withdraw(transfer_id)
            done.set()

        self._post(call)
        if not done.wait(_WITHDRAW_S):
            log.critical("the transfer plane has not answered for %.0f s", _WITHDRAW_S)
            os._exit(1)

    def drop(self, transfer_id: str) -> None:
        """End a lease that no reader needs."""
        self._post(lambda plane: plane.drop(transfer_id))

    def keep(self, key: str, blocks: Sequence[int], hashes: Sequence[bytes], limit_s: float) -> None:
        """Lend blocks of a prompt's beginning, each by its hash, for so many seconds.

        Comes to exactly one `KeptEnded`; until then the blocks must stay as they are.
        """
        self._post_kept(lambda kept: kept.keep(key, blocks, hashes, limit_s))

    def end_kept(self, key: str) -> None:
        """Lend it to no one else."""
        self._post_kept(lambda kept: kept.end(key))

    def drop_kept(self, keys: Sequence[str]) -> None:
        """End them at once: what is being read of them is not proven right."""
        self._post_kept(lambda kept: kept.drop(keys))

    # Consumer.

    def ask_prefix(
        self, transfer_id: str, remote: RemotePrompt, hashes: Sequence[bytes], timeout_s: float
    ) -> None:
        """See `SchedulerConnector.ask_prefix`. The transfer id must be new."""
        self._post(lambda plane: plane.ask_prefix(transfer_id, remote, hashes, timeout_s))

    def hold(self, transfer_id: str, remote: RemotePrompt, timeout_s: float) -> None:
        """See `SchedulerConnector.hold`. A transfer id that is in use is not held a second time."""

        def call(plane: SchedulerConnector) -> None:
            try:
                plane.hold(transfer_id, remote, timeout_s)
            except DuplicateTransfer:
                log.warning("transfer %s is in use and cannot be held again", transfer_id)

        self._post(call)

    def pull(
        self,
        transfer_id: str,
        remote: RemotePrompt,
        runs: Sequence[BlockRun],
        timeout_s: float,
        ids_hash: str,
        fill_s: float = 0.0,
    ) -> None:
        """See `SchedulerConnector.pull`. A transfer id that is in use comes to a `PullFailed`."""

        def call(plane: SchedulerConnector) -> None:
            try:
                plane.pull(transfer_id, remote, runs, timeout_s, ids_hash, fill_s)
            except DuplicateTransfer:
                failed = PullFailed(transfer_id=transfer_id, reason="cancelled", quiescent=True)
                self._events.append(failed)

        self._post(call)

    def cancel(self, transfer_id: str) -> None:
        """See `SchedulerConnector.cancel`."""
        self._post(lambda plane: plane.cancel(transfer_id))

    # Both.

    def take_events(self) -> list[Event]:
        """Return and clear the events since the last call, in order."""
        events: list[Event] = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def _post(self, call: Callable[[SchedulerConnector], object]) -> None:
        if self._loop is None or self._plane is None:
            raise RuntimeError("the transfer plane has not been started")
        self._loop.call_soon_threadsafe(call, self._plane)

    def _post_kept(self, call: Callable[[KeptPrompts], object]) -> None:
        if self._loop is None or self._kept is None:
            raise RuntimeError("the transfer plane has not been started")
        self._loop.call_soon_threadsafe(call, self._kept)

    # The thread.

    def _run(self) -> None:
        ended = False
        try:
            asyncio.run(self._main())
            ended = True
        except (OSError, RuntimeError, ValueError, zmq.ZMQError) as error:
            if not self._started.is_set():  # `start` raises it
                self._error = error
                ended = True
            else:
                raise
        finally:
            if not ended:
                # Nothing would end a lease or a pull any more: the engine's processes share one fate (I8).
                log.critical("the transfer plane broke", exc_info=sys.exc_info())
                os._exit(1)
            self._started.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        # An exception in a callback would be logged and forgotten, and its transfer stranded.
        self._loop.set_exception_handler(_end_process)
        plane = SchedulerConnector(self._config, self._collect)
        self._plane = plane
        self._kept = KeptPrompts(
            plane, self._config.geometry.block_size, lambda key: self._events.append(KeptEnded(key=key))
        )
        try:
            await plane.start(self._start_timeout_s)
            self.transfers, self.control_port = plane.transfers, plane.control_port
            self._started.set()
            async with asyncio.TaskGroup() as tasks:
                running = []
                if self._background is not None:
                    running.append(tasks.create_task(_as_task(self._background(plane))))
                if self._parent is not None:
                    running.append(tasks.create_task(_watch_parent(self._parent)))
                await self._stop.wait()
                for task in running:
                    task.cancel()
        finally:
            await plane.close()

    def _collect(self) -> None:
        if self._plane is None or self._kept is None:
            return
        for event in self._plane.take_events():
            match event:
                case LoanRequested():
                    self._kept.requested(event)
                case LeaseEnded() if self._kept.lease_ended(event):
                    pass
                case _:
                    self._events.append(event)


async def _watch_parent(parent: int) -> None:
    """End this process when its parent has: no one would read what it computes (I8)."""
    with suppress(ProcessLookupError):
        try:
            descriptor = os.pidfd_open(parent)
        except OSError as error:
            if error.errno != errno.ENOSYS:
                raise
            while os.getppid() == parent:  # noqa: ASYNC110 (nothing says when it ends)
                await asyncio.sleep(_PARENT_POLL_S)
        else:
            await _wait_ended(descriptor, parent)
    log.critical("the API process has gone: this engine ends too")
    os._exit(1)


async def _wait_ended(descriptor: int, parent: int) -> None:
    """Wait until the process of a descriptor ends, or is not the parent: its id may be another's by now."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        if os.getppid() == parent:
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _as_task(work: Awaitable[None]) -> None:
    await work


def _end_process(loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
    error = context.get("exception")
    log.critical("%s", context.get("message"), exc_info=error if isinstance(error, Exception) else None)
    if error is not None:
        os._exit(1)

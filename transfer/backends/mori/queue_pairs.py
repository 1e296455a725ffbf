# SPDX-License-Identifier: Apache-2.0
"""Makes the queue pairs to a peer beside the transfer thread, so that a slow peer delays no other.

`create_session` keeps the interpreter for as long as the peer takes: no thread of this process runs
meanwhile. A read of an engine makes the same queue pairs and lets the interpreter go. So a thread of its
own reads a few bytes of each of the peer's regions first, into memory set aside for that, and a session
finds everything made. It also shows that the way to the peer's memory works, which no handshake does.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.backends.mori.regions import SCRATCH_BYTES, MoriPool, RemotePool
from kvferry.transfer.engine import PeerBroken, PeerUnreachable

_MAX_AT_ONCE = 8
"""Peers to which queue pairs are made at the same time; others wait for their turn."""
_SLICE_MS = 50
"""How soon a wait notices that the engine closes."""


class QueuePairMaker:
    """Its threads, of one engine. `wake` is called when the state of a peer may have changed."""

    def __init__(self, library: MoriLibrary, wake: Callable[[], None]) -> None:
        self._library = library
        self._wake = wake
        self._closing = threading.Event()
        self._threads = ThreadPoolExecutor(_MAX_AT_ONCE, thread_name_prefix="mori-connect")

    def make(self, local: MoriPool, remote: RemotePool, deadline: float) -> Future[None]:
        """Begin. The future raises `PeerUnreachable` with the reason, or `PeerBroken`."""
        future = self._threads.submit(self._make, local, remote, deadline)
        future.add_done_callback(lambda _: self._wake())
        return future

    def close(self) -> None:
        """Wait for the threads: the library must not be destroyed while they are in it. Bounded by its own
        time limit for an answer (`control_timeout_ms`).
        """
        self._closing.set()
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _make(self, local: MoriPool, remote: RemotePool, deadline: float) -> None:
        engine = self._library.engine
        try:
            for index, memory in enumerate(remote.memory):
                # One read takes one queue pair, in turn: the first region is read over each of them.
                for _ in range(1 if index else self._library.lanes.count):
                    self._read(engine, local, memory, deadline)
            for memory in local.memory:  # these need nothing of the peer; each registers a local region
                if engine.create_session(memory, remote.memory[0]) is None:
                    raise PeerUnreachable("no way between their memory and ours")
        except (RuntimeError, OSError) as error:
            raise PeerUnreachable(str(error)) from error

    def _read(self, engine: Any, local: MoriPool, memory: Any, deadline: float) -> None:
        nbytes = min(SCRATCH_BYTES, memory.size)
        uid = engine.allocate_transfer_uid()
        status = engine.read(local.scratch, 0, memory, 0, nbytes, uid)
        while not (status.Succeeded() or status.Failed()):
            if self._closing.is_set() or time.monotonic() > deadline:
                self._library.unfinished.append(status)
                raise PeerUnreachable("no queue pairs within the deadline")
            if status.Init():
                self._closing.wait(_SLICE_MS / 1000)  # the library's own wait would return at once
            else:
                status.WaitFor(_SLICE_MS)
        if status.Failed() and status.Code() == self._library.lanes.peer_error:
            raise PeerBroken(f"a first read failed: {status.Message()}")
        if status.Failed():
            raise PeerUnreachable(f"no way between their memory and ours: {status.Message()}")

# SPDX-License-Identifier: Apache-2.0
"""The thread of one pair of ranks, and the store over which both ends build their communicator.

An end that fails is torn down at once, and closing its socket ends the other (L11). So no message of a broken
pair is ever matched with one of a later pair.
"""

from __future__ import annotations

import enum
import queue
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.nccl.communicator import (
    Communicator,
    GlooPair,
    NcclPair,
    PairBroken,
    broken_pair,
    time_left,
)
from kvferry.transfer.backends.nccl.staging import Staging
from kvferry.transfer.backends.nccl.wire import HEAD_BYTES, pack_head, tag

if TYPE_CHECKING:
    import torch

MAX_JOBS = 1024
"""Reads that may wait in one pair."""

GRACE_S = 0.5
"""The pair's thread waits for this longer than the transfer thread, which must notice a deadline first."""

_SERVER, _READER = 0, 1


class PairState(enum.Enum):
    BUILDING = "building"
    READY = "ready"
    BROKEN = "broken"


Job = Callable[["PairThread"], None]
"""Runs on the pair's thread; raises `PairBroken` when the pair cannot go on."""


class PairThread:
    """Builds a communicator, then runs jobs in order, until it is closed or the pair breaks.

    Only the thread writes `state` and `error`; each change wakes `waker`. A thread that waits for a stopped
    peer ends by its deadline, and holds nothing but messages until then.
    """

    def __init__(
        self,
        pair_id: bytes,
        staging: Staging,
        build: Callable[[], Communicator],
        first: Job,
        waker: Waker,
    ) -> None:
        self.pair_id = pair_id
        self.staging = staging
        self.state = PairState.BUILDING
        self.error = ""
        self._build = build
        self._first = first
        self._waker = waker
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_JOBS)
        self._closing = threading.Event()
        self._communicator: Communicator | None = None
        self._thread = threading.Thread(target=self._run, name=f"nccl-pair-{pair_id.hex()[:8]}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Queue a job. Raises `queue.Full`."""
        self._jobs.put_nowait(job)

    def close(self) -> None:
        """Request the thread's end: gloo's comes after the current message, NCCL's at once."""
        self._closing.set()
        try:
            self._jobs.put_nowait(None)  # in case it waits for a job
        except queue.Full:
            return

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    # On the thread.

    def send(self, message: torch.Tensor, read_id: bytes, number: int) -> Any:
        """Begin to send one filled message."""
        return self._open().send(message, tag(read_id, number))

    def wait(self, work: Any, deadline: float) -> None:
        """Wait for the end of a send or receive."""
        self._open().wait(work, deadline, self._closing)

    def receive(
        self, message: torch.Tensor, read_id: bytes, number: int, nbytes: int, deadline: float
    ) -> None:
        """Receive exactly the message that is due. Any other breaks the pair (L10)."""
        due = message[: HEAD_BYTES + nbytes]
        self.wait(self._open().receive(due, tag(read_id, number)), deadline)
        if self.staging.head(due) != pack_head(read_id, number, nbytes):
            raise PairBroken(f"a message that is not part {number} of the read that was asked for")

    def _open(self) -> Communicator:
        if self._closing.is_set() or self._communicator is None:
            raise PairBroken("closed")
        return self._communicator

    def _run(self) -> None:
        try:
            with self.staging.on_stream():
                self._work()
        except PairBroken as error:
            self.error = str(error)
        finally:
            self.state = PairState.BROKEN
            self._tear_down()
            self._waker.wake()

    def _work(self) -> None:
        self._communicator = self._build()
        self._first(self)
        self.state = PairState.READY
        self._waker.wake()
        while not self._closing.is_set():
            job = self._jobs.get()
            if job is not None:
                job(self)

    def _tear_down(self) -> None:
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            try:
                communicator.close()
            except PairBroken as error:
                self.error = self.error or str(error)


class Rendezvous:
    """The server's end of a pair's store, on a port of its own."""

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=4)
        self._host = reachable(host)
        self.port: int = self._listener.getsockname()[1]

    def store(self, deadline: float) -> Any:
        """Open the store on it. Raises `PairBroken`."""
        return _store(self._host, self.port, deadline, is_master=True, listener=self._listener.detach())

    def close(self) -> None:
        """Close the port, unless the store owns it."""
        self._listener.close()


def server_end(rendezvous: Rendezvous, fabric: str, host: str, deadline: float) -> Communicator:
    """Build the server's end of a pair. Raises `PairBroken`."""
    return _communicator(rendezvous.store(deadline), _SERVER, fabric, host, deadline)


def reader_end(host: str, port: int, fabric: str, own_host: str, deadline: float) -> Communicator:
    """Build the reader's end of a pair. Raises `PairBroken`."""
    return _communicator(_store(host, port, deadline), _READER, fabric, own_host, deadline)


def reachable(host: str) -> str:
    """An address under which this host reaches what it bound."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _communicator(store: Any, rank: int, fabric: str, host: str, deadline: float) -> Communicator:
    return NcclPair(store, rank) if fabric == "nccl" else GlooPair(store, rank, host, deadline)


def _store(
    host: str, port: int, deadline: float, *, is_master: bool = False, listener: int | None = None
) -> Any:
    import torch.distributed as dist

    with broken_pair():
        return dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            world_size=None,
            is_master=is_master,
            timeout=time_left(deadline),
            wait_for_workers=False,
            master_listen_fd=listener,
        )

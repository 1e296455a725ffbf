# SPDX-License-Identifier: Apache-2.0
"""A communicator of two ranks: torch.distributed's gloo for host memory, NCCL for GPUs.

Each is built by hand, over a store of its own: torch.distributed's default group belongs to the model.
Building one blocks, and so do gloo's operations (they complete only while a thread waits), so all of this
runs on the thread of the pair.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

_ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ENVIRONMENT = threading.Lock()
"""Pairs are built on threads of their own, and the environment is the whole process's."""
_POLL_S = 0.0001
_NEVER = timedelta(days=365)


class PairBroken(Exception):
    """The communicator is unusable: the peer died, stopped, or sent an unexpected message."""


class Communicator(Protocol):
    """Messages between two ranks, in order. Every method raises `PairBroken`."""

    def send(self, message: torch.Tensor, tag: int) -> Any:
        """Begin to send; the message must stay as it is until `wait` has returned."""

    def receive(self, message: torch.Tensor, tag: int) -> Any:
        """Begin to receive into the message, which must be as long as the one that arrives."""

    def wait(self, work: Any, deadline: float, closing: threading.Event) -> None:
        """Wait for the end of a send or receive: a received message may be read then. Stops waiting once
        `closing` is set, where it can.
        """

    def close(self) -> None:
        """Tear it down; afterwards nothing is written into any message."""


class GlooPair:
    """Host memory."""

    def __init__(self, store: Any, rank: int, host: str, deadline: float) -> None:
        import torch.distributed as dist

        self._other = 1 - rank
        with broken_pair():
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
            options._timeout = time_left(deadline)
            options._threads = 1
            self._group: Any = dist.ProcessGroupGloo(store, rank, 2, options)

    def send(self, message: torch.Tensor, tag: int) -> Any:
        with broken_pair():
            return self._group.send([message], self._other, tag)

    def receive(self, message: torch.Tensor, tag: int) -> Any:
        with broken_pair():
            return self._group.recv([message], self._other, tag)

    def wait(self, work: Any, deadline: float, closing: threading.Event) -> None:
        """Wait. A wait that passes the deadline closes the connection, so the peer notices too."""
        with broken_pair():
            work.wait(time_left(deadline))

    def close(self) -> None:
        self._group = None


class NcclPair:
    """GPU memory. Work is ordered on the stream that is current where these are called."""

    def __init__(self, store: Any, rank: int) -> None:
        import torch.distributed as dist

        self._other = 1 - rank
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # deadlines are enforced here: its watchdog would end the process
        with broken_pair(), _watchdog_off():
            self._group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)

    def send(self, message: torch.Tensor, tag: int) -> Any:
        with broken_pair():
            return self._group.send([message], self._other, 0)

    def receive(self, message: torch.Tensor, tag: int) -> Any:
        with broken_pair():
            return self._group.recv([message], self._other, 0)

    def wait(self, work: Any, deadline: float, closing: threading.Event) -> None:
        """Wait: our stream for NCCL's own, then the host for ours (L1).

        A kernel that waits for a dead peer delays everything that CUDA or UCX does to the whole device, so it
        must not outlive its pair.
        """
        import torch

        with broken_pair():
            work.wait()
            done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            while not done.query():
                if closing.is_set():
                    raise PairBroken("closed")
                if time.monotonic() >= deadline:
                    raise PairBroken("a message passed its deadline")
                time.sleep(_POLL_S)

    def close(self) -> None:
        """Abort what is in flight: the only end of kernels that wait for a dead peer."""
        with broken_pair():
            self._group.abort()
        self._group = None


@contextmanager
def broken_pair() -> Iterator[None]:
    """Translate the RuntimeErrors of torch.distributed."""
    try:
        yield
    except RuntimeError as error:
        raise PairBroken(str(error).splitlines()[0]) from error


@contextmanager
def _watchdog_off() -> Iterator[None]:
    """Build groups meanwhile that do not end the process when their peer dies."""
    with _ENVIRONMENT:
        before = os.environ.get(_ASYNC_ERRORS)
        os.environ[_ASYNC_ERRORS] = "0"
        try:
            yield
        finally:
            if before is None:
                del os.environ[_ASYNC_ERRORS]
            else:
                os.environ[_ASYNC_ERRORS] = before


def time_left(deadline: float) -> timedelta:
    """Time until the deadline, never zero: that is no limit to gloo."""
    return timedelta(seconds=max(0.001, deadline - time.monotonic()))

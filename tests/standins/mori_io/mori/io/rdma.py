# SPDX-License-Identifier: Apache-2.0
"""The RDMA backend: queue pairs per remote engine, and transfers over them."""

from __future__ import annotations

import ctypes
import os
import queue
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass

import numpy as np
from mori.cpp import (
    EngineDesc,
    MemoryDesc,
    PeerFailureEvent,
    PeerFailureReason,
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
)
from mori.io.control import ControlServer, Registry, query
from mori.io.faults import Faults
from mori.io.queue_pair import Batch, QueuePair, WorkRequest

_DEFAULT_DEPTH = 8192
_DEVICE_DEPTH = 16384
"""What one queue pair of the device holds at most, whatever is asked for."""
_MAX_PIECES = 4
"""Pieces of local memory that one work request gathers."""
_MAX_MESSAGE = 1 << 30
_MAX_REQUEST = (1 << 32) - 1
_locked = ctypes.PyDLL(None)
"""Calls through it keep the interpreter."""


@dataclass
class Route:
    """From one local region to one remote one."""

    local: MemoryDesc
    remote: MemoryDesc
    pairs: list[QueuePair]


class RdmaBackend:
    """Everything of one engine that another could reach, and the ways to others."""

    def __init__(self, key: str, host: str, port: int, config: RdmaBackendConfig, faults: Faults) -> None:
        if "topology" in faults:
            print("[ROCm-SMI] rsmi_num_monitor_devices reported 0 GPUs", file=sys.stderr, flush=True)
            os._exit(255)
        while "no_pci_address" in faults:
            time.sleep(1.0)
        if "no_device" in faults:
            raise RuntimeError(
                "no active RDMA device on this host; "
                "set MORI_DISABLE_AUTO_XGMI=0 to enable XGMI-only fallback"
            )
        self.key = key
        self.config = config
        self.faults = faults
        self.registry = Registry(faults)
        self.remotes: dict[str, EngineDesc] = {}
        self._pairs: dict[str, list[QueuePair]] = {}
        self._making: dict[str, threading.Lock] = {}
        self._known: dict[tuple[str, int], list[int]] = {}
        self._batches = 0
        self.failures: deque[PeerFailureEvent] = deque()
        self._notifier = Notifier()
        self._late: list[threading.Timer] = []
        self._server = ControlServer(host, port, self.registry)
        self.port = self._server.port

    def close(self) -> None:
        """Destroy it: no byte is written afterwards."""
        for timer in self._late:
            timer.cancel()
            timer.join()
        for pairs in self._pairs.values():
            for pair in pairs:
                pair.close()
        self._notifier.close()
        self._server.close()

    def can_reach(self, remote: MemoryDesc) -> bool:
        return remote.engine_key in self.remotes

    def route(self, local: MemoryDesc, remote: MemoryDesc, *, keep_interpreter: bool = False) -> Route:
        """Connect, and register memory on both sides. Blocks; raises RuntimeError if the peer does not help.

        Queue pairs to an engine are made once and never again, even after they broke.
        """
        engine = self.remotes[remote.engine_key]
        self.registry.pin(local)
        known = self._known.get((engine.key, remote.id))
        if known is None:
            known = query(engine, ["memory", remote.id])
            if known[0] != remote.size:
                raise RuntimeError(f"remote MR size mismatch: expected={remote.size} got={known[0]}")
            self._known[engine.key, remote.id] = known
        with self._making.setdefault(engine.key, threading.Lock()):
            if engine.key not in self._pairs:
                self._wait_for_peer(keep_interpreter)
                self._pairs[engine.key] = self._make_pairs(engine.key, (known[1], known[2]))
        return Route(local, remote, self._pairs[engine.key])

    def _wait_for_peer(self, keep_interpreter: bool) -> None:
        """As long as a slow peer takes."""
        seconds = self.faults["connect"].seconds if "connect" in self.faults else 0.0
        if keep_interpreter:
            _locked.usleep(int(seconds * 1e6))
        else:
            time.sleep(seconds)

    def _make_pairs(self, key: str, remote: tuple[int, int]) -> list[QueuePair]:
        depth = min(_DEVICE_DEPTH, _setting("QP_MAX_SEND_WR", self.config.max_send_wr or _DEFAULT_DEPTH))

        def broke(why: str) -> None:
            if "unheard" not in self.faults:
                self.failures.append(PeerFailureEvent(key, PeerFailureReason.PEER_UNREACHABLE, detail=why))

        return [
            QueuePair(lane, depth, remote, self.faults, broke)
            for lane in range(_setting("QP_PER_TRANSFER", self.config.qp_per_transfer))
        ]

    def transfer(
        self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, *, read: bool, batch: bool
    ) -> None:
        """Begin to copy rows of (local offset, remote offset, size); `status` is its state."""
        if "init" in self.faults:
            timer = threading.Timer(
                self.faults["init"].seconds, self._begin, (route, rows, status, uid, read, batch)
            )
            self._late.append(timer)
            timer.start()
            return
        self._begin(route, rows, status, uid, read, batch)

    def _begin(
        self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, read: bool, batch: bool
    ) -> None:
        status.SetCode(StatusCode.IN_PROGRESS)
        number, self._batches = self._batches, self._batches + batch
        problem = _problem(route, rows)
        if problem:
            status.Update(StatusCode.ERR_INVALID_ARGS, problem)
        elif not len(rows):
            status.Update(StatusCode.SUCCESS, "")
        else:
            self._post(route, rows, status, uid, number if batch else -1, read)

    def _post(
        self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, number: int, read: bool
    ) -> None:
        """Spread the rows over the queue pairs, from one that the uid names on. `number` -1: no batch."""
        postings = [
            (lane, pieces, starts)
            for lane, some in self._split(rows, len(route.pairs), number >= 0)
            for pieces, starts in [_merge(some + np.array([route.local.data, route.remote.data, 0]))]
        ]
        longest = max(int(np.add.reduceat(pieces[:, 2], starts).max()) for _, pieces, starts in postings)
        if longest > _MAX_MESSAGE:
            problem = f"merged RDMA WR length {longest} exceeds local max_msg_sz {_MAX_MESSAGE}"
            status.Update(StatusCode.ERR_INVALID_ARGS, problem)
            return
        batch = Batch(status, sum(len(starts) for _, _, starts in postings))
        full = self.faults.get("full")
        index = 0
        for lane, pieces, starts in postings:
            for some, count in self._portions(pieces, starts, route.pairs[: 1 if lane is not None else None]):
                pair = route.pairs[(uid + (index if lane is None else lane)) % len(route.pairs)]
                faulty = index > 0 and full is not None and number == full.after
                if faulty or not _has_room(pair, count):
                    status.Update(StatusCode.ERR_RDMA_OP, f"SQ full (batch): depth={pair.outstanding}")
                    return
                pair.post(WorkRequest(batch, some, count, read))
                index += 1
        if _setting("ENABLE_NOTIFICATION", int(self.config.enable_notification)):
            self._notify(route, uid, batch)

    def _split(self, rows: np.ndarray, lanes: int, batch: bool) -> list[tuple[int | None, np.ndarray]]:
        """With worker threads a batch is divided among them, and so the queue pairs, before it is merged."""
        workers = min(lanes, _setting("NUM_WORKER_THREADS", self.config.num_worker_threads))
        if workers <= 1 or not batch:
            return [(None, rows)]
        share = -(-len(rows) // workers)
        return [(lane, rows[first : first + share]) for lane, first in enumerate(range(0, len(rows), share))]

    def _portions(
        self, pieces: np.ndarray, starts: np.ndarray, pairs: list[QueuePair]
    ) -> list[tuple[np.ndarray, int]]:
        """What is posted at once to one of these queue pairs, and of how many work requests it is."""
        size = _setting("POST_BATCH_SIZE", self.config.post_batch_size)
        share = min(size if size > 0 else -(-len(starts) // len(pairs)), pairs[0].depth)
        ends = np.append(starts, len(pieces))
        return [
            (pieces[ends[first] : ends[min(first + share, len(starts))]], min(share, len(starts) - first))
            for first in range(0, len(starts), share)
        ]

    def _notify(self, route: Route, uid: int, batch: Batch) -> None:
        """Behind the work requests, on every queue pair; what is posted next does not wait for it."""
        engine = self.remotes[route.remote.engine_key]
        message = ["arrived", self.key, uid, len(route.pairs)]
        for pair in route.pairs:
            pair.post(WorkRequest(batch, (), 1, True, notify=lambda: self._notifier.send(engine, message)))


class Notifier:
    """Sends notifications, in order, from a thread of its own."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[EngineDesc, list[object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mori-notify", daemon=True)
        self._thread.start()

    def send(self, engine: EngineDesc, message: list[object]) -> None:
        self._queue.put((engine, message))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                query(*item)
            except RuntimeError:
                continue  # the peer is gone


def _problem(route: Route, rows: np.ndarray) -> str:
    if len(rows) and int(rows[:, 2].max()) > _MAX_REQUEST:
        return "single request size exceeds UINT32_MAX; split it before submitting"
    for offsets, region in ((rows[:, 0], route.local), (rows[:, 1], route.remote)):
        if len(rows) and int((offsets + rows[:, 2]).max()) > region.size:
            return "length out of range"
    return ""


def _merge(pieces: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """In order of remote address, neighbours on both sides as one; and where work requests begin.

    One gathers up to four pieces that are neighbours on the remote side.
    """
    pieces = pieces[np.argsort(pieces[:, 1], kind="stable")]
    ends = pieces[:-1, :2] + pieces[:-1, 2:]
    starts = np.flatnonzero(np.r_[True, (ends != pieces[1:, :2]).any(axis=1)])
    merged = pieces[starts]
    merged[:, 2] = np.add.reduceat(pieces[:, 2], starts)
    apart = np.r_[True, merged[:-1, 1] + merged[:-1, 2] != merged[1:, 1]]
    group = np.flatnonzero(apart)
    within = np.arange(len(merged)) - np.repeat(group, np.diff(np.r_[group, len(merged)]))
    return merged, np.flatnonzero(within % _MAX_PIECES == 0)


def _has_room(pair: QueuePair, count: int, patience_s: float = 5.0) -> bool:
    """Wait, as the real library does, until the send queue takes that many more."""
    deadline = time.monotonic() + patience_s
    while pair.outstanding + count > pair.depth:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _setting(name: str, configured: int) -> int:
    """A setting, or the environment's, which has the last word."""
    return int(os.environ.get(f"MORI_IO_{name}") or configured)

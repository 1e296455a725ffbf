# SPDX-License-Identifier: Apache-2.0
"""The RDMA backend: queue pairs per remote engine, and transfers over them."""

from __future__ import annotations

import os
import sys
import threading
import time
from dataclasses import dataclass

import numpy as np
from mori.cpp import EngineDesc, MemoryDesc, RdmaBackendConfig, StatusCode, TransferStatus
from mori.io.control import ControlServer, Registry, query
from mori.io.faults import Faults
from mori.io.queue_pair import Batch, QueuePair, WorkRequest

_DEFAULT_DEPTH = 8192
_MAX_REQUEST = (1 << 32) - 1


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
            print("TopoSystem: no monitored GPU", file=sys.stderr, flush=True)
            os._exit(255)
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
        self._known: dict[tuple[str, int], list[int]] = {}
        self._batches = 0
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
        self._server.close()

    def can_reach(self, remote: MemoryDesc) -> bool:
        return remote.engine_key in self.remotes

    def route(self, local: MemoryDesc, remote: MemoryDesc) -> Route:
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
        if engine.key not in self._pairs:
            depth = self.config.max_send_wr or _DEFAULT_DEPTH
            self._pairs[engine.key] = [
                QueuePair(lane, depth, known[1], known[2], self.faults)
                for lane in range(int(os.environ.get("MORI_IO_QP_PER_TRANSFER", self.config.qp_per_transfer)))
            ]
        return Route(local, remote, self._pairs[engine.key])

    def transfer(
        self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, *, read: bool
    ) -> None:
        """Begin to copy rows of (local offset, remote offset, size); `status` is its state."""
        if "init" in self.faults:
            timer = threading.Timer(
                self.faults["init"].seconds, self._begin, (route, rows, status, uid), {"read": read}
            )
            self._late.append(timer)
            timer.start()
            return
        self._begin(route, rows, status, uid, read=read)

    def _begin(self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, *, read: bool) -> None:
        status.SetCode(StatusCode.IN_PROGRESS)
        number, self._batches = self._batches, self._batches + 1
        problem = _problem(route, rows)
        if problem:
            status.Update(StatusCode.ERR_INVALID_ARGS, problem)
        elif not len(rows):
            status.Update(StatusCode.SUCCESS, "")
        else:
            self._post(route, rows, status, uid, number, read)

    def _post(
        self, route: Route, rows: np.ndarray, status: TransferStatus, uid: int, number: int, read: bool
    ) -> None:
        """Spread the rows over the queue pairs, beginning with one that the uid names."""
        pieces = _merge(rows + np.array([route.local.data, route.remote.data, 0]))
        lanes = len(route.pairs)
        size = self.config.post_batch_size
        share = min(size if size > 0 else -(-len(pieces) // lanes), route.pairs[0].depth)
        batch = Batch(status, len(pieces))
        full = self.faults.get("full")
        for index, first in enumerate(range(0, len(pieces), share)):
            pair = route.pairs[(uid + index) % lanes]
            faulty = index > 0 and full is not None and number == full.after
            if faulty or not _has_room(pair):
                status.Update(StatusCode.ERR_RDMA_OP, f"SQ full (batch): depth={pair.outstanding}")
                return
            pair.post(WorkRequest(batch, pieces[first : first + share], read))
        if self.config.enable_notification:
            self._notify(route, uid, batch)

    def _notify(self, route: Route, uid: int, batch: Batch) -> None:
        engine = self.remotes[route.remote.engine_key]
        message = ["arrived", self.key, uid, len(route.pairs)]
        for pair in route.pairs:
            pair.post(WorkRequest(batch, (), True, notify=lambda: _notify(engine, message)))


def _problem(route: Route, rows: np.ndarray) -> str:
    if len(rows) and int(rows[:, 2].max()) > _MAX_REQUEST:
        return "single request size exceeds UINT32_MAX; split it before submitting"
    for offsets, region in ((rows[:, 0], route.local), (rows[:, 1], route.remote)):
        if len(rows) and int((offsets + rows[:, 2]).max()) > region.size:
            return "length out of range"
    return ""


def _merge(pieces: np.ndarray) -> np.ndarray:
    """In order of remote address, neighbours on both sides as one."""
    pieces = pieces[np.argsort(pieces[:, 1], kind="stable")]
    ends = pieces[:-1, :2] + pieces[:-1, 2:]
    starts = np.flatnonzero(np.r_[True, (ends != pieces[1:, :2]).any(axis=1)])
    merged = pieces[starts]
    merged[:, 2] = np.add.reduceat(pieces[:, 2], starts)
    return merged


def _has_room(pair: QueuePair, patience_s: float = 5.0) -> bool:
    """Wait, as the real library does, until the send queue takes one more."""
    deadline = time.monotonic() + patience_s
    while pair.outstanding >= pair.depth:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.001)
    return True


def _notify(engine: EngineDesc, message: list[object]) -> None:
    try:
        query(engine, message)
    except RuntimeError as error:
        raise OSError(str(error)) from error

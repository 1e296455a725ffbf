# SPDX-License-Identifier: Apache-2.0
"""`IOEngine` and `IOEngineSession`, with the argument orders of the real ones; transfers take no keywords."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from mori.cpp import (
    BackendType,
    EngineDesc,
    IOEngineConfig,
    MemoryDesc,
    MemoryLocationType,
    PeerFailureEvent,
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
)
from mori.io import memory
from mori.io.faults import from_environment
from mori.io.rdma import RdmaBackend, Route

Columns = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Local offsets, remote offsets, sizes."""
TORCH_DEVICE_TYPE_MAP = {"cpu": MemoryLocationType.CPU, "cuda": MemoryLocationType.GPU}


def set_log_level(level: str) -> None:
    """The stand-in logs nothing. The real one takes any word too."""


class IOEngine:
    """Moves host memory. Its threads end when the object does, as in the real library."""

    def __init__(self, key: str, config: IOEngineConfig) -> None:
        self._key = key
        self._config = config
        self._faults = from_environment()
        self._rdma: RdmaBackend | None = None
        self._regions = itertools.count()
        self._uids = itertools.count()

    def __del__(self) -> None:
        self.remove_backend(BackendType.RDMA)

    def get_engine_desc(self) -> EngineDesc:
        return EngineDesc.make(
            key=self._key,
            node_id=os.environ.get("MORI_NODE_ID", socket.gethostname()),
            hostname=socket.gethostname(),
            host=self._config.host,
            port=self._rdma.port if self._rdma is not None else self._config.port,
            pid=os.getpid(),
        )

    def create_backend(self, type: BackendType, config: RdmaBackendConfig | None = None) -> None:
        """A second backend of one type is skipped. XGMI takes GPU memory only, so here it reaches nothing."""
        if type in (BackendType.TCP, BackendType.Unknown):
            raise NotImplementedError("backend not implemented yet")
        if type == BackendType.RDMA and self._rdma is None:
            chosen = config or RdmaBackendConfig()
            self._rdma = RdmaBackend(self._key, self._config.host, self._config.port, chosen, self._faults)

    def remove_backend(self, type: BackendType) -> None:
        if type == BackendType.RDMA and getattr(self, "_rdma", None) is not None:
            assert self._rdma is not None
            self._rdma.close()
            self._rdma = None

    def register_remote_engine(self, engine: EngineDesc) -> None:
        if self._rdma is not None:
            self._rdma.remotes[engine.key] = engine

    def deregister_remote_engine(self, engine: EngineDesc) -> None:
        if self._rdma is not None:
            self._rdma.remotes.pop(engine.key, None)

    def register_memory(self, ptr: int, size: int, device_id: int, mem_loc: MemoryLocationType) -> MemoryDesc:
        """Note a region. The device hears of it at first use."""
        if mem_loc != MemoryLocationType.CPU:
            raise RuntimeError("the stand-in moves host memory only")
        memory.allow_readers()
        region = MemoryDesc.make(
            engine_key=self._key,
            id=next(self._regions),
            device_id=device_id,
            data=ptr,
            size=size,
            loc=mem_loc,
        )
        if self._rdma is not None:
            self._rdma.registry.regions[region.id] = region
        return region

    def register_torch_tensor(self, tensor: Any) -> MemoryDesc:
        if not tensor.is_contiguous():
            raise RuntimeError("input tensor must be contiguous")
        device = -1 if tensor.device.index is None else tensor.device.index
        size = tensor.nelement() * tensor.element_size()
        kind = TORCH_DEVICE_TYPE_MAP[tensor.device.type]
        return self.register_memory(tensor.data_ptr(), size, device, kind)

    def deregister_memory(self, region: MemoryDesc) -> None:
        if self._rdma is not None:
            self._rdma.registry.regions.pop(region.id, None)

    def allocate_transfer_uid(self) -> int:
        return next(self._uids)

    def read(self, *arguments: Any) -> TransferStatus:
        return self._one(*arguments, read=True)

    def write(self, *arguments: Any) -> TransferStatus:
        return self._one(*arguments, read=False)

    def batch_read(self, *arguments: Any) -> list[TransferStatus]:
        return self._many(*arguments, read=True)

    def batch_write(self, *arguments: Any) -> list[TransferStatus]:
        return self._many(*arguments, read=False)

    def create_session(self, local: MemoryDesc, remote: MemoryDesc) -> IOEngineSession | None:
        """None if no backend reaches that memory. Raises RuntimeError if the owner does not help.

        Nothing else of this process runs while a slow owner makes its queue pairs.
        """
        if self._rdma is None or not self._rdma.can_reach(remote):
            return None
        return IOEngineSession(self, self._rdma, self._rdma.route(local, remote, keep_interpreter=True))

    def pop_inbound_transfer_status(self, remote_key: str, uid: int) -> TransferStatus | None:
        if self._rdma is None or (remote_key, uid) not in self._rdma.registry.inbound:
            return None
        if self._rdma.registry.inbound[remote_key, uid]:
            return None
        status = TransferStatus()
        status.SetCode(StatusCode.SUCCESS)
        return status

    def pop_peer_failure(self) -> PeerFailureEvent | None:
        """The oldest failure that was noticed, or None."""
        return self._rdma.failures.popleft() if self._rdma is not None and self._rdma.failures else None

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        """The first code that is no success, in the order of the statuses."""
        if timeout_ms == 0:
            return _poll_all(statuses)
        deadline = time.monotonic() + timeout_ms / 1000
        first_error = StatusCode.SUCCESS
        for status in statuses:
            left = -1 if timeout_ms < 0 else max(0, int((deadline - time.monotonic()) * 1000))
            code = status.WaitFor(left)
            if code == StatusCode.IN_PROGRESS:
                return code if first_error == StatusCode.SUCCESS else first_error
            if first_error == StatusCode.SUCCESS:
                first_error = code
        return first_error

    def _one(
        self, local: MemoryDesc, local_offset: int, remote: MemoryDesc, remote_offset: int, size: int,
        uid: int, *, read: bool,
    ) -> TransferStatus:  # fmt: skip
        status = TransferStatus()
        self._start(
            (local, remote), ([local_offset], [remote_offset], [size]), status, uid, read, batch=False
        )
        return status

    def _many(
        self, locals_: Sequence[MemoryDesc], local_offsets: Sequence[Sequence[int]],
        remotes: Sequence[MemoryDesc], remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]], uids: Sequence[int], *, read: bool,
    ) -> list[TransferStatus]:  # fmt: skip
        """One status for each pair of regions. Lists of unequal length end the process."""
        statuses = [TransferStatus() for _ in sizes]
        _expect_equal_lengths(locals_, local_offsets, remotes, remote_offsets, sizes, statuses, uids)
        each = zip(locals_, local_offsets, remotes, remote_offsets, sizes, uids, statuses, strict=True)
        for local, ours, remote, theirs, size, uid, status in each:
            _expect_equal_lengths(ours, theirs, size)
            if not self._start((local, remote), (ours, theirs, size), status, uid, read, batch=True):
                break  # the real library leaves the rest in INIT
        return statuses

    def _start(
        self, pair: tuple[MemoryDesc, MemoryDesc], columns: Columns, status: TransferStatus, uid: int,
        read: bool, *, batch: bool,
    ) -> bool:  # fmt: skip
        """Whether any backend could be asked."""
        if self._rdma is None or not self._rdma.can_reach(pair[1]):
            status.Update(StatusCode.ERR_BAD_STATE, "No available backend found, create backend first")
            return False
        _start(self._rdma, self._rdma.route(*pair), columns, status, uid, read, batch)
        return True


class IOEngineSession:
    """One pair of regions."""

    def __init__(self, engine: IOEngine, rdma: RdmaBackend, route: Route) -> None:
        # Not the engine itself: sessions of the real library do not keep their engine alive.
        self.allocate_transfer_uid = engine._uids.__next__
        self._rdma = rdma
        self._route = route

    def read(self, local_offset: int, remote_offset: int, size: int, uid: int, /) -> TransferStatus:
        return self._transfer(([local_offset], [remote_offset], [size]), uid, read=True, batch=False)

    def write(self, local_offset: int, remote_offset: int, size: int, uid: int, /) -> TransferStatus:
        return self._transfer(([local_offset], [remote_offset], [size]), uid, read=False, batch=False)

    def batch_read(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], uid: int, /
    ) -> TransferStatus:
        return self._transfer((local_offsets, remote_offsets, sizes), uid, read=True, batch=True)

    def batch_write(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], uid: int, /
    ) -> TransferStatus:
        return self._transfer((local_offsets, remote_offsets, sizes), uid, read=False, batch=True)

    def alive(self) -> bool:
        """Says nothing: the real one is always true."""
        return True

    def _transfer(self, columns: Columns, uid: int, *, read: bool, batch: bool) -> TransferStatus:
        status = TransferStatus()
        _start(self._rdma, self._route, columns, status, uid, read, batch)
        return status


def _expect_equal_lengths(*lists: Sequence[Any]) -> None:
    """The real library is built with its assertions."""
    if len({len(each) for each in lists}) != 1:
        os.write(2, b"engine.cpp: Assertion `batchSize == sizes.size()' failed.\n")
        os.abort()


def _start(
    rdma: RdmaBackend,
    route: Route,
    columns: Columns,
    status: TransferStatus,
    uid: int,
    read: bool,
    batch: bool,
) -> None:
    if len({len(column) for column in columns}) != 1:
        status.Update(
            StatusCode.ERR_INVALID_ARGS, "lengths of local offsets, remote offsets or sizes mismatch"
        )
        return
    rows = np.array(columns, dtype=np.int64).reshape(3, -1).T
    rdma.transfer(route, rows, status, uid, read=read, batch=batch)


def _poll_all(statuses: Sequence[TransferStatus]) -> StatusCode:
    codes = [status.WaitFor(0) for status in statuses]
    failed = [code for code in codes if code not in (StatusCode.SUCCESS, StatusCode.IN_PROGRESS)]
    if failed:
        return failed[0]
    return StatusCode.IN_PROGRESS if StatusCode.IN_PROGRESS in codes else StatusCode.SUCCESS

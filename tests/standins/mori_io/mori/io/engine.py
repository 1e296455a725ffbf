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
    RdmaBackendConfig,
    StatusCode,
    TransferStatus,
)
from mori.io import memory
from mori.io.faults import from_environment
from mori.io.rdma import RdmaBackend, Route

_LEVELS = ("trace", "debug", "info", "warn", "error", "critical")


def set_log_level(level: str) -> None:
    """The stand-in logs nothing."""
    if level not in _LEVELS:
        raise ValueError(level)


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
        return EngineDesc(
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
        if type is BackendType.RDMA and self._rdma is None:
            chosen = config or RdmaBackendConfig()
            self._rdma = RdmaBackend(self._key, self._config.host, self._config.port, chosen, self._faults)

    def remove_backend(self, type: BackendType) -> None:
        if type is BackendType.RDMA and getattr(self, "_rdma", None) is not None:
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
        if mem_loc is not MemoryLocationType.CPU:
            raise RuntimeError("the stand-in moves host memory only")
        memory.allow_readers()
        region = MemoryDesc(
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
        return self.register_memory(tensor.data_ptr(), size, device, MemoryLocationType.CPU)

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
        """None if no backend reaches that memory. Blocks; raises RuntimeError if the owner does not help."""
        if self._rdma is None or not self._rdma.can_reach(remote):
            return None
        return IOEngineSession(self, self._rdma, self._rdma.route(local, remote))

    def pop_inbound_transfer_status(self, remote_key: str, uid: int) -> TransferStatus | None:
        if self._rdma is None or (remote_key, uid) not in self._rdma.registry.inbound:
            return None
        if self._rdma.registry.inbound[remote_key, uid]:
            return None
        status = TransferStatus()
        status.SetCode(StatusCode.SUCCESS)
        return status

    def wait_all(self, statuses: Sequence[TransferStatus], timeout_ms: int = -1) -> StatusCode:
        if timeout_ms == 0:
            return _poll_all(statuses)
        deadline = time.monotonic() + timeout_ms / 1000
        first_error = StatusCode.SUCCESS
        for status in statuses:
            left = -1 if timeout_ms < 0 else max(0, int((deadline - time.monotonic()) * 1000))
            code = status.WaitFor(left)
            if code is StatusCode.IN_PROGRESS:
                return first_error or StatusCode.IN_PROGRESS
            first_error = first_error or code
        return first_error

    def _one(
        self, local: MemoryDesc, local_offset: int, remote: MemoryDesc, remote_offset: int, size: int,
        uid: int, *, read: bool,
    ) -> TransferStatus:  # fmt: skip
        return self._many([local], [[local_offset]], [remote], [[remote_offset]], [[size]], [uid], read=read)[
            0
        ]

    def _many(
        self, locals_: Sequence[MemoryDesc], local_offsets: Sequence[Sequence[int]],
        remotes: Sequence[MemoryDesc], remote_offsets: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]], uids: Sequence[int], *, read: bool,
    ) -> list[TransferStatus]:  # fmt: skip
        """One status for each pair of regions."""
        statuses = [TransferStatus() for _ in sizes]
        each = zip(locals_, local_offsets, remotes, remote_offsets, sizes, uids, statuses, strict=True)
        for local, ours, remote, theirs, size, uid, status in each:
            if self._rdma is None or not self._rdma.can_reach(remote):
                status.Update(StatusCode.ERR_BAD_STATE, "No available backend found, create backend first")
                break  # the real library leaves the rest in INIT
            _start(self._rdma, self._rdma.route(local, remote), (ours, theirs, size), status, uid, read)
        return statuses


class IOEngineSession:
    """One pair of regions."""

    def __init__(self, engine: IOEngine, rdma: RdmaBackend, route: Route) -> None:
        # Not the engine itself: sessions of the real library do not keep their engine alive.
        self.allocate_transfer_uid = engine._uids.__next__
        self._rdma = rdma
        self._route = route

    def read(self, local_offset: int, remote_offset: int, size: int, uid: int, /) -> TransferStatus:
        return self._transfer(([local_offset], [remote_offset], [size]), uid, read=True)

    def write(self, local_offset: int, remote_offset: int, size: int, uid: int, /) -> TransferStatus:
        return self._transfer(([local_offset], [remote_offset], [size]), uid, read=False)

    def batch_read(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], uid: int, /
    ) -> TransferStatus:
        return self._transfer((local_offsets, remote_offsets, sizes), uid, read=True)

    def batch_write(
        self, local_offsets: Sequence[int], remote_offsets: Sequence[int], sizes: Sequence[int], uid: int, /
    ) -> TransferStatus:
        return self._transfer((local_offsets, remote_offsets, sizes), uid, read=False)

    def alive(self) -> bool:
        """Says nothing: the real one is always true."""
        return True

    def _transfer(self, columns: tuple[Sequence[int], ...], uid: int, *, read: bool) -> TransferStatus:
        status = TransferStatus()
        _start(self._rdma, self._route, columns, status, uid, read)
        return status


def _start(
    rdma: RdmaBackend,
    route: Route,
    columns: tuple[Sequence[int], ...],
    status: TransferStatus,
    uid: int,
    read: bool,
) -> None:
    if len({len(column) for column in columns}) != 1:
        status.Update(
            StatusCode.ERR_INVALID_ARGS, "lengths of local offsets, remote offsets or sizes mismatch"
        )
        return
    rows = np.array(columns, dtype=np.int64).reshape(3, -1).T
    rdma.transfer(route, rows, status, uid, read=read)


def _poll_all(statuses: Sequence[TransferStatus]) -> StatusCode:
    codes = [status.WaitFor(0) for status in statuses]
    failed = [code for code in codes if code not in (StatusCode.SUCCESS, StatusCode.IN_PROGRESS)]
    if failed:
        return failed[0]
    return StatusCode.IN_PROGRESS if StatusCode.IN_PROGRESS in codes else StatusCode.SUCCESS

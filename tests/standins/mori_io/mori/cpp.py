# SPDX-License-Identifier: Apache-2.0
"""What the real library's extension module `mori.cpp` defines: codes, settings, descriptions, statuses."""

from __future__ import annotations

import enum
import threading
import time
from dataclasses import astuple, dataclass, field
from typing import Self

import msgpack

HANDLE_BYTES = 64


class StatusCode(enum.IntEnum):
    SUCCESS = 0
    INIT = 1
    IN_PROGRESS = 2
    ERR_INVALID_ARGS = 11
    ERR_NOT_FOUND = 12
    ERR_RDMA_OP = 13
    ERR_BAD_STATE = 14
    ERR_GPU_OP = 15


class BackendType(enum.IntEnum):
    Unknown = 0
    XGMI = 1
    RDMA = 2
    TCP = 3
    FABRIC = 4


class MemoryLocationType(enum.IntEnum):
    Unknown = 0
    CPU = 1
    GPU = 2


class PollCqMode(enum.IntEnum):
    POLLING = 0
    EVENT = 1


@dataclass
class IOEngineConfig:
    host: str = ""
    port: int = 0


@dataclass
class RdmaBackendConfig:
    """The last three are attributes only: the real constructor does not take them."""

    qp_per_transfer: int = 1
    post_batch_size: int = -1
    num_worker_threads: int = -1
    poll_cq_mode: PollCqMode = PollCqMode.POLLING
    enable_notification: bool = True
    notif_per_qp: int = 1024
    enable_transfer_chunking: bool = False
    chunk_bytes: int = 65536
    max_chunks_per_transfer: int = 64
    num_nics_per_transfer: int = 1
    max_send_wr: int = field(default=0, init=False)
    max_cqe_num: int = field(default=0, init=False)
    max_msg_sge: int = field(default=0, init=False)


@dataclass
class XgmiBackendConfig:
    num_streams: int = 64
    num_events: int = 64


@dataclass
class FabricBackendConfig:
    num_streams: int = 64
    num_events: int = 64


def _unpack(packed: bytes) -> list[object]:
    """The fields of a description. The real library raises RuntimeError for bytes that are none."""
    try:
        fields = msgpack.unpackb(packed)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise RuntimeError(f"msgpack: {error}") from error
    if not isinstance(fields, list):
        raise RuntimeError("msgpack: not an array")
    return fields


@dataclass(frozen=True)
class EngineDesc:
    """Fields in the order in which the real one packs them."""

    key: str
    node_id: str
    hostname: str
    host: str
    port: int
    pid: int

    def pack(self) -> bytes:
        return msgpack.packb(list(astuple(self)))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        fields = _unpack(packed)
        if len(fields) != 6:
            raise RuntimeError("msgpack: not an engine description")
        return cls(*fields)


@dataclass(frozen=True)
class MemoryDesc:
    """Fields in the order in which the real one packs them; equality leaves the handles out, as there."""

    engine_key: str = ""
    id: int = 0
    device_id: int = -1
    device_bus_id: str = ""
    data: int = 0
    size: int = 0
    loc: MemoryLocationType = MemoryLocationType.Unknown
    ipc_handle: bytes = field(default=bytes(HANDLE_BYTES), compare=False)
    numa_node: int = -1
    ipc_offset: int = 0
    fabric_handle: bytes = field(default=bytes(HANDLE_BYTES), compare=False)
    vpod_id: int = field(default=-1, compare=False)
    vpod_ppod_id: str = field(default="", compare=False)
    fabric_offset: int = field(default=0, compare=False)
    fabric_alloc_size: int = field(default=0, compare=False)

    def pack(self) -> bytes:
        return msgpack.packb(list(astuple(self)))

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        fields = _unpack(packed)
        if len(fields) != 15:
            raise RuntimeError("msgpack: not a memory description")
        fields[6] = MemoryLocationType(fields[6])
        return cls(*fields)


class TransferStatus:
    """How far a transfer came. An error stays, whatever `Update` says later."""

    def __init__(self) -> None:
        self._code = StatusCode.INIT
        self._message = ""
        self._changed = threading.Condition()

    def Code(self) -> StatusCode:
        return self._code

    def Message(self) -> str:
        return self._message

    def Update(self, code: StatusCode, message: str) -> None:
        with self._changed:
            if self.Failed():
                return
            self._code, self._message = code, message
            self._changed.notify_all()

    def SetCode(self, code: StatusCode) -> None:
        with self._changed:
            self._code = code
            self._changed.notify_all()

    def SetMessage(self, message: str) -> None:
        self._message = message

    def Init(self) -> bool:
        return self._code == StatusCode.INIT

    def InProgress(self) -> bool:
        return self._code == StatusCode.IN_PROGRESS

    def Succeeded(self) -> bool:
        return self._code == StatusCode.SUCCESS

    def Failed(self) -> bool:
        return self._code > 10

    def Wait(self) -> None:
        self.WaitFor(-1)

    def WaitFor(self, timeout_ms: int = -1) -> StatusCode:
        """Returns at once in every state but IN_PROGRESS, so in INIT too."""
        deadline = None if timeout_ms < 0 else time.monotonic() + timeout_ms / 1000
        with self._changed:
            while self._code == StatusCode.IN_PROGRESS:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            return self._code

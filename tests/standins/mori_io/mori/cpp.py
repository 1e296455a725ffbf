# SPDX-License-Identifier: Apache-2.0
"""What the real library's extension module `mori.cpp` defines: codes, settings, descriptions, statuses."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import msgpack

HANDLE_BYTES = 64


class BoundEnum:
    """An enum as the extension module's: equal to its like only, never to a number, without an order, and a
    new object each time, so that `is` tells nothing.
    """

    __members__: ClassVar[dict[str, Self]]

    def __init_subclass__(cls, **values: int) -> None:
        cls.__members__ = {name: cls(value) for name, value in values.items()}  # type: ignore[misc]
        for name, member in cls.__members__.items():
            setattr(cls, name, member)

    def __init__(self, value: int) -> None:
        self._value = value

    @property
    def name(self) -> str:
        return next(name for name, member in self.__members__.items() if member._value == self._value)

    @property
    def value(self) -> int:
        return self._value

    def __int__(self) -> int:
        return self._value

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}.{self.name}: {self._value}>"


class StatusCode(
    BoundEnum, SUCCESS=0, INIT=1, IN_PROGRESS=2, ERR_INVALID_ARGS=11, ERR_NOT_FOUND=12, ERR_RDMA_OP=13,
    ERR_BAD_STATE=14, ERR_GPU_OP=15,
):  # fmt: skip
    pass


class BackendType(BoundEnum, Unknown=0, XGMI=1, RDMA=2, TCP=3, FABRIC=4):
    pass


class MemoryLocationType(BoundEnum, Unknown=0, CPU=1, GPU=2):
    pass


class PollCqMode(BoundEnum, POLLING=0, EVENT=1):
    pass


class PeerFailureReason(
    BoundEnum, UNKNOWN=0, PEER_UNREACHABLE=1, LOCAL_QP_ERROR=2, LOCAL_PORT_DOWN=3, LOCAL_DEVICE_FATAL=4,
    LOCAL_CQ_ERROR=5,
):  # fmt: skip
    pass


@dataclass(frozen=True)
class PeerFailureEvent:
    """A failure that no transfer told. `remote_engine_key` is empty unless one peer is meant."""

    remote_engine_key: str
    reason: PeerFailureReason
    qp_num: int = 0
    port_num: int = 0
    device_name: str = "standin0"
    detail: str = ""


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


class _Description:
    """Read-only, equal by its fields and without a hash, as the extension module's."""

    _fields: ClassVar[dict[str, Any]]
    """Names in the order in which they are packed, with what they are when a packed one is too short."""
    _compared: ClassVar[int]
    """How many of the first fields count for equality."""

    def __init__(self) -> None:
        raise TypeError(f"{type(self).__name__}: No constructor defined!")

    @classmethod
    def make(cls, **values: Any) -> Self:
        made = cls.__new__(cls)
        object.__setattr__(made, "_values", {**cls._fields, **values})
        return made

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields or name in _HIDDEN:
            raise AttributeError(name)
        return self._values[name]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> list[Any]:
        values = list(self._values.values())[: self._compared]
        return [value for value in values if not isinstance(value, bytes)]

    def pack(self) -> bytes:
        return msgpack.packb(
            [int(value) if isinstance(value, BoundEnum) else value for value in self._values.values()]
        )

    @classmethod
    def unpack(cls, packed: bytes) -> Self:
        """Take descriptions of older and newer versions, which are shorter or longer. Raises RuntimeError."""
        unpacker = msgpack.Unpacker()
        unpacker.feed(packed)
        try:
            fields = unpacker.unpack()
        except msgpack.OutOfData as error:
            raise RuntimeError("insufficient bytes") from error
        except (ValueError, msgpack.exceptions.UnpackException) as error:
            raise RuntimeError("parse error") from error
        if not isinstance(fields, list):
            raise RuntimeError("std::bad_cast")
        named = dict(zip(cls._fields, fields, strict=False))
        for name, value in named.items():
            default = cls._fields[name]
            if type(value) is not (int if isinstance(default, BoundEnum) else type(default)):
                raise RuntimeError("std::bad_cast")
            if isinstance(default, BoundEnum):
                named[name] = type(default)(value)
        return cls.make(**named)


class EngineDesc(_Description):
    _fields: ClassVar = {"key": "", "node_id": "", "hostname": "", "host": "", "port": 0, "pid": 0}
    _compared: ClassVar = 6


_HIDDEN = frozenset(
    {"ipc_offset", "fabric_handle", "vpod_id", "vpod_ppod_id", "fabric_offset", "fabric_alloc_size"}
)
"""Fields of `MemoryDesc` that are packed and cannot be read."""


class MemoryDesc(_Description):
    """Equality leaves handles and what follows them out."""

    _fields: ClassVar = {
        "engine_key": "", "id": 0, "device_id": -1, "device_bus_id": "", "data": 0, "size": 0,
        "loc": MemoryLocationType.Unknown, "ipc_handle": bytes(HANDLE_BYTES), "numa_node": -1,
        "ipc_offset": 0, "fabric_handle": bytes(HANDLE_BYTES), "vpod_id": -1, "vpod_ppod_id": "",
        "fabric_offset": 0, "fabric_alloc_size": 0,
    }  # fmt: skip
    _compared: ClassVar = 10

    def __init__(self) -> None:
        object.__setattr__(self, "_values", dict(self._fields))


class TransferStatus:
    """How far a transfer came. An error stays, whatever `Update` says later."""

    def __init__(self) -> None:
        self._code = StatusCode.INIT
        self._message = ""
        self._changed = threading.Condition()

    def Code(self) -> StatusCode:
        return StatusCode(int(self._code))

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
        return int(self._code) > 10

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
            return self.Code()

# SPDX-License-Identifier: Apache-2.0
"""The control plane between engines: what is this region of yours, and what has arrived from me.

One connection a message, served by a thread, as in the real library; asking blocks for up to
MORI_IO_CP_TIMEOUT_MS.
"""

from __future__ import annotations

import os
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field

import msgpack
from mori.cpp import EngineDesc, MemoryDesc
from mori.io import memory
from mori.io.faults import Faults

_MAX_BYTES = 65536


@dataclass
class Registry:
    """An engine's memory, and notifications that came in: (sender's key, uid) to how many are missing."""

    faults: Faults
    regions: dict[int, MemoryDesc] = field(default_factory=dict)
    pinned: set[int] = field(default_factory=set)
    inbound: Counter[tuple[str, int]] = field(default_factory=Counter)

    def pin(self, region: MemoryDesc) -> None:
        """Register with the device, which happens at first use. The real library aborts when that fails."""
        fault = self.faults.get("registration")
        if fault is not None and region.size > fault.above:
            os.write(2, b"RegisterRdmaMemoryRegion failed! errno:12 (Cannot allocate memory)\n")
            os.abort()
        self.pinned.add(region.id)

    def arrived(self, sender: str, uid: int, total: int) -> None:
        """One of `total` notifications. None is ever erased (the real library has the same defect)."""
        if (sender, uid) not in self.inbound:
            self.inbound[sender, uid] = total
        self.inbound[sender, uid] -= 1


class ControlServer:
    """Answers other engines."""

    def __init__(self, host: str, port: int, registry: Registry) -> None:
        self._registry = registry
        self._listener = socket.create_server((host, port))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, name="mori-control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_timeout_s())
                try:
                    connection.sendall(msgpack.packb(self._answer(msgpack.unpackb(_receive(connection)))))
                except (OSError, ValueError, TypeError, IndexError):
                    continue  # a peer that talks nonsense or left: it will find out

    def _answer(self, message: list[object]) -> list[object]:
        match message:
            case ["memory", int(number)]:
                region = self._registry.regions.get(number)
                if region is None:
                    return [0, 0, 0]
                self._registry.pin(region)
                return [region.size, os.getpid(), memory.started(os.getpid())]
            case ["arrived", str(sender), int(uid), int(total)]:
                self._registry.arrived(sender, uid, total)
        return []


def query(engine: EngineDesc, message: list[object]) -> list[int]:
    """Send one message and wait for the answer. Raises RuntimeError when there is none in time."""
    try:
        with socket.create_connection((engine.host, engine.port), _timeout_s()) as connection:
            connection.sendall(msgpack.packb(message))
            connection.shutdown(socket.SHUT_WR)
            answer = msgpack.unpackb(_receive(connection))
    except (OSError, ValueError) as error:
        raise RuntimeError(f"control plane of {engine.key}: {error}") from error
    assert isinstance(answer, list)
    return answer


def _receive(connection: socket.socket) -> bytes:
    received = b""
    while piece := connection.recv(_MAX_BYTES):
        received += piece
        if len(received) > _MAX_BYTES:
            raise ValueError("too long")
    return received


def _timeout_s() -> float:
    return int(os.environ.get("MORI_IO_CP_TIMEOUT_MS", "5000")) / 1000

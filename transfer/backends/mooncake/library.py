# SPDX-License-Identifier: Apache-2.0
"""Mooncake's own transfer engine: its setup, and the calls that are used."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvferry.transfer.backends.common.regions import MemoryAddress, NumBytes
from kvferry.transfer.engine import BackendUnavailable, PeerUnreachable, Status

CANARY_BYTES = 32
_ACCEPT_TIMEOUT = struct.pack("@ll", 0, 100_000)
"""A `struct timeval`."""


class MooncakeAddress(
    msgspec.Struct, frozen=True, kw_only=True, rename={"canary": "proof", "canary_address": "proof_address"}
):
    """What a reader needs: Mooncake's name for the engine, and the address of a copy of `canary`."""

    segment: str
    canary: bytes
    canary_address: MemoryAddress


class MooncakeRegionAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A pool's region in its owner's address space."""

    address: MemoryAddress
    nbytes: NumBytes


class Piece(NamedTuple):
    """One read to post: addresses in the two processes, and a length."""

    local: int
    remote: int
    length: int


class MooncakeLibrary:
    """One of Mooncake's engines, with a bounce buffer for a peer's canary.

    `known_peers` holds the canary of every segment that it was used for: Mooncake caches what it learns about
    a segment.
    """

    def __init__(self, host: str) -> None:
        module = _load()
        self.moves_cuda = bool(getattr(module, "SUPPORT_CUDA", False))
        self.known_peers: dict[str, bytes] = {}
        self.bounce_buffer = np.zeros(CANARY_BYTES, dtype=np.uint8)
        self._host = host
        self._pool: Sequence[MooncakeRegionAddress] = ()
        self._engine: Any = module.TransferEngine()
        if self._engine.initialize(host, "P2PHANDSHAKE", _protocol(), "") != 0:
            raise BackendUnavailable(f"mooncake: its engine does not start as {host}")
        _shorten_accept(self._engine.get_rpc_port())
        self.pin(self.bounce_buffer.ctypes.data, CANARY_BYTES)

    def segment(self) -> str:
        """Name of the segment that peers open."""
        return f"{self._host}:{self._engine.get_rpc_port()}"

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory. Raises `BackendUnavailable` if the engine refuses."""
        if self._engine.register_memory(address, nbytes) != 0:
            raise BackendUnavailable(f"mooncake: {nbytes} bytes of memory cannot be registered")

    def pin_pool(self, pool: Sequence[MooncakeRegionAddress]) -> None:
        """Register the pool that reads are written to. Raises `PeerUnreachable` if the engine refuses."""
        try:
            for region in pool:
                self.pin(region.address, region.nbytes)
        except BackendUnavailable as error:
            raise PeerUnreachable(str(error)) from error
        self._pool = pool

    def unpin_pool(self) -> None:
        """Make the pool unreachable through this engine."""
        for region in self._pool:
            self._engine.unregister_memory(region.address)
        self._pool = ()

    def start_read(self, segment: str, piece: Piece) -> int:
        """Post one read; 0 if Mooncake refuses it. Blocks on the peer if the segment is new."""
        batch: int = self._engine.batch_transfer_async_read(
            segment, [piece.local], [piece.remote], [piece.length]
        )
        return batch

    def check(self, batch: int) -> Status:
        """Poll a read. Mooncake frees it when this is DONE or FAILED."""
        state = self._engine.transfer_check_status(batch)
        if state == 1:
            return Status.DONE
        return Status.FAILED if state == -1 else Status.PENDING  # -2: past its own timeout, but not over

    def close(self) -> None:
        """Destroy the engine: it neither serves nor writes any more. Holds the interpreter up to 0.1 s."""
        self._engine = None


def probe(options: Mapping[str, str]) -> str | None:
    """Why Mooncake does not run in this process, or None if it does."""
    try:
        MooncakeLibrary("127.0.0.1").close()
    except BackendUnavailable as error:
        return str(error)
    return None


def _load() -> Any:
    """Import Mooncake. It reads its settings from the environment when an engine starts."""
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    os.environ.setdefault("MC_TCP_ENABLE_CONNECTION_POOL", "1")  # or every read connects, and blocks
    if _protocol() == "tcp":
        os.environ.setdefault("MC_FORCE_TCP", "1")
    try:
        import mooncake.engine as module
    except (ImportError, OSError) as error:
        raise BackendUnavailable(f"mooncake: {error}") from error
    return module


def _shorten_accept(port: int) -> None:
    """Shorten the accept timeout of the engine's listener from a second to 0.1 s.

    Destroying the engine waits for it, holding the interpreter. An accept that has begun keeps its second.
    """
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(link.name))) as ours:
                if ours.getsockname()[1:2] == (port,):
                    ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _ACCEPT_TIMEOUT)
        except OSError:
            continue  # another thread has closed it meanwhile


def _protocol() -> str:
    """RDMA where there is an adapter for it, unless MC_FORCE_TCP says otherwise."""
    adapters = Path("/sys/class/infiniband")
    has_rdma = adapters.is_dir() and any(adapters.iterdir())
    return "rdma" if has_rdma and "MC_FORCE_TCP" not in os.environ else "tcp"

# SPDX-License-Identifier: Apache-2.0
"""The mooncake backend: one-sided reads through Mooncake's transfer engine (RDMA, or TCP without it).

Traits of its Python API (version 0.3.13, docs/sources.md#mooncake), and what this backend does about them:

- Polling a batch spins, and after a timeout the batch is abandoned, still writing. A batch of *one* read can
  be polled without blocking until it is over. So every piece is a batch of its own, and a transfer is
  quiescent when each has ended, or when this backend is closed: a destroyed engine writes nothing.
- Opening a segment blocks on the peer, up to a minute, and locks its engine. So a thread does it, and every
  producer has an engine of its own: one that hangs delays no other. Destroying an engine holds the
  interpreter, so idle ones are reused.
- It does not authenticate and listens on every address of the host. Every process that reaches it can read
  and write the registered pool. So it opens only when named, never under `--transfer auto`.
- It has no usable deadline: deadlines are enforced here.

The RDMA path is untested.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.mooncake.library import (
    CANARY_BYTES,
    MooncakeAddress,
    MooncakeLibrary,
    MooncakeRegionAddress,
    probe,
)
from kvferry.transfer.backends.mooncake.peer import MooncakePeer, MooncakeTransfer, cut
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region
from kvferry.transfer.layout import SpanTable, check_bounds

if TYPE_CHECKING:
    import torch

__all__ = ["MooncakeEngine", "open_backend", "probe"]

_log = logging.getLogger(__name__)


class MooncakeRegion:
    """A region that peers may read."""

    def __init__(self, memory: torch.Tensor) -> None:
        nbytes = memory.numel() * memory.element_size()
        self.address = MooncakeRegionAddress(address=memory.data_ptr(), nbytes=nbytes)

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self.address)


class MooncakeEngine:
    """See `transfer.engine.TransferEngine`. One library engine serves, and one per producer reads."""

    name = "mooncake"

    def __init__(self, options: EngineOptions) -> None:
        self._host = options.advertise_host
        self._serving = MooncakeLibrary(self._host)
        self._waker = Waker()
        self._pool: list[MooncakeRegionAddress] = []
        self._peers: list[MooncakePeer] = []
        self._spare: list[MooncakeLibrary] = []
        self._canary = np.frombuffer(secrets.token_bytes(CANARY_BYTES), dtype=np.uint8).copy()
        self._serving.pin(self._canary.ctypes.data, CANARY_BYTES)

    def admit(self, secret: bytes) -> None:
        """Do nothing: Mooncake checks no token."""

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        if pool[0].is_cuda and not self._serving.moves_cuda:
            raise BackendUnavailable("mooncake: this build moves host memory only, and the pool is on a GPU")
        regions = [MooncakeRegion(memory) for memory in pool]
        self._pool = [region.address for region in regions]
        for address in self._pool:
            self._serving.pin(address.address, address.nbytes)
        return regions

    def describe(self) -> bytes:
        address = MooncakeAddress(
            segment=self._serving.segment(),
            canary=self._canary.tobytes(),
            canary_address=self._canary.ctypes.data,
        )
        return msgspec.msgpack.encode(address)

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=MooncakeAddress)
            pool = [msgspec.msgpack.decode(each, type=MooncakeRegionAddress) for each in regions]
        except msgspec.MsgspecError as error:
            raise PeerUnreachable(f"not a mooncake engine's description: {error}") from error
        if any(each.opening and each.segment == address.segment for each in self._peers):
            raise PeerUnreachable(f"mooncake: {address.segment} has not answered an earlier attempt yet")
        client = MooncakePeer(self._acquire_library(address), address, pool, self._waker, timeout_s)
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> MooncakeTransfer:
        """Queue a read. Raises ValueError for a span outside the peer's pool or ours."""
        client = cast(MooncakePeer, peer)
        sizes = ([each.nbytes for each in pool] for pool in (self._pool, client.pool))
        check_bounds(spans, *sizes)
        pieces = cut(spans, self._pool, client.pool)
        transfer = MooncakeTransfer(pieces, len(spans), time.monotonic() + timeout_s)
        client.read(transfer)
        return transfer

    def progress(self) -> None:
        self._waker.drain()
        now = time.monotonic()
        for peer in self._peers:
            peer.progress(now)
        self._recycle()

    def fileno(self) -> int | None:
        return self._waker.fileno()

    def next_deadline(self) -> float | None:
        now = time.monotonic()
        times = [peer.next_deadline(now) for peer in self._peers]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        """Destroy every engine, up to 0.1 s each. One whose segment is still being opened is left to its
        thread, which ends by itself; it has no read in flight.
        """
        for peer in self._peers:
            if peer.opening:
                peer.close()
                peer.library.unpin_pool()
            else:
                peer.abandon()
        for library in [self._serving, *self._spare]:
            library.close()
        self._peers.clear()
        self._spare.clear()
        self._waker.close()

    def _recycle(self) -> None:
        """Collect the engines of finished peers for reuse."""
        finished = [peer for peer in self._peers if peer.finished]
        self._spare += [peer.library for peer in finished]
        self._peers = [peer for peer in self._peers if peer not in finished]

    def _acquire_library(self, address: MooncakeAddress) -> MooncakeLibrary:
        """Reuse an engine that knows no earlier incarnation at this address, or start one."""
        for library in self._spare:
            if library.known_peers.get(address.segment, address.canary) == address.canary:
                self._spare.remove(library)
                break
        else:
            library = self._new_library()
        library.known_peers[address.segment] = address.canary
        library.bounce_buffer[:] = 0
        return library

    def _new_library(self) -> MooncakeLibrary:
        try:
            library = MooncakeLibrary(self._host)
        except BackendUnavailable as error:
            raise PeerUnreachable(str(error)) from error
        library.pin_pool(self._pool)
        return library


def open_backend(options: EngineOptions) -> MooncakeEngine:
    """Start an engine. Raises `BackendUnavailable` with the reason if Mooncake does not run here."""
    if not options.explicit:
        raise BackendUnavailable(
            "mooncake: every process that reaches it can write the pool, so it must be chosen by name"
        )
    if ":" in options.advertise_host:
        raise BackendUnavailable("mooncake: IPv6 addresses are not supported")
    engine = MooncakeEngine(options)
    if options.bind_host not in ("0.0.0.0", "::"):
        _log.warning("mooncake listens on every address of this host, not only on %s", options.bind_host)
    return engine

# SPDX-License-Identifier: Apache-2.0
"""The nccl backend: KV over torch.distributed, for GPUs without RDMA libraries; gloo on CPU, for tests.

NCCL and gloo have only send and receive, so this backend is two-sided: a reader sends requests over a socket,
and the server's thread gathers the spans into messages that the reader receives and copies out. Every pair of
ranks has a communicator of its own, and every message carries the id of its read and its number: none is
matched by its order alone (L10).

A peer must hold a token from the control channel to be served. What the two libraries send is neither
encrypted nor authenticated. NCCL's kernels run beside the model's own; NCCL refuses a pair on one GPU.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.transfer.backends.common.handshake import HandshakeServer
from kvferry.transfer.backends.common.regions import SizedRegion, unpack_sizes
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.nccl.peer import NcclPeer, NcclTransfer
from kvferry.transfer.backends.nccl.session import NcclSession
from kvferry.transfer.backends.nccl.wire import PROTOCOL, NcclAddress
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region
from kvferry.transfer.layout import SpanTable
from kvferry.transfer.memory import region_sizes

if TYPE_CHECKING:
    import torch

_MAX_PAIRS = 256
_CLOSE_S = 2.0


class NcclEngine:
    """See `transfer.engine.TransferEngine`."""

    name = "nccl"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._fabric = "gloo"
        self._registered: Sequence[torch.Tensor] | None = None
        self._peers: list[NcclPeer] = []
        everywhere = options.bind_host in ("0.0.0.0", "::")
        self._own_host = options.advertise_host if everywhere else options.bind_host
        self._waker = Waker()
        self._selector = selectors.EpollSelector()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        self._server = HandshakeServer(
            options.bind_host, self._selector, PROTOCOL, self._new_session, _MAX_PAIRS
        )

    def admit(self, secret: bytes) -> None:
        self._server.admit(secret)

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        self._fabric = _fabric(pool[0], self._options.explicit)
        self._registered = pool
        return [SizedRegion(size) for size in region_sizes(pool)]

    def describe(self) -> bytes:
        address = self._server.address(self._options.advertise_host)
        return msgspec.msgpack.encode(NcclAddress(**msgspec.structs.asdict(address), fabric=self._fabric))

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=NcclAddress)
            sizes = unpack_sizes(regions)
        except (msgspec.MsgspecError, struct.error) as error:
            raise PeerUnreachable(f"not an nccl engine's description: {error}") from error
        if address.fabric != self._fabric:
            raise PeerUnreachable(f"nccl: their pool moves by {address.fabric}, ours by {self._fabric}")
        client = NcclPeer(
            address, sizes, token, self._pool(), self._own_host, self._selector, self._waker, timeout_s
        )
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> NcclTransfer:
        return cast(NcclPeer, peer).read(spans, timeout_s)

    def progress(self) -> None:
        for key, events in self._selector.select(0):
            key.data.on_ready(events)
        now = time.monotonic()
        for peer in self._peers:
            peer.progress(now)
        self._server.progress(now)
        self._peers = [peer for peer in self._peers if not peer.finished]

    def fileno(self) -> int | None:
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        times = [self._server.next_deadline(), *(peer.next_deadline() for peer in self._peers)]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        """End every pair. A thread that waits for a stopped peer ends later, by its deadline, without access
        to the pool.
        """
        sessions = cast("list[NcclSession]", self._server.sessions)
        pairs: list[NcclPeer | NcclSession] = [*self._peers, *sessions]
        for pair in pairs:
            pair.close()
        self._server.close()
        until = time.monotonic() + _CLOSE_S
        for pair in pairs:
            pair.end(max(0.0, until - time.monotonic()))
        self._selector.close()
        self._waker.close()

    def _new_session(self, connection: socket.socket, server: HandshakeServer) -> NcclSession:
        hosts = (self._options.bind_host, self._own_host)
        return NcclSession(connection, server, self._pool(), hosts, self._fabric, self._waker)

    def _pool(self) -> Sequence[torch.Tensor]:
        if self._registered is None:
            raise AssertionError("no pool is registered")
        return self._registered


def open_backend(options: EngineOptions) -> NcclEngine:
    """Listen for readers. Raises `BackendUnavailable` with the reason."""
    reason = probe(options.backend_options)
    if reason is not None:
        raise BackendUnavailable(reason)
    try:
        return NcclEngine(options)
    except OSError as error:
        raise BackendUnavailable(f"nccl on {options.bind_host}: {error}") from error


def probe(options: Mapping[str, str]) -> str | None:
    """Why neither gloo nor NCCL works in this process, or None. The pool decides which is needed."""
    try:
        import torch.distributed as dist
    except ImportError as error:
        return f"nccl: {error}"
    if not dist.is_available() or not (dist.is_nccl_available() or dist.is_gloo_available()):
        return "nccl: this build of torch has neither NCCL nor gloo"
    return None


def _fabric(pool: torch.Tensor, explicit: bool) -> str:
    """The library for this pool. Raises `BackendUnavailable` if it is missing."""
    import torch.distributed as dist

    if pool.is_cuda:
        if not dist.is_nccl_available():
            raise BackendUnavailable("nccl: this build of torch is without NCCL, and the pool is on a GPU")
        return "nccl"
    if not explicit:
        raise BackendUnavailable("nccl: in host memory it is gloo, which has to be asked for by name")
    if not dist.is_gloo_available():
        raise BackendUnavailable("nccl: this build of torch is without gloo, and the pool is in host memory")
    return "gloo"

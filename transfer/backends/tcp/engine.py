# SPDX-License-Identifier: Apache-2.0
"""The tcp backend: KV over plain sockets, for hosts without anything better.

No copy beyond the socket's own: the server sends straight from its pool, the reader receives straight
into its own. A peer must hold a token from the control channel; a token is good for the whole pool. Bytes
travel in the clear.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.transfer.backends.common.handshake import HandshakeAddress, HandshakeServer
from kvferry.transfer.backends.common.regions import SizedRegion, unpack_sizes
from kvferry.transfer.backends.tcp.peer import TcpPeer, TcpTransfer
from kvferry.transfer.backends.tcp.session import TcpSession
from kvferry.transfer.backends.tcp.wire import PROTOCOL
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region
from kvferry.transfer.layout import SpanTable
from kvferry.transfer.memory import PoolMemory, pool_memory

if TYPE_CHECKING:
    import torch


class TcpEngine:
    """See `transfer.engine.TransferEngine`."""

    name = "tcp"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._memory: PoolMemory | None = None
        self._selector = selectors.EpollSelector()
        self._peers: list[TcpPeer] = []
        self._server = HandshakeServer(options.bind_host, self._selector, PROTOCOL, self._new_session)

    def admit(self, secret: bytes) -> None:
        self._server.admit(secret)

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        self._memory = pool_memory(pool)
        return [SizedRegion(size) for size in self._memory.sizes]

    def describe(self) -> bytes:
        return msgspec.msgpack.encode(self._server.address(self._options.advertise_host))

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=HandshakeAddress)
            sizes = unpack_sizes(regions)
        except (msgspec.MsgspecError, struct.error) as error:
            raise PeerUnreachable(f"not a tcp engine's description: {error}") from error
        deadline = time.monotonic() + timeout_s
        client = TcpPeer(address, sizes, token, self._pool(), self._selector, deadline)
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> TcpTransfer:
        return cast(TcpPeer, peer).read(spans, timeout_s)

    def progress(self) -> None:
        for key, events in self._selector.select(0):
            key.data.on_ready(events)
        now = time.monotonic()
        for peer in self._peers:
            peer.progress(now)
        self._server.progress(now)
        self._peers = [peer for peer in self._peers if not peer.closed]

    def fileno(self) -> int | None:
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        times = [self._server.next_deadline(), *(peer.next_deadline() for peer in self._peers)]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        for peer in self._peers:
            peer.close()
        self._server.close()
        self._selector.close()

    def _new_session(self, connection: socket.socket, server: HandshakeServer) -> TcpSession:
        return TcpSession(connection, server, self._pool())

    def _pool(self) -> PoolMemory:
        if self._memory is None:
            raise AssertionError("no pool is registered")
        return self._memory


def open_backend(options: EngineOptions) -> TcpEngine:
    """Listen for readers. Raises `BackendUnavailable` if the address cannot be bound."""
    try:
        return TcpEngine(options)
    except OSError as error:
        raise BackendUnavailable(f"tcp on {options.bind_host}: {error}") from error


def probe(options: Mapping[str, str]) -> str | None:
    """None: sockets work everywhere."""
    return None

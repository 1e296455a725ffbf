# SPDX-License-Identifier: Apache-2.0
"""The tcp backend: KV over plain sockets, for hosts without anything better.

No copy beyond the socket's own: the server sends straight from its pool, the reader receives straight
into its own. A peer must hold a token from the control channel; whoever holds one may read the whole
pool. Bytes travel in the clear.
"""

from __future__ import annotations

import secrets
import selectors
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.transfer import tokens
from kvferry.transfer.backends.common import sockets
from kvferry.transfer.backends.tcp.client import TcpPeer, TcpTransfer
from kvferry.transfer.backends.tcp.server import ServedConnection
from kvferry.transfer.backends.tcp.wire import NONCE_BYTES, TcpAddress
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Region
from kvferry.transfer.layout import SpanTable
from kvferry.transfer.memory import PoolMemory, pool_memory

if TYPE_CHECKING:
    import torch

_MAX_CONNECTIONS = 1024
_POOL_SIZE = struct.Struct("<Q")


class TcpRegion:
    """A pool that peers may read; its description is its size in bytes."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def describe(self) -> bytes:
        return _POOL_SIZE.pack(self._nbytes)


class TcpEngine:
    """See `transfer.engine.TransferEngine`."""

    name = "tcp"

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._secret: bytes | None = None
        self._memory: PoolMemory | None = None
        self._selector = selectors.EpollSelector()
        self._peers: list[TcpPeer] = []
        self._served: list[ServedConnection] = []
        self._listener = sockets.listen(options.bind_host)
        self._selector.register(self._listener, selectors.EVENT_READ, self)

    def admit(self, secret: bytes) -> None:
        self._secret = secret

    def register(self, pool: torch.Tensor) -> Region:
        self._memory = pool_memory(pool)
        return TcpRegion(self._memory.nbytes)

    def describe(self) -> bytes:
        port = self._listener.getsockname()[1]
        return msgspec.msgpack.encode(
            TcpAddress(host=self._options.advertise_host, port=port, nonce=self._nonce)
        )

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=TcpAddress)
            (pool_bytes,) = _POOL_SIZE.unpack(regions[0])
        except (msgspec.MsgspecError, struct.error, IndexError) as error:
            raise PeerUnreachable(f"not a tcp engine's description: {error}") from error
        client = TcpPeer(address, pool_bytes, token, self._pool(), self._selector, timeout_s)
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> TcpTransfer:
        return cast(TcpPeer, peer).read(spans, timeout_s)

    def progress(self) -> None:
        for key, events in self._selector.select(0):
            key.data.on_ready(events)
        now = time.monotonic()
        for connection in self._connections():
            connection.expire(now)
        self._served = [connection for connection in self._served if not connection.closed]
        self._peers = [peer for peer in self._peers if not peer.broken]

    def fileno(self) -> int | None:
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        times = [connection.next_deadline() for connection in self._connections()]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        for connection in self._connections():
            connection.close()
        self._selector.close()
        self._listener.close()

    def on_ready(self, events: int) -> None:
        """A peer knocks at the listener."""
        connection = sockets.accept(self._listener)
        if connection is None:
            return
        if len(self._served) >= _MAX_CONNECTIONS:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._served.append(self._serve(connection))

    def _serve(self, connection: socket.socket) -> ServedConnection:
        return ServedConnection(connection, self._selector, self._pool(), self._check)

    def _check(self, nonce: bytes, token: bytes) -> bool:
        """Whether a reader means this engine and was admitted by our engine process."""
        return nonce == self._nonce and self._secret is not None and tokens.verify(self._secret, token)

    def _connections(self) -> list[TcpPeer | ServedConnection]:
        return [*self._peers, *self._served]

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


def probe() -> str | None:
    """Sockets work everywhere."""
    return None

# SPDX-License-Identifier: Apache-2.0
"""The mori backend: one-sided reads through AMD's MORI-IO (RDMA between hosts, XGMI between GPUs of one).

What was run where is in docs/backends/mori.md. The library's traits (docs/sources.md#mori-io), and what this
backend does about them:

* It ends its process on a failed topology or registration: a child process tries first.
* It connects with blocking calls that hold the interpreter: a handshake comes first (`HandshakePeer`), then a
  thread makes the queue pairs by a call that does not hold it (`QueuePairMaker`).
* It has no deadline, no cancel, and may write after it has reported an error: `MoriTransfer` posts a fence.
* Its queue pairs to an engine are made once and stay broken: such a peer is refused from then on, so that the
  link falls back to another backend and our engine is opened anew when it is idle.
* It reports a dead peer before the transfers end: they fail at once (`MoriLibrary.failures`).
* Posting more than a NIC's send queue holds would block: the excess waits here.

MORI does not authenticate: every process that reaches its port can ask for the keys to the registered memory.
It keeps a core busy polling for completions for as long as its engine lives.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import msgspec

from kvferry.transfer.backends.common.handshake import HandshakeAddress, HandshakeServer
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.mori.library import MoriLibrary
from kvferry.transfer.backends.mori.peer import MoriPeer
from kvferry.transfer.backends.mori.probe import find_reason
from kvferry.transfer.backends.mori.queue_pairs import QueuePairMaker
from kvferry.transfer.backends.mori.regions import MoriPool, MoriRegionAddress, RemotePool
from kvferry.transfer.backends.mori.settings import read_settings
from kvferry.transfer.backends.mori.transfer import MoriTransfer
from kvferry.transfer.engine import (
    BackendUnavailable,
    EngineOptions,
    Peer,
    PeerBroken,
    PeerUnreachable,
    Region,
)
from kvferry.transfer.layout import SpanTable

if TYPE_CHECKING:
    import torch

_POLL_S = 0.001


class MoriAddress(msgspec.Struct, frozen=True, kw_only=True):
    """What a reader needs: MORI's own description of the engine, and where its handshake is."""

    engine: bytes
    greeting: HandshakeAddress


class MoriEngine:
    """See `transfer.engine.TransferEngine`."""

    name = "mori"

    def __init__(self, options: EngineOptions, library: MoriLibrary) -> None:
        self._options = options
        self._library = library
        self.pool: MoriPool | None = None
        self._peers: list[MoriPeer] = []
        self._selector = selectors.EpollSelector()
        self._server = HandshakeServer(options.bind_host, self._selector)
        self._waker = Waker()
        self._selector.register(self._waker, selectors.EVENT_READ, self._waker)
        self._maker = QueuePairMaker(library, self._waker.wake)

    def admit(self, secret: bytes) -> None:
        self._server.admit(secret)

    def register(self, pool: Sequence[torch.Tensor]) -> Sequence[Region]:
        self.pool = MoriPool(pool, self._library)
        return self.pool.regions

    def describe(self) -> bytes:
        address = MoriAddress(
            engine=self._library.engine.get_engine_desc().pack(),
            greeting=self._server.address(self._options.advertise_host),
        )
        return msgspec.msgpack.encode(address)

    def connect(self, peer: bytes, regions: Sequence[bytes], token: bytes, timeout_s: float) -> Peer:
        try:
            address = msgspec.msgpack.decode(peer, type=MoriAddress)
            pool = [msgspec.msgpack.decode(each, type=MoriRegionAddress) for each in regions]
        except msgspec.MsgspecError as error:
            raise PeerUnreachable(f"not a mori engine's description: {error}") from error
        remote = RemotePool(self._library.module, address.engine, pool)
        if remote.key in self._library.broken:
            raise PeerBroken("mori: our queue pairs to it are in error")
        deadline = time.monotonic() + timeout_s
        client = MoriPeer(
            self._library,
            self._maker,
            self._registered_pool(),
            remote,
            address.greeting,
            token,
            self._selector,
            deadline,
        )
        self._library.engine.register_remote_engine(remote.engine)
        self._peers.append(client)
        return client

    def read(self, peer: Peer, spans: SpanTable, timeout_s: float) -> MoriTransfer:
        return cast(MoriPeer, peer).read(spans, time.monotonic() + timeout_s)

    def progress(self) -> None:
        for key, events in self._selector.select(0):
            key.data.on_ready(events)
        now = time.monotonic()
        self._server.progress(now)
        self._end_failed()
        for peer in self._peers:
            peer.progress(now)
        self._forget_lost()

    def fileno(self) -> int | None:
        return self._selector.fileno()

    def next_deadline(self) -> float | None:
        """MORI has no descriptor: reads in flight are polled."""
        if any(peer.underway for peer in self._peers):
            return time.monotonic() + _POLL_S
        times = [self._server.next_deadline(), *(peer.next_deadline() for peer in self._peers)]
        return min((each for each in times if each is not None), default=None)

    def close(self) -> None:
        self._server.close()
        self._maker.close()
        for peer in self._peers:
            peer.forget_sessions()
        self._library.close()
        for peer in self._peers:
            peer.abandon()
        self._peers.clear()
        self._selector.close()
        self._waker.close()

    def _end_failed(self) -> None:
        """End peers that the library has found dead, without waiting for their transfers."""
        for failure in self._library.failures():
            for peer in self._peers:
                if failure.engine_key in ("", peer.remote.key):
                    if failure.fatal:
                        self._library.broken.add(peer.remote.key)
                    peer.lose(failure.reason)

    def _forget_lost(self) -> None:
        """Forget finished peers; the library forgets an engine with its last peer."""
        finished = [peer for peer in self._peers if peer.finished]
        if not finished:
            return
        self._peers = [peer for peer in self._peers if not peer.finished]
        for peer in finished:
            peer.forget_sessions()
        in_use = {peer.remote.key for peer in self._peers}
        for remote in {peer.remote.key: peer.remote for peer in finished}.values():
            if remote.key not in in_use:
                self._library.engine.deregister_remote_engine(remote.engine)

    def _registered_pool(self) -> MoriPool:
        if self.pool is None:
            raise AssertionError("no pool is registered")
        return self.pool


def open_backend(options: EngineOptions) -> MoriEngine:
    """Make an engine. Raises `BackendUnavailable` with the reason if MORI-IO does not run here, and
    ValueError for an invalid option.
    """
    settings = read_settings(options.backend_options)
    try:
        host = socket.gethostbyname(options.advertise_host)  # MORI takes numeric IPv4 addresses only
    except OSError as error:
        raise BackendUnavailable(f"mori: {options.advertise_host}: {error}") from error
    reason = find_reason(host, options.backend_options)
    if reason is not None:
        raise BackendUnavailable(reason)
    try:
        return MoriEngine(options, MoriLibrary(options.name, host, settings))
    except OSError as error:
        raise BackendUnavailable(f"mori on {options.bind_host}: {error}") from error


def probe(options: Mapping[str, str]) -> str | None:
    """Why MORI-IO does not run on this machine, or None if it does."""
    return find_reason("127.0.0.1", options)

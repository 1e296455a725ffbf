# SPDX-License-Identifier: Apache-2.0
"""The channel between an engine process and a rank on another host: over TCP, encrypted by CURVE.

Either side has one end of a socket pair, as it has of a Unix socket where both are on one host, and a thread
that passes its frames on. The rank makes a key pair of its own; who has the public key can command it, so it
must reach the engine process in private.
"""

from __future__ import annotations

import socket
import threading

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.common.addresses import bracketed
from kvferry.transfer.plane import RemoteRank
from kvferry.transfer.ranks.channel import MAX_FRAME_BYTES, Frames, RankEnd, packed

_HEARTBEAT_MS = 1_000
_SILENCE_MS = 30_000
"""After which the other host counts as gone."""
_HANDSHAKE_MS = 10_000
_SEND_S = 30.0
_SEND_MS = 10_000
_RECEIVE_BYTES = 1 << 16
_GREETING = b""


class RemoteRankSocket:
    """Where such a rank listens, as `RankSocket`. Raises OSError (`zmq.ZMQError`) if it cannot be bound."""

    def __init__(self, bind_host: str, advertise_host: str) -> None:
        public, secret = zmq.curve_keypair()
        self._context = zmq.Context()
        self._accepted = False
        self._socket = _socket(self._context, secret=secret, public=public)
        self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        try:
            port = self._socket.bind_to_random_port(f"tcp://{bracketed(bind_host)}")
        except zmq.ZMQError:
            self._context.destroy()
            raise
        self.address = RemoteRank(host=advertise_host, port=port, key=public)

    def accept(self, stopped: socket.socket) -> RankEnd | None:
        """As `RankSocket.accept`."""
        poller = zmq.Poller()
        for each in (self._socket, stopped):
            poller.register(each, zmq.POLLIN)
        if stopped.fileno() in dict(poller.poll()):
            self.close()
            return None
        greeting = self._socket.recv(copy=False)
        self._accepted = True
        connection = int(greeting.get(zmq.SRCFD))
        return RankEnd(_tunnel(self._context, self._socket, connection))

    def close(self) -> None:
        """Stop listening; a tunnel closes with the rank's end. Idempotent."""
        if not self._accepted:
            self._context.destroy()


def connect(rank: RemoteRank) -> socket.socket:
    """Connect to a rank, which may begin to listen later. Returns the engine process's end."""
    context = zmq.Context()
    public, secret = zmq.curve_keypair()
    peer = _socket(context, secret=secret, public=public)
    peer.setsockopt(zmq.CURVE_SERVERKEY, rank.key)
    peer.connect(f"tcp://{rank}")
    peer.send(_GREETING)
    return _tunnel(context, peer, None)


def _socket(context: zmq.Context[zmq.Socket[bytes]], *, secret: bytes, public: bytes) -> zmq.Socket[bytes]:
    made = context.socket(zmq.DEALER)
    for option, value in (
        (zmq.LINGER, 0),
        (zmq.SNDTIMEO, _SEND_MS),
        (zmq.IPV6, 1),
        (zmq.MAXMSGSIZE, MAX_FRAME_BYTES),
        (zmq.HEARTBEAT_IVL, _HEARTBEAT_MS),
        (zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS),
        (zmq.HANDSHAKE_IVL, _HANDSHAKE_MS),
        (zmq.CURVE_SECRETKEY, secret),
        (zmq.CURVE_PUBLICKEY, public),
    ):
        made.setsockopt(option, value)
    return made


def _tunnel(
    context: zmq.Context[zmq.Socket[bytes]], peer: zmq.Socket[bytes], connection: int | None
) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.settimeout(_SEND_S)
    relay = threading.Thread(
        target=_relay, args=(context, peer, ours, connection), name="rank-tunnel", daemon=True
    )
    relay.start()
    return theirs


def _relay(
    context: zmq.Context[zmq.Socket[bytes]],
    peer: zmq.Socket[bytes],
    ours: socket.socket,
    connection: int | None,
) -> None:
    """Pass frames on until either side has gone, which the other then sees.

    `connection`: the descriptor of the peer's connection at a socket to which strangers can connect too.
    """
    monitor = peer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    frames = Frames()
    poller = zmq.Poller()
    for each in (peer, ours, monitor):
        poller.register(each, zmq.POLLIN)
    try:
        while True:
            ready = dict(poller.poll())
            if peer in ready:
                ours.sendall(packed(peer.recv()))
            if ours.fileno() in ready:
                data = ours.recv(_RECEIVE_BYTES)
                for frame in frames.feed(data):
                    peer.send(frame)
                if not data:
                    return
            if monitor in ready and peer not in ready:
                ended = recv_monitor_message(monitor)["value"]
                if connection is None or ended == connection:
                    return
    except (OSError, zmq.Again):  # either side has gone, or does not read
        return
    finally:
        ours.close()
        context.destroy()

# SPDX-License-Identifier: Apache-2.0
"""The two ends of the control channel: a server on a ROUTER socket, a client on a DEALER.

Every request gets a response, or None by its deadline. A broken connection is reported at once, by the
socket's monitor, not after a timeout. With a key, both ends connect only to peers that own it (`curve`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from uuid import uuid4

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvferry.common.curve import ClusterKey, CurveAuthenticator
from kvferry.transfer.control.channel import Channel, ChannelFull, limit_socket, tcp_endpoint
from kvferry.transfer.control.messages import (
    MAX_FRAME_BYTES,
    BadControlFrame,
    Received,
    Request,
    Response,
    decode_request,
    decode_response,
    encode,
)
from kvferry.transfer.net import cannot_bind

_QUEUE = 4096
"""Frames queued per connection and direction, and requests that may be pending."""

_LINGER_MS = 200
"""Limit for sending the last requests after a client was closed."""

_BROKEN = zmq.EVENT_DISCONNECTED | zmq.EVENT_CONNECT_RETRIED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL

CONTROL_CHANNEL = "the control channel"
"""As errors call it."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request: its address on the ROUTER, the request's number and its version. Valid for one
    response.
    """

    identity: bytes
    seq: int
    version: int


class ControlServer:
    """Serves any number of consumers. Bad frames are counted and dropped, never fatal."""

    def __init__(
        self,
        on_request: Callable[[Caller, Received], None],
        key: ClusterKey | None = None,
    ) -> None:
        self._on_request = on_request
        self._key = key
        self._authenticator: CurveAuthenticator | None = None
        self._channel: Channel | None = None
        self.bad_frames = 0

    def start(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> int:
        """Bind, and return the port. Raises `CannotBind`.

        With a key, the authenticator runs before any peer can connect.
        """
        socket = context.socket(zmq.ROUTER)
        self._channel = Channel(socket, self._received)
        limit_socket(socket, queue=_QUEUE, max_frame=MAX_FRAME_BYTES)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._key is not None:
            self._key.secure_server(socket)
            self._authenticator = CurveAuthenticator(context, self._key)
            self._authenticator.start()
        try:
            socket.bind(tcp_endpoint(host, port or "*"))
        except zmq.ZMQError as error:
            raise cannot_bind(CONTROL_CHANNEL, host, port, os.strerror(error.errno or 0)) from error
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._channel.start()
        return int(endpoint.rpartition(":")[2])

    def respond(self, caller: Caller, response: Response) -> None:
        """Send a response. Dropped if the caller has left or does not read."""
        if self._channel is None:
            return
        try:
            self._channel.send([caller.identity, encode(response)])
        except ChannelFull as error:
            _log.debug("response %d was not sent: %s", caller.seq, error)

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._authenticator is not None:
            self._authenticator.close()
            self._authenticator = None

    def _received(self, frames: list[bytes]) -> None:
        try:
            if len(frames) != 2:
                raise BadControlFrame(f"{len(frames)} parts")
            request = decode_request(frames[1])
        except BadControlFrame as error:
            self.bad_frames += 1
            _log.debug("dropped a control frame: %s", error)
            return
        self._on_request(Caller(frames[0], request.seq, request.v), request)


class ControlClient:
    """The client of one producer. `on_broken` is called once, when the connection fails or is lost."""

    def __init__(
        self,
        on_broken: Callable[[], None],
        key: ClusterKey | None = None,
    ) -> None:
        self._endpoint = ""
        self._on_broken = on_broken
        self._key = key
        self._seq = itertools.count(1)
        self._waiting: dict[int, tuple[Callable[[Response | None], None], asyncio.TimerHandle]] = {}
        self._socket: zmq.Socket[bytes] | None = None
        self._channel: Channel | None = None
        self._monitor: Channel | None = None
        self._unsent: list[bytes] = []
        self._closed = False
        self.bad_frames = 0

    def start(self, context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> None:
        """Begin to connect to a numeric address, and send the requests made before.

        Raises `zmq.ZMQError` for an invalid address.
        """
        self._endpoint = tcp_endpoint(host, port)
        socket = context.socket(zmq.DEALER)
        limit_socket(socket, queue=_QUEUE, max_frame=MAX_FRAME_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # a lost producer gets a new link, with a handshake
        if self._key is not None:
            self._key.secure_client(socket)
        self._channel = Channel(socket, self._received)
        # pyzmq would name the monitor after the socket's descriptor, which a client closed just before may
        # have had: the name is freed later than the descriptor.
        monitor = socket.get_monitor_socket(_BROKEN | zmq.EVENT_CLOSED, f"inproc://{uuid4().hex}")
        self._socket = socket
        self._monitor = Channel(monitor, self._monitored)
        socket.connect(self._endpoint)
        self._channel.start()
        self._monitor.start()
        for frame in self._unsent:
            self._channel.send([frame])
        self._unsent.clear()

    def next_seq(self) -> int:
        """The number for the next request."""
        return next(self._seq)

    def request(
        self, request: Request, timeout_s: float, on_response: Callable[[Response | None], None]
    ) -> None:
        """Send a request. `on_response` is called once, later: with the answer, or with None when there is
        none by the deadline, the queue is full, or the client is closed.
        """
        loop = asyncio.get_running_loop()
        if self._closed or len(self._waiting) >= _QUEUE:
            loop.call_soon(on_response, None)
            return
        timer = loop.call_later(timeout_s, self._settle, request.seq, None)
        self._waiting[request.seq] = (on_response, timer)
        try:
            self._send(encode(request))
        except ChannelFull:
            timer.cancel()
            del self._waiting[request.seq]
            loop.call_soon(on_response, None)

    def close(self) -> None:
        """Close; pending requests get None."""
        self._closed = True
        self._unsent.clear()
        socket, channel, monitor = self._socket, self._channel, self._monitor
        self._socket = self._channel = self._monitor = None
        if socket is not None:
            # ZMQ's I/O thread would block on an event that is not received any more.
            socket.disable_monitor()
        if monitor is not None:
            monitor.close()
        if channel is not None:
            channel.close(linger_ms=_LINGER_MS)
        loop = asyncio.get_running_loop()
        for on_response, timer in self._waiting.values():
            timer.cancel()
            loop.call_soon(on_response, None)
        self._waiting.clear()

    def _send(self, frame: bytes) -> None:
        """Raises `ChannelFull`."""
        if self._channel is not None:
            self._channel.send([frame])
        elif len(self._unsent) < _QUEUE:
            self._unsent.append(frame)
        else:
            raise ChannelFull("not connected yet")

    def _received(self, frames: list[bytes]) -> None:
        try:
            response = decode_response(b"".join(frames))
        except BadControlFrame as error:
            self.bad_frames += 1
            _log.warning("dropped a control frame from %s: %s", self._endpoint, error)
            return
        self._settle(response.seq, response)

    def _settle(self, seq: int, response: Response | None) -> None:
        """End a request, with its response or None. Repeated and late responses are ignored."""
        waiting = self._waiting.pop(seq, None)
        if waiting is None:
            return
        on_response, timer = waiting
        timer.cancel()
        on_response(response)

    def _monitored(self, frames: list[bytes]) -> None:
        event = parse_monitor_message(frames)
        _log.debug("control channel to %s broke: %s", self._endpoint, event["event"])
        on_broken, self._on_broken = self._on_broken, _nothing
        on_broken()


def _nothing() -> None:
    """A broken connection is reported once."""

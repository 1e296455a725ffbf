# SPDX-License-Identifier: Apache-2.0
"""A ZMQ socket on the asyncio loop: frames come by callback, sending never waits.

Plain pyzmq driven by the socket's descriptor costs about half the CPU of pyzmq's asyncio form per round trip
(docs/sources.md#zmq), and lets the state machines above it stay synchronous.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import zmq

from kvferry.transfer import net

_BURST = 256
"""Frames delivered before other work of the loop gets its turn."""


class ChannelFull(Exception):
    """The frame was not queued: the queue is full, or there is no peer."""


class Channel:
    """Owns one ZMQ socket. Call `start` on the loop's thread, `close` when done."""

    def __init__(self, socket: zmq.Socket[bytes], on_frames: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._on_frames = on_frames
        self._loop: asyncio.AbstractEventLoop | None = None
        self._again: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to deliver frames."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._schedule()

    def send(self, frames: list[bytes]) -> None:
        """Queue one message. Raises `ChannelFull` instead of waiting."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in (zmq.EAGAIN, zmq.EHOSTUNREACH):
                raise ChannelFull(str(error)) from error
            raise
        finally:
            # The descriptor is edge-triggered and sending may have consumed the edge.
            self._schedule()

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop delivering and close the socket; what is not sent within `linger_ms` is lost. Idempotent."""
        if self._socket.closed:
            return
        if self._again is not None:
            self._again.cancel()
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close(linger=linger_ms)

    def _schedule(self) -> None:
        if self._again is None and self._loop is not None:
            self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._again is not None:
            self._again.cancel()
            self._again = None
        more = True
        try:
            more = self._receive_burst()
        finally:  # a handler that raises must not leave what came after its frame
            if more and not self._socket.closed:
                self._schedule()

    def _receive_burst(self) -> bool:
        """Deliver up to `_BURST` frames. Returns whether there may be more."""
        for _ in range(_BURST):
            if self._socket.closed:  # a frame's handler may close us
                return False
            # Cheaper than the exception that would end every burst.
            if not cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return False
            self._on_frames(self._socket.recv_multipart(zmq.NOBLOCK))
        return True


def tcp_endpoint(host: str, port: int | str) -> str:
    """A ZMQ address for a host name or an IPv4 or IPv6 address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def limit_socket(socket: zmq.Socket[bytes], *, queue: int, max_frame: int) -> None:
    """Bound a socket's queues and frames, and the time until a vanished peer counts as lost."""
    socket.setsockopt(zmq.SNDHWM, queue)
    socket.setsockopt(zmq.RCVHWM, queue)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, net.KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, net.KEEPALIVE_INTERVAL_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, net.KEEPALIVE_PROBES)
    socket.setsockopt(zmq.TCP_MAXRT, net.KEEPALIVE_LIMIT_MS)

# SPDX-License-Identifier: Apache-2.0
"""Finds out who fails to connect to the discovery socket, and why.

A peer with the wrong cluster key, or another protocol, never gets a message through. ZMQ's monitor reports
that a handshake has failed, but not whose: the address is that of the accepted file descriptor, which ZMQ
closes within a fraction of a millisecond. So a thread reads these events, and holds a duplicate of each new
connection's descriptor for a moment.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

logger = logging.getLogger(__name__)

NEW_S = 2.0
"""For so long a connection's descriptor is held; a handshake fails at once."""
MAX_NEW = 256
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_ENDPOINT = "inproc://handshakes"
_SIGNATURE_BYTES = 10
"""Length of ZMTP's signature, in bytes: no more is sent to a peer that does not begin with its own."""
_BYTES_ACKED_AND_RECEIVED = struct.Struct("120xQQ")
"""In Linux' `tcp_info`."""


class HandshakeFailure(enum.StrEnum):
    """Why a peer could not connect. The text is shown to operators."""

    OTHER_KEY = "its cluster key differs from this proxy's"
    NO_KEY = "it has no cluster key, which this proxy requires (--cluster-key)"
    UNEXPECTED_KEY = "it has a cluster key, and this proxy has none (--cluster-key)"
    NOT_ZMQ = "it speaks HTTP or another protocol on the discovery port, which is for agents' pings"


KEY_FAILURES = (HandshakeFailure.OTHER_KEY, HandshakeFailure.NO_KEY, HandshakeFailure.UNEXPECTED_KEY)

Report = Callable[[HandshakeFailure, str | None], object]
"""Takes each failure, with the peer's host where that is known."""


def watch_handshakes(
    listener: zmq.Socket[Any], context: zmq.Context[Any], *, has_key: bool, report: Report
) -> None:
    """Have `report` called, on the running event loop, for every peer that fails to connect to `listener`.

    Until `context` is terminated, which waits for the thread that watches. The monitor ends with its socket:
    to disable it would hold the GIL until the thread had read what ZMQ writes of that, which needs the GIL.
    """
    loop = asyncio.get_running_loop()
    port = int(listener.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
    listener.monitor(_ENDPOINT, _EVENTS)
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    events = plain.socket(zmq.PAIR)
    events.linger = 0
    events.connect(_ENDPOINT)
    watch = _Watch(port, has_key, lambda *failure: loop.call_soon_threadsafe(report, *failure))
    threading.Thread(target=watch.run, args=(events,), name="handshakes", daemon=True).start()


class _Connection(NamedTuple):
    """A duplicate of a new connection's descriptor, until `by`."""

    duplicate: socket.socket
    host: str
    by: float

    def is_foreign(self) -> bool:
        """Whether the peer has sent something, and was sent no more than ZMTP's signature."""
        if not hasattr(socket, "TCP_INFO"):
            return False
        info = self.duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        if len(info) < _BYTES_ACKED_AND_RECEIVED.size:
            return False
        acked, received = _BYTES_ACKED_AND_RECEIVED.unpack_from(info)
        return bool(received) and acked <= _SIGNATURE_BYTES + 1


class _Watch:
    """The thread's state: connections that are new, by the descriptor that ZMQ has of them."""

    def __init__(self, port: int, has_key: bool, report: Report) -> None:
        self._port = port
        self._has_key = has_key
        self._report = report
        self._new: dict[int, _Connection] = {}
        self._failure: HandshakeFailure | None = None
        """Of the connection whose end is the next event."""

    def run(self, events: zmq.Socket[bytes]) -> None:
        """Read events until their context is terminated. ZMQ waits until each is read."""
        with events, suppress(zmq.ContextTerminated):
            while True:
                if events.poll(int(NEW_S * 1000)):
                    event = parse_monitor_message(events.recv_multipart())
                    try:
                        self._handle(event["event"], event["value"])
                    except OSError:
                        pass  # the descriptor may be closed: then the peer's next try is as good
                    except Exception:
                        logger.exception("internal error while watching handshakes")
                self._drop_old()
        for connection in self._new.values():
            connection.duplicate.close()

    def _handle(self, event: int, value: int) -> None:
        match event:
            case zmq.EVENT_ACCEPTED:
                self._accepted(value)
            case zmq.EVENT_DISCONNECTED:
                self._ended(value)
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._failure = HandshakeFailure.OTHER_KEY
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
                self._failure = HandshakeFailure.OTHER_KEY
            case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
                self._failure = HandshakeFailure.NO_KEY if self._has_key else HandshakeFailure.UNEXPECTED_KEY

    def _accepted(self, fd: int) -> None:
        if len(self._new) >= MAX_NEW or fd in self._new:
            return
        with ExitStack() as undo:
            number = os.dup(fd)
            undo.callback(os.close, number)
            duplicate = socket.socket(fileno=number)
            undo.pop_all()
            undo.enter_context(duplicate)
            # By now the descriptor may be another file's.
            is_tcp = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            if is_tcp and duplicate.getsockname()[1] == self._port:
                host = duplicate.getpeername()[0].removeprefix("::ffff:")
                self._new[fd] = _Connection(duplicate, host, time.monotonic() + NEW_S)
                undo.pop_all()

    def _ended(self, fd: int) -> None:
        failure, self._failure = self._failure, None
        connection = self._new.pop(fd, None)
        if connection is None:
            if failure is not None:
                self._report(failure, None)
            return
        with connection.duplicate:
            if failure is None and connection.is_foreign():
                failure = HandshakeFailure.NOT_ZMQ
        if failure is not None:
            self._report(failure, connection.host)

    def _drop_old(self) -> None:
        now = time.monotonic()
        for fd in [fd for fd, connection in self._new.items() if connection.by <= now]:
            self._new.pop(fd).duplicate.close()

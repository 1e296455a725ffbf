# SPDX-License-Identifier: Apache-2.0
"""Non-blocking sockets between ranks."""

from __future__ import annotations

import socket
from typing import Annotated

from msgspec import Meta

from kvferry.transfer import net
from kvferry.transfer.engine import PeerUnreachable

Port = Annotated[int, Meta(ge=1, le=65_535)]
_BACKLOG = 128


def dial(host: str, port: int) -> socket.socket:
    """Begin to connect; the outcome shows when the socket turns writable.

    Raises `PeerUnreachable` for an invalid address.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        connection = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: not a host name
        raise PeerUnreachable(f"{host}:{port}: {error}") from error
    _prepare(connection)
    connection.connect_ex(where)
    return connection


def listen(host: str) -> socket.socket:
    """Listen on a port that the OS chooses. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; None if there is none."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None  # it has left, or no descriptor is free: its own deadline ends the attempt
    _prepare(connection)
    return connection


def _prepare(connection: socket.socket) -> None:
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, net.KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, net.KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, net.KEEPALIVE_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, net.KEEPALIVE_LIMIT_MS)

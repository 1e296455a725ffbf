# SPDX-License-Identifier: Apache-2.0
"""Sockets between ranks. None of them blocks."""

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

    Raises `PeerUnreachable` for an address that makes no sense.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        connection = socket.socket(family, kind, protocol)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be one
        raise PeerUnreachable(f"{host}:{port}: {error}") from error
    _prepare(connection)
    connection.connect_ex(where)
    return connection


def listen(host: str) -> socket.socket:
    """Listen at a port of the OS's choice. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    listener.setblocking(False)
    return listener


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection; None if there is none."""
    try:
        connection, _ = listener.accept()
    except OSError:
        return None  # it has left, or we are out of descriptors: it gives up by its own deadline
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

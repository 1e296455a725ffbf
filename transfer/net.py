# SPDX-License-Identifier: Apache-2.0
"""What every TCP connection between agents needs: keepalive limits, ports that can be bound, and host names
looked up off the loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from contextlib import suppress

# Left to itself, TCP drops the connection to a host that vanished after a quarter of an hour if there is
# something to send, and never if there is not.
KEEPALIVE_INTERVAL_S = 10
"""Idle time before the first probe, and the time between two probes."""
KEEPALIVE_PROBES = 3
KEEPALIVE_LIMIT_MS = (KEEPALIVE_PROBES + 1) * KEEPALIVE_INTERVAL_S * 1000
"""When a connection without a reply is dropped."""


class CannotBind(OSError):
    """An address on which this process is to listen is taken, or not this host's; the message names it."""


def cannot_bind(what: str, host: str, port: int, reason: str) -> CannotBind:
    """The error for `what` at an address."""
    return CannotBind(f"cannot bind {what} to {host}:{port}: {reason}")


def check_can_bind(what: str, host: str, port: int) -> None:
    """Raise `CannotBind` if `what` could not listen at an address now. Any port, 0, can always be had.

    Nothing listens meanwhile: a peer that connects again must not meet a socket without our keys.
    """
    try:
        [(family, kind, _, _, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise cannot_bind(what, host, port, error.strerror or str(error)) from error


async def resolve(host: str) -> str:
    """The first address of a host; one that is an address already is returned as it is.

    Raises OSError for a name that has none, ValueError for what cannot be a name. A look-up that was
    cancelled goes on for as long as the system's resolver takes. The end of the process does not wait for it,
    as it would for one in the loop's executor.
    """
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return host
    loop = asyncio.get_running_loop()
    found: asyncio.Future[str] = loop.create_future()

    def settle(address: str | Exception) -> None:
        if found.done():
            return
        if isinstance(address, Exception):
            found.set_exception(address)
        else:
            found.set_result(address)

    def look_up() -> None:
        address: str | Exception
        try:
            address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, ValueError) as error:
            address = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, address)

    threading.Thread(target=look_up, name=f"resolve-{host}", daemon=True).start()
    return await found

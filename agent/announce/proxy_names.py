# SPDX-License-Identifier: Apache-2.0
"""`--proxy dns:NAME[:PORT]`: every address of a name is a proxy; the name is looked up again and again."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections.abc import Callable

from kvferry.common.addresses import check_dialable, check_host_port, host_port
from kvferry.common.telemetry.recurring_warnings import StatusLog
from kvferry.proxy.wire.registration import DEFAULT_DISCOVERY_PORT

log = logging.getLogger(__name__)

LOOKUP_INTERVAL_S = 1.5
"""Pause between two lookups. A link ends with the second one that lacks its address: a resolver that knows
only some of them for a moment costs no link, and what is gone is left within 5 s."""
LOOKUP_TIMEOUT_S = 10.0
"""A lookup that takes longer is reported; it goes on, in its own thread, and nothing waits for it."""
MAX_ADDRESSES = 64
_PREFIX = "dns:"

Lookup = Callable[[str, int], list[str]]
"""All addresses of a name, as HOST:PORT. Raises `OSError`; may take as long as the system's resolver does."""


def is_name(proxy: str) -> bool:
    """Whether `proxy` is a name to look up, not one HOST:PORT."""
    return proxy.startswith(_PREFIX)


def check_proxy(proxy: str) -> None:
    """Raise `ValueError` unless `proxy` is HOST:PORT or dns:NAME[:PORT]."""
    if "://" in proxy:
        raise ValueError(
            f"proxy must be HOST:PORT of a proxy's discovery (port {DEFAULT_DISCOVERY_PORT} by default), "
            f"not a URL, got {proxy!r}"
        )
    if is_name(proxy):
        split_name(proxy)
    else:
        check_host_port("proxy", proxy)


def split_name(proxy: str) -> tuple[str, int]:
    """Name and port of dns:NAME[:PORT]; `DEFAULT_DISCOVERY_PORT` when none is given. Raises `ValueError`."""
    name, colon, port = proxy.removeprefix(_PREFIX).partition(":")
    wrong = ValueError(f"proxy must be dns:NAME or dns:NAME:PORT, got {proxy!r}")
    try:
        check_dialable(name)
        if colon:
            check_host_port("proxy", f"{name}:{port}")
    except ValueError:
        raise wrong from None
    return name, int(port) if colon else DEFAULT_DISCOVERY_PORT


def look_up(name: str, port: int) -> list[str]:
    """All addresses of a name, IPv4 and IPv6, by the system's resolver."""
    found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(host_port(str(address[0]), port) for *_, address in found))


class ProxyName:
    """The addresses of a name, from a thread that looks it up until `close`. Reading them never waits.

    A lookup that fails, or does not end, leaves what was known as it was.
    """

    def __init__(
        self, proxy: str, *, lookup: Lookup = look_up, interval_s: float = LOOKUP_INTERVAL_S
    ) -> None:
        self.proxy = proxy
        self._name, self._port = split_name(proxy)
        self._lookup = lookup
        self._interval_s = interval_s
        self._closing = threading.Event()
        # Replaced as a whole by the thread, read by others.
        self._seen: dict[str, int] = {}
        """How many lookups in a row lacked an address."""
        self._begun_at = math.inf
        self._status = StatusLog(log, proxy)
        threading.Thread(target=self._run, name=f"lookup-{self._name}", daemon=True).start()

    def addresses(self) -> tuple[str, ...]:
        """What is known now: the addresses of the last lookup that succeeded, and of the one before."""
        if time.monotonic() - self._begun_at > LOOKUP_TIMEOUT_S:
            self._status.note("no answer from the resolver", logging.WARNING)
        return tuple(self._seen)

    def close(self) -> None:
        """End the thread, at once or when its lookup ends; it holds nothing."""
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            self._begun_at = time.monotonic()
            try:
                found = self._lookup(self._name, self._port)
            except (OSError, UnicodeError) as error:
                self._status.note(f"cannot be looked up: {error}", logging.WARNING)
            else:
                self._take(found)
            self._begun_at = math.inf
            self._closing.wait(self._interval_s)

    def _take(self, found: list[str]) -> None:
        kept = dict.fromkeys(found[:MAX_ADDRESSES], 0)
        for address, lacking in self._seen.items():
            if address not in kept and lacking == 0:
                kept[address] = 1
        self._seen = kept
        dropped = f", of which {MAX_ADDRESSES} are used" if len(found) > MAX_ADDRESSES else ""
        self._status.note(f"is {', '.join(sorted(found)) or 'no address'}{dropped}", logging.INFO)

# SPDX-License-Identifier: Apache-2.0
"""Announces the agent to its proxies (design §4)."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence

import zmq

from kvferry.proxy.wire.cluster_key import ClusterKey
from kvferry.proxy.wire.messages import (
    PING_INTERVAL_S,
    Ack,
    BadFrame,
    Bye,
    Incarnation,
    Refused,
    Register,
    decode_proxy_message,
    encode,
)

log = logging.getLogger(__name__)

_MAX_ANSWERS_PER_PING = 16
_BYE_LINGER_MS = 200
_CLOSE_S = 0.5


class ProxyLink:
    """The way to one proxy, which may be down, come back as another process, or refuse us.

    It has a ZMQ context of its own: a context resolves names on its only I/O thread, over and over while
    nobody is there, so a resolver that does not answer holds up whatever else that thread does.
    """

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_ANSWERS_PER_PING)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_ANSWERS_PER_PING)
        # No queue while nobody is connected: a proxy that comes back must not read old news.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            key.secure_client(self._socket)
        self._socket.connect(f"tcp://{address}")
        self._standing: str | None = None

    def send(self, frame: bytes) -> None:
        """Send if the proxy is connected and reads; else this ping is lost, and the next one is due soon."""
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._note("unreachable", logging.DEBUG)

    def hear(self) -> None:
        """Read the answers that have come since the last ping; never waits."""
        for _ in range(_MAX_ANSWERS_PER_PING):
            try:
                answer = decode_proxy_message(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except BadFrame as error:
                self._note(f"answered nonsense: {error}", logging.WARNING)
                continue
            match answer:
                case Ack(proxy=proxy):
                    self._note(f"registered with {proxy}", logging.INFO)
                case Refused(reason=reason):
                    self._note(f"refused: {reason}", logging.WARNING)

    def close(self) -> threading.Thread:
        """Close once what was sent has left, or soon. The thread ends then, or when a name is resolved."""
        self._socket.close(linger=_BYE_LINGER_MS)
        # `term` waits for the I/O thread, however long a name takes.
        closing = threading.Thread(target=self._context.term, name=f"bye-{self.address}", daemon=True)
        closing.start()
        return closing

    def _note(self, standing: str, level: int) -> None:
        """Log how we stand with the proxy, once per change."""
        if standing != self._standing:
            self._standing = standing
            log.log(level, "proxy %s: %s", self.address, standing)


class Announcer:
    """Pings every proxy once per interval (seconds), and at once when `changed` is set, which it clears.

    Args:
        describe: Returns the registration that carries a given ping counter; None for no ping this time.
        key: When given, only proxies that hold the same key are spoken to.
    """

    def __init__(
        self,
        proxies: Sequence[str],
        changed: asyncio.Event,
        describe: Callable[[int], Register | None],
        interval_s: float = PING_INTERVAL_S,
        key: ClusterKey | None = None,
    ) -> None:
        self._links = [ProxyLink(address, key) for address in proxies]
        self._changed = changed
        self._describe = describe
        self._interval_s = interval_s

    async def run(self) -> None:
        """Ping for ever."""
        index = 0
        while True:
            self._changed.clear()
            ping = self._describe(index)
            for link in self._links:
                link.hear()
                if ping is not None:
                    link.send(encode(ping))
            index += 1
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def say_bye(self, incarnation: Incarnation) -> None:
        """Say goodbye to every proxy that is connected."""
        for link in self._links:
            link.send(encode(Bye(incarnation=incarnation)))

    def close(self) -> None:
        """Return once what was said has left, or soon."""
        deadline = time.monotonic() + _CLOSE_S
        for closing in [link.close() for link in self._links]:
            closing.join(max(deadline - time.monotonic(), 0.0))

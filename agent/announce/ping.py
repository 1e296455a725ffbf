# SPDX-License-Identifier: Apache-2.0
"""Announces the agent to its proxies (docs/architecture.md#discovery)."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec
import zmq

from kvferry.agent.announce.proxy_names import Lookup, ProxyName, is_name, look_up
from kvferry.common.curve import ClusterKey
from kvferry.common.telemetry.recurring_warnings import StatusLog
from kvferry.proxy.wire.registration import (
    PING_INTERVAL_S,
    Ack,
    BadFrame,
    Bye,
    Incarnation,
    Register,
    Rejected,
    decode_proxy_message,
    encode,
)

log = logging.getLogger(__name__)

DRAIN_PING_INTERVAL_S = 0.1
ACK_TIMEOUT_S = 3 * PING_INTERVAL_S
"""A proxy that has acknowledged nothing for so long is gone, and sends nothing either."""
_UNREACHABLE_PINGS = 3
"""That could not be sent, in a row, before the log says so: connecting takes a moment."""
_RECONNECT_S = 10.0
"""ZMQ does not connect again by itself where the other side has refused this one's cluster key."""
_MAX_RESPONSES_PER_PING = 16
_BYE_LINGER_MS = 200
_CLOSE_S = 0.5


class ProxyConnection:
    """The connection to one proxy, which may be down, restart, or reject this agent.

    It has a ZMQ context of its own: a context resolves names on its only I/O thread, again and again while it
    cannot connect, so a resolver that does not answer blocks everything else on that thread.
    """

    def __init__(self, address: str, key: ClusterKey | None) -> None:
        self.address = address
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_RESPONSES_PER_PING)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_RESPONSES_PER_PING)
        # No queue while not connected: a proxy that restarts must not read old pings.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.setsockopt(zmq.IPV6, 1)
        if key is not None:
            key.secure_client(self._socket)
        self._socket.connect(f"tcp://{address}")
        self._status = StatusLog(log, f"proxy {address}:")
        self._unsent = 0
        """Pings in a row that could not be sent."""
        self._reconnect_at = math.inf
        wrong_key = "a cluster key, and this agent has none" if key is None else "another cluster key"
        self._unreachable = f"unreachable, or it has {wrong_key}"
        self._acked_at = -math.inf
        self._acked_index = -1
        self._in_flight = 0
        self.asks_to_drain = False

    def send(self, message: Register | Bye) -> None:
        """Send if the proxy is connected and reads; else drop this ping: the next one is due soon."""
        try:
            self._socket.send(encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._unsent += 1
            if self._unsent >= _UNREACHABLE_PINGS:
                self._status.note(self._unreachable, logging.WARNING)
            self._reconnect()
        else:
            self._unsent = 0
            self._reconnect_at = math.inf

    def read_responses(self) -> None:
        """Read the responses that have come since the last ping; never waits."""
        for _ in range(_MAX_RESPONSES_PER_PING):
            try:
                response = decode_proxy_message(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return
            except BadFrame as error:
                self._status.note(f"invalid response: {error}", logging.WARNING)
                continue
            match response:
                case Ack(proxy=proxy):
                    self._status.note(f"registered with {proxy}", logging.INFO)
                    self._acked_at = time.monotonic()
                    self._acked_index, self._in_flight = response.index, response.in_flight
                    self.asks_to_drain = response.drain
                case Rejected(reason=reason):
                    self._status.note(f"rejected: {reason}", logging.WARNING)

    def has_released(self, draining_since: int) -> bool:
        """Return whether the proxy has nothing at this agent and sends nothing new.

        Args:
            draining_since: Index of the first ping that said so.
        """
        if time.monotonic() - self._acked_at > ACK_TIMEOUT_S:
            return True
        return self._acked_index >= draining_since and not self._in_flight

    def has_requests_here(self) -> bool:
        """Whether the proxy lives, and has requests at this agent or on their way to it."""
        return bool(self._in_flight) and time.monotonic() - self._acked_at <= ACK_TIMEOUT_S

    def close(self) -> threading.Thread:
        """Close once what is queued is sent, or soon. The thread ends then, or when a name is resolved."""
        self._socket.close(linger=_BYE_LINGER_MS)
        # `term` waits for the I/O thread, however long a name takes.
        closing = threading.Thread(target=self._context.term, name=f"bye-{self.address}", daemon=True)
        closing.start()
        return closing

    def _reconnect(self) -> None:
        """Connect anew, once per `_RECONNECT_S` without a connection."""
        now = time.monotonic()
        if self._reconnect_at == math.inf:
            self._reconnect_at = now + _RECONNECT_S
        elif now >= self._reconnect_at:
            self._reconnect_at = now + _RECONNECT_S
            with suppress(zmq.ZMQError):  # ZMQ has given it up
                self._socket.disconnect(f"tcp://{self.address}")
            self._socket.connect(f"tcp://{self.address}")


class Announcer:
    """Pings every proxy once per interval (seconds), and at once when `changed` is set, which it clears.

    While it announces a draining agent it pings every `DRAIN_PING_INTERVAL_S`: acks say what is still to
    come.

    Args:
        proxies: HOST:PORT, or dns:NAME[:PORT] for every address of a name, which is followed: proxies that
            are new there are announced to, and those that are gone no longer, once they have no request here.
        describe: Returns the registration that carries a given ping counter; None for no ping this time.
            It is called in the thread that pings.
        key: When given, only proxies with the same key are announced to.
        drain: Called, on the event loop that runs `run`, when an operator has asked a proxy to let this agent
            drain and end; maybe more than once.
        lookup: How names are looked up.
    """

    def __init__(
        self,
        proxies: Sequence[str],
        changed: threading.Event,
        describe: Callable[[int], Register | None],
        interval_s: float = PING_INTERVAL_S,
        key: ClusterKey | None = None,
        drain: Callable[[], None] = lambda: None,
        lookup: Lookup = look_up,
    ) -> None:
        self._key = key
        self._drain = drain
        self._connections = {
            address: ProxyConnection(address, key) for address in proxies if not is_name(address)
        }
        self._fixed = frozenset(self._connections)
        self._names = [ProxyName(proxy, lookup=lookup) for proxy in dict.fromkeys(proxies) if is_name(proxy)]
        self._changed = changed
        self._describe = describe
        self._interval_s = interval_s
        self._stopping = threading.Event()
        # Sockets are no thread's own: one uses them at a time. Nothing that is done meanwhile waits.
        self._sending = threading.Lock()
        self._loop_due_at = math.inf
        """When the event loop is to run again, on the monotonic clock."""
        self._draining_since: int | None = None
        """Index of the first ping that said that the agent is draining."""
        self._released = asyncio.Event()
        self._announced: Incarnation | None = None
        """Of the last ping; None after a bye."""

    async def run(self) -> None:
        """Ping until cancelled, from a thread: an event loop that is busy is not one that is dead.

        Each ping says by how much the loop is late; what that means is for the proxies to judge.
        """
        loop = asyncio.get_running_loop()
        failed: asyncio.Future[None] = loop.create_future()
        thread = threading.Thread(target=self._ping, args=(loop, failed), name="pings", daemon=True)
        thread.start()
        try:
            while not failed.done():
                self._loop_due_at = time.monotonic() + PING_INTERVAL_S
                await asyncio.wait({failed}, timeout=PING_INTERVAL_S)
            failed.result()
        finally:
            self._stopping.set()
            self._changed.set()
            thread.join()

    def _ping(self, loop: asyncio.AbstractEventLoop, failed: asyncio.Future[None]) -> None:
        """Ping until `_stopping`; what goes wrong is raised in `run`."""
        try:
            for index in itertools.count():
                self._changed.clear()
                if self._stopping.is_set():
                    return
                self._ping_once(index)
                if any(each.asks_to_drain for each in self._connections.values()):
                    loop.call_soon_threadsafe(self._drain)
                if self._is_released():
                    loop.call_soon_threadsafe(self._released.set)
                self._changed.wait(
                    self._interval_s if self._draining_since is None else DRAIN_PING_INTERVAL_S
                )
        except BaseException as error:  # noqa: BLE001 (it is raised in `run`)
            loop.call_soon_threadsafe(failed.set_exception, error)

    def _ping_once(self, index: int) -> None:
        loop_lag_s = max(0.0, time.monotonic() - self._loop_due_at)
        with self._sending:
            ping = self._describe(index)
            if ping is not None:
                ping = msgspec.structs.replace(ping, loop_lag_s=round(loop_lag_s, 3))
                self._announced = ping.incarnation
            if self._draining_since is None and ping is not None and ping.state == "draining":
                self._draining_since = index
            if self._names:
                self._follow_names()
            for connection in self._connections.values():
                connection.read_responses()
                if ping is not None:
                    connection.send(ping)

    def _follow_names(self) -> None:
        """Open links to addresses that are new, and end those to addresses that are gone.

        There is no bye: that would be for good, and a name may have an address again.
        """
        named = {address for name in self._names for address in name.addresses()}
        for address in named - self._connections.keys():
            self._connections[address] = ProxyConnection(address, self._key)
        for address in self._connections.keys() - named - self._fixed:
            # A proxy that is on its way out has streams here, and would take the end of pings for a death.
            if not self._connections[address].has_requests_here():
                log.info("proxy %s: is announced to no longer", address)
                self._connections.pop(address).close()

    async def wait_released(self) -> None:
        """Wait until every proxy knows that the agent is draining and has no request left for it.

        To be called once the registration says so, while `run` runs.
        """
        await self._released.wait()

    def _is_released(self) -> bool:
        since = self._draining_since
        return since is not None and all(each.has_released(since) for each in self._connections.values())

    def send_bye(self) -> None:
        """Say bye to every proxy that is connected for what was announced last, once.

        No ping that was described before comes after it.
        """
        with self._sending:
            if self._announced is not None:
                for connection in self._connections.values():
                    connection.send(Bye(incarnation=self._announced))
            self._announced = None

    def close(self) -> None:
        """Close all links. Returns once what was queued is sent, or soon."""
        for name in self._names:
            name.close()
        deadline = time.monotonic() + _CLOSE_S
        for closing in [connection.close() for connection in self._connections.values()]:
            closing.join(max(deadline - time.monotonic(), 0.0))

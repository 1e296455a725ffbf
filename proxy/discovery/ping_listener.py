# SPDX-License-Identifier: Apache-2.0
"""The discovery socket: agents' pings in, acks out (docs/architecture.md#discovery)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from kvferry.common.addresses import check_dialable, host_port
from kvferry.common.curve import ClusterKey, CurveAuthenticator
from kvferry.common.telemetry.recurring_warnings import RecurringWarnings
from kvferry.proxy.dialects import atom, vllm_moriio
from kvferry.proxy.discovery.handshake_monitor import (
    KEY_FAILURES,
    HandshakeFailure,
    watch_handshakes,
)
from kvferry.proxy.fleet.address_rules import MAX_ADDRESS_CHARS, RejectReason
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire import registration as wire
from kvferry.proxy.wire.dialects import NATIVE_DIALECT

logger = logging.getLogger(__name__)

HIGH_WATER_MARK = 1024
UNKNOWN_HOST_AFTER = 10
"""Failures of which none's host is known, in a row, before they are logged without one."""
_LASTING = (RejectReason.ADDRESS, RejectReason.PLAINTEXT, RejectReason.FULL)
"""Why a ping is rejected that will be rejected again."""


class PingListener:
    """One ROUTER socket. Nothing that a peer sends ends it: bad frames are counted and dropped.

    Args:
        complete: Adds what another engine's ping leaves out.
        in_flight: Returns how many sequences this proxy has in flight at an agent.
    """

    def __init__(
        self,
        registry: Registry,
        metrics: Metrics,
        proxy_id: str,
        key: ClusterKey | None = None,
        complete: Callable[[wire.Register], wire.Register] = lambda info: info,
        in_flight: Callable[[wire.Incarnation], int] = lambda _: 0,
    ) -> None:
        self._registry = registry
        self._metrics = metrics
        for reason in RejectReason:  # so that a first one is seen as an increase
            metrics.rejected_pings.labels(reason.name.lower())
        for failure in KEY_FAILURES:
            metrics.rejected_keys.labels(failure.name.lower())
        self._warnings = RecurringWarnings(logger)
        self._num_unknown = 0
        """Failures to connect in a row of hosts that are not known."""
        self._has_key = key is not None
        self._proxy_id = proxy_id
        self._in_flight = in_flight
        self._complete = complete
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IPV6, 1)
        # A peer that sends faster than we read is slowed down by its own queue; one that does not read its
        # acks loses them. Larger frames end the peer's connection inside libzmq, before they take memory.
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MARK)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._authenticator: CurveAuthenticator | None = None
        if key is not None:
            key.secure_server(self._socket)
            self._authenticator = CurveAuthenticator(self._context, key)

    def bind(self, host: str, port: int) -> int:
        """Bind and return the port; 0 lets the OS choose. Raises `OSError` when it is taken.

        With a key, needs a running event loop: the authenticator starts before the socket is bound.
        """
        if self._authenticator is not None:
            self._authenticator.start()
        try:
            self._socket.bind(f"tcp://{host_port(host, port or '*')}")
        except zmq.ZMQError as error:
            raise OSError(
                error.errno, f"cannot bind discovery to {host_port(host, port)}: {error}"
            ) from error
        return int(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    async def run(self) -> None:
        """Serve until cancelled."""
        watch_handshakes(self._socket, self._context, has_key=self._has_key, report=self.handshake_failed)
        while True:
            await self._serve_one(await self._socket.recv_multipart())

    async def _serve_one(self, frames: list[bytes]) -> None:
        try:
            response = self.handle(frames)
        except Exception:
            self._metrics.bad_pings.inc()
            logger.exception("internal error while handling a ping")
            return
        if response is not None:
            try:
                await self._socket.send_multipart([frames[0], response], flags=zmq.NOBLOCK)
            except zmq.Again:
                logger.debug("an agent does not read its acks")

    def handshake_failed(self, failure: HandshakeFailure, host: str | None) -> None:
        """Count a peer that could not connect, and warn of it."""
        if failure in KEY_FAILURES:
            self._metrics.rejected_keys.labels(failure.name.lower()).inc()
        else:
            self._metrics.bad_pings.inc()
        self._num_unknown = 0 if host else self._num_unknown + 1
        if host is not None:
            self._warnings.warn(failure.name, host, "%s cannot register an agent: %s", host, failure.value)
        elif self._num_unknown >= UNKNOWN_HOST_AFTER:
            self._warnings.warn(failure.name, "", "a host cannot register an agent: %s", failure.value)

    def close(self) -> None:
        """Close the socket and its context. Idempotent."""
        self._socket.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()

    def handle(self, frames: list[bytes]) -> bytes | None:
        """Handle one multipart message (`[identity, body]`) and return the response's frame, if any."""
        try:
            if len(frames) != 2:
                raise wire.BadFrame(f"{len(frames)} frames where 2 were expected")
            body = wire.unpack_map(frames[1])
            # Other engines cannot hold the key, so a secure socket accepts none of their maps.
            foreign = None if "v" in body or self._authenticator is not None else _foreign(body)
            message = foreign or wire.agent_message(body)
            if isinstance(message, wire.Register) and not self._registry.advertises(message):
                _check_addresses(message)
            if foreign is not None and self._registry.reject_reason(foreign) is None:
                # Only an address that may be dialled is probed.
                message = self._complete(foreign)
        except wire.OtherVersion as other:
            return self._reject_version(other.info)
        except wire.BadFrame as error:
            self._metrics.bad_pings.inc()
            logger.debug("bad ping dropped: %s", error)
            return None
        if isinstance(message, wire.Bye):
            self._registry.bye(message.incarnation)
            return None
        rejected = self._registry.register(message, reads_acks=foreign is None)
        if rejected is not None:
            self._metrics.rejected_pings.labels(rejected.name.lower()).inc()
        if rejected in _LASTING:
            self._warn_of(message, rejected)
        if foreign is not None:
            return None  # other engines do not read responses
        if rejected is not None:
            return wire.encode(wire.Rejected(reason=rejected.value))
        ack = wire.Ack(
            proxy=self._proxy_id,
            index=message.index,
            in_flight=self._in_flight(message.incarnation),
            drain=self._registry.drain_requested(message.incarnation),
        )
        return wire.encode(ack)

    def _warn_of(self, info: wire.Register | wire.OtherRegister, reason: RejectReason) -> None:
        address = info.address[:MAX_ADDRESS_CHARS]
        self._warnings.warn(reason.name, address, "agent %s is rejected: %s", address, reason.value)

    def _reject_version(self, info: wire.OtherRegister) -> bytes:
        reason = RejectReason.VERSION
        self._registry.reject_version(info)
        self._warn_of(info, reason)
        self._metrics.rejected_pings.labels(reason.name.lower()).inc()
        return wire.encode(wire.Rejected(reason=reason.value))


def _foreign(body: dict[str, Any]) -> wire.Register | None:
    """The registration in another engine's ping, or None if the map is not one. Raises `BadFrame`."""
    for dialect in (atom, vllm_moriio):
        if dialect.recognises(body):
            return wire.checked(dialect.registration(body))
    return None


def _check_addresses(info: wire.Register) -> None:
    """Raise `BadFrame` unless the advertised addresses can be dialled; names and IPv6 will do (X9).

    What other engines' `control` means is theirs to know. An agent may have no port for it.
    """
    try:
        url = urlsplit(info.address)
        usable = url.scheme in ("http", "https") and url.hostname and url.port
        check_dialable(url.hostname or "")
    except ValueError as error:
        raise wire.BadFrame(f"address {info.address!r}: {error}") from error
    if not usable or url.path.strip("/") or url.query or url.fragment or url.username:
        raise wire.BadFrame(f"address {info.address!r} is not http://host:port")
    if info.dialect == NATIVE_DIALECT:
        try:
            control = urlsplit(info.control)
            check_dialable(control.hostname or "")
        except ValueError as error:
            raise wire.BadFrame(f"control {info.control!r}: {error}") from error
        if control.scheme != "tcp":
            raise wire.BadFrame(f"control {info.control!r} is not tcp://host:port")

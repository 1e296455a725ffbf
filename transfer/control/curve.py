# SPDX-License-Identifier: Apache-2.0
"""The lock of the control channel: with a key, only agents that own the same one speak to each other.

CURVE (RFC 26/ZeroMQ) encrypts and seals every frame of a connection, numbered, so that none can be read,
altered or replayed; a ZAP judge (RFC 27) decides who may connect.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

_DOMAIN = "kvferry control"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKey:
    """What the agents of one cluster share: a CURVE key pair, as Z85 text."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of_optional(cls, secret: str | None) -> CurveKey | None:
        """The pair of a secret key, if there is one. Raises ValueError if it is not a CURVE secret key."""
        return None if secret is None else cls.of(secret)

    @classmethod
    def of(cls, secret: str) -> CurveKey:
        """The pair that a secret key belongs to. Raises ValueError if it is none."""
        try:
            return cls(public=zmq.curve_public(secret.encode()), secret=secret.encode())
        except (zmq.ZMQError, ValueError):
            raise ValueError("not a CURVE secret key") from None

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Before `connect`: speak only to a server that owns this key, and prove that we own it."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        self._prove(socket)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Before `bind`: let in whom a `CurveAuthenticator` admits, and nobody while there is none."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._prove(socket)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        # libzmq alone would admit any CURVE client when nobody judges.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _prove(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class CurveAuthenticator:
    """Judges, for the locked servers of one context, who may connect. Needs a running event loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: CurveKey) -> None:
        self._key = key
        self._judge = AsyncioAuthenticator(context)
        self._judge.configure_curve_callback(_DOMAIN, self)
        self._judge.start()
        self._is_open = True

    def close(self) -> None:
        """Judge no more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._judge.stop()

    def callback(self, domain: str, public: bytes) -> bool:
        """Whether a peer that has proved to own this public key (Z85) may come in."""
        return secrets.compare_digest(public, self._key.public)

# SPDX-License-Identifier: Apache-2.0
"""CURVE security of the control channel: with a key, only agents that own the same key connect.

CURVE (RFC 26/ZeroMQ) encrypts and authenticates every frame of a connection, numbered, so that none can be
read, altered or replayed; a ZAP handler (RFC 27) decides who may connect.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

_DOMAIN = "kvferry control"


@dataclass(frozen=True, slots=True, kw_only=True)
class CurveKey:
    """The CURVE key pair (Z85 text) that the agents of one cluster share."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of_optional(cls, secret: str | None) -> CurveKey | None:
        """Derive the pair of a secret key, if there is one. Raises ValueError if it is not one."""
        return None if secret is None else cls.of(secret)

    @classmethod
    def of(cls, secret: str) -> CurveKey:
        """Derive the pair of a secret key. Raises ValueError if it is not one."""
        try:
            return cls(public=zmq.curve_public(secret.encode()), secret=secret.encode())
        except (zmq.ZMQError, ValueError):
            raise ValueError("not a CURVE secret key") from None

    def secure_client(self, socket: zmq.Socket[bytes]) -> None:
        """Require a server with this key, and prove that we own it. Call before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        self._prove(socket)

    def secure_server(self, socket: zmq.Socket[bytes]) -> None:
        """Admit clients that a `CurveAuthenticator` accepts; none while there is none. Call before `bind`."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._prove(socket)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
        # Without a ZAP handler libzmq would admit any CURVE client.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _prove(self, socket: zmq.Socket[bytes]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


class CurveAuthenticator:
    """The ZAP handler of one context's CURVE servers. Needs a running event loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: CurveKey) -> None:
        self._key = key
        self._zap = AsyncioAuthenticator(context)
        self._zap.configure_curve_callback(_DOMAIN, self)
        self._zap.start()
        self._is_open = True

    def close(self) -> None:
        """Stop. Idempotent; from then on no client is admitted."""
        if self._is_open:
            self._is_open = False
            self._zap.stop()

    def callback(self, domain: str, public: bytes) -> bool:
        """Return whether the owner of this public key (Z85) is admitted; pyzmq calls it."""
        return secrets.compare_digest(public, self._key.public)

# SPDX-License-Identifier: Apache-2.0
"""The cluster key: a CURVE key pair that admits peers to ZMQ sockets, and the HTTP token derived from it.

CURVE (RFC 26/ZeroMQ) encrypts and authenticates every frame of a connection, numbered, so that none can be
read, altered or replayed; a ZAP handler (RFC 27) decides who may connect.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

ZAP_DOMAIN = "kvferry"


class BadClusterKey(ValueError):
    """Text that is no cluster key, or a file that others can read; the message does not show the key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKey:
    """The CURVE key pair (Z85) that the proxies and agents of one cluster share."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, secret: str | bytes) -> ClusterKey:
        """Derive the pair of a secret key (Z85). Raises `BadClusterKey` if it is not one."""
        secret = secret.encode() if isinstance(secret, str) else secret
        try:
            return cls(public=zmq.curve_public(secret), secret=secret)
        except (zmq.ZMQError, ValueError):
            raise BadClusterKey("not a CURVE secret key") from None

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read a file made by `kvferry keygen`: a secret key. Raises `OSError` or `BadClusterKey`."""
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            secret = file.read().strip()
        try:
            return cls.of(secret)
        except BadClusterKey:
            raise BadClusterKey(f"{path} does not hold a cluster key") from None

    @property
    def bearer(self) -> str:
        """The token that agents require over HTTP. The key cannot be derived from it."""
        return hmac.new(self.secret, b"kvferry http", hashlib.sha256).hexdigest()

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Talk only to a server that has this key, and prove that we have it. Call before `connect`."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
        self._prove(socket)

    def secure_server(self, socket: zmq.Socket[Any]) -> None:
        """Admit clients that a `CurveAuthenticator` accepts; none while none runs. Call before `bind`."""
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        self._prove(socket)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        # Without a ZAP handler libzmq would admit any CURVE client.
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def _prove(self, socket: zmq.Socket[Any]) -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)


def _check_private(path: Path, status: os.stat_result) -> None:
    """Raise `BadClusterKey` if others than the owner can read the file.

    A group may, where the file is root's and the group one of this process: so Kubernetes mounts a secret for
    a pod with `fsGroup`.
    """
    ours = {os.getegid(), *os.getgroups()}
    by_group = stat.S_IRGRP if status.st_uid == 0 and status.st_gid in ours else 0
    others = stat.S_IMODE(status.st_mode) & (stat.S_IRWXG | stat.S_IRWXO) & ~by_group
    if others:
        raise BadClusterKey(f"{path} can be read or written by others: chmod 600 it")


class CurveAuthenticator:
    """The ZAP handler of one context: admits only holders of the key to the context's CURVE servers.

    Start it before a socket binds. Until then, and once it is closed, no client is admitted.
    """

    def __init__(self, context: zmq.Context[Any], key: ClusterKey) -> None:
        self._key = key
        self._zap = AsyncioAuthenticator(context)
        self._zap.configure_curve_callback(ZAP_DOMAIN, self)
        self._is_running = False

    def start(self) -> None:
        """Begin to admit clients. Needs a running event loop."""
        self._zap.start()
        self._is_running = True

    def close(self) -> None:
        """Idempotent."""
        if self._is_running:
            self._is_running = False
            self._zap.stop()

    def callback(self, domain: str, public: bytes) -> bool:
        """Return whether the owner of this public key (Z85) is admitted; pyzmq calls it."""
        return secrets.compare_digest(public, self._key.public)

# SPDX-License-Identifier: Apache-2.0
"""The cluster key: a CURVE key pair that admits peers to ZMQ sockets, and the HTTP token derived from it."""

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
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

ZAP_DOMAIN = "kvferry"


class BadClusterKey(ValueError):
    """A file that holds no cluster key, or one that others can read; the message names the file only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterKey:
    """The CURVE key pair (Z85) that the proxies and agents of one cluster share."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> ClusterKey:
        """Read a file made by `kvferry keygen`: a secret key. Raises `OSError` or `BadClusterKey`."""
        with path.open("rb") as file:
            _check_private(path, os.fstat(file.fileno()))
            secret = file.read().strip()
        try:
            return cls(public=zmq.curve_public(secret), secret=secret)
        except (zmq.ZMQError, ValueError) as error:
            raise BadClusterKey(f"{path} does not hold a cluster key") from error

    @property
    def bearer(self) -> str:
        """The token that agents require over HTTP. The key cannot be derived from it."""
        return hmac.new(self.secret, b"kvferry http", hashlib.sha256).hexdigest()

    def secure_client(self, socket: zmq.Socket[Any]) -> None:
        """Before `connect`: talk only to a server that has this key, and prove that we have it."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)
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


class ClusterKeyAuthenticator:
    """Admits only peers that hold the cluster key to one listening socket; start it before the socket binds.

    Fails closed: from its creation on the socket speaks CURVE only, and libzmq rejects every peer while the
    authenticator does not run (`ZAP_ENFORCE_DOMAIN`).
    """

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any], key: ClusterKey) -> None:
        self._key = key
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self)
        self._is_running = False
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def start(self) -> None:
        """Start to admit peers. Needs a running event loop."""
        self._authenticator.start()
        self._is_running = True

    def stop(self) -> None:
        """Idempotent."""
        if self._is_running:
            self._is_running = False
            self._authenticator.stop()

    def callback(self, domain: str, public: bytes) -> bool:
        """Called by pyzmq: whether to admit a peer that has proved to own this public key (Z85)."""
        return secrets.compare_digest(public, self._key.public)

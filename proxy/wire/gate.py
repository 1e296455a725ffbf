# SPDX-License-Identifier: Apache-2.0
"""Lets only holders of the cluster key reach a ZMQ socket (CURVE, judged over ZAP)."""

from __future__ import annotations

import secrets
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from kvferry.proxy.wire.messages import ClusterKey

DOMAIN = "kvferry"


class Gate:
    """Guards one listening socket of a context; open it before the socket binds.

    Fails closed: from here on the socket speaks CURVE only, and while nobody judges, libzmq is told to turn
    every peer away (`ZAP_ENFORCE_DOMAIN`).
    """

    def __init__(self, context: zmq.asyncio.Context, socket: zmq.Socket[Any], key: ClusterKey) -> None:
        self._key = key
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(DOMAIN, self)
        self._is_open = False
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, key.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, key.secret)
        socket.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def open(self) -> None:
        """Begin to judge peers. Needs a running event loop."""
        self._authenticator.start()
        self._is_open = True

    def close(self) -> None:
        """Judge no more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._authenticator.stop()

    def callback(self, domain: str, public: bytes) -> bool:
        """Whether a peer that has proved to own this public key (Z85) may come in."""
        return secrets.compare_digest(public, self._key.public)

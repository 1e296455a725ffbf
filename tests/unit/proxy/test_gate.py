# SPDX-License-Identifier: Apache-2.0
"""Secure discovery: who does not hold the cluster key changes nothing, and is told nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from proxy import wire
from proxy.discovery import Discovery
from proxy.metrics import Metrics
from proxy.registry import Registry
from tests.unit.proxy.builders import registration

PING = wire.encode(registration("decode", 1))
REFUSAL_S = 0.5
"""How long a peer that is not admitted is watched; one that is admitted is answered in a few ms."""

Secure = Callable[[zmq.Socket[Any]], None]


def new_key() -> wire.ClusterKey:
    public, secret = zmq.curve_keypair()
    return wire.ClusterKey(public=public, secret=secret)


@asynccontextmanager
async def discovery(key: wire.ClusterKey | None) -> AsyncIterator[tuple[Registry, str]]:
    """A listening discovery socket; yields its registry and address."""
    registry, clock = Registry(), asyncio.get_running_loop().time
    metrics = Metrics()
    listener = Discovery(registry, metrics, "proxy-1", clock, key)
    try:
        address = f"tcp://127.0.0.1:{listener.bind('127.0.0.1', 0)}"
        running = asyncio.create_task(listener.run())
        try:
            yield registry, address
        finally:
            running.cancel()
            await asyncio.wait([running])
    finally:
        listener.close()


async def answered(address: str, secure: Secure, within_s: float) -> bool:
    """Whether a ping of a peer that is set up by `secure` gets an ack."""
    context = zmq.asyncio.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.setsockopt(zmq.LINGER, 0)
        secure(dealer)
        dealer.connect(address)
        await dealer.send(PING)
        return bool(await dealer.poll(int(within_s * 1000)))
    finally:
        dealer.close()
        context.term()


def stranger(server: bytes) -> Secure:
    """Knows the cluster's public key, and has a key pair of its own."""
    own = new_key()

    def secure(socket: zmq.Socket[Any]) -> None:
        own.secure_client(socket)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server)

    return secure


async def test_holders_of_the_key_are_admitted() -> None:
    key = new_key()
    async with discovery(key) as (registry, address):
        assert await answered(address, key.secure_client, 5)
        assert len(registry.snapshot(asyncio.get_running_loop().time()).nodes) == 1


@pytest.mark.parametrize("peer", ["plain", "another cluster", "knows the public key"])
async def test_without_the_key_nobody_is_admitted(peer: str) -> None:
    """Issue 4, "Security": a node without the key is never routed to."""
    key = new_key()
    secure: Secure = {
        "plain": lambda socket: None,
        "another cluster": new_key().secure_client,
        "knows the public key": stranger(key.public),
    }[peer]
    async with discovery(key) as (registry, address):
        assert not await answered(address, secure, REFUSAL_S)
        assert not registry.snapshot(asyncio.get_running_loop().time()).nodes
        assert await answered(address, key.secure_client, 5), "and the gate still stands"


async def test_an_agent_does_not_speak_to_a_proxy_without_the_key() -> None:
    async with discovery(None) as (registry, address):
        assert not await answered(address, new_key().secure_client, REFUSAL_S)
        assert not registry.snapshot(asyncio.get_running_loop().time()).nodes


async def test_no_socket_is_bound_before_its_judge_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Issue 4, "Security": with the authenticator failing to start, nothing listens."""

    def fail(self: AsyncioAuthenticator) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    monkeypatch.setattr(AsyncioAuthenticator, "start", fail)
    registry = Registry()
    listener = Discovery(registry, Metrics(), "p", lambda: 0.0, new_key())
    bound: list[str] = []
    monkeypatch.setattr(zmq.asyncio.Socket, "bind", lambda self, where: bound.append(where))
    with pytest.raises(zmq.ZMQError):
        listener.bind("127.0.0.1", 0)
    assert not bound
    listener.close()


async def test_while_nobody_judges_everybody_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails closed: libzmq alone would admit any CURVE client when no authenticator answers."""
    monkeypatch.setattr(AsyncioAuthenticator, "start", lambda self: None)
    monkeypatch.setattr(AsyncioAuthenticator, "stop", lambda self: None)
    key = new_key()
    async with discovery(key) as (registry, address):
        assert not await answered(address, key.secure_client, REFUSAL_S)
        assert not registry.snapshot(asyncio.get_running_loop().time()).nodes


def test_a_key_file_is_read_or_refused_by_name(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    path = tmp_path / "cluster.key"
    path.write_bytes(secret + b"\n")
    key = wire.ClusterKey.read(path)
    assert (key.public, key.secret) == (public, secret)
    assert secret.decode() not in f"{key} {key.bearer}", "neither logs nor tokens give it away"
    for wrong in (b"", b"x" * 39, b"x" * 41, b"\xff" * 40, public + secret):
        path.write_bytes(wrong)
        with pytest.raises(wire.BadClusterKey, match=r"cluster\.key"):
            wire.ClusterKey.read(path)

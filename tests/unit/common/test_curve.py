# SPDX-License-Identifier: Apache-2.0
"""Secure discovery: peers without the cluster key change nothing, and get no response."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from kvferry.common.curve import BadClusterKey, ClusterKey
from kvferry.proxy.discovery.ping_listener import PingListener
from kvferry.proxy.fleet.address_rules import RejectReason
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire import registration as wire
from tests.standins.wiretap import Wiretap
from tests.unit.proxy.builders import load, registration

PING = wire.encode(registration("decode", 1))
REFUSAL_S = 0.5
"""How long a peer that is not admitted is watched; one that is admitted is answered in a few ms."""

Secure = Callable[[zmq.Socket[Any]], None]


def new_key() -> ClusterKey:
    public, secret = zmq.curve_keypair()
    return ClusterKey(public=public, secret=secret)


@asynccontextmanager
async def discovery(key: ClusterKey | None) -> AsyncIterator[tuple[Registry, str]]:
    """A listening discovery socket; yields its registry and address."""
    registry = Registry(asyncio.get_running_loop().time)
    metrics = Metrics()
    listener = PingListener(registry, metrics, "proxy-1", key)
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
        assert len(registry.snapshot().nodes) == 1


@pytest.mark.parametrize("peer", ["plain", "another cluster", "knows the public key"])
async def test_peers_without_the_key_are_not_admitted(peer: str) -> None:
    """A node without the key is never routed to."""
    key = new_key()
    secure: Secure = {
        "plain": lambda socket: None,
        "another cluster": new_key().secure_client,
        "knows the public key": stranger(key.public),
    }[peer]
    async with discovery(key) as (registry, address):
        assert not await answered(address, secure, REFUSAL_S)
        assert not registry.snapshot().nodes
        assert await answered(address, key.secure_client, 5), "and the gate still stands"


async def test_an_agent_does_not_speak_to_a_proxy_without_the_key() -> None:
    async with discovery(None) as (registry, address):
        assert not await answered(address, new_key().secure_client, REFUSAL_S)
        assert not registry.snapshot().nodes


class Agent:
    """A holder of the key that pings by way of a port."""

    def __init__(self, key: ClusterKey, port: int) -> None:
        self._context = zmq.asyncio.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        key.secure_client(self._dealer)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")

    async def send(self, message: wire.AgentMessage) -> None:
        await self._dealer.send(wire.encode(message))

    async def ping(self, message: wire.Register) -> wire.ProxyMessage:
        """Send a registration and return the answer."""
        await self.send(message)
        async with asyncio.timeout(20):
            return wire.decode_proxy_message(await self._dealer.recv())

    def close(self) -> None:
        self._dealer.close()
        self._context.term()


async def test_pings_recorded_on_the_wire_cannot_be_replayed() -> None:
    """An agent's life, sent again byte by byte, is not processed."""
    key = new_key()
    async with discovery(key) as (registry, address):
        port = int(address.rpartition(":")[2])
        async with Wiretap(port) as tap:
            first, second = Agent(key, tap.port), Agent(key, port)
            try:
                await first.ping(registration("decode", 1, index=0))
                await first.ping(registration("decode", 1, index=1, state="draining"))
                await first.send(wire.Bye(incarnation=registration("decode", 1).incarnation))
                await second.ping(registration("decode", 2))
                while len(registry.snapshot().nodes) != 1:
                    await asyncio.sleep(0.01)
                before = registry.snapshot()
                assert PING not in tap.heard and b"10.0.0.1" not in tap.heard, "it is encrypted"
                await tap.replay()
                assert registry.snapshot() == before
                assert isinstance(await second.ping(registration("decode", 2)), wire.Ack)
            finally:
                first.close()
                second.close()


@pytest.mark.parametrize("byte", [0, 1, 10, 40, -17, -1])
async def test_a_ping_altered_on_the_wire_changes_nothing(byte: int) -> None:
    """One bit of its frame's length, name, number, seal or contents is enough."""
    key = new_key()

    def flip(data: bytes) -> bytes:
        altered = bytearray(data)
        altered[byte] ^= 1
        return bytes(altered)

    async with discovery(key) as (registry, address):
        port = int(address.rpartition(":")[2])
        async with Wiretap(port) as tap:
            victim, other = Agent(key, tap.port), Agent(key, port)
            try:
                await victim.ping(registration("decode", 1, index=0))
                before = registry.snapshot().nodes
                tap.alter = flip
                # Its last byte is `max_running`: without the seal, 8 would arrive as 9.
                await victim.send(registration("decode", 1, index=1, load=load(max_running=8)))
                async with asyncio.timeout(20):
                    await tap.altered.wait()
                await asyncio.sleep(REFUSAL_S / 2)
                assert registry.snapshot().nodes == before
                assert isinstance(await other.ping(registration("decode", 2)), wire.Ack), "it listens on"
            finally:
                victim.close()
                other.close()


async def test_holders_of_the_key_cannot_bring_back_what_was() -> None:
    """An old index, and an incarnation that another one has replaced."""
    key = new_key()
    async with discovery(key) as (registry, address):
        agent = Agent(key, int(address.rpartition(":")[2]))
        try:
            old = registration("decode", 1, index=5)
            await agent.ping(old)
            stale = await agent.ping(registration("decode", 1, index=4, state="draining"))
            assert stale == wire.Rejected(reason=RejectReason.STALE.value)
            new = registration("decode", 1, incarnation="f" * 16, index=0)
            await agent.ping(new)
            late = await agent.ping(registration("decode", 1, index=6))
            assert late == wire.Rejected(reason=RejectReason.RETIRED.value)
            assert [node.info for node in registry.snapshot().nodes] == [new]
        finally:
            agent.close()


async def test_no_socket_is_bound_before_its_authenticator_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authenticator failing to start, nothing listens."""

    def fail(self: AsyncioAuthenticator) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    monkeypatch.setattr(AsyncioAuthenticator, "start", fail)
    registry = Registry(lambda: 0.0)
    listener = PingListener(registry, Metrics(), "p", new_key())
    bound: list[str] = []
    monkeypatch.setattr(zmq.asyncio.Socket, "bind", lambda self, where: bound.append(where))
    with pytest.raises(zmq.ZMQError):
        listener.bind("127.0.0.1", 0)
    assert not bound
    listener.close()


async def test_without_a_running_authenticator_no_peer_is_admitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails closed: libzmq alone would admit any CURVE client when no authenticator answers."""
    monkeypatch.setattr(AsyncioAuthenticator, "start", lambda self: None)
    monkeypatch.setattr(AsyncioAuthenticator, "stop", lambda self: None)
    key = new_key()
    async with discovery(key) as (registry, address):
        assert not await answered(address, key.secure_client, REFUSAL_S)
        assert not registry.snapshot().nodes


def test_a_key_file_is_read_or_rejected_by_name(tmp_path: Path) -> None:
    public, secret = zmq.curve_keypair()
    path = tmp_path / "cluster.key"
    path.write_bytes(secret + b"\n")
    path.chmod(0o600)
    key = ClusterKey.read(path)
    assert (key.public, key.secret) == (public, secret)
    assert secret.decode() not in f"{key} {key.bearer}", "neither logs nor tokens give it away"
    for wrong in (b"", b"x" * 39, b"x" * 41, b"\xff" * 40, public + secret):
        path.write_bytes(wrong)
        with pytest.raises(BadClusterKey, match=r"cluster\.key"):
            ClusterKey.read(path)


@pytest.mark.parametrize(
    ("mode", "accepted"),
    [(0o600, True), (0o400, True), (0o440, os.getuid() == 0), (0o604, False), (0o644, False), (0o660, False)],
)
def test_a_key_that_others_can_read_is_rejected(tmp_path: Path, mode: int, accepted: bool) -> None:
    """D14. Root's own file may be its group's to read: so Kubernetes mounts secrets."""
    path = tmp_path / "cluster.key"
    path.write_bytes(zmq.curve_keypair()[1])
    path.chmod(mode)
    if accepted:
        ClusterKey.read(path)
    else:
        with pytest.raises(BadClusterKey, match=r"cluster\.key can be read or written by others"):
            ClusterKey.read(path)

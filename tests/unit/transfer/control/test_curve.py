# SPDX-License-Identifier: Apache-2.0
"""The control channel with a key: without the cluster key no request arrives (X22)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from kvferry.common.curve import ClusterKey
from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import Caller, ControlClient, ControlServer
from kvferry.transfer.events import PullDone, PullFailed
from kvferry.transfer.plane import one_group
from tests.standins.wiretap import Wiretap
from tests.unit.transfer.rig import Agent, assert_same_kv

RESPONSE_TIMEOUT_S = 20.0
REFUSAL_S = 0.5
"""How long a peer that is not admitted is watched; one that is admitted is answered in a few ms."""
MARK = "a-transfer-id-that-must-stay-secret"

Secure = Callable[[zmq.Socket[bytes]], None]


def new_key() -> ClusterKey:
    return ClusterKey.of(zmq.curve_keypair()[1].decode())


class Server:
    """A control server that answers every drop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: ClusterKey | None) -> None:
        self.server = ControlServer(self._requested, key=key)
        self.port = self.server.start(context, "127.0.0.1", 0)
        self.requests: list[wire.Request] = []

    def _requested(self, caller: Caller, request: wire.Request) -> None:
        self.requests.append(request)
        self.server.respond(caller, wire.Dropped(seq=caller.seq, incarnation="i", transfer_id=MARK))


@asynccontextmanager
async def serving(key: ClusterKey | None) -> AsyncIterator[Server]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = Server(context, key)
    try:
        yield server
    finally:
        server.server.close()
        context.term()


async def send(port: int, key: ClusterKey | None, timeout_s: float) -> tuple[wire.Response | None, bool]:
    """One request by a client with this key: its answer, and whether the connection was reported broken."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    broken = asyncio.Event()
    client = ControlClient(broken.set, key=key)
    response: asyncio.Future[wire.Response | None] = asyncio.get_running_loop().create_future()
    try:
        client.start(context, "127.0.0.1", port)
        request = wire.Drop(seq=client.next_seq(), incarnation="i", transfer_id=MARK)
        client.request(request, timeout_s, response.set_result)
        return await response, broken.is_set()
    finally:
        client.close()
        context.term()


async def test_holders_of_the_key_are_heard() -> None:
    key = new_key()
    async with serving(key) as server:
        assert (await send(server.port, key, RESPONSE_TIMEOUT_S))[0] is not None


@pytest.mark.parametrize("peer", ["plain", "another cluster"])
async def test_without_the_key_no_request_arrives(peer: str) -> None:
    """A client without it gets an error at once, so that a pull fails without waiting for its deadline."""
    key = new_key()
    async with serving(key) as server:
        theirs = None if peer == "plain" else new_key()
        assert await send(server.port, theirs, REFUSAL_S) == (None, True)
        assert not server.requests
        assert (await send(server.port, key, RESPONSE_TIMEOUT_S))[0] is not None, "and the gate still stands"


async def test_the_public_key_alone_opens_nothing() -> None:
    key, own = new_key(), new_key()
    async with serving(key) as server:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        own.secure_client(dealer)
        dealer.setsockopt(zmq.CURVE_SERVERKEY, key.public)
        dealer.connect(f"tcp://127.0.0.1:{server.port}")
        dealer.send(wire.encode(wire.Drop(seq=1, incarnation="i", transfer_id=MARK)))
        assert (await send(server.port, key, RESPONSE_TIMEOUT_S))[0] is not None
        await asyncio.sleep(REFUSAL_S)
        dealer.close()
        context.term()
        assert len(server.requests) == 1


async def test_a_holder_of_the_key_does_not_speak_to_a_server_without_it() -> None:
    async with serving(None) as server:
        assert await send(server.port, new_key(), REFUSAL_S) == (None, True)
        assert not server.requests


async def test_no_socket_is_bound_before_its_judge_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the authenticator failing to start, nothing listens."""

    def fail(self: AsyncioAuthenticator) -> None:
        raise zmq.ZMQError(zmq.EADDRINUSE)

    bound: list[str] = []
    monkeypatch.setattr(AsyncioAuthenticator, "start", fail)
    monkeypatch.setattr(zmq.Socket, "bind", lambda self, where: bound.append(where))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = ControlServer(lambda caller, request: None, key=new_key())
    with pytest.raises(zmq.ZMQError):
        server.start(context, "127.0.0.1", 0)
    assert not bound
    server.close()
    context.term()


async def test_without_an_authenticator_every_client_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails closed: libzmq alone would admit any CURVE client when no authenticator answers."""
    monkeypatch.setattr(AsyncioAuthenticator, "start", lambda self: None)
    monkeypatch.setattr(AsyncioAuthenticator, "stop", lambda self: None)
    key = new_key()
    async with serving(key) as server:
        assert (await send(server.port, key, REFUSAL_S))[0] is None
        assert not server.requests


async def test_what_goes_over_the_wire_cannot_be_read_or_repeated() -> None:
    key = new_key()
    async with serving(key) as server, Wiretap(server.port) as tap:
        assert (await send(tap.port, key, RESPONSE_TIMEOUT_S))[0] is not None
        assert len(server.requests) == 1
        assert MARK.encode() not in tap.heard and MARK.encode() not in tap.said
        assert MARK.encode() not in await tap.replay()
        assert (await send(server.port, key, RESPONSE_TIMEOUT_S))[0] is not None
        assert len(server.requests) == 2, "the replay reached no server"


async def test_planes_with_the_key_pull_and_others_are_kept_out() -> None:
    """A stranger that knows a live transfer's id and where its KV lies gets none of it."""
    key = new_key()
    async with (
        Agent(curve_secret=key.secret.decode(), seed=1) as producer,
        Agent(curve_secret=key.secret.decode(), seed=2) as consumer,
        Agent(seed=3) as stranger,
    ):
        transfer_id = producer.lend([3, 4, 5], 12)
        before = stranger.pools[0].clone()
        stranger.plane.pull(transfer_id, producer.remote(12), one_group([7, 8, 9]), 30.0)
        failed = await stranger.event(PullFailed)
        assert failed.reason == "unreachable"
        assert stranger.pools[0].equal(before)
        assert producer.plane.stats().leased == 1, "the lease is still there for its reader"

        consumer.plane.pull(transfer_id, producer.remote(12), one_group([7, 8, 9]), 30.0)
        await consumer.event(PullDone)
        assert_same_kv(producer, [3, 4, 5], consumer, [7, 8, 9])


def test_what_is_no_key_is_refused_without_being_shown() -> None:
    for wrong in ("", "x" * 39, "x" * 41):
        with pytest.raises(ValueError, match="not a CURVE secret key") as caught:
            ClusterKey.of(wrong)
        assert caught.value.__cause__ is None
    key = new_key()
    assert key.secret.decode() not in repr(key)

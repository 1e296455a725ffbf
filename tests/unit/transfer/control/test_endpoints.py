# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import zmq

from kvferry.transfer.control import messages as wire
from kvferry.transfer.control.endpoints import Caller, ControlClient, ControlServer
from tests.helpers.waiting import until

HEAD = {"seq": 1, "incarnation": "i"}


class Server:
    """A control server that responds to every drop, unless `silent`."""

    def __init__(self) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.server = ControlServer(self.requested)
        self.port = self.server.start(self.context, "127.0.0.1", 0)
        self.silent = False
        self.requests: list[wire.Request] = []

    def requested(self, caller: Caller, request: wire.Request) -> None:
        self.requests.append(request)
        if not self.silent:
            self.server.respond(caller, wire.Dropped(seq=caller.seq, incarnation="i", transfer_id="t"))


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    yield made
    made.server.close()
    made.context.term()


Connect = Callable[..., ControlClient]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients: list[ControlClient] = []

    def start(port: int, on_broken: Callable[[], None] = lambda: None) -> ControlClient:
        client = ControlClient(on_broken)
        client.start(context, "127.0.0.1", port)
        clients.append(client)
        return client

    yield start
    for client in clients:
        client.close()
    context.term()


async def send(client: ControlClient, timeout_s: float = 5.0) -> wire.Response | None:
    response: asyncio.Future[wire.Response | None] = asyncio.get_running_loop().create_future()
    request = wire.Drop(seq=client.next_seq(), incarnation="i", transfer_id="t")
    client.request(request, timeout_s, response.set_result)
    return await response


async def test_every_request_gets_the_answer_with_its_number(server: Server, connect: Connect) -> None:
    client = connect(server.port)
    answers = await asyncio.gather(*(send(client) for _ in range(200)))
    assert sorted(response.seq for response in answers if response is not None) == list(range(1, 201))


async def test_no_answer_is_reported_by_the_deadline(server: Server, connect: Connect) -> None:
    """R11, X13: a wait always ends."""
    server.silent = True
    assert await send(connect(server.port), timeout_s=0.1) is None


async def test_garbage_is_counted_and_the_listener_goes_on(server: Server, connect: Connect) -> None:
    """X3, X16: bytes, wrong types and extra parts, and raw TCP from strangers: a browser, a bad greeting, and
    one frame of ZMTP 1.0 (which has no greeting, so that random bytes may be frames by chance).
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(f"tcp://127.0.0.1:{server.port}")
        for frame in (b"", b"\xc1", os.urandom(500), wire.encode(wire.Pending(**HEAD, transfer_id="t"))):
            stranger.send(frame)
        stranger.send_multipart([b"two", b"parts"])
    for junk in (b"GET / HTTP/1.1\r\nHost: kvferry\r\n\r\n", b"\xff" * 200, b"\x01\x00\x09\x00garbage!"):
        with socket.create_connection(("127.0.0.1", server.port)) as raw:
            raw.sendall(junk)
    assert await send(connect(server.port)) is not None
    await until(lambda: server.server.bad_frames >= 6, 20.0)
    assert server.server.bad_frames == 6


async def test_a_frame_over_the_limit_costs_its_sender_the_connection(
    server: Server, connect: Connect
) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{server.port}")
        stranger.send(bytes(wire.MAX_FRAME_BYTES + 1))
        assert await send(connect(server.port)) is not None
    assert server.requests and server.server.bad_frames == 0


async def test_an_answer_to_someone_who_left_is_passed_over(server: Server, connect: Connect) -> None:
    """X25: nothing queues up for a peer that is gone."""
    server.server.respond(Caller(b"unknown", 1, 2), wire.Dropped(**HEAD, transfer_id="t"))
    assert await send(connect(server.port)) is not None


async def test_a_lost_connection_is_reported_once_and_at_once(connect: Connect) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = ControlServer(lambda caller, request: None)
    port = server.start(context, "127.0.0.1", 0)
    broken = asyncio.Event()
    reports: list[None] = []

    def report() -> None:
        reports.append(None)
        broken.set()

    client = connect(port, report)
    assert await send(client, timeout_s=0.2) is None
    server.close()
    context.term()
    async with asyncio.timeout(15.0):
        await broken.wait()
    assert len(reports) == 1


async def test_a_refused_connection_is_reported_at_once(connect: Connect) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    broken = asyncio.Event()
    connect(port, broken.set)
    async with asyncio.timeout(15.0):
        await broken.wait()


async def test_closing_ends_pending_requests(server: Server, connect: Connect) -> None:
    server.silent = True
    client = connect(server.port)
    waiting = asyncio.ensure_future(send(client, timeout_s=30.0))
    await asyncio.sleep(0)
    client.close()
    async with asyncio.timeout(15.0):
        assert await waiting is None
    assert await send(client) is None


async def test_what_is_asked_before_there_is_a_connection_is_sent_with_it(server: Server) -> None:
    with zmq.Context() as context:
        client = ControlClient(lambda: None)
        early = asyncio.ensure_future(send(client))
        await asyncio.sleep(0)
        client.start(context, "127.0.0.1", server.port)
        assert await early is not None
        client.close()


async def test_closing_while_connecting_leaves_the_next_alone(server: Server, connect: Connect) -> None:
    """ZMQ's I/O thread, which all clients share, must not be left telling a monitor that is gone."""
    for _ in range(100):
        connect(server.port).close()
    assert await send(connect(server.port)) is not None


async def test_a_client_takes_a_descriptor_whose_name_is_still_in_use() -> None:
    """ZMQ frees the name of a monitor, as pyzmq would name it, after the descriptor it is named after."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as closed_just_now:
        for descriptor in range(1000):
            closed_just_now.bind(f"inproc://monitor.s-{descriptor}")
        client = ControlClient(lambda: None)
        client.start(context, "127.0.0.1", 9)
        client.close()

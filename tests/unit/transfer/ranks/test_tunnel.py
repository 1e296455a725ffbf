# SPDX-License-Identifier: Apache-2.0
"""The channel between an engine process and a rank on another host."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import zmq

from kvferry.transfer.memory import own_pool
from kvferry.transfer.plane import RemoteRank
from kvferry.transfer.ranks.channel import RankConnection, RankEnd, RankGone, dial
from kvferry.transfer.ranks.tunnel import RemoteRankSocket, connect
from kvferry.transfer.ranks.worker import WorkerConnector
from tests.helpers.waiting import patient, until
from tests.unit.transfer.rig import GEOMETRY

HOST = "127.0.0.1"
WAIT_S = patient(10.0)


@pytest.fixture
def stop() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What a rank watches while it waits, after the end that a test closes to have it stop."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


async def meet(
    rank: RemoteRankSocket, stopped: socket.socket, received: asyncio.Queue[bytes]
) -> tuple[RankConnection, RankEnd]:
    accepting = asyncio.create_task(asyncio.to_thread(rank.accept, stopped))
    connection = await dial(connect(rank.address), lambda _, frame: received.put_nowait(frame))
    end = await asyncio.wait_for(accepting, WAIT_S)
    assert end is not None
    return connection, end


def frames_of(end: RankEnd, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        assert select.select([end], [], [], WAIT_S)[0]
        frames += end.receive()
    return frames


async def test_frames_go_both_ways_and_long_ones_too(stop: tuple[socket.socket, socket.socket]) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()
    connection, end = await meet(RemoteRankSocket(HOST, HOST), stop[1], received)
    long = bytes(range(256)) * 4096
    arriving = asyncio.to_thread(frames_of, end, 4)
    for frame in (b"a", long, b"", b"b"):
        connection.send(frame)
    assert await arriving == [b"a", long, b"", b"b"]
    await asyncio.to_thread(end.send, long)
    await asyncio.to_thread(end.send, b"c")
    assert [await asyncio.wait_for(received.get(), WAIT_S) for _ in range(2)] == [long, b"c"]
    connection.close()
    end.close()


async def test_either_side_sees_that_the_other_has_gone(stop: tuple[socket.socket, socket.socket]) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()
    connection, end = await meet(RemoteRankSocket(HOST, HOST), stop[1], received)
    connection.close()
    assert await asyncio.to_thread(lambda: list(end.frames())) == []
    assert end.gone
    end.close()

    connection, end = await meet(RemoteRankSocket(HOST, HOST), stop[1], received)
    end.close()

    def is_gone() -> bool:
        try:
            connection.send(b"x")
        except RankGone:
            return True
        return False

    await until(is_gone)


async def test_a_stranger_that_connects_and_leaves_ends_nothing(
    stop: tuple[socket.socket, socket.socket],
) -> None:
    received: asyncio.Queue[bytes] = asyncio.Queue()
    rank = RemoteRankSocket(HOST, HOST)
    early = socket.create_connection((HOST, rank.address.port))
    connection, end = await meet(rank, stop[1], received)
    early.close()
    socket.create_connection((HOST, rank.address.port)).close()
    await asyncio.sleep(1.0)
    connection.send(b"on")
    assert await asyncio.to_thread(frames_of, end, 1) == [b"on"]
    connection.close()
    end.close()


async def test_who_does_not_have_the_ranks_key_reaches_nobody(
    stop: tuple[socket.socket, socket.socket],
) -> None:
    """Neither by another key, nor without any."""
    rank = RemoteRankSocket(HOST, HOST)
    accepting = asyncio.create_task(asyncio.to_thread(rank.accept, stop[1]))
    other, _ = zmq.curve_keypair()
    stranger = await dial(connect(replace(rank.address, key=other)), lambda *_: None)
    stranger.send(b"command")
    with zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.linger = 0
        plain.connect(f"tcp://{rank.address}")
        plain.send(b"command")
        await asyncio.sleep(1.0)
    assert not accepting.done()
    stop[0].close()
    assert await asyncio.wait_for(accepting, WAIT_S) is None
    stranger.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_rank_ends_when_its_engine_process_on_another_host_has_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[int] = []
    monkeypatch.setattr("kvferry.transfer.ranks.worker.os._exit", ended.append)
    rank = WorkerConnector(
        address=None,
        rank=0,
        pool=own_pool(torch.zeros(GEOMETRY.pool_shape(8, 4)), GEOMETRY, 1, 0),
        transfer="tcp",
        bind_host=HOST,
        advertise_host=HOST,
    )
    rank.start()
    assert isinstance(rank.address, RemoteRank)
    received: asyncio.Queue[bytes] = asyncio.Queue()
    connection = await dial(connect(rank.address), lambda _, frame: received.put_nowait(frame))
    await asyncio.wait_for(received.get(), WAIT_S)
    assert not ended
    connection.close()
    await until(lambda: ended == [1])
    rank.close()


async def test_an_engine_process_may_dial_before_the_rank_listens(
    stop: tuple[socket.socket, socket.socket],
) -> None:
    with socket.create_server((HOST, 0)) as probe:
        port = probe.getsockname()[1]
    nobody = RemoteRank(host=HOST, port=port, key=zmq.curve_keypair()[0])
    connection = await dial(connect(nobody), lambda *_: None)
    connection.send(b"waits")
    connection.close()

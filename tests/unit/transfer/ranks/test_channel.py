# SPDX-License-Identifier: Apache-2.0
"""The channel between an engine process and its ranks' transfer threads."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvferry.transfer.ranks import channel as rank_channel
from kvferry.transfer.ranks.channel import (
    Frames,
    OversizedFrame,
    RankConnection,
    RankEnd,
    RankGone,
    RankListener,
    RankSocket,
    connect_at_once,
    dial,
    packed,
)
from tests.helpers.waiting import until

WAIT_S = 10.0


class Engine:
    """The listening end, which keeps what comes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.received: asyncio.Queue[tuple[RankConnection, bytes]] = asyncio.Queue()
        self.listener = RankListener(lambda connection, frame: self.received.put_nowait((connection, frame)))

    async def next(self) -> tuple[RankConnection, bytes]:
        return await asyncio.wait_for(self.received.get(), WAIT_S)

    async def meet(self) -> tuple[RankConnection, RankEnd]:
        """Both ends of a rank."""
        end = connect_at_once(self.path)
        end.send(b"hello")
        return (await self.next())[0], end


@pytest.fixture
def stop() -> Iterator[tuple[socket.socket, socket.socket]]:
    """What a rank watches while it waits, after the end that a test closes to have it stop."""
    pair = socket.socketpair()
    yield pair
    for end in pair:
        end.close()


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path / "ranks")
    await made.listener.start(made.path)
    yield made
    made.listener.close()


def frames_of(end: RankEnd, count: int) -> list[bytes]:
    """The next frames."""
    frames: list[bytes] = []
    while len(frames) < count:
        assert select.select([end], [], [], WAIT_S)[0]
        frames += end.receive()
    return frames


@pytest.mark.parametrize("step", [1, 3, 4, 1000])
def test_frames_come_out_whole_however_the_stream_is_cut(step: int) -> None:
    sent = [b"", b"one", b"x" * 300, b"four"]
    stream, frames = b"".join(map(packed, sent)), Frames()
    pieces = [stream[at : at + step] for at in range(0, len(stream), step)]
    assert [frame for piece in pieces for frame in frames.feed(piece)] == sent


def test_a_length_that_none_of_ours_has_is_refused_before_anything_is_kept_for_it() -> None:
    with pytest.raises(OversizedFrame):
        list(Frames().feed(b"\xff\xff\xff\xff"))


async def test_frames_go_both_ways_and_long_ones_too(engine: Engine) -> None:
    connection, end = await engine.meet()
    long = bytes(range(256)) * 4096
    received = asyncio.to_thread(frames_of, end, 3)
    for frame in (b"a", long, b"b"):
        connection.send(frame)
    assert await received == [b"a", long, b"b"]
    await asyncio.to_thread(end.send, long)
    assert (await engine.next())[1] == long
    end.close()


async def test_a_rank_is_connected_to_once_and_leaves_no_file(
    tmp_path: Path, stop: tuple[socket.socket, socket.socket]
) -> None:
    path = tmp_path / "rank"
    rank = RankSocket(path)
    accepting = asyncio.create_task(asyncio.to_thread(rank.accept, stop[1]))
    received: asyncio.Queue[bytes] = asyncio.Queue()
    connection = await dial(path, lambda _, frame: received.put_nowait(frame))
    end = await asyncio.wait_for(accepting, WAIT_S)
    assert end is not None
    end.send(b"from the rank")
    assert await asyncio.wait_for(received.get(), WAIT_S) == b"from the rank"
    connection.send(b"to the rank")
    assert await asyncio.to_thread(frames_of, end, 1) == [b"to the rank"]
    assert not path.exists()
    with pytest.raises(OSError):
        await dial(path, lambda _, frame: None)
    connection.close()
    end.close()


async def test_a_rank_that_stops_does_not_wait_for_an_engine_process(
    tmp_path: Path, stop: tuple[socket.socket, socket.socket]
) -> None:
    """R7"""
    accepting = asyncio.create_task(asyncio.to_thread(RankSocket(tmp_path / "rank").accept, stop[1]))
    stop[0].close()
    assert await asyncio.wait_for(accepting, WAIT_S) is None
    assert not (tmp_path / "rank").exists()


def test_an_address_that_is_taken_or_invalid_is_an_error(tmp_path: Path) -> None:
    taken = RankSocket(tmp_path / "rank")
    for path in (tmp_path / "rank", tmp_path / "absent" / "rank"):
        with pytest.raises(OSError):
            RankSocket(path)
    taken.close()


async def test_a_rank_that_has_left_or_does_not_read_is_gone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_channel, "_MAX_QUEUED_BYTES", 1 << 20)
    connection, end = await engine.meet()
    with pytest.raises(RankGone, match="does not read"):
        for _ in range(1000):
            connection.send(bytes(1 << 16))
    end.close()

    def left() -> bool:
        try:
            connection.send(b"anybody?")
        except RankGone as gone:
            return "has left" in str(gone)
        return False

    await until(left, WAIT_S)


async def test_a_rank_whose_engine_process_has_gone_is_silent(engine: Engine) -> None:
    """I8: something else ends it, so it must neither break nor keep reporting."""
    _, end = await engine.meet()
    engine.listener.close()
    assert await asyncio.to_thread(select.select, [end], [], [], WAIT_S)
    await until(lambda: not list(end.receive()) and end.gone, WAIT_S)
    end.send(b"anybody?")
    end.close()

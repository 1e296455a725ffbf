# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio

import zmq

from kvferry.transfer.control.channel import Channel


async def test_a_handler_that_raises_does_not_lose_what_came_after() -> None:
    """The descriptor is edge-triggered: what is not taken now is not announced again."""
    taken: list[bytes] = []
    last = asyncio.Event()

    def on_frames(frames: list[bytes]) -> None:
        taken.append(frames[0])
        if frames[0] == b"last":
            last.set()
        if frames[0] == b"bad":
            raise ValueError("bad")

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: errors.append(context["exception"])
    )
    with zmq.Context() as context, context.socket(zmq.PAIR) as sender:
        receiver = context.socket(zmq.PAIR)
        sender.bind("inproc://frames")
        receiver.connect("inproc://frames")
        for frame in (b"first", b"bad", b"last"):
            sender.send(frame)
        channel = Channel(receiver, on_frames)
        channel.start()
        async with asyncio.timeout(20.0):
            await last.wait()
        channel.close()
    assert taken == [b"first", b"bad", b"last"]
    assert [type(error) for error in errors] == [ValueError]

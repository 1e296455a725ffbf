# SPDX-License-Identifier: Apache-2.0
"""Many writers, one reader, a bound in between."""

from __future__ import annotations

import asyncio

from kvferry.proxy.exchange.funnel import BoundedQueue


async def test_writers_wait_for_a_slow_reader_and_nothing_is_lost() -> None:
    """Style 17: however slow the client, no more than `capacity` items lie in memory."""
    funnel, written = BoundedQueue(2), []

    async def write() -> None:
        for number in range(5):
            await funnel.put(b"%d" % number)
            written.append(number)

    writing = asyncio.get_running_loop().create_task(write())
    writing.add_done_callback(lambda _: funnel.close())
    for _ in range(10):
        await asyncio.sleep(0)
    assert written == [0, 1]
    read = [item async for item in funnel]
    assert read == [b"0", b"1", b"2", b"3", b"4"]


async def test_closing_never_waits() -> None:
    funnel = BoundedQueue(1)
    await funnel.put(b"a")
    funnel.close()
    assert [item async for item in funnel] == [b"a"]

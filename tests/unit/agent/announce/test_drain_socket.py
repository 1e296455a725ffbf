# SPDX-License-Identifier: Apache-2.0
"""The starter of a server of several data-parallel ranks ends it when all of them have drained."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvferry.agent.announce.drain_socket import DrainConnection, Drainer
from kvferry.common.stop import StopRequest

DEADLINE_S = 20.0


@pytest.mark.parametrize("asks", [True, False], ids=["asked by the starter", "asked by a proxy"])
async def test_the_last_rank_that_has_drained_ends_the_server(asks: bool, tmp_path: Path) -> None:
    stop = StopRequest(DEADLINE_S)
    drainer = Drainer(stop)
    async with asyncio.timeout(DEADLINE_S), drainer.listening(tmp_path / "drain"):
        ranks = [await DrainConnection.open(str(tmp_path / "drain")) for _ in range(2)]
        await asyncio.sleep(0.05)  # the starter accepts them
        draining = asyncio.ensure_future(drainer.drain()) if asks else None
        if asks:
            for rank in ranks:
                asked = asyncio.Event()
                await rank.read(asked.set)
                assert asked.is_set()
        await ranks[0].say_drained()
        await asyncio.sleep(0.05)
        assert not stop.made.is_set() and (draining is None or not draining.done())
        await ranks[1].say_drained()
        await stop.made.wait()
        if draining is not None:
            await draining
        for rank in ranks:
            rank.close()

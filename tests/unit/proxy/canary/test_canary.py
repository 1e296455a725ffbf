# SPDX-License-Identifier: Apache-2.0
"""Probes by hand, over HTTP. `tests/system/test_canary.py` has real agents."""

from __future__ import annotations

import asyncio

from kvferry.proxy.canary.canary import MAX_WAITING
from tests.unit.proxy.conftest import StartStage


async def test_no_more_probes_wait_than_are_allowed(start_stage: StartStage) -> None:
    """The stand-ins' answers have no logprobs, so a probe that has its turn has failed."""
    stage = await start_stage()
    await stage.pair()

    async def probe() -> int:
        async with stage.http.post(f"{stage.proxy.url}/canary") as response:
            return int(response.status)

    assert await probe() == 200
    probes = [asyncio.create_task(probe()) for _ in range(MAX_WAITING + 12)]
    statuses = sorted(await asyncio.gather(*probes))
    assert set(statuses) == {200, 429}
    assert MAX_WAITING <= statuses.count(200) < len(probes)
    await stage.assert_quiescent()

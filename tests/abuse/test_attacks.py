# SPDX-License-Identifier: Apache-2.0
"""Every attack of the table, one after the other, beside 16 ordinary streams."""

from __future__ import annotations

import asyncio

import pytest

from kvferry.deploy.launcher import Cluster
from tests.abuse.attacks import ATTACKS, Attack, Target
from tests.abuse.watch import Ordinary, Seen, watching

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(120)]

FLOOD_S = 1.0
LONG_FLOOD_S = 20.0
SETTLE_S = 0.3
"""How long after an attack it may still be noticed."""


async def nobody_notices(
    attack: Attack, cluster: Cluster, ordinary: Ordinary, control: Seen, flood_s: float
) -> None:
    action = attack.make()
    target = Target(
        urls={"proxy": cluster.url, "agent": cluster.agents["decode-0"].url},
        discovery=f"127.0.0.1:{cluster.proxy.listening['discovery_port']}",
        flood_s=flood_s,
    )
    async with watching(cluster, ordinary) as seen:
        # In a thread: a stall of this loop would look like one of theirs.
        await asyncio.to_thread(asyncio.run, action(target))
        await asyncio.sleep(SETTLE_S)
    print(seen.summary())
    assert not seen.complaints(control, attack.growth)


def name_of(attack: Attack) -> str:
    return f"{attack.id} {attack.name}"


@pytest.mark.parametrize(
    "attack",
    [pytest.param(each, marks=pytest.mark.full if each.full else ()) for each in ATTACKS],
    ids=name_of,
)
async def test_nobody_else_notices(
    attack: Attack, cluster: Cluster, ordinary: Ordinary, control: Seen
) -> None:
    await nobody_notices(attack, cluster, ordinary, control, FLOOD_S)


@pytest.mark.full
@pytest.mark.parametrize("attack", [each for each in ATTACKS if each.floods], ids=name_of)
async def test_nor_when_it_goes_on(
    attack: Attack, cluster: Cluster, ordinary: Ordinary, control: Seen
) -> None:
    """The attacks without an end, for longer."""
    await nobody_notices(attack, cluster, ordinary, control, LONG_FLOOD_S)

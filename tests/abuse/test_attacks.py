# SPDX-License-Identifier: Apache-2.0
"""Every attack of the table, one after the other, beside 16 ordinary streams."""

from __future__ import annotations

from functools import partial

import pytest

from kvferry.deploy.launcher import Cluster
from tests.abuse.attacks import ATTACKS, Attack, Target
from tests.abuse.watch import Ordinary, Seen, complaints_about

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300), pytest.mark.alone]

FLOOD_S = 1.0
LONG_FLOOD_S = 20.0


async def nobody_notices(
    attack: Attack, cluster: Cluster, ordinary: Ordinary, control: Seen, flood_s: float
) -> None:
    target = Target(
        urls={"proxy": cluster.url, "agent": cluster.agents["decode-0"].url},
        discovery=f"127.0.0.1:{cluster.proxy.listening['discovery_port']}",
        flood_s=flood_s,
    )
    action = partial(attack.make(), target)
    assert not await complaints_about(action, cluster, ordinary, control, attack.growth)


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

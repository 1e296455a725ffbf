# SPDX-License-Identifier: Apache-2.0
"""I7: eight choices are one prefill, one lease and one transfer, and nothing is stranded per sibling."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.client import Answer, complete_all, heldout
from tests.helpers.metrics import blocks, settled, total, wait_idle
from tests.system.conftest import StartCluster

BATCH = 8
CHOICES = 8
SHARED = "".join(f"{first}{second}=417;" for first in "abcd" for second in "wxyz")
"""What all prompts begin with: several blocks that the prefix cache shares."""
SETTLE_S = 5.0
MAX_KV_USE = 0.05


def bodies(count: int) -> list[dict[str, Any]]:
    """Distinct prompts: one that the decode agent had cached whole would need no transfer."""
    prompts = [prompt for prompt in heldout(task="recall") if prompt.prompt_tokens <= 200]
    return [
        {
            "model": "ferry-tiny",
            "prompt": f"{SHARED}z{index:03d}=417;{prompts[index % len(prompts)].prompt}",
            "n": CHOICES,
            "seed": index,
            "max_tokens": 12,
            "ignore_eos": True,
            "stream": bool(index % 2),
        }
        for index in range(count)
    ]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.full)])
async def test_eight_choices_over_a_shared_prefix(count: int, start_cluster: StartCluster) -> None:
    asked = bodies(count)
    async with start_cluster(args=("--prefix-cache", "true")) as cluster:
        prefill, decode = cluster.agents["prefill-0"].url, cluster.agents["decode-0"].url
        for first in range(0, count, BATCH):
            batch = asked[first : first + BATCH]
            for answer in await complete_all(cluster.url, batch, BATCH):
                assert isinstance(answer, Answer), answer
                assert len(answer.choices) == CHOICES and not answer.timing["recomputed"]
                assert answer.completion_tokens == CHOICES * 12
            await wait_idle(prefill, SETTLE_S)
            states = await blocks(prefill)
            assert sum(states.values()) - states["free"] < MAX_KV_USE * sum(states.values()), states
        done = await settled(
            prefill, "kvferry_transfer_leases_ended_total", count, timeout_s=SETTLE_S, cause="released"
        )
        assert total(done, "kvferry_transfer_leases_ended_total", cause="released") == count
        assert total(done, "kvferry_transfer_leases_ended_total") == count, "no lease expired or was dropped"
        pulled = await settled(decode, "kvferry_transfer_pulls_total", count, timeout_s=SETTLE_S)
        assert total(pulled, "kvferry_transfer_pulls_total") == count
        assert total(pulled, "kvferry_transfer_failures_total") == 0

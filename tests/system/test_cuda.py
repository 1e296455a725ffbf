# SPDX-License-Identifier: Apache-2.0
"""`--device cuda`: prefill and decode apart on a GPU give the answers of one agent, ties excused (I4).

Prompts of some length are streamed, so that their blocks move while the GPU computes the next ones.
"""

from __future__ import annotations

import pytest

from tests.helpers.client import complete_all
from tests.helpers.gpu import needs_gpus
from tests.helpers.metrics import wait_idle
from tests.system.conftest import StartAgent, StartCluster
from tests.system.test_equality import MAX_TIES, bodies, exact_match, expect_answers, ties

COUNT = 60
CELLS = [("greedy", 1, "answers"), ("greedy", 4, "ignore_eos"), ("t1", 4, "ignore_eos"), ("t2", 1, "answers")]
ARGS = ("--dtype", "float32", "--device", "cuda", "--prefill-chunk", "64")
STREAMED = ("--stream-pull-min-tokens", "100")


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.timeout(600)
async def test_apart_equals_together_on_a_gpu(start_agent: StartAgent, start_cluster: StartCluster) -> None:
    async with start_agent(*ARGS) as agent:
        theirs = {
            cell: expect_answers(await complete_all(agent.url, bodies(*cell, COUNT), 16)) for cell in CELLS
        }
    async with start_cluster(args=ARGS, proxy_args=STREAMED) as cluster:
        early = 0
        for cell in CELLS:
            ours = expect_answers(await complete_all(cluster.url, bodies(*cell, COUNT), 16))
            excused = sum(ties(left, right) for left, right in zip(ours, theirs[cell], strict=True))
            pulled = sum(answer.timing["pull_bytes"] for answer in ours)
            early += sum(answer.timing["pull_early_blocks"] for answer in ours)
            backends = {answer.timing["backend"] for answer in ours}
            print(f"{cell}: {excused} ties excused, {pulled:,} bytes pulled over {backends}")
            assert excused <= MAX_TIES
            assert pulled > 0
            assert not any(answer.timing["recomputed"] for answer in ours)
            if cell == CELLS[0]:
                assert exact_match(ours, COUNT) >= 0.97
                assert exact_match(theirs[cell], COUNT) >= 0.97
        assert early > 0
        for running in cluster.agents.values():
            left = await wait_idle(running.url, timeout_s=3)
            assert left["used"] == left["leased"] == left["quarantined"] == 0

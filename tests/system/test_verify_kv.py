# SPDX-License-Identifier: Apache-2.0
"""With `--verify-kv` the damage of `test_damage.py`, which is its control, changes no answer."""

from __future__ import annotations

from tests.system.client import Answer, complete_all
from tests.system.conftest import StartCluster
from tests.system.metrics import scrape, total
from tests.system.test_damage import DAMAGED_BLOCK, asked_in_damaged_block, body
from tests.system.test_equality import BLOCK_BYTES

DAMAGED_PULLS = 3


async def test_damage_in_flight_is_found_counted_and_computed_anew(start_cluster: StartCluster) -> None:
    """The first pulls are damaged as in the control, the others are not."""
    prompts = asked_in_damaged_block()
    start = DAMAGED_BLOCK * BLOCK_BYTES
    fault = f"flip:start={start},end={start + BLOCK_BYTES},count={DAMAGED_PULLS}"
    async with start_cluster(
        args=("--transfer", "tcp", "--verify-kv"), prefill_args=("--tcp-fault", fault)
    ) as cluster:
        answers = await complete_all(cluster.url, [body(prompt) for prompt in prompts], concurrency=4)
        samples = await scrape(cluster.agents["decode-0"].url)
    recomputed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert isinstance(answer, Answer), answer
        assert answer.choices[0].text == prompt.answer
        recomputed += answer.timing["recomputed"]
    assert recomputed == DAMAGED_PULLS < len(prompts)
    assert total(samples, "kvferry_transfer_failures_total", reason="checksum") == DAMAGED_PULLS
    assert total(samples, "kvferry_transfer_failures_total") == DAMAGED_PULLS
    assert total(samples, "kvferry_verify_seconds_total") > 0

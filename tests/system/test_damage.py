# SPDX-License-Identifier: Apache-2.0
"""Control: the equality comparison can fail. Damage in flight shows as wrong answers."""

from __future__ import annotations

from tests.helpers.client import Answer, Prompt, complete_all, heldout
from tests.helpers.metrics import settled, total
from tests.standins import faults
from tests.system.conftest import StartCluster
from tests.system.test_equality import BLOCK_BYTES, BLOCK_TOKENS

DAMAGED_BLOCK = 4
TCP = ("--transfer", "tcp")


def asked_in_damaged_block() -> list[Prompt]:
    """Held-out prompts whose asked pair lies wholly in the damaged block."""
    first = DAMAGED_BLOCK * BLOCK_TOKENS
    # A pair is 6 tokens long (key, =, three digits, ;), so it must begin 6 tokens before the block's end.
    wanted = range(first, first + BLOCK_TOKENS - 6 + 1)
    return [prompt for prompt in heldout(task="recall") if prompt.asked_pair_token in wanted]


def body(prompt: Prompt) -> dict[str, object]:
    return {"model": "ferry-tiny", "prompt": prompt.prompt, "temperature": 0, "max_tokens": 16}


async def test_a_damaged_block_changes_the_answers(start_cluster: StartCluster) -> None:
    """XOR 0x40 in the top byte of every element of the block that holds the asked pair, on the wire."""
    prompts = asked_in_damaged_block()
    assert len(prompts) >= 5, "the held-out file must hold prompts that ask for a pair in this block"
    fault = f"flip:start={DAMAGED_BLOCK * BLOCK_BYTES},end={(DAMAGED_BLOCK + 1) * BLOCK_BYTES}"
    async with start_cluster(module=faults.AGENT, args=TCP, prefill_args=("--tcp-fault", fault)) as cluster:
        answers = await complete_all(cluster.url, [body(prompt) for prompt in prompts], concurrency=4)
    wrong = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert isinstance(answer, Answer), answer
        wrong += answer.choices[0].text != prompt.answer
    assert wrong >= 0.9 * len(prompts), f"only {wrong} of {len(prompts)} answers changed"


async def test_a_failed_pull_is_recomputed_and_counted(start_cluster: StartCluster) -> None:
    """Every read is cut: the decode agent computes each prompt itself, says so, and answers right."""
    prompts = heldout(8)
    async with start_cluster(module=faults.AGENT, args=TCP, prefill_args=("--tcp-fault", "drop")) as cluster:
        answers = await complete_all(cluster.url, [body(prompt) for prompt in prompts], concurrency=4)
        legs = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            assert isinstance(answer, Answer), answer
            assert answer.choices[0].text == prompt.answer
            legs += len(answer.choices[0].token_ids) > 1
            assert answer.timing["recomputed"] == (len(answer.choices[0].token_ids) > 1)
        samples = await settled(cluster.agents["decode-0"].url, "kvferry_agent_recomputes_total", legs)
    assert total(samples, "kvferry_agent_recomputes_total") == legs > 0

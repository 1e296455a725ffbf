# SPDX-License-Identifier: Apache-2.0
"""Pairs of vLLM servers whose layers keep different things, in several KV-cache groups: what goes wrong with
one group's pages costs a computation and never an answer, and nothing stays in use (`make test-vllm`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.standins.damage import SWITCH
from tests.system.vllm.servers import MARKS
from tests.system.vllm.test_breadth import CASES, models, prompt_ids
from tests.system.vllm.test_kv_lifetime import (
    LEASE_S,
    SLOTS,
    a_client_leaves_while_its_request_decodes,
    a_client_leaves_while_its_request_waits,
    a_client_leaves_while_kv_is_pulled,
    a_lease_is_dropped,
    greedy,
)
from tests.system.vllm.test_kvferry import (
    BATCH,
    ENDED,
    FAILED,
    Answer,
    Stack,
    answers,
    assert_all_equal,
    late,
    salted,
    started,
)

__all__ = ["models"]
pytestmark = MARKS

LENGTHS = (70, 100, 150, 200, 300, 420)
"""At each every group has something to lend."""
MOST_BELIEVED = 20


@dataclass(frozen=True, slots=True)
class Model:
    """A model's groups of layers, so many blocks that prompts of a late read are overwritten, and how many
    there are of these reads.
    """

    num_groups: int
    num_blocks: int
    trials: int


MODELS: Mapping[str, Model] = MappingProxyType(
    {
        "gemma3": Model(3, 240, 50),
        "llama4": Model(4, 240, 50),
        "nemotron_h": Model(3, 40, 50),
        "mistral": Model(1, 80, 20),
        "gpt_oss": Model(2, 160, 20),
        "deepseek_v3": Model(1, 160, 20),
        "qwen3_next": Model(4, 40, 20),
    }
)


@pytest.mark.parametrize("name", MODELS)
async def test_what_goes_wrong_with_one_group_costs_a_computation_and_no_answer(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, switch = MODELS[name], tmp_path / "damage"
    # What rounds gives other digits in a batch of another size.
    at_once = 1 if CASES[name].rounds else BATCH
    switch.write_text("none")
    monkeypatch.setenv(SWITCH, str(switch))
    damaging: dict[str, Any] = {
        "kv_connector": "DamagingConnector",
        "kv_connector_module_path": "tests.standins.damaging_connector",
    }
    async with started(
        tmp_path,
        model=models / name,
        words=CASES[name].words,
        connector=damaging,
        lease_s=LEASE_S,
        num_blocks=model.num_blocks,
        max_running=SLOTS,
    ) as stack:
        asked = [greedy(prompt_ids(length)) for length in LENGTHS]
        wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in asked], at_once)
        assert len({str(answer.texts) for answer in wanted}) == len(LENGTHS)
        for group in range(model.num_groups):
            for how, reason in (("deny", "invalid"), ("hole", "mismatch"), ("overwrite", "")):
                switch.write_text(f"{how} {group}")
                before = await counts(stack, reason)
                found = await answers(stack.http, stack.proxy_url, [salted(each) for each in asked], at_once)
                transfers, recomputed, failed = await counts(stack, reason)
                moved = (transfers - before[0], recomputed - before[1])
                wrong = num_wrong(found, wanted)
                print(f"{name}, group {group}, {how}: {wrong} of {len(asked)} wrong, {moved}", flush=True)
                if reason:
                    assert not wrong and moved == (0, len(asked))
                    assert failed - before[2] == len(asked)
                else:
                    assert wrong and moved == (len(asked), 0), "the control"
        switch.write_text("none")
        await stack.settled()
        await a_lease_is_dropped(stack)
        await a_client_leaves_while_its_request_waits(stack)
        await a_client_leaves_while_kv_is_pulled(stack)
        await a_client_leaves_while_its_request_decodes(stack)
        await late_readers(stack, switch, asked, wanted, model.trials, at_once)


async def late_readers(
    stack: Stack,
    switch: Path,
    asked: list[dict[str, Any]],
    wanted: list[Answer],
    trials: int,
    at_once: int,
) -> None:
    """Leases end and other prompts overwrite the blocks before they are read."""
    _, recomputed, failed = await counts(stack, "invalid")
    expired = await stack.prefill.sample(stack.http, ENDED, 'reason="expired"')
    for first in range(0, trials, at_once):
        batch = [(first + each) % len(asked) for each in range(at_once)]
        found = await late(stack, [salted(asked[each]) for each in batch])
        assert_all_equal(found, [wanted[each] for each in batch])
    await stack.settled()
    now = await counts(stack, "invalid")
    assert await stack.prefill.sample(stack.http, ENDED, 'reason="expired"') - expired == trials
    assert now[1] - recomputed == trials
    print(f"{trials} late reads: 0 wrong, {now[2] - failed:g} not proven", flush=True)
    assert now[2] > failed
    switch.write_text("believe")
    for tried in range(at_once, MOST_BELIEVED + 1, at_once):  # some find no lease any more
        found = await late(stack, [salted(each) for each in asked[-at_once:]])
        if wrong := num_wrong(found, wanted[-at_once:]):
            print(f"believed: {wrong} of {tried} late reads wrong", flush=True)
            return
    pytest.fail("the control: no late read found another prompt's blocks")


def num_wrong(found: list[Answer], wanted: list[Answer]) -> int:
    return sum(one.texts != other.texts for one, other in zip(found, wanted, strict=True))


async def counts(stack: Stack, reason: str) -> tuple[float, float, float]:
    """Transfers so far, prompts that were computed again, and transfers that failed for a reason."""
    failed = await stack.decode.sample(stack.http, FAILED, f'reason="{reason}"')
    return *await stack.moved(), failed

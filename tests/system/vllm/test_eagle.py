# SPDX-License-Identifier: Apache-2.0
"""A pair of vLLM servers that draft by EAGLE: the draft layer's KV is transferred with the rest, so as many
drafted tokens are accepted after a transfer as without one (`make test-vllm`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.standins.damage import SWITCH
from tests.system.vllm.models import EAGLE_DRAFT
from tests.system.vllm.servers import MARKS, MODEL, VllmServer
from tests.system.vllm.test_breadth import LEASE_S, models, prompt_ids
from tests.system.vllm.test_kvferry import GENERATED, Stack, answers, assert_all_equal, salted, started

__all__ = ["models"]
pytestmark = MARKS

PROMPTS = 30
ANSWER = 64
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
"""Counted per generated token. Per drafted token would show what vLLM adds: it pads the first step after a
transfer with drafts that are none, for steps of one size, and counts them as drafted (docs/sources.md).
"""


async def test_drafts_are_accepted_after_a_transfer_as_without_one(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft predicts the model exactly, as long as it has its own KV of the prompt."""
    switch = tmp_path / "damage"
    switch.write_text("none")
    monkeypatch.setenv(SWITCH, str(switch))
    draft = {"method": "eagle", "model": str(models / EAGLE_DRAFT), "num_speculative_tokens": 3}
    damaging: dict[str, Any] = {
        "kv_connector": "DamagingConnector",
        "kv_connector_module_path": "tests.standins.damaging_connector",
    }
    async with started(
        tmp_path,
        model=models / "eagle",
        words=("--speculative-config", json.dumps(draft)),
        connector=damaging,
        lease_s=LEASE_S,
    ) as stack:
        plain = {"model": MODEL, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
        asked = [plain | {"prompt": prompt_ids(33 + 20 * number)} for number in range(PROMPTS)]
        wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in asked])
        assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
        rates = {"a plain server": await acceptance(stack, stack.prefill, (0.0, 0.0))}
        for how, ways in (("none", (False, True)), ("draft", (False,))):
            switch.write_text(how)
            for stream in ways:
                before, moved = await counts(stack, stack.decode), await stack.moved()
                found = [salted(each) | {"stream": stream} for each in asked]
                assert_all_equal(await answers(stack.http, stack.proxy_url, found), wanted)
                transfers, recomputed = await stack.moved()
                assert (transfers - moved[0], recomputed - moved[1]) == (PROMPTS, 0)
                name = f"{'streamed' if stream else 'whole'}, damage: {how}"
                rates[name] = await acceptance(stack, stack.decode, before)
        print(
            f"accepted drafts per token: { {name: round(rate, 3) for name, rate in rates.items()} }",
            flush=True,
        )
        alone = rates["a plain server"]
        assert alone > 0.7, "the draft predicts the model: three of four tokens at most"
        assert rates["whole, damage: none"] >= 0.95 * alone
        assert rates["streamed, damage: none"] >= 0.95 * alone
        assert rates["whole, damage: draft"] < 0.7 * alone, "the control"


async def counts(stack: Stack, server: VllmServer) -> tuple[float, float]:
    """Tokens generated so far, and those of them that were accepted drafts."""
    await stack.settled()
    return await server.sample(stack.http, GENERATED), await server.sample(stack.http, ACCEPTED)


async def acceptance(stack: Stack, server: VllmServer, before: tuple[float, float]) -> float:
    generated, accepted = await counts(stack, server)
    return (accepted - before[1]) / (generated - before[0])

# SPDX-License-Identifier: Apache-2.0
"""With `--verify-kv` the damage of `test_damage.py`, which is its control, changes no answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec
from tests.helpers.client import Answer, Prompt, complete_all, heldout
from tests.helpers.metrics import Samples, scrape, settled, total
from tests.standins import faults
from tests.system.conftest import COMMON_ARGS, MODEL
from tests.system.test_damage import DAMAGED_BLOCK, asked_in_damaged_block, body
from tests.system.test_equality import BLOCK_BYTES

DAMAGED_PULLS = 3
DIFFERENCE = "rejected by the decode agent in their handshake: verify_kv: theirs off, ours on"


async def test_damage_in_flight_is_found_counted_and_computed_anew(log_dir: Path) -> None:
    """One prefill agent's first answers are damaged on the wire, as in the control.

    The other has no checksums to offer, is refused for it, and gets nothing more once the proxy knows.
    """
    async with Cluster(cluster(log_dir)) as running:
        await running.wait_ready()
        decode, plain = running.agents["decode-0"].url, running.agents["prefill-1"].url
        recomputed = await ask(running.url, asked_in_damaged_block())
        before = await settled(decode, "kvferry_transfer_failures_total", recomputed)
        await wait_refused(running.url, plain)
        assert await ask(running.url, heldout(6)) == 0
        after = await scrape(decode)
    assert failures(before, "checksum") == DAMAGED_PULLS
    assert failures(before, "refused") > 0, "both prefill agents take their turn at first"
    assert total(before, "kvferry_transfer_failures_total") == recomputed
    assert total(after, "kvferry_transfer_failures_total") == recomputed
    assert total(after, "kvferry_transfer_verify_seconds_total") > 0


def cluster(log_dir: Path) -> ClusterSpec:
    start = DAMAGED_BLOCK * BLOCK_BYTES
    fault = f"flip:start={start},end={start + BLOCK_BYTES},count={DAMAGED_PULLS}"
    args = (*COMMON_ARGS, "--transfer", "tcp")
    agents = (
        AgentSpec(
            name="prefill-0",
            role="prefill",
            args=(*args, "--verify-kv", "--tcp-fault", fault),
            module=faults.AGENT,
        ),
        AgentSpec(name="prefill-1", role="prefill", args=args),
        AgentSpec(name="decode-0", role="decode", args=(*args, "--verify-kv")),
    )
    return ClusterSpec(model=MODEL, agents=agents, log_dir=log_dir / "verify-kv")


async def ask(url: str, prompts: list[Prompt]) -> int:
    """How many of the answers, which must all be right, the decode agent computed all by itself."""
    answers = await complete_all(url, [body(prompt) for prompt in prompts], concurrency=4)
    recomputed = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert isinstance(answer, Answer), answer
        assert answer.choices[0].text == prompt.answer
        recomputed += answer.timing["recomputed"]
    return recomputed


def failures(samples: Samples, reason: str) -> float:
    return total(samples, "kvferry_transfer_failures_total", reason=reason)


async def wait_refused(url: str, agent: str) -> None:
    """Until /nodes says why no request goes to this agent, with both values."""
    async with asyncio.timeout(20.0), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"{url}/nodes") as response:
                page: dict[str, Any] = await response.json()
            if {node["address"]: node["not_paired"] for node in page["nodes"]}[agent] == DIFFERENCE:
                return
            await asyncio.sleep(0.1)

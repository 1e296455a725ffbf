# SPDX-License-Identifier: Apache-2.0
"""The canary finds agents whose KV is wrong, and requests go to the others. Real agents, planted faults."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, get_args

import aiohttp
import pytest

from kvferry.deploy.launcher import AgentSpec, Cluster, ClusterSpec
from kvferry.proxy.canary.canary import LEARN_FIRST
from kvferry.proxy.telemetry.metrics import VERDICTS
from tests.helpers.client import Answer, complete_all, heldout
from tests.helpers.metrics import scrape, total
from tests.standins import faults
from tests.standins.faults.kv import BLOCKS_PER_BAD_BYTE, KvFault
from tests.system.conftest import MODEL

ARGS = ("--threads", "1", "--transfer", "tcp")
TO_FIND = 3
"""Probes of a pair until it is out, at most: each of these faults changes nearly every answer."""
MANY_PROBES = 10_000
PROBES = "kvferry_proxy_canary_probes_total"
OUT_REASON = "their answers differ from those of the decode agent alone"
SMALL_FAULTS: tuple[KvFault, ...] = ("stale",)
FULL_FAULTS: tuple[KvFault, ...] = ("zero_layer", "swap_kv", "rope", "stale", "late_rank")


@asynccontextmanager
async def cluster(
    log_dir: Path, wrong: tuple[KvFault, ...], *proxy_args: str, right: tuple[int, ...] = (1,)
) -> AsyncIterator[Cluster]:
    """`right`: the tensor parallelism of each prefill agent without a fault."""
    agents = []
    for number, tp in enumerate(right):
        args = (*ARGS, "--tp", f"{tp}", "--name", f"right-{number}")
        agents.append(AgentSpec(name=f"right-{number}", role="prefill", args=args))
    for fault in wrong:
        ranks = "2" if fault == "late_rank" else "1"
        broken = (*ARGS, "--tp", ranks, "--name", fault, "--kv-fault", fault)
        agents.append(AgentSpec(name=fault, role="prefill", args=broken, module=faults.AGENT))
    agents.append(AgentSpec(name="decode", role="decode", args=(*ARGS, "--name", "decode")))
    number = len(list(log_dir.iterdir()))
    spec = ClusterSpec(
        model=MODEL, agents=tuple(agents), log_dir=log_dir / f"{number}", proxy_args=proxy_args
    )
    async with Cluster(spec) as running:
        await running.wait_ready()
        yield running


async def probe(url: str, times: int) -> list[dict[str, Any]]:
    reports = []
    async with aiohttp.ClientSession() as http:
        for _ in range(times):
            async with http.post(f"{url}/canary") as response:
                assert response.status == 200, await response.text()
                reports.append(await response.json())
    return reports


async def pairs(url: str) -> dict[str, dict[str, Any]]:
    """What the canary knows, by the prefill agent's name."""
    async with aiohttp.ClientSession() as http, http.get(f"{url}/canary") as response:
        return {each["pair"].partition(" ")[0]: each for each in (await response.json())["pairs"]}


async def not_paired(url: str) -> dict[str, str | None]:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/nodes") as response:
        return {node["name"]: node["not_paired"] for node in (await response.json())["nodes"]}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "wrong", [SMALL_FAULTS, pytest.param(FULL_FAULTS, marks=pytest.mark.full)], ids=["small", "full"]
)
async def test_agents_with_wrong_kv_are_found_and_get_no_more_requests(
    log_dir: Path, wrong: tuple[KvFault, ...]
) -> None:
    assert set(FULL_FAULTS) | {"bad_byte"} == set(get_args(KvFault))
    async with cluster(log_dir, wrong) as running:
        await probe(running.url, LEARN_FIRST + TO_FIND * (len(wrong) + 1))
        found, states = await pairs(running.url), await not_paired(running.url)
        assert found.pop("right-0")["state"] == "trusted"
        assert {name: each["state"] for name, each in found.items()} == dict.fromkeys(map(str, wrong), "out")
        assert states.pop("right-0") is states.pop("decode") is None
        assert states == dict.fromkeys(map(str, wrong), OUT_REASON)
        await assert_right(running.url)
        if wrong is not SMALL_FAULTS:
            return
        # Without another pair the decode agent serves alone: that is no outage, and no wrong tokens.
        await cordon(running.url, "right-0")
        async with aiohttp.ClientSession() as http, http.get(f"{running.url}/ready") as response:
            assert response.status == 200, await response.text()
        await assert_right(running.url)
        words = ("-m", "kvferry.deploy", "canary", running.url, "--probes", "2")
        command = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=asyncio.subprocess.PIPE)
        shown, _ = await command.communicate()
        assert command.returncode == 1 and b"different (out)" in shown, shown


async def assert_right(url: str) -> None:
    prompts = heldout(6)
    bodies: list[dict[str, Any]] = [
        {"model": "ferry-tiny", "prompt": each.prompt, "temperature": 0, "max_tokens": 16} for each in prompts
    ]
    for prompt, answer in zip(prompts, await complete_all(url, bodies, concurrency=4), strict=True):
        assert isinstance(answer, Answer), answer
        assert answer.choices[0].text == prompt.answer


async def cordon(url: str, name: str) -> None:
    async with aiohttp.ClientSession() as http, http.get(f"{url}/nodes") as response:
        [node] = [each for each in (await response.json())["nodes"] if each["name"] == name]
        async with http.post(f"{url}/nodes/{node['incarnation']}/cordon") as done:
            assert done.status == 200, await done.text()


@pytest.mark.full
@pytest.mark.timeout(1800)
async def test_a_bad_byte_in_one_of_a_thousand_blocks_is_found(log_dir: Path) -> None:
    async with cluster(log_dir, ("bad_byte",)) as running:
        for _ in range(40):
            await probe(running.url, 20)
            found = await pairs(running.url)
            if found["bad_byte"]["state"] == "out":
                break
        assert found["bad_byte"]["state"] == "out", BLOCKS_PER_BAD_BYTE
        assert found["right-0"]["state"] == "trusted"


@pytest.mark.full
@pytest.mark.timeout(2 * 3600)
async def test_without_a_fault_nothing_is_suspected(log_dir: Path) -> None:
    """Of pairs of one rank each, and of two and one, under the load of six canaries and of some clients."""
    flags = ("--canary-interval-s", "0.01", "--canary-max-share", "1000", "--workers", "6")
    async with cluster(log_dir, (), *flags, right=(1, 2)) as running:
        bodies = [
            {"model": "ferry-tiny", "prompt": each.prompt, "max_tokens": 48, "ignore_eos": True}
            for each in heldout(40)
        ]
        probes: dict[str, float] = {}
        while probes.get("same", 0) < MANY_PROBES:
            await complete_all(running.url, bodies, concurrency=2)
            await asyncio.sleep(10.0)
            samples = await scrape(running.url)
            probes = {each: total(samples, PROBES, verdict=each) for each in VERDICTS}
            print(probes, flush=True)
            assert probes["different"] == probes["failed"] == 0

# SPDX-License-Identifier: Apache-2.0
"""Draining, and prompts that are too short to split, with real agents."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.deploy.pages import steps
from tests.helpers.client import Answer, Prompt, complete_all, heldout, session
from tests.helpers.metrics import scrape, total, wait_idle, wait_one_running
from tests.helpers.waiting import patient
from tests.system.conftest import StartCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPLIT_MIN_TOKENS = 64
# Prompts that are surely split, and that are surely not: the proxy has but an estimate of their lengths.
LONG, SHORT = range(300, 500), range(50)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(
        decode=2,
        args=("--max-model-len", "1536"),
        proxy_args=("--split-min-tokens", str(SPLIT_MIN_TOKENS)),
    ) as cluster:
        yield cluster


def prompts_of(count: int, tokens: range) -> list[Prompt]:
    return [prompt for prompt in heldout(task="recall") if prompt.prompt_tokens in tokens][:count]


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "ferry-tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}


async def nodes(http: aiohttp.ClientSession, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What `/nodes` says, by address."""
    async with http.get(f"{cluster.url}/nodes") as response:
        return {node["address"]: node for node in (await response.json())["nodes"]}


async def command(http: aiohttp.ClientSession, cluster: Cluster, node: dict[str, Any], verb: str) -> None:
    async with http.post(f"{cluster.url}/nodes/{node['incarnation']}/{verb}") as response:
        assert response.status == 200, await response.text()


async def test_a_cordoned_agent_finishes_what_it_has_and_gets_nothing_new(cluster: Cluster) -> None:
    """As before an upgrade: no stream is cut, and a proxy's word is enough."""
    prompts = prompts_of(6, LONG)
    long = [body(each.prompt, max_tokens=200, ignore_eos=True, stream=True) for each in prompts]
    short = [body(each.prompt) for each in prompts]
    async with session() as http:
        streams = asyncio.ensure_future(complete_all(cluster.url, long, concurrency=len(long)))
        name = await wait_one_running(cluster.agents, len(long) // 2)
        cordoned = cluster.agents[name]
        other = cluster.agents["decode-1" if name == "decode-0" else "decode-0"]
        await command(http, cluster, (await nodes(http, cluster))[cordoned.url], "cordon")
        told = (await nodes(http, cluster))[cordoned.url]
        assert (told["state"], told["load"]["max_running"]) == ("cordoned", 64)
        answers = await complete_all(cluster.url, short, concurrency=4)
        assert [answer.choices[0].text for answer in answers if isinstance(answer, Answer)] == [
            each.answer for each in prompts
        ]
        for answer in await streams:
            assert isinstance(answer, Answer) and answer.completion_tokens == 200
        assert (await wait_idle(cordoned.url, timeout_s=10))["used"] == 0
        assert (await nodes(http, cluster))[cordoned.url]["in_flight"] == 0
        served = {
            agent.url: total(await scrape(agent.url), "kvferry_agent_requests_total")
            for agent in (cordoned, other)
        }
        assert served[cordoned.url] == told["in_flight"]
        assert served[other.url] == len(long) + len(short) - told["in_flight"]
        await command(http, cluster, (await nodes(http, cluster))[cordoned.url], "uncordon")
        await complete_all(cluster.url, short, concurrency=len(short))
        assert total(await scrape(cordoned.url), "kvferry_agent_requests_total") > served[cordoned.url]


async def test_a_prompt_too_short_to_split_is_served_by_a_decode_agent(cluster: Cluster) -> None:
    """The same answers, and the prefill agent has done nothing."""
    prompts = prompts_of(8, SHORT)
    before = await requests(cluster)
    answers = await complete_all(
        cluster.url,
        [body(each.prompt, stream=index % 2 == 0) for index, each in enumerate(prompts)],
        concurrency=4,
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert isinstance(answer, Answer) and answer.choices[0].text == prompt.answer
    after = await requests(cluster)
    assert after["prefill-0"] == before["prefill-0"]
    assert sum(after.values()) - sum(before.values()) == len(prompts)


async def test_without_a_prefill_agent_long_prompts_are_served_by_decode_agents_alone(
    cluster: Cluster,
) -> None:
    """W2. The last test of this file but one: there is no prefill agent afterwards."""
    await cluster.agents["prefill-0"].stop()
    (long,) = prompts_of(1, LONG)
    asked = [body(long.prompt, stream=stream) for stream in (False, True)]
    for answer in await complete_all(cluster.url, asked, concurrency=2):
        assert isinstance(answer, Answer) and answer.choices[0].text == long.answer
    async with aiohttp.ClientSession() as http, http.get(f"{cluster.url}/ready") as response:
        assert response.status == 200
    assert total(await scrape(cluster.url), "kvferry_proxy_decode_only_requests_total") == 2


async def requests(cluster: Cluster) -> dict[str, float]:
    """How many requests each agent has answered."""
    return {
        name: total(await scrape(agent.url), "kvferry_agent_requests_total")
        for name, agent in cluster.agents.items()
    }


async def test_the_commands_of_the_page_about_rolling_do_what_it_says(cluster: Cluster) -> None:
    """As they stand, but for the addresses. The last of this file: an agent ends."""
    async with session() as http:
        agent = cluster.agents["decode-1"].url
        there = {"10.0.0.9:10001": urlsplit(cluster.url).netloc, "10.0.0.1:8000": urlsplit(agent).netloc}
        there["INCARNATION"] = (await nodes(http, cluster))[agent]["incarnation"]
        listing, cordon, uncordon = steps("rolling.md", "Out of rotation, and back")
        assert agent in {node["address"] for node in json.loads(await typed(listing, there))["nodes"]}
        await typed(cordon, there)
        assert (await nodes(http, cluster))[agent]["state"] == "cordoned"
        await typed(uncordon, there)
        assert (await nodes(http, cluster))[agent]["state"] == "ready"
        [end] = steps("rolling.md", "Agents")
        assert "has drained and ended" in await typed(end, there)
        assert await asyncio.wait_for(cluster.agents["decode-1"].process.wait(), patient(10.0)) == 0
        assert agent not in await nodes(http, cluster)


async def typed(command: str, there: dict[str, str]) -> str:
    """What a command of a page prints, with what is there in place of what the page names."""
    for named, found in there.items():
        command = command.replace(named, found)
    program, *words = shlex.split(command)
    argv = [sys.executable, "-m", "kvferry.deploy"] if program == "kvferry" else [program]
    process = await asyncio.create_subprocess_exec(*argv, *words, stdout=asyncio.subprocess.PIPE)
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), patient(60.0))
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, command
    return printed.decode()

# SPDX-License-Identifier: Apache-2.0
"""Draining, and prompts that are too short to split, with real agents."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp

from deploy.launcher import Cluster
from tests.system.client import Answer, complete_all, heldout, session
from tests.system.conftest import StartCluster
from tests.system.metrics import scrape, total, wait_idle


def body(prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": "ferry-tiny", "prompt": prompt, "temperature": 0, "max_tokens": 16, **fields}


async def nodes(http: aiohttp.ClientSession, cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What `/nodes` says, by address."""
    async with http.get(f"{cluster.url}/nodes") as response:
        return {node["address"]: node for node in (await response.json())["nodes"]}


async def command(http: aiohttp.ClientSession, cluster: Cluster, node: dict[str, Any], verb: str) -> None:
    async with http.post(f"{cluster.url}/nodes/{node['incarnation']}/{verb}") as response:
        assert response.status == 200, await response.text()


async def test_a_drained_agent_finishes_what_it_has_and_gets_nothing_new(start_cluster: StartCluster) -> None:
    """As before an upgrade: no stream is cut, and a proxy's word is enough."""
    prompts = heldout(6)
    long = [body(each.prompt, max_tokens=200, ignore_eos=True, stream=True) for each in prompts]
    short = [body(each.prompt) for each in prompts]
    async with start_cluster(decode=2, args=("--max-model-len", "1536")) as cluster, session() as http:
        drained, other = (cluster.agents[name] for name in ("decode-0", "decode-1"))
        streams = asyncio.ensure_future(complete_all(cluster.url, long, concurrency=len(long)))
        async with asyncio.timeout(30):
            while total(await scrape(drained.url), "kvferry_running") < len(long) // 2:
                await asyncio.sleep(0.02)
        await command(http, cluster, (await nodes(http, cluster))[drained.url], "drain")
        told = (await nodes(http, cluster))[drained.url]
        assert (told["state"], told["load"]["max_running"]) == ("draining", 64)
        answers = await complete_all(cluster.url, short, concurrency=4)
        assert [answer.choices[0].text for answer in answers if isinstance(answer, Answer)] == [
            each.answer for each in prompts
        ]
        for answer in await streams:
            assert isinstance(answer, Answer) and answer.completion_tokens == 200
        assert (await wait_idle(drained.url, timeout_s=5))["used"] == 0
        assert (await nodes(http, cluster))[drained.url]["in_flight"] == 0
        served = {
            agent.url: total(await scrape(agent.url), "kvferry_requests_total") for agent in (drained, other)
        }
        assert served[drained.url] == len(long) // 2
        assert served[other.url] == len(long) // 2 + len(short)
        await command(http, cluster, (await nodes(http, cluster))[drained.url], "undrain")
        await complete_all(cluster.url, short, concurrency=1)
        assert total(await scrape(drained.url), "kvferry_requests_total") > served[drained.url]


async def test_a_prompt_too_short_to_split_is_served_by_a_decode_agent(start_cluster: StartCluster) -> None:
    """The same answers, and the prefill agent has done nothing."""
    prompts = heldout(8)
    async with start_cluster(proxy_args=("--split-min-tokens", "100000")) as cluster:
        answers = await complete_all(
            cluster.url,
            [body(each.prompt, stream=index % 2 == 0) for index, each in enumerate(prompts)],
            concurrency=4,
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert isinstance(answer, Answer) and answer.choices[0].text == prompt.answer
        prefill, decode = cluster.agents["prefill-0"], cluster.agents["decode-0"]
        assert total(await scrape(prefill.url), "kvferry_requests_total") == 0
        assert total(await scrape(decode.url), "kvferry_requests_total") == len(prompts)

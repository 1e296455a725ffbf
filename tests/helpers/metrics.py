# SPDX-License-Identifier: Apache-2.0
"""Reads a process's own /metrics page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from kvferry.deploy.launcher import Process
from tests.helpers.waiting import patient

STATS_S = 10.0
PAGE_AGE_S = 1.0
"""How old what an agent's page says may be."""
RUNNING, GENERATED = "kvferry_agent_num_requests_running", "kvferry_agent_generation_tokens_total"
TOKENS_BEGUN = 4
"""How many tokens a stream has when it counts as begun."""
Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def scrape(url: str) -> Samples:
    """Every sample of `url`/metrics by (name, sorted labels)."""
    async with (
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as http,
        http.get(f"{url}/metrics") as response,
    ):
        text = await response.text()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def total(samples: Samples, name: str, **labels: str) -> float:
    """Sum of the samples of that name whose labels include `labels`. Raises `KeyError` where none has it."""
    if not is_shown(samples, name):
        raise KeyError(f"no sample of this page is named {name}")
    wanted = set(labels.items())
    return sum(value for (key, have), value in samples.items() if key == name and wanted <= set(have))


def is_shown(samples: Samples, name: str) -> bool:
    """Whether the page has samples of that name: gauges of what is not known yet are absent."""
    return any(key == name for key, _ in samples)


async def settled(url: str, name: str, count: int, *, timeout_s: float = STATS_S, **labels: str) -> Samples:
    """The metrics page, given time for a counter to reach `count`: snapshots are a second old at most."""
    deadline = time.monotonic() + timeout_s
    while total(samples := await scrape(url), name, **labels) < count and time.monotonic() < deadline:
        await asyncio.sleep(0.1)
    return samples


async def blocks(url: str) -> dict[str, int]:
    """KV blocks of one agent by state."""
    async with asyncio.timeout(STATS_S):  # after its start an engine has a second to tell of itself
        while not is_shown(samples := await scrape(url), "kvferry_agent_kv_blocks"):
            await asyncio.sleep(0.1)
    states = ("free", "used", "leased", "quarantined")
    return {state: int(total(samples, "kvferry_agent_kv_blocks", state=state)) for state in states}


async def wait_running(url: str, least: int = 1) -> None:
    """Wait until an agent runs so many requests. Raises TimeoutError."""
    async with asyncio.timeout(patient(60.0)):
        while await num_running(url) < least:
            await asyncio.sleep(0.02)


async def wait_one_running(agents: Mapping[str, Process], least: int) -> str:
    """Wait until one of the decode agents runs so many requests and streams them; returns its name.

    Routing goes by measured costs, so it need not give each of them as many. A request whose first token has
    not left its decode agent is tried again elsewhere, which is no migration, hence the tokens. Raises
    TimeoutError.
    """
    decode = {name: agent.url for name, agent in agents.items() if name.startswith("decode")}
    before = {name: total(await scrape(url), GENERATED) for name, url in decode.items()}
    async with asyncio.timeout(patient(60.0)):
        while True:
            for name, url in decode.items():
                page = await scrape(url)
                begun = total(page, GENERATED) - before[name] >= TOKENS_BEGUN * least
                if begun and total(page, RUNNING) >= least:
                    return name
            await asyncio.sleep(0.02)


async def num_running(url: str) -> float:
    return total(await scrape(url), RUNNING)


async def wait_idle(url: str, timeout_s: float) -> dict[str, int]:
    """Wait until no block of the agent is used, leased or quarantined, or until the deadline; say what is."""
    deadline = time.monotonic() + timeout_s
    while True:
        now = await blocks(url)
        if not (now["used"] or now["leased"] or now["quarantined"]) or time.monotonic() > deadline:
            return now
        await asyncio.sleep(0.1)

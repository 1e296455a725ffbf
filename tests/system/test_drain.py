# SPDX-License-Identifier: Apache-2.0
"""Agents are replaced one by one under load: no request fails, none is computed twice, no lease lapses.

The long forms for one proxy; `make test` shows the same in `test_rolling.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import signal

import pytest

from kvferry.deploy.launcher import AgentSpec, Cluster, Process
from tests.helpers.client import Answer, complete, mixed_bodies, session
from tests.helpers.metrics import Samples, scrape, total
from tests.system.conftest import StartCluster

LEASE_S = 20.0
CONCURRENCY = 12
DRAIN_S = 60.0
ASKED = mixed_bodies(12, 64)


async def load(url: str, ended: asyncio.Event, answers: list[tuple[int, object]]) -> None:
    """Keep `CONCURRENCY` requests under way until `ended`; note each one's answer or what it raised."""
    order = itertools.cycle(range(len(ASKED)))

    async def client() -> None:
        while not ended.is_set():
            index = next(order)
            try:
                answers.append((index, await complete(http, url, ASKED[index])))
            except Exception as error:  # noqa: BLE001 (each is one request's answer)
                answers.append((index, error))

    async with session() as http, asyncio.TaskGroup() as clients:
        for _ in range(CONCURRENCY):
            clients.create_task(client())


async def end(agent: Process) -> Samples:
    """Send SIGTERM, wait for the end, and return the last metrics page."""
    page = await scrape(agent.url)
    agent.process.ask_to_end(signal.SIGTERM)
    async with asyncio.timeout(DRAIN_S):
        while agent.process.returncode is None:
            try:
                page = await scrape(agent.url)
            except OSError:
                break
            await asyncio.sleep(0.05)
        assert await agent.process.wait() == 0, agent.log_tail()
    return page


async def replace(cluster: Cluster, spec: AgentSpec, name: str) -> Samples:
    """Start another agent as `name`, and then end the one of `spec`; return what that one counted."""
    old = cluster.agents.pop(spec.name)
    await cluster.start_agent(AgentSpec(name=name, role=spec.role, args=spec.args))
    await cluster.wait_ready()
    return await end(old)


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("transfer", "rounds", "proxy_args"),
    [("tcp", 1, ()), ("tcp", 2, ("--workers", "2")), ("nixl", 2, ())],
)
async def test_agents_are_replaced_under_load_and_nobody_notices(
    start_cluster: StartCluster, transfer: str, rounds: int, proxy_args: tuple[str, ...]
) -> None:
    args = ("--lease-s", str(LEASE_S), "--transfer", transfer)
    async with start_cluster(args=args, proxy_args=proxy_args) as cluster:
        async with session() as http:
            expected = await asyncio.gather(*(complete(http, cluster.url, body) for body in ASKED))
        answers: list[tuple[int, object]] = []
        ended = asyncio.Event()
        loading = asyncio.ensure_future(load(cluster.url, ended, answers))
        pages = []
        specs = {spec.role: spec for spec in cluster.spec.agents}
        for number, (role, spec) in itertools.product(range(rounds), specs.items()):
            name = f"{role}-{number + 1}"
            pages.append(await replace(cluster, spec, name))
            specs[role] = AgentSpec(name=name, role=spec.role, args=spec.args)
        ended.set()
        await loading
        for index, answer in answers:
            assert isinstance(answer, Answer), answer
            assert answer.same() == expected[index].same()
            assert not answer.timing.get("recomputed")
        assert len(answers) > 3 * CONCURRENCY
        proxy = await scrape(cluster.url)
        for name in ("kvferry_proxy_retries_total", "kvferry_proxy_migrations_total"):
            assert total(proxy, name) == 0
        pages += [await scrape(agent.url) for agent in cluster.agents.values()]
        for page in pages:
            assert total(page, "kvferry_agent_recomputes_total") == 0
            assert total(page, "kvferry_transfer_leases_ended_total", cause="expired") == 0

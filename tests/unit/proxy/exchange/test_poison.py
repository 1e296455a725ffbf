# SPDX-License-Identifier: Apache-2.0
"""A request that brings down the agents that serve it: two at most, and the others serve on."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from typing import Any, NamedTuple

import aiohttp
import pytest

from kvferry.proxy.exchange import poison
from kvferry.proxy.exchange.poison import MAX_CRASHED_AGENTS
from kvferry.proxy.fleet import registry
from kvferry.proxy.http import hang_detector
from kvferry.proxy.wire.registration import Load
from tests.helpers.waiting import until
from tests.standins.agents import DEADLY_TO, Fault
from tests.standins.engines import SERVERS, Fabric, StandInServer
from tests.unit.proxy.conftest import Stage, StartStage, side_by_side
from tests.unit.proxy.exchange.test_other_engines import KINDS
from tests.unit.proxy.test_process import process

pytestmark = pytest.mark.long

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6, "seed": 7}
PAIRS = 3
DEADLINE_S = 30.0
START_S = 60.0
PING_S = 0.2
"""Between two pings of a stand-in."""
EXPIRY_S = 7 * PING_S
"""3.5 s in a real proxy."""
OUTAGE_S = 1.0


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins ping five times a second, so less time shows as much. Processes of their own wait longer."""
    monkeypatch.setattr(poison, "VERDICT_S", EXPIRY_S)
    monkeypatch.setattr(poison, "OUTAGE_S", OUTAGE_S)
    monkeypatch.setattr(hang_detector, "NODE_EXPIRY_S", EXPIRY_S)
    monkeypatch.setattr(registry, "NODE_EXPIRY_S", EXPIRY_S)


def deadly(*moments: str) -> dict[str, Any]:
    return {**BODY, "prompt": " ".join(f"{DEADLY_TO}{moment}" for moment in moments)}


@asynccontextmanager
async def others(url: str) -> AsyncIterator[list[int | str]]:
    """Ordinary requests beside, one after the other; yields their statuses, and the codes of errors."""
    statuses: list[int | str] = []
    body = {**BODY, "prompt": "an ordinary one"}

    async def ask() -> None:
        async with aiohttp.ClientSession() as http:
            while True:
                async with http.post(f"{url}/v1/completions", json=body) as response:
                    answer = await response.json()
                    statuses.append(200 if response.status == 200 else answer["error"]["code"])
                await asyncio.sleep(0.02)

    asking = asyncio.ensure_future(ask())
    try:
        yield statuses
    finally:
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


async def open_breakers(stage: Stage) -> int:
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    return sum(node["breaker"] != "closed" for node in nodes)


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.timeout(180)  # processes to start, beside whatever else runs on two cores
async def test_of_six_agents_four_outlive_a_deadly_prompt(start_stage: StartStage, workers: int) -> None:
    """D2: once, such a request walked through the fleet. Those that it kills, and those that it stops."""

    async def outlive(death: str) -> None:
        async with AsyncExitStack() as stack:
            if workers == 1:
                stage = await start_stage()
                url, discovery = stage.proxy.url, stage.discovery
            else:
                _, listening = await stack.enter_async_context(process("--workers", str(workers)))
                url, discovery = listening["url"], f"127.0.0.1:{listening['discovery_port']}"
            await stack.enter_async_context(agents_of(discovery, death))
            await check(await stack.enter_async_context(aiohttp.ClientSession()), url)

    async def check(http: aiohttp.ClientSession, url: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(await ready(http, url)) < 2 * PAIRS:
                await asyncio.sleep(0.05)
            async with (
                others(url) as statuses,
                http.post(f"{url}/v1/completions", json=deadly("decode")) as response,
            ):
                answer = await response.json()
                assert (response.status, answer["error"]["code"]) == (500, "suspect_request")
                assert response.headers["X-Should-Retry"] == "false"
                # The first of the others may have been at both agents beside it, and not be answered yet.
                while 200 not in statuses:
                    await asyncio.sleep(0.02)
            # Workers take turns each for itself, so a request that was beside it at the first agent may be so
            # at the second one: then nobody can know which it was. One worker takes another agent for each.
            both = statuses.count("suspect_request")
            assert both <= (workers > 1) and set(statuses) - {"suspect_request"} == {200}
            while len(left := await ready(http, url)) > 2 * PAIRS - MAX_CRASHED_AGENTS:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # no other may fall later
        assert len(await ready(http, url)) == len(left) == 2 * PAIRS - MAX_CRASHED_AGENTS

    await side_by_side(outlive, ["killed", "stopped"])


@asynccontextmanager
async def agents_of(proxy: str, death: str) -> AsyncIterator[None]:
    """Pairs, each agent a process."""
    roles = ("prefill", "decode") * PAIRS
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.standins.agents", "--role", *roles, "--proxy", proxy, "--death", death,
        stdout=asyncio.subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert child.stdout is not None
    try:
        for _ in roles:
            json.loads(await asyncio.wait_for(child.stdout.readline(), START_S))
        yield
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        await child.communicate()


async def ready(http: aiohttp.ClientSession, url: str) -> list[str]:
    async with http.get(f"{url}/nodes") as response:
        return [node["address"] for node in (await response.json())["nodes"] if node["state"] == "ready"]


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.full), PAIRS])
async def test_a_deadly_prompt_ends_typed(start_stage: StartStage, nodes: int) -> None:
    """Where a pair is all that there is at an address, too; and where both legs are sent at once."""

    async def check(case: tuple[tuple[str, ...], bool]) -> None:
        moments, pulled_meanwhile = case  # if so, both may crash at once, as a place of two would
        stage = await start_stage(breaker_failures=1, stream_pull_min_tokens=1 if pulled_meanwhile else 4096)
        agents = [
            await stage.agent(role, host=f"127.0.0.{1 + number % (1 if pulled_meanwhile else nodes)}")
            for number in range(PAIRS)
            for role in ("prefill", "decode")
        ]
        async with others(stage.proxy.url) as statuses:
            if moments == ("stream",):
                streamed = await stage.stream(deadly(*moments))
                assert streamed.error is not None and streamed.error["code"] == "suspect_request"
            else:
                status, answer = await stage.ask(deadly(*moments))
                assert (status, answer["error"]["code"]) == (500, "suspect_request")
        assert sum(agent.is_dead for agent in agents) == MAX_CRASHED_AGENTS
        assert set(statuses) == {200}
        assert stage.metric("kvferry_proxy_suspect_requests_total") == 1
        assert await open_breakers(stage) <= MAX_CRASHED_AGENTS

    both = ("prefill", "decode")
    await side_by_side(
        check,
        [(("prefill",), False), (("decode",), False), (("stream",), False), (both, False), (both, True)],
    )


DOOMED = "127.0.0.2"


class Deaths(NamedTuple):
    """`first`, `second`: addresses and hosts. `third`: what one of the node does that had not the request."""

    first: tuple[str, str] = (DOOMED, "one")
    second: tuple[str, str] = (DOOMED, "one")
    apart_s: float = 0.3
    third: str = ""
    is_one: bool = False


async def test_agents_that_die_with_their_place_are_one_loss(start_stage: StartStage) -> None:
    """With their host, which both legs of a long prompt are at; or with their node, one after the other."""

    async def check_host(others: int) -> None:
        """Where another agent of the host works on, it was not the host."""
        stage = await start_stage(stream_pull_min_tokens=1)
        pair = await stage.pair(overrides={"host_id": "lost"})
        for agent in pair:
            agent.faults.append(Fault(agent.role, "hang"))
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(stage.ask(BODY))
            for agent in pair:
                await agent.until(lambda agent=agent: agent.running)
            await stage.pair()
            for _ in range(others):
                await stage.agent("prefill", overrides={"host_id": "lost"})
            await asyncio.gather(*(agent.silence() for agent in pair))
            await asyncio.gather(*(agent.close_http() for agent in pair))
        assert asking.result()[0] == (500 if others else 200), asking.result()
        assert stage.metric("kvferry_proxy_suspect_requests_total") == others

    async def check_node(case: Deaths) -> None:
        """Its second agent takes over what the first one had, and dies with it."""
        first, second, apart_s, third, is_one = case
        stage = await start_stage()
        decode = await stage.agent("decode", host=first[0], overrides={"host_id": first[1]}, interval_s=0.05)
        prefill = await stage.agent("prefill", host=second[0], overrides={"host_id": second[1]})
        body = {**BODY, "max_tokens": 100}
        async with asyncio.TaskGroup() as tasks:
            streaming = tasks.create_task(stage.stream(body))
            await decode.until(lambda: decode.running)
            prefill.faults.append(Fault("prefill", "hang"))
            await stage.agent("decode", overrides={"host_id": "one"})
            if third:
                beside = await stage.agent(
                    "decode", host=DOOMED, overrides={"host_id": second[1], "model": "other"}
                )
            await decode.silence()
            await decode.close_http()
            await prefill.until(lambda: prefill.running)
            await stage.agent("prefill", overrides={"host_id": "one"})
            await asyncio.sleep(apart_s)
            await prefill.silence()
            await prefill.close_http()
            if third == "dies":
                await asyncio.sleep(0.5)
                await beside.silence()
        error = streaming.result().error
        assert (error and error["code"]) == (None if is_one else "suspect_request")
        assert stage.metric("kvferry_proxy_suspect_requests_total") == (not is_one)
        if is_one:
            assert streaming.result().text() == (await stage.stream(body)).text()

    async def check(case: int | Deaths) -> None:
        await (check_host(case) if isinstance(case, int) else check_node(case))

    await side_by_side(
        check,
        [
            0,
            1,
            Deaths(is_one=True),
            Deaths(("127.0.0.3", "two"), (DOOMED, "two"), is_one=True),  # its host dies
            Deaths(third="dies", is_one=True),
            Deaths(third="lives"),
            Deaths(apart_s=OUTAGE_S + 0.3),
            Deaths(first=("127.0.0.3", "one")),  # two nodes
            Deaths((DOOMED, ""), (DOOMED, "")),  # unknown hosts
        ],
    )


@pytest.mark.parametrize(
    ("n", "deaths"),
    [
        (8, [["decode"], ["prefill", "decode"]]),
        pytest.param(8, [["prefill"]], marks=pytest.mark.full),
        pytest.param(1, [["prefill"], ["decode"], ["prefill", "decode"]], marks=pytest.mark.full),
    ],
    ids=str,
)
async def test_servers_of_other_engines_are_no_exception(
    start_stage: StartStage, n: int, deaths: list[list[str]]
) -> None:
    """However many sub-requests a request is: n = 8 must not open a breaker by itself either."""

    async def check(case: tuple[str, list[str]]) -> None:
        kind, moments = case
        stage, fabric = await start_stage(moriio_lease_s=60.0), Fabric()
        dialect, fixed = KINDS[kind]
        servers: list[StandInServer] = []
        for role in ("prefill", "decode") * PAIRS:
            made = SERVERS[dialect](role=role, proxies=(stage.discovery,), fabric=fabric, **fixed)  # type: ignore[arg-type]
            servers.append(await stage.bring(made))
        status, answer = await stage.ask({**deadly(*moments), "n": n})
        assert (status, answer["error"]["code"]) == (500, "suspect_request")
        assert sum(server.is_dead for server in servers) <= MAX_CRASHED_AGENTS
        assert await open_breakers(stage) == 0
        # Until their pings have expired, some requests still find one of the dead.
        assert (await stage.ask(BODY))[0] == 200

    await side_by_side(check, product(KINDS, deaths))


async def test_one_request_opens_the_breakers_of_two_agents_at_most(start_stage: StartStage) -> None:
    """They are alive and only fail, so a third and a fourth are tried."""

    async def check(kind: Any) -> None:
        stage = await start_stage(breaker_failures=1, breaker_pause_s=60, retries=4)
        agents = [await stage.agent(role) for role in ("prefill", "decode") * 5]
        for agent in agents:
            agent.faults.append(Fault("decode", kind, status=500))
        status, _ = await stage.ask(BODY)
        assert status == 502
        assert sum(bool(agent.asked) for agent in agents if agent.role == "decode") == 5
        assert await open_breakers(stage) == MAX_CRASHED_AGENTS

    await side_by_side(check, ["reset", "status"])


async def test_a_broken_connection_is_no_death(stage: Stage) -> None:
    """The pings show it: the third agent is tried, and the stream goes on there."""
    for _ in range(PAIRS):
        await stage.pair()
    undisturbed = await stage.stream(BODY)
    decodes = [agent for agent in stage.agents if agent.role == "decode"]
    shared = [Fault("decode", "cut"), Fault("decode", "cut")]
    for agent in decodes:
        agent.faults = shared
    streamed = await stage.stream(BODY)
    assert streamed.error is None and streamed.text() == undisturbed.text()
    assert stage.metric("kvferry_proxy_migrations_total") == 2
    assert stage.metric("kvferry_proxy_suspect_requests_total") == 0


async def test_agents_that_have_announced_their_end_have_not_crashed(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rolling restart takes a long stream from agent to agent."""
    monkeypatch.setattr(registry, "PING_INTERVAL_S", PING_S)
    monkeypatch.setattr(registry, "PROOF_S", PING_S)
    await stage.agent("prefill")
    decodes = [await stage.agent("decode", interval_s=0.05) for _ in range(PAIRS)]
    agents = stage.proxy.fleet.registry
    body = {**BODY, "max_tokens": 1000}

    async def restart() -> None:
        [serving] = [agent for agent in decodes if agent.running]
        serving.overrides["state"] = "draining"
        await until(lambda: agents.is_leaving(serving.incarnation))
        await serving.silence()
        await serving.close_http()
        await until(lambda: any(agent.running for agent in decodes if agent is not serving))

    async with asyncio.TaskGroup() as tasks:
        streaming = tasks.create_task(stage.stream(body))
        await until(lambda: any(agent.running for agent in decodes))
        for _ in range(2):
            await restart()
        for agent in decodes:
            agent.interval_s = 0.0
    assert streaming.result().error is None
    assert stage.metric("kvferry_proxy_migrations_total") == 2


async def test_an_agent_with_too_much_to_do_is_not_blamed_for_a_deadline(start_stage: StartStage) -> None:
    async def check(waiting: int) -> None:
        stage = await start_stage(breaker_failures=1, breaker_pause_s=60, first_byte_timeout_s=0.5)
        prefill = await stage.agent("prefill", overrides={"load": Load(1, waiting, 64, 64, 0)})
        await stage.agent("decode")
        prefill.faults.append(Fault("prefill", "hang"))
        status, answer = await stage.ask(BODY)
        assert (status, answer["error"]["code"]) == (504, "agent_timeout")
        assert await open_breakers(stage) == (0 if waiting else 1)

    await side_by_side(check, [0, 3])

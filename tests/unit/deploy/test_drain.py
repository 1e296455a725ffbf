# SPDX-License-Identifier: Apache-2.0
"""`kvferry drain PROXY AGENT`: which agent a word means. `tests/system/test_rolling.py` drains real ones."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest
from aiohttp import web

from kvferry.deploy.drain import DrainFailed, drain
from kvferry.proxy.api.openapi import NodeList, NodeView
from tests.unit.deploy.test_status import NODE

TIMEOUT_S = 20.0


def agent(incarnation: str, port: int, name: str) -> NodeView:
    return msgspec.structs.replace(
        NODE, incarnation=incarnation, address=f"http://10.0.0.1:{port}", name=name
    )


@asynccontextmanager
async def proxy_with(*nodes: NodeView) -> AsyncIterator[tuple[str, list[str]]]:
    """A stand-in for a proxy: its URL, and the incarnations that it was asked to end. It forgets these."""
    asked: list[str] = []

    async def list_nodes(_: web.Request) -> web.Response:
        left = [node for node in nodes if node.incarnation not in asked]
        page = NodeList(nodes=left, refused_pairings=[], num_refused_pairings=0, rejected_agents=[], down=[])
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    async def drained(request: web.Request) -> web.Response:
        asked.append(request.match_info["incarnation"])
        return web.Response(status=202)

    app = web.Application()
    app.router.add_get("/nodes", list_nodes)
    app.router.add_post("/nodes/{incarnation}/drain", drained)
    async with served(app) as url:
        yield url, asked


@asynccontextmanager
async def served(app: web.Application) -> AsyncIterator[str]:
    """The base URL of an application that is served meanwhile."""
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("word", ["decode-1", "10.0.0.1:8001", "http://10.0.0.1:8001/", "second"])
async def test_a_name_an_address_and_an_incarnation_mean_an_agent(word: str) -> None:
    nodes = (agent("first", 8000, "decode-0"), agent("second", 8001, "decode-1"), agent("third", 8002, ""))
    async with proxy_with(*nodes) as (url, asked):
        await drain(url, word, None, None, TIMEOUT_S)
    assert asked == ["second"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("decode", "several agents are called decode; .* http://10.0.0.1:8000, http://10.0.0.1:8001$"),
        ("decode-7", "no agent decode-7; it knows decode at http://10.0.0.1:8000, .*, http://10.0.0.1:8002$"),
        ("", "knows no agent "),
    ],
)
async def test_no_agent_is_asked_where_the_word_does_not_mean_one(word: str, said: str) -> None:
    nodes = (agent("first", 8000, "decode"), agent("second", 8001, "decode"), agent("third", 8002, ""))
    async with proxy_with(*nodes) as (url, asked):
        with pytest.raises(DrainFailed, match=said):
            await drain(url, word, None, None, TIMEOUT_S)
    assert not asked


@pytest.mark.parametrize(
    "word", ["decode", "10.0.0.1:8000", "http://10.0.0.1:8000", "http://10.0.0.1:8000#0"]
)
async def test_a_server_of_several_ranks_is_asked_once(word: str) -> None:
    """The proxy asks its other ranks."""
    nodes = [
        msgspec.structs.replace(
            agent(incarnation, 8000, "decode"), address=f"http://10.0.0.1:8000#{rank}", dp_rank=rank
        )
        for rank, incarnation in enumerate(("first", "second"))
    ]
    async with proxy_with(*nodes, agent("third", 8001, "prefill")) as (url, asked):
        await drain(url, word, None, None, TIMEOUT_S)
    assert asked == ["first"]


async def test_an_address_goes_before_a_name() -> None:
    """Whoever names an agent chooses the name."""
    nodes = (agent("first", 8000, "10.0.0.1:8001"), agent("second", 8001, "other"))
    async with proxy_with(*nodes) as (url, asked):
        await drain(url, "10.0.0.1:8001", None, None, TIMEOUT_S)
    assert asked == ["second"]


METRICS = """\
kvferry_agent_num_requests_running{model="m"} 3.0
kvferry_agent_num_requests_waiting{model="m"} 1.0
kvferry_agent_kv_blocks{state="free"} 90.0
kvferry_agent_kv_blocks{state="leased"} 7.0
"""


@pytest.mark.parametrize("agent_word", [None, "decode"])
async def test_a_drain_that_takes_a_while_says_what_is_left(
    agent_word: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = msgspec.structs.replace(NODE.load, running=3, waiting=1, kv_blocks_leased=7)
    node = msgspec.structs.replace(agent("first", 8000, "decode"), load=load)
    page = NodeList(nodes=[node], refused_pairings=[], num_refused_pairings=0, rejected_agents=[], down=[])

    async def drained(_: web.Request) -> web.Response:
        return web.Response(status=202)

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def list_nodes(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(page), content_type="application/json")

    monkeypatch.setattr("kvferry.deploy.drain.REPORT_S", 0.2)
    app = web.Application()
    app.router.add_post("/drain", drained)
    app.router.add_post("/nodes/{incarnation}/drain", drained)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/nodes", list_nodes)
    async with served(app) as url:
        with pytest.raises(DrainFailed, match="still runs after 1 s"):
            await drain(url, agent_word, None, None, 1.2)
    shown = capsys.readouterr()
    said = (
        rf"{agent_word or url} has been draining for \d s: 3 requests running, 1 waiting, 7 KV blocks leased"
    )
    assert (shown.out, bool(shown.err)) == ("", True)
    assert all(re.fullmatch(said, line) for line in shown.err.splitlines()), shown.err


async def test_an_agent_of_a_cluster_wants_its_key() -> None:
    async def drain_agent(_: web.Request) -> web.Response:
        error = {"message": "this agent serves only the proxies of its cluster", "code": "unauthorized"}
        return web.json_response({"error": error}, status=401)

    app = web.Application()
    app.router.add_post("/drain", drain_agent)
    async with served(app) as url:
        with pytest.raises(DrainFailed) as raised:
            await drain(url, None, None, None, TIMEOUT_S)
    assert str(raised.value) == (
        f"{url}/drain answered 401: this agent serves only the proxies of its cluster; "
        "--cluster-key names the file with its key"
    )

# SPDX-License-Identifier: Apache-2.0
"""The dashboard: its files, and a feed that costs nothing without viewers."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import sys
from contextlib import AsyncExitStack
from importlib.metadata import version
from typing import Any, Literal
from urllib.parse import quote

import aiohttp
import pytest
from yarl import URL

from kvferry.proxy.api import dashboard
from kvferry.proxy.api.dashboard import FOLDER
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.registry import Registry
from kvferry.proxy.server import running_proxy
from kvferry.proxy.telemetry.request_log import MAX_TEXT_CHARS
from kvferry.proxy.wire.registration import Incarnation, LinkUse, WorkReport
from tests.helpers.waiting import until
from tests.standins.agents import Fault, Leg, StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}


async def next_snapshot(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The next snapshot of an open feed."""
    async with asyncio.timeout(20):
        while not (line := await response.content.readline()).startswith(b"data: "):
            assert line, "the feed ended"
    return json.loads(line.removeprefix(b"data: "))


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/ui", "text/html; charset=utf-8"),
        ("/ui/", "text/html; charset=utf-8"),
        ("/ui/ui.css", "text/css; charset=utf-8"),
        ("/ui/ui.js", "text/javascript; charset=utf-8"),
        ("/ui/charts.js", "text/javascript; charset=utf-8"),
        ("/ui/uPlot.js", "text/javascript; charset=utf-8"),
        ("/ui/uPlot.css", "text/css; charset=utf-8"),
        ("/ui/icon.svg", "image/svg+xml"),
    ],
)
async def test_the_files_say_what_they_are_and_load_from_here_only(
    stage: Stage, path: str, content_type: str
) -> None:
    async with stage.http.get(f"{stage.proxy.url}{path}") as response:
        assert (response.status, response.headers["Content-Type"]) == (200, content_type)
        assert response.headers["Content-Security-Policy"].startswith(
            "default-src 'none'; script-src 'self';"
        )
        assert "unsafe" not in response.headers["Content-Security-Policy"]
        assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("path", ["/ui/index.html", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/other.js"])
async def test_other_paths_are_not_served(stage: Stage, path: str) -> None:
    url = URL(f"{stage.proxy.url}{path}", encoded=True)
    async with stage.http.get(url) as response:
        assert response.status == 404


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    """The policy would block it: better to see it here than as a page that does not work."""
    page = (FOLDER / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*\bsrc=)", page)
    links = re.findall(r'(?:src|href)="([^"#]*)"', page)
    assert links and all((FOLDER.parent / link).is_file() for link in links)
    scripts = {path.name: path.read_text() for path in FOLDER.glob("*.js")}
    assert scripts.keys() | {"index.html"} <= dashboard.CONTENT_TYPES.keys(), "all are served"
    for name, script in scripts.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b", script), name
        for imported in re.findall(r'^import .* from "\./(.*)";$', script, re.MULTILINE):
            assert imported in scripts, name
    assert "MIT" in (FOLDER / "uPlot.LICENSE").read_text()


async def test_the_feed_shows_nodes_traffic_and_failures(stage: Stage) -> None:
    await stage.agent("prefill")
    await stage.agent("decode", overrides={"layout": "another"})
    status, _ = await stage.ask({**BODY, "model": "unheard-of" * 100})
    assert status == 404
    async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        snapshot = await next_snapshot(response)
    assert {node["role"] for node in snapshot["nodes"]} == {"prefill", "decode"}
    assert snapshot["num_nodes"] == 2
    assert not snapshot["readiness"]["ready"]
    [refused] = snapshot["refused_pairings"]
    assert refused["reason"] == "different KV layouts"
    [failed] = snapshot["failures"]
    assert (failed["status"], failed["code"], failed["count"]) == (404, "model_not_found", 1)
    assert failed["message"].startswith("no agent serves this model: 'unheard-of")
    assert len(failed["message"]) == MAX_TEXT_CHARS
    assert failed["agent"] == "", "no agent had it"
    assert len(failed["model"]) == 100, "what clients send is cut to a bound"


@pytest.mark.parametrize(
    ("leg", "kind"),
    [
        ("prefill", "status"),
        ("prefill", "reset"),
        ("decode", "status"),
        ("decode", "reset"),
        ("decode", "cut"),
    ],
)
async def test_an_error_is_shown_with_its_message_and_the_agent_that_had_the_request(
    start_stage: StartStage, leg: Leg, kind: Literal["status", "reset", "cut"]
) -> None:
    """D, "/ui": a click showed "status 502 · agent lost" and neither why nor where."""
    stage = await start_stage(retries=0, migrations=0)
    failing = dict(zip(("prefill", "decode"), await stage.pair(), strict=True))[leg]
    failing.faults.append(Fault(leg, kind, status=500))
    async with stage.post({**BODY, "stream": True}, headers={"X-Request-Id": "failing"}) as response:
        body = await response.text()
    async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
        [failed] = (await next_snapshot(response))["failures"]
    assert failed["message"] and json.dumps(failed["message"], ensure_ascii=False)[1:-1] in body
    assert failed["agent"] == failing.address
    page = await timeline(stage, "failing")
    assert (page["code"], page["message"]) == (failed["code"], failed["message"])


async def test_the_feed_of_one_model(stage: Stage) -> None:
    """D, "/ui": several models were mixed."""
    agents = {name: await stage.agent("both", model=name) for name in ("one", "two")}
    for name, count in (("one", 3), ("two", 1)):
        for _ in range(count):
            await stage.stream({**BODY, "model": name, "max_tokens": 4})
    agents["two"].faults.append(Fault("alone", "status", status=422))
    await stage.ask({**BODY, "model": "two"})

    async def snapshot_of(model: str) -> dict[str, Any]:
        url = f"{stage.proxy.url}/ui/events"
        async with stage.http.get(url, params={"model": model}) as feed:
            return await next_snapshot(feed)

    async with asyncio.timeout(20):
        while not any((await snapshot_of("two"))["charts"]["client_errors"]):  # of the last request
            await asyncio.sleep(0.1)
    shown = {model: await snapshot_of(model) for model in ("", "one", "two", "of nobody")}
    for snapshot in shown.values():
        assert snapshot["models"] == ["one", "two"]
    for name, agent in agents.items():
        assert [node["address"] for node in shown[name]["nodes"]] == [agent.address]
        assert {event["model"] for event in shown[name]["events"]} == {name}
        assert shown[name]["num_nodes"] == 1
    assert [len(shown[model]["failures"]) for model in ("", "one", "two")] == [1, 0, 1]
    requests = {model: sum(snapshot["charts"]["requests"]) for model, snapshot in shown.items()}
    assert requests["one"] == pytest.approx(1.5 * requests["two"], rel=0.2), "3 to 2"
    assert requests[""] == pytest.approx(requests["one"] + requests["two"], rel=0.2)
    assert max(shown["two"]["charts"]["events"]) > 0
    assert any(shown["one"]["charts"]["itl_p99"])
    assert (requests["of nobody"], shown["of nobody"]["nodes"]) == (0, [])
    await until(lambda: not stage.proxy.services.dashboard.num_viewers, 20)
    assert not stage.proxy.services.dashboard._latest, "nothing is kept for nobody"


async def test_the_feed_says_which_proxy_it_is_and_where_agents_find_it(start_stage: StartStage) -> None:
    """D, "/ui": two tabs looked the same, and an empty fleet's page named no next step."""
    stage = await start_stage(cluster_name="of the tests")
    async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
        facts = (await next_snapshot(response))["proxy"]
    assert facts == {
        "cluster_name": "of the tests",
        "machine": socket.gethostname(),
        "version": version("kvferry"),
        "discovery_host": "127.0.0.1",
        "discovery_port": stage.proxy.discovery_port,
        "has_cluster_key": False,
    }


async def test_a_refused_agent_is_shown_with_the_reason(start_stage: StartStage) -> None:
    """A rogue address is rejected, and the operator sees it."""
    stage = await start_stage(allow_address="10.0.0.0/8")
    rogue = StandInAgent("decode", (stage.discovery,))
    async with rogue:
        await rogue.until(lambda: rogue.refusals)
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        page = await response.json()
    assert not page["nodes"]
    [refused] = page["rejected_agents"]
    assert (refused["address"], refused["role"]) == (rogue.address, "decode")
    assert "--allow-address" in refused["reason"]
    async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
        assert [each["address"] for each in (await next_snapshot(response))["rejected_agents"]] == [
            rogue.address
        ]


async def test_a_request_in_flight_is_shown_in_its_phase(stage: Stage) -> None:
    await stage.pair(interval_s=0.05)
    async with stage.post({**BODY, "max_tokens": 100, "stream": True}) as streaming:
        await streaming.content.readline()
        async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
            while (snapshot := await next_snapshot(response))["in_flight"].get("decode") != 1:
                pass
            while not any(snapshot["charts"]["events"]):
                snapshot = await next_snapshot(response)
            assert any(snapshot["charts"]["ttft_p50"])


async def timeline(stage: Stage, request_id: str) -> dict[str, Any]:
    """Where a request went."""
    url = URL(f"{stage.proxy.url}/ui/requests/{quote(request_id, safe='')}", encoded=True)
    async with stage.http.get(url) as response:
        assert response.status == 200
        assert response.headers["Content-Security-Policy"]
        return await response.json()


async def test_where_a_request_went_is_found_by_its_id(stage: Stage) -> None:
    """Also while it is under way; and after a retry, why there was one."""
    lost, _ = await stage.pair(interval_s=0.05)
    other = await stage.agent("prefill")
    lost.faults.append(Fault("prefill", "reset"))
    request, pages = {**BODY, "max_tokens": 20, "stream": True}, []
    for name in ("of a client/1", "of a client/2"):  # the policy gives one of them to the agent that fails
        async with stage.post(request, headers={"X-Request-Id": name}) as streaming:
            await streaming.content.readline()
            page = await timeline(stage, name)
            assert (page["status"], page["phases"][-1]["end_s"]) == (None, None)
            await streaming.read()
        pages.append(await timeline(stage, name))
    plain, retried = sorted(pages, key=lambda page: len(page["losses"]))
    assert (plain["status"], plain["code"], plain["model"], plain["losses"]) == (200, None, "stand-in", [])
    assert [each["phase"] for each in plain["phases"]] == ["route", "prefill", "decode_wait", "decode"]
    assert 0.0 < plain["first_text_s"] < plain["total_s"] == plain["phases"][-1]["end_s"]
    assert [each["prefill"] for each in retried["attempts"]] == [lost.address, other.address]
    assert [each["phase"] for each in retried["phases"]][:4] == ["route", "prefill", "route", "prefill"]
    [loss] = retried["losses"]
    assert lost.address in loss["reason"]
    async with stage.http.get(f"{stage.proxy.url}/ui/requests/unheard-of") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_an_agents_facts_and_its_last_hour_are_found_by_its_incarnation(stage: Stage) -> None:
    """D, "/ui": bars of this second only, and neither device nor block size nor uptime."""
    facts = {"device": "NVIDIA H200", "uptime_s": 90.0, "geometry": {"block_size": "16", "dtype": "bfloat16"}}
    agent = await stage.agent("decode", overrides=facts)
    async with stage.http.get(f"{stage.proxy.url}/ui/agents/{agent.incarnation}") as response:
        assert response.status == 200
        assert response.headers["Content-Security-Policy"]
        page = await response.json()
    assert {name: page[name] for name in facts} == facts
    assert (page["address"], page["version"]) == (agent.address, "0")
    for window in ("charts", "hour"):
        assert page[window]["running"][-1] == 0
        assert page[window]["kv_used"][-1] == 0
    async with stage.http.get(f"{stage.proxy.url}/ui/agents/a/b") as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"


async def test_what_happened_to_agents_stays_in_sight(stage: Stage) -> None:
    """Issue 22: a killed agent left a page that was all green within ten seconds."""
    prefill, decode = await stage.pair()
    async with stage.http.post(f"{stage.proxy.url}/nodes/{decode.incarnation}/cordon") as response:
        assert response.status == 200
    # What it has done before this proxy knew it is not counted: its first report is of nothing.
    acks = decode.acks
    await decode.until(lambda: decode.acks > acks + 1)
    link = LinkUse(producer=Incarnation(prefill.incarnation), pulls=2)
    decode.overrides["work"] = WorkReport(pull_bytes=4096, pulls=(0, 2), links=(link,))
    async with stage.http.get(f"{stage.proxy.url}/ui/events") as response:
        while not (snapshot := await next_snapshot(response))["pairs"]:
            pass
        [pair] = snapshot["pairs"]
        assert (pair["producer"], pair["consumer"], pair["pulls"]) == (prefill.address, decode.address, 2)
        assert snapshot["totals"]["pull_bytes"] == 4096
        await decode.silence()
        while not (snapshot := await next_snapshot(response))["lost"]:
            pass
    assert [each["address"] for each in snapshot["lost"]] == [decode.address]
    kinds = [event["kind"] for event in snapshot["events"] if event["address"] == decode.address]
    assert kinds == ["lost", "cordoned", "joined"]


async def test_an_agent_of_both_roles_is_given_one(stage: Stage) -> None:
    """And every request then goes through the pair that the pins make."""
    one, two = await stage.agent("both"), await stage.agent("both")
    pins = [(one, "prefill"), (two, "decode")]
    for node, role in pins:
        async with stage.http.post(f"{stage.proxy.url}/nodes/{node.incarnation}/role/{role}") as response:
            assert response.status == 200
            assert (await response.json())["role"] == role
    for _ in range(4):
        status, _ = await stage.ask(BODY)
        assert status == 200
    assert (len(one.asked), len(two.asked)) == (4, 4)
    fixed = await stage.agent("decode")
    for node, role, status in ((fixed, "both", 409), (one, "proxy", 404)):
        async with stage.http.post(f"{stage.proxy.url}/nodes/{node.incarnation}/role/{role}") as response:
            assert response.status == status


async def test_viewers_share_one_snapshot_per_second(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without viewers none is computed."""
    stage = await start_stage()
    made = 0
    real = Registry.snapshot

    def counted(self: Registry) -> Any:
        nonlocal made
        made += 1
        return real(self)

    monkeypatch.setattr(Registry, "snapshot", counted)
    feeds = [stage.proxy.services.dashboard.events() for _ in range(5)]
    for feed in feeds:
        assert await anext(feed) == dashboard.RECONNECT
    assert made == 0
    assert len({await anext(feed) for feed in feeds}) == 1
    assert made == 1
    for feed in feeds:
        await feed.aclose()


async def test_viewers_are_limited_and_a_disconnect_frees_a_slot(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "MAX_VIEWERS", 1)
    url = f"{stage.proxy.url}/ui/events"
    async with stage.http.get(url) as first:
        await next_snapshot(first)
        async with stage.http.get(url) as second:
            assert second.status == 503
            assert (await second.json())["error"]["code"] == "too_many_viewers"
        first.close()
    await until(lambda: not stage.proxy.services.dashboard.is_full, 20)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only --client-stall-s holds")
async def test_viewers_that_do_not_read_make_way(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N9: the system buffered megabytes for each of them, so they had their places for ever."""
    monkeypatch.setattr(dashboard, "UNREAD_S", 1.0)
    stage = await start_stage()
    feed, url = stage.proxy.services.dashboard, f"{stage.proxy.url}/ui/events"
    async with stage.http.get(url) as reading, AsyncExitStack() as stack:
        for _ in range(dashboard.MAX_VIEWERS - 1):
            viewer = stack.enter_context(socket.create_connection(("127.0.0.1", stage.proxy.port)))
            viewer.sendall(b"GET /ui/events HTTP/1.1\r\nHost: x\r\n\r\n")
        async with asyncio.timeout(15):
            while not feed.is_full:
                await next_snapshot(reading)
            while feed.num_viewers > 1:
                await next_snapshot(reading)
        async with stage.http.get(url) as newcomer:
            await next_snapshot(newcomer)
        await next_snapshot(reading)


async def test_a_stopping_proxy_does_not_wait_for_viewers() -> None:
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(aiohttp.ClientSession())
        serving = await stack.enter_async_context(AsyncExitStack())
        config = ProxyConfig(port=0, discovery_port=0, drain_s=30.0)
        proxy = await serving.enter_async_context(running_proxy(config))
        async with http.get(f"{proxy.url}/ui/events") as response:
            await next_snapshot(response)
            async with asyncio.timeout(20):
                await serving.aclose()

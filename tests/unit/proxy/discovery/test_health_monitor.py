# SPDX-License-Identifier: Apache-2.0
"""Watching servers of other engines: when they are up, as whom, how busy, and that restarts are noticed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import msgpack
import msgspec
import pytest

from kvferry.common.engine_servers import probe as health_probe
from kvferry.common.engine_servers.description import server_from_words
from kvferry.common.engine_servers.monitor import (
    MAX_FAILED_PROBES,
    HealthMonitor,
    ServerDown,
    ServerUp,
    described,
)
from kvferry.common.engine_servers.probe import MAX_COUNT, EngineDown, ProbeResult, ServerLoad, probe
from kvferry.proxy.wire.engine_servers import ATOM_WITHOUT_INFO, load_of, registration_of
from kvferry.proxy.wire.registration import NODE_EXPIRY_S, PING_INTERVAL_S, Bye, Register
from tests.standins.engines import SERVERS, Fabric
from tests.standins.watched_server import WatchedServer
from tests.unit.proxy.conftest import Stage, StartStage

# As SGLang 0.5 shows it, cut to what matters; it has no start time.
SGLANG_METRICS = """\
sglang:num_running_reqs{{model_name="m"}} 6.0
sglang:num_queue_reqs{{model_name="m"}} 1.0
sglang:token_usage{{model_name="m"}} 0.1
sglang:max_total_num_tokens{{model_name="m"}} 1000.0
"""

# As ATOM at ffdf3bb5d shows it (`make test-atom`), cut to what matters.
ATOM_METRICS = """\
atom:requests_running 4.0
atom:requests_waiting 1.0
atom:kv_cache_blocks_total 512.0
atom:kv_cache_usage_ratio 0.25
"""


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def test_a_probe_of_vllm_shows_model_load_and_start(http: aiohttp.ClientSession) -> None:
    async with WatchedServer() as server:
        seen = await probe(http, server.url, max_running=9)
    assert (seen.model, seen.max_model_len, seen.steps, seen.started_at) == ("m", 512, 7, 1000.0)
    assert seen.load == ServerLoad(running=5, waiting=4, kv_blocks_free=50, kv_blocks_total=80, max_running=9)


@pytest.mark.parametrize(
    ("metrics", "running", "total"),
    [(SGLANG_METRICS, 6, 1000), (ATOM_METRICS, 4, 512), (None, 0, 0), ("vllm:num_requests_running x", 0, 0)],
)
async def test_what_an_engine_does_not_tell_stays_unknown(
    http: aiohttp.ClientSession, metrics: str | None, running: int, total: int
) -> None:
    async with WatchedServer(metrics=metrics) as server:
        seen = await probe(http, server.url, "adapter")
    assert (seen.model, seen.max_model_len, seen.steps, seen.started_at) == ("adapter", 0, None, None)
    assert (seen.load.running, seen.load.kv_blocks_total) == (running, total)


HALF_FULL = "vllm:kv_cache_usage_perc 0.5\n"
LARGEST = f"vllm:num_requests_running {MAX_COUNT}\n"


def config_info(blocks: str) -> str:
    return f'vllm:cache_config_info{{{{num_gpu_blocks="{blocks}"}}}} 1\n'


@pytest.mark.parametrize(
    ("metrics", "running", "total"),
    [
        ("vllm:num_requests_running +Inf\n", 0, 0),
        ("vllm:num_requests_running NaN\n", 0, 0),
        ("vllm:num_requests_running 1e300\n", 0, 0),
        ("vllm:num_requests_running +Inf\nvllm:num_requests_running 3\n", 3, 0),
        (LARGEST * 3000, MAX_COUNT, 0),
        (config_info("9" * 400) + HALF_FULL, 0, 0),
        (config_info("9" * 5000) + HALF_FULL, 0, 0),
        (config_info("9" * 15) * 30_000 + HALF_FULL, 0, MAX_COUNT),
        ("sglang:max_total_num_tokens +Inf\nsglang:token_usage 0.5\n", 0, 0),
        ("process_start_time_seconds +Inf\n", 0, 0),
    ],
    ids=range(10),
)
async def test_numbers_that_cannot_be_true_are_not_believed(
    http: aiohttp.ClientSession, metrics: str, running: int, total: int
) -> None:
    """Whatever they are, they end nothing, and what is said of the server fits a frame."""
    async with WatchedServer(metrics=metrics) as server:
        seen = await probe(http, server.url)
    assert (seen.load.running, seen.load.kv_blocks_total, seen.started_at) == (running, total, None)
    msgpack.packb(msgspec.to_builtins(load_of(seen.load)))


@pytest.mark.parametrize(
    ("server", "why", "refused"),
    [
        (WatchedServer(health=503), "HTTP 503", True),
        (WatchedServer(models="[]"), "/v1/models", True),
        (WatchedServer(models='{"data": []}'), "/v1/models", True),
        (WatchedServer(models="[" * 5000), "/v1/models", True),
        (WatchedServer(models=b'{"data": [{"id": "m\xff"}]}'), "/v1/models", True),
        (WatchedServer(max_model_len=10**30), "/v1/models", True),
        (WatchedServer(hangs=True), "no response", False),
    ],
)
async def test_a_server_that_cannot_serve_is_down_and_says_why(
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    server: WatchedServer,
    why: str,
    refused: bool,
) -> None:
    monkeypatch.setattr(health_probe, "PROBE_TIMEOUT_S", 0.3 if server.hangs else 5.0)
    async with server:
        with pytest.raises(EngineDown) as down:
            await probe(http, server.url)
    assert why in str(down.value) and down.value.refused is refused


async def test_a_look_that_fails_leaves_no_request_behind(http: aiohttp.ClientSession) -> None:
    """Both pages are asked for at once; the one that is still awaited when the other fails is let go."""
    before = asyncio.all_tasks()
    async with WatchedServer(models_status=503, metrics_hang=True) as server:
        with pytest.raises(EngineDown, match="HTTP 503"):
            await probe(http, server.url)
        left = [task for task in asyncio.all_tasks() - before if "_get" in repr(task.get_coro())]
        assert not left
        await asyncio.wait_for(server.metrics_left.wait(), 20)


async def test_a_server_that_is_not_there_or_lacks_the_model_is_down(http: aiohttp.ClientSession) -> None:
    async with WatchedServer() as server:
        with pytest.raises(EngineDown, match="other"):
            await probe(http, server.url, "other")
    with pytest.raises(EngineDown) as down:
        await probe(http, server.url)
    assert down.value.refused


INFO = {"tp_size": 8, "dp_size": 2, "kv_role": "kv_producer", "handshake_port": 7301}
"""What ATOM answers to `GET /kv_transfer_info` (ffdf3bb5d, seen in `make test-atom`)."""


def test_what_an_atom_server_reports_of_itself_need_not_be_typed_in() -> None:
    """Sizes, role and port; and what was typed in may be there when it is right."""
    for words, role in (
        ("", "prefill"),
        ("", "both"),
        (",dp_size=2,tp_size=8,handshake_port=7301", "prefill"),
    ):
        server = described(server_from_words(f"http://a:1{words}", role, "atom"), json.dumps(INFO).encode())
        assert (server.role, server.tp_size, server.dp_size) == ("prefill", 8, 2)
        assert server.control == "tcp://a:7301"


@pytest.mark.parametrize(
    ("words", "role", "info", "why"),
    [
        ("", "decode", INFO, "kv_producer"),
        ("", "prefill", INFO | {"kv_role": None}, "no kv_role"),
        ("", "prefill", INFO | {"kv_role": "kv_both"}, "kv_both"),
        (",dp_size=1", "prefill", INFO, "its dp_size is 2, not 1"),
        (",tp_size=4", "prefill", INFO, "its tp_size is 8, not 4"),
        (",handshake_port=6301", "prefill", INFO, "its handshake_port is 7301, not 6301"),
        ("", "prefill", INFO | {"dp_size": 10**9}, "cannot be read"),
        ("", "prefill", INFO | {"handshake_port": 0}, "cannot be read"),
        ("", "prefill", [], "cannot be read"),
    ],
)
def test_an_atom_server_that_is_not_what_it_is_named_is_down(
    words: str, role: Any, info: Any, why: str
) -> None:
    """With other ranks than the real ones KV would be read from another rank's memory."""
    with pytest.raises(EngineDown, match=why) as down:
        described(server_from_words(f"http://a:1{words}", role, "atom"), json.dumps(info).encode())
    assert down.value.refused


async def test_an_atom_server_without_that_page_is_taken_as_named(http: aiohttp.ClientSession) -> None:
    """0c982ea92. But a page that fails is no page that is not there."""
    said: list[Register | Bye] = []
    async with WatchedServer() as server:
        named = server_from_words(f"{server.url},handshake_port=6400,dp_size=4", "prefill", "atom")
        watched = HealthMonitor(named, lambda found: said.append(registration_of(found)))
        watched.succeeded(await probe(http, server.url, info_path=named.info_path))
    [registered] = said
    assert isinstance(registered, Register) and registered.version == ATOM_WITHOUT_INFO
    assert (registered.dp_size, registered.tp_size) == (4, 1) and registered.control.endswith(":6400")
    async with WatchedServer(info="no", info_status=500) as server:
        with pytest.raises(EngineDown, match="HTTP 500"):
            await probe(http, server.url, info_path="/kv_transfer_info")


def result(started_at: float | None = 1.0, steps: int | None = None) -> ProbeResult:
    return ProbeResult(model="m", max_model_len=5, load=ServerLoad(), steps=steps, started_at=started_at)


def watch() -> tuple[HealthMonitor, list[Register | Bye]]:
    said: list[Register | Bye] = []
    server = server_from_words("http://a:1", "decode", "vllm-nixl")
    return HealthMonitor(server, lambda found: said.append(registration_of(found))), said


def incarnations(said: list[Register | Bye]) -> list[tuple[str, str]]:
    names: dict[str, str] = {}
    return [(message.type, names.setdefault(message.incarnation, f"{len(names)}")) for message in said]


def test_a_restart_between_two_probes_is_a_new_incarnation() -> None:
    """Row 4 of docs/sources.md#failures."""
    watched, said = watch()
    for started_at in (1.0, 1.0, 500.0, 500.0):
        watched.succeeded(result(started_at))
    assert incarnations(said) == [
        ("register", "0"), ("register", "0"), ("bye", "0"), ("register", "1"), ("register", "1"),
    ]  # fmt: skip
    assert [message.index for message in said if isinstance(message, Register)] == [1, 2, 3, 4]


def test_a_server_that_was_away_comes_back_as_another() -> None:
    watched, said = watch()
    watched.succeeded(result(None))
    watched.failed(EngineDown("cannot connect", refused=True))
    watched.failed(EngineDown("cannot connect", refused=True))
    assert watched.down_reason == "cannot connect"
    watched.succeeded(result(None))
    assert incarnations(said) == [("register", "0"), ("bye", "0"), ("register", "1")]
    assert watched.down_reason is None


def test_a_server_that_is_slow_is_not_given_up_at_once() -> None:
    watched, said = watch()
    watched.succeeded(result())
    for _ in range(MAX_FAILED_PROBES - 1):
        watched.failed(EngineDown("no answer"))
    watched.succeeded(result())
    assert incarnations(said) == [("register", "0")] * (MAX_FAILED_PROBES + 1)
    for _ in range(MAX_FAILED_PROBES):
        watched.failed(EngineDown("no answer"))
    assert incarnations(said) == [("register", "0")] * (2 * MAX_FAILED_PROBES) + [("bye", "0")]


async def test_an_internal_error_in_a_probe_counts_as_a_failed_one(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends neither the watch nor what the watch runs in, and it is logged."""
    outcomes: list[ProbeResult | None] = [result(), None, result()]

    async def probing(*_: object) -> ProbeResult:
        if not outcomes:
            await asyncio.Event().wait()
        if (outcome := outcomes.pop(0)) is None:
            raise ZeroDivisionError
        return outcome

    said: list[Register | Bye] = []
    all_said = asyncio.Event()

    def say(found: ServerUp | ServerDown) -> None:
        said.append(registration_of(found))
        if len(said) == 3:
            all_said.set()

    monkeypatch.setattr(health_probe, "_probe", probing)
    watched = HealthMonitor(server_from_words("http://a:1", "decode", "vllm-nixl"), say)
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        running = tasks.create_task(watched.run(http, interval_s=0.0))
        await all_said.wait()
        running.cancel()
    assert incarnations(said) == [("register", "0")] * 3
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_a_slow_probe_takes_less_than_a_nodes_expiry() -> None:
    """Else a server under load would fall out of rotation between two probes that both succeed."""
    assert health_probe.PROBE_TIMEOUT_S + PING_INTERVAL_S < NODE_EXPIRY_S


def test_one_that_does_not_report_its_steps_never_counts_as_stalled() -> None:
    watched, said = watch()
    watched.succeeded(result())
    watched.succeeded(result())
    watched.succeeded(result(steps=7))
    assert [message.steps for message in said if isinstance(message, Register)] == [1, 2, 7]


async def test_named_servers_join_leave_and_return_like_agents_that_ping(
    start_stage: StartStage, tmp_path: Any
) -> None:
    async with WatchedServer() as prefill, WatchedServer() as decode:
        nodes = tmp_path / "nodes.yml"
        nodes.write_text(f"nodes: [{{url: '{decode.url}', role: decode, dialect: vllm-nixl}}]")
        stage = await start_stage(prefill=(prefill.url,), dialect="vllm-nixl", nodes=nodes)
        first = await until_nodes(stage, 2)
        assert {(node["address"], node["role"], node["state"]) for node in first.values()} == {
            (prefill.url, "prefill", "ready"),
            (decode.url, "decode", "ready"),
        }
        assert {node["load"]["running"] for node in first.values()} == {5}
        await decode.stop()
        left = await until_nodes(stage, 1)
        page = await nodes_page(stage)
        assert [(node["address"], node["role"]) for node in page["down"]] == [(decode.url, "decode")]
        assert "cannot connect" in page["down"][0]["reason"]
        async with stage.http.get(f"{stage.proxy.url}/metrics") as response:
            assert "kvferry_proxy_named_servers_down 1.0" in (await response.text()).splitlines()
        async with decode:
            back = await until_nodes(stage, 2)
        assert set(left) < set(back) and set(back) - set(left) != set(first) - set(left)


@pytest.mark.parametrize(
    ("dialect", "option", "sizes"),
    [("vllm-nixl", "", {}), ("sglang", ",kv_host=10.0.0.7", {}), ("atom", "", {"dp_size": 4, "tp_size": 2})],
)
async def test_a_named_pair_serves_requests(
    start_stage: StartStage, dialect: str, option: str, sizes: dict[str, int]
) -> None:
    """ATOM servers report their sizes, handshake port and role: a URL is enough."""
    fabric, engine = Fabric(), SERVERS[dialect]
    async with (
        engine(role="prefill", fabric=fabric, **sizes) as prefill,
        engine(role="decode", fabric=fabric, **sizes) as decode,
    ):
        named = {"prefill": (prefill.address + option,), "decode": (decode.address + option,)}
        stage = await start_stage(**named, dialect=dialect)
        nodes = await until_nodes(stage, 2)
        for node in nodes.values():
            shown = {"tp_size": node["tp_size"], "dp_size": node["dp_size"]}
            assert shown == {"tp_size": 1, "dp_size": 1} | sizes
            assert node["transfer_mode"] == ("write" if dialect == "sglang" else "read")
        body = {"model": "stand-in", "prompt": "a b c", "max_tokens": 4}
        status, answer = await stage.ask(body)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "length")
        assert (await stage.stream(body)).error is None
        assert len(prefill.asked) == len(decode.asked) == 2
    assert not fabric.wrongs


async def nodes_page(stage: Stage) -> dict[str, Any]:
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        return json.loads(await response.read())


async def until_nodes(stage: Stage, count: int) -> dict[str, Any]:
    async with asyncio.timeout(15):
        while len(nodes := (await nodes_page(stage))["nodes"]) != count:
            await asyncio.sleep(0.02)
    return {node["incarnation"]: node for node in nodes}

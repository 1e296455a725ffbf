# SPDX-License-Identifier: Apache-2.0
"""The application is Quart's: any ASGI server serves it, and Quart's test client tests it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import hypercorn.asyncio
import hypercorn.config
import pytest
import uvicorn
from quart import Quart

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.server import asgi_app
from tests.standins.agents import Fault
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 5, "seed": 7}
KEY = "client-key-0123456789"


@asynccontextmanager
async def by_uvicorn(app: Quart) -> AsyncIterator[str]:
    """With its own connections, not ours."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
        serving = asyncio.create_task(server._serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@asynccontextmanager
async def by_hypercorn(app: Quart) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        stop, config = asyncio.Event(), hypercorn.config.Config()
        config.bind, config.graceful_timeout = [f"fd://{os.dup(listener.fileno())}"], 1.0
        serving = asyncio.create_task(hypercorn.asyncio.serve(app, config, shutdown_trigger=stop.wait))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            stop.set()
            await serving


Serve = Callable[[Quart], AbstractAsyncContextManager[str]]
SERVERS = pytest.mark.parametrize("serve", [by_uvicorn, by_hypercorn])


@SERVERS
@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
async def test_any_server_streams_what_ours_does(stage: Stage, serve: Serve, path: str) -> None:
    await stage.pair()
    chat = [{"role": "user", "content": "a b c"}]
    body: dict[str, Any] = {"model": "stand-in", "stream": True, "max_tokens": 5}
    match path:
        case "completions":
            body = BODY | body
        case "responses":
            body = {"model": "stand-in", "stream": True, "max_output_tokens": 5, "input": chat}
        case _:
            body["messages"] = chat
    async with serve(stage.proxy.services.create_app()) as url:
        shown = []
        for base in (stage.proxy.url, url):
            async with stage.http.post(f"{base}/v1/{path}", json=body) as response:
                assert response.status == 200, await response.text()
                assert response.content_type == "text/event-stream"
                assert response.headers["Server-Timing"] and response.headers["X-Request-Id"]
                shown.append(await response.text())
    assert shown[0].count("data: ") == shown[1].count("data: ") > 5


@SERVERS
async def test_any_server_serves_all_routes(start_stage: StartStage, serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"{KEY} admin\n")
    stage = await start_stage(api_keys=tmp_path / "keys", max_body_bytes=10_000)
    await stage.pair()
    asked: list[tuple[str, str, int]] = [
        ("GET", "/health", 200),
        ("PUT", "/health", 405),
        ("HEAD", "/health", 200),
        ("GET", "/nodes", 200),
        ("GET", "/v1/completions", 405),
        ("GET", "/none", 404),
        ("POST", "/v1/completions", 200),
    ]
    async with serve(stage.proxy.services.create_app()) as url:
        for method, path, status in asked:
            body = BODY if method == "POST" else None
            headers = {"X-Request-Id": "mine", "Authorization": f"Bearer {KEY}"}
            async with stage.http.request(method, url + path, json=body, headers=headers) as response:
                assert response.status == status, (method, path, await response.text())
                assert status == 200 or response.headers["X-Request-Id"] == "mine"
        async with stage.http.post(f"{url}/v1/completions", json=BODY) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (401, "invalid_api_key")
        large = {**BODY, "prompt": "x" * 10_001}
        async with stage.http.post(f"{url}/v1/completions", json=large, headers=headers) as response:
            assert response.status == 413


@SERVERS
async def test_a_page_of_another_site_changes_nothing_at_any_server(
    start_stage: StartStage, serve: Serve
) -> None:
    """N4: our own connections refuse it themselves, before the body."""
    stage = await start_stage(cors_origins=("https://chat.example.com",))
    await stage.pair()
    async with serve(stage.proxy.services.create_app()) as url:
        for headers, code in (
            ({"Origin": "http://evil.example"}, "cross_site"),
            ({"Host": "evil.example"}, "host_not_allowed"),
        ):
            async with stage.http.post(f"{url}/v1/completions", json=BODY, headers=headers) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (403, code)
        allowed = {"Origin": "https://chat.example.com"}
        for path in ("completions", "models"):
            method = "POST" if path == "completions" else "GET"
            async with stage.http.request(method, f"{url}/v1/{path}", json=BODY, headers=allowed) as response:
                assert response.status == 200
                assert response.headers["Access-Control-Allow-Origin"] == allowed["Origin"]


@SERVERS
async def test_a_client_that_leaves_any_server_stops_its_agent(stage: Stage, serve: Serve) -> None:
    _, decode = await stage.pair(interval_s=0.05)
    async with serve(stage.proxy.services.create_app()) as url:
        async with stage.http.post(
            f"{url}/v1/completions", json={**BODY, "max_tokens": 2000, "stream": True}
        ) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        await decode.until(lambda: decode.aborted == 1)
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="499"}') == 1


@SERVERS
async def test_a_stream_that_breaks_ends_with_an_error_event(stage: Stage, serve: Serve) -> None:
    await stage.pair(faults=[Fault("decode", "cut")])
    async with (
        serve(stage.proxy.services.create_app()) as url,
        stage.http.post(f"{url}/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


@SERVERS
async def test_a_proxy_is_an_application_of_its_own(serve: Serve) -> None:
    """Its lifespan opens and closes it: no other server listens for clients."""
    app = asgi_app(ProxyConfig(discovery_port=0))
    async with serve(app) as url, aiohttp.ClientSession() as http:
        async with http.get(f"{url}/health") as response:
            assert response.status == 200
        async with http.get(f"{url}/nodes") as response:
            assert (await response.json())["nodes"] == []


async def test_quarts_test_client_completes(stage: Stage) -> None:
    await stage.pair()
    client = stage.proxy.services.create_app().test_client()
    whole = await client.post("/v1/completions", json=BODY)
    assert whole.status_code == 200
    text = (await whole.get_json())["choices"][0]["text"]
    streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
    assert streamed.content_type == "text/event-stream"
    events = (await streamed.get_data()).decode().removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    shown = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(shown) == text
    wrong = await client.get("/v1/completions")
    assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
    assert (await wrong.get_json())["error"]["code"] == "method_not_allowed"

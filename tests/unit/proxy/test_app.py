# SPDX-License-Identifier: Apache-2.0
"""The routes: statuses, content types, headers, and refusals before any agent is bothered."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import threading
from typing import Any

import pytest

from kvferry.proxy.api import completions
from kvferry.proxy.api.completions import INLINE_BODY_BYTES
from kvferry.proxy.dialects import native
from kvferry.proxy.exchange.relay import RelayedResponse
from kvferry.proxy.ids import Endpoint
from kvferry.proxy.request import ClientRequest, parse_request
from kvferry.proxy.telemetry.metrics import Metrics
from tests.unit.proxy.builders import registration
from tests.unit.proxy.conftest import Stage, StartStage

TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"
BODY: dict[str, Any] = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}


@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_content_types_say_what_is_sent(stage: Stage, path: str, body: dict[str, Any]) -> None:
    """R1."""
    await stage.pair()
    async with stage.post(body, path) as response:
        assert response.headers["Content-Type"].startswith("application/json")
    async with stage.post({**body, "stream": True}, path) as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        await response.read()
    async with stage.post({**body, "model": "other"}, path) as response:
        assert response.headers["Content-Type"] == "application/json"


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"[]", 400, None),
        ({"prompt": "p"}, 400, "model"),
        ({**BODY, "max_tokens": -1}, 400, "max_tokens"),
        ({**BODY, "prompt": ""}, 400, "prompt"),
        ({**BODY, "prompt": ["a", [1, 2]]}, 400, "prompt"),
        ({**BODY, "prompt": [1] * 5000}, 400, "prompt"),
        ({**BODY, "prompt": [1] * 4095, "max_tokens": 2}, 400, "prompt"),
        ({**BODY, "model": "unheard-of"}, 404, "model"),
        ({**BODY, "prompt": "x" * 10_001}, 413, None),
    ],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_what_the_proxy_can_reject_reaches_no_agent(
    start_stage: StartStage, body: Any, status: int, param: str | None, stream: bool
) -> None:
    """OpenAI's error shape, streamed or not."""
    # With `split_min_tokens`, routing looks at the prompt's length.
    stage = await start_stage(max_body_bytes=10_000 if status == 413 else 2**20, split_min_tokens=1)
    prefill, decode = await stage.pair()
    asked = {**body, "stream": stream} if isinstance(body, dict) else body
    given, answer = await stage.ask(asked)
    assert (given, answer["error"]["param"]) == (status, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    if status == 404:
        assert "unheard-of" in answer["error"]["message"]
    assert not prefill.asked and not decode.asked


PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/tokenize",
    "/detokenize",
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("coding", ["gzip", "BR", "identity, deflate"])
async def test_a_compressed_body_is_a_415(stage: Stage, path: str, coding: str) -> None:
    """F15: it was called invalid JSON."""
    prefill, decode = await stage.pair()
    raw = gzip.compress(json.dumps(BODY).encode())
    async with stage.http.post(
        stage.proxy.url + path, data=raw, headers={"Content-Encoding": coding}
    ) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (415, "invalid_request_error")
        assert coding in error["message"]
        assert path == "/v1/messages" or error["code"] == "unsupported_media_type"
        assert response.headers["Accept-Encoding"] == "identity"
    assert not prefill.asked and not decode.asked


@pytest.mark.parametrize("coding", ["Identity", "identity \t", "", "identity, identity"])
async def test_a_body_may_say_that_it_is_not_compressed(stage: Stage, coding: str) -> None:
    await stage.pair()
    async with stage.post(BODY, headers={"Content-Encoding": coding}) as response:
        assert response.status == 200


async def test_an_error_repeats_little_of_a_coding(stage: Stage) -> None:
    async with stage.post(BODY, headers={"Content-Encoding": "x" * 3000}) as response:
        assert response.status == 415 and len(await response.read()) < 400


async def test_a_large_body_is_parsed_beside_the_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 MiB of token ids stopped everybody's tokens for 50 ms."""
    threads: list[threading.Thread] = []

    def parse(endpoint: Endpoint, raw: bytes) -> ClientRequest:
        threads.append(threading.current_thread())
        return parse_request(endpoint, raw)

    monkeypatch.setattr(completions, "parse_request", parse)
    await stage.pair()
    assert (await stage.ask({**BODY, "user": "u" * 100}))[0] == 200
    assert (await stage.ask({**BODY, "user": "u" * INLINE_BODY_BYTES}))[0] == 200
    status, answer = await stage.ask({**BODY, "max_tokens": -1, "user": "u" * INLINE_BODY_BYTES})
    assert (status, answer["error"]["param"]) == (400, "max_tokens")
    assert [each is threading.current_thread() for each in threads] == [True, False, False]


async def test_large_bodies_that_wait_are_bounded(
    start_stage: StartStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first may have any size; what comes while it is parsed is refused."""
    monkeypatch.setattr(completions, "MAX_PARSED_BYTES", 2 * INLINE_BODY_BYTES)
    begun, go_on = threading.Event(), threading.Event()

    def parse(endpoint: Endpoint, raw: bytes) -> ClientRequest:
        begun.set()
        assert go_on.wait(10)
        return parse_request(endpoint, raw)

    monkeypatch.setattr(completions, "parse_request", parse)
    stage = await start_stage()
    await stage.pair()
    body = {**BODY, "user": "u" * INLINE_BODY_BYTES}
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(stage.ask(body))
        await asyncio.to_thread(begun.wait, 10)
        status, answer = await stage.ask(body)
        go_on.set()
    assert (status, answer["error"]["code"]) == (503, "too_many_bodies")
    assert first.result()[0] == 200


async def test_a_body_that_does_not_come_is_a_408(start_stage: StartStage) -> None:
    stage = await start_stage(body_timeout_s=0.2)
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert b" 408 " in await asyncio.wait_for(reader.readline(), 20)
    writer.close()
    await writer.wait_closed()


FAILED = {
    "message": "internal error of the proxy",
    "type": "server_error",
    "param": None,
    "code": "internal_error",
}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_internal_error_is_a_500_and_is_logged(
    stage: Stage, stream: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """I5: every request ends with a response, whatever the failure."""
    await stage.pair()
    monkeypatch.setattr(native, "headers", lambda _: 1 // 0)
    async with stage.post({**BODY, "stream": stream}, headers={"X-Request-Id": "mine"}) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (500, "mine")
        assert (await response.json())["error"] == FAILED
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="500"}') == 1
    [defect] = [record for record in caplog.records if record.exc_info]
    assert "mine" in defect.getMessage() and defect.exc_info[0] is ZeroDivisionError


async def test_an_internal_error_in_mid_stream_is_an_error_event_and_done(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    await stage.pair()
    monkeypatch.setattr(RelayedResponse, "feed", lambda *_: 1 // 0)
    streamed = await stage.stream(BODY)
    assert streamed.text() and streamed.events[-1] == {"error": FAILED}
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="500"}') == 1


async def test_an_internal_error_after_the_end_adds_nothing_to_the_response(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client has it all; what came after would be taken for the beginning of the next answer."""
    await stage.pair()
    monkeypatch.setattr(Metrics, "ended", lambda *_: 1 // 0)
    body = json.dumps({**BODY, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    answer = await asyncio.wait_for(reader.read(), 20)
    assert answer.count(b"[DONE]") == 1 and answer.endswith(b"\r\n0\r\n\r\n")
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ([], "no agent has announced itself"),
        (["prefill"], "no decode agent"),
        (["decode"], "no prefill agent"),
    ],
)
async def test_without_a_pair_the_response_has_a_retry_after(
    start_stage: StartStage, roles: list[Any], reason: str
) -> None:
    stage = await start_stage(decode_only_fallback=False)
    for role in roles:
        await stage.agent(role)
    async with stage.post(BODY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert reason in (await response.json())["error"]["message"]
    async with stage.http.get(f"{stage.proxy.url}/ready") as response:
        assert response.status == 503


async def test_agents_that_cannot_be_paired_are_a_503_and_the_pages_say_why(stage: Stage) -> None:
    await stage.agent("prefill")
    await stage.agent("decode", overrides={"layout": "other"})
    status, answer = await stage.ask(BODY)
    assert status == 503
    assert "fits" in answer["error"]["message"]
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        [refused] = (await response.json())["refused_pairings"]
    assert refused["reason"] == "different KV layouts"
    async with stage.http.get(f"{stage.proxy.url}/ready") as response:
        waiting = (await response.json())["waiting"]
    assert waiting == {"stand-in": "no prefill agent fits a decode agent of this model"}
    assert stage.metric('kvferry_proxy_refused_pairings{reason="layout"}') == 1


async def test_a_draining_agent_gets_nothing_new(stage: Stage) -> None:
    _, first = await stage.pair()
    second = await stage.agent("decode")
    acks, first.overrides["state"] = first.acks, "draining"
    await first.until(lambda: first.acks > acks + 1)
    for _ in range(4):
        await stage.ask(BODY)
    assert not first.asked and len(second.asked) == 4


async def test_an_operator_lets_an_agent_end_through_any_proxy(stage: Stage) -> None:
    _, told = await stage.pair()
    other = await stage.agent("decode")
    named = registration("decode", 9)
    stage.proxy.fleet.registry.register(named, reads_acks=False)
    for agent, status in ((named.incarnation, 409), (other.incarnation, 202), ("nobody", 404)):
        async with stage.http.post(f"{stage.proxy.url}/nodes/{agent}/drain") as response:
            assert response.status == status, await response.text()
    await other.until(lambda: other.is_asked_to_drain)
    assert not told.is_asked_to_drain
    await stage.ask(BODY)
    assert told.asked and not other.asked


@pytest.mark.parametrize(
    ("given", "kept"),
    [("my-id", True), ("x" * 128, True), ("x" * 129, False), ("", False), ("tab\there", False)],
)
@pytest.mark.parametrize("stream", [True, False])
async def test_the_clients_request_id_is_kept_if_it_is_fit_to_log(
    stage: Stage, given: str, kept: bool, stream: bool
) -> None:
    prefill, decode = await stage.pair()
    headers = {"X-Request-Id": given, "traceparent": TRACEPARENT}
    async with stage.post({**BODY, "stream": stream}, headers=headers) as response:
        await response.read()
        shown = response.headers["X-Request-Id"]
    assert (shown == given) is kept
    assert re.fullmatch(r"[0-9a-f]{32}", shown) or kept
    for agent in (prefill, decode):
        assert agent.asked[0].headers["X-Request-Id"] == shown
        assert agent.asked[0].headers["traceparent"] == TRACEPARENT


async def test_failures_carry_the_request_id_too(stage: Stage) -> None:
    async with stage.post(BODY, headers={"X-Request-Id": "mine"}) as response:
        assert response.headers["X-Request-Id"] == "mine"


async def test_the_clients_credentials_are_not_passed_on(stage: Stage) -> None:
    """X5: and no `Bearer None` either."""
    prefill, _ = await stage.pair()
    async with stage.post(BODY, headers={"Authorization": "Bearer secret"}):
        pass
    assert "Authorization" not in prefill.asked[0].headers


async def test_models_are_those_of_ready_agents(stage: Stage) -> None:
    await stage.pair()
    await stage.agent("both", model="second")
    await stage.agent("both", model="not yet", overrides={"state": "starting"})
    async with stage.http.get(f"{stage.proxy.url}/v1/models") as response:
        page = await response.json()
    assert [model["id"] for model in page["data"]] == ["second", "stand-in"]
    assert page["object"] == "list" and page["data"][0]["object"] == "model"


async def test_an_unknown_model_is_answered_with_those_that_are_served(stage: Stage) -> None:
    await stage.pair()
    await stage.agent("both", model="second")
    await stage.agent("both", model="not yet", overrides={"state": "starting"})
    said = "no agent serves this model: 'unheard-of'; models served now: 'second', 'stand-in'"
    url = f"{stage.proxy.url}/v1/models/unheard-of"
    for path, body in (("v1/completions", BODY), ("v1/chat/completions", CHAT), ("tokenize", BODY)):
        asked = {**body, "model": "unheard-of"}
        async with stage.http.post(f"{stage.proxy.url}/{path}", json=asked) as response:
            assert (response.status, (await response.json())["error"]["message"]) == (404, said)
    async with stage.http.get(url) as response:
        assert (response.status, (await response.json())["error"]["message"]) == (404, said)


async def test_health_ready_and_nodes(stage: Stage) -> None:
    async with stage.http.get(f"{stage.proxy.url}/health") as response:
        assert response.status == 200
    await stage.pair()
    async with stage.http.get(f"{stage.proxy.url}/ready") as response:
        assert response.status == 200
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    assert {(node["role"], node["state"], node["in_flight"]) for node in nodes} == {
        ("prefill", "ready", 0),
        ("decode", "ready", 0),
    }
    assert all(0 <= node["last_ping_s"] < 3.5 for node in nodes)


async def test_unknown_paths_and_methods_are_typed_errors(stage: Stage) -> None:
    async with stage.http.get(f"{stage.proxy.url}/v2") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")
    async with stage.http.get(f"{stage.proxy.url}/v1/completions") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
    async with stage.http.post(f"{stage.proxy.url}/v1/models") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["Allow"]


NO_UNICODE = {
    "/v1/completions": b'"prompt": "a", "%b": "b"',
    "/v1/chat/completions": b'"messages": [{"role": "user", "content": "%b"}]',
    "/v1/messages": b'"max_tokens": 1, "messages": [{"role": "assistant", "content": '
    b'[{"type": "tool_use", "id": "a", "name": "f", "input": {"a": "%b"}}]}]',
    "/v1/messages/count_tokens": b'"messages": [{"role": "user", "content": "a"}], "metadata": {"a": "%b"}',
    "/v1/responses": b'"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": "%b"}]',
    "/tokenize": b'"prompt": "%b"',
    "/detokenize": b'"tokens": [1], "%b": 1',
}


@pytest.mark.parametrize("path", NO_UNICODE)
@pytest.mark.parametrize("bad", [b"\xff", b"\xed\xa0\x80", b"\xc3", b"\\ud800", b"\\udc00"])
async def test_what_is_no_unicode_is_refused_wherever_it_is(stage: Stage, path: str, bad: bytes) -> None:
    await stage.pair()
    body = b'{"model": "stand-in", %b}' % (NO_UNICODE[path] % bad)
    async with stage.http.post(stage.proxy.url + path, data=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["type"]) == (400, "invalid_request_error")
        assert "not valid JSON" in error["message"]


async def test_a_refusal_of_head_has_no_body(stage: Stage) -> None:
    """The client would take it for the beginning of the next answer on its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port)
    async with asyncio.timeout(20):
        for request, status in ((b"HEAD /v1/completions", b"405"), (b"GET /health", b"200")):
            writer.write(request + b" HTTP/1.1\r\nHost: x\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 " + status)
    writer.close()
    await writer.wait_closed()


async def test_metrics_count_what_happened(stage: Stage) -> None:
    await stage.pair()
    await stage.stream({**BODY, "max_tokens": 5})
    await stage.ask(BODY)
    await stage.ask({**BODY, "model": "other"})
    async with stage.http.get(f"{stage.proxy.url}/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    for line, value in {
        'kvferry_proxy_requests_total{endpoint="completions",status="200"}': 2,
        'kvferry_proxy_requests_total{endpoint="completions",status="404"}': 1,
        "kvferry_proxy_time_to_first_token_seconds_count": 1,
        "kvferry_proxy_request_time_per_output_token_seconds_count": 1,
        "kvferry_proxy_e2e_request_latency_seconds_count": 3,
        'kvferry_proxy_phase_seconds_count{phase="prefill"}': 2,
        'kvferry_proxy_nodes{role="prefill",state="ready"}': 1,
        'kvferry_proxy_nodes{role="decode",state="stalled"}': 0,
    }.items():
        assert stage.metric(line) == value, line
    assert stage.metric("kvferry_proxy_inter_token_latency_seconds_count") >= 1


async def test_a_stream_may_outlast_what_quart_would_allow(stage: Stage) -> None:
    """Quart's own response timeout (60 s) is off; ours is the exchange's."""
    app = stage.proxy.services.create_app()
    assert app.config["RESPONSE_TIMEOUT"] is None
    assert app.config["MAX_CONTENT_LENGTH"] == stage.proxy.services.config.max_body_bytes
    assert app.config["BODY_TIMEOUT"] == stage.proxy.services.config.body_timeout_s


async def test_openai_clients_agree_with_the_answers(stage: Stage) -> None:
    from openai import AsyncOpenAI, BadRequestError

    await stage.pair()
    async with AsyncOpenAI(base_url=f"{stage.proxy.url}/v1", api_key="none", max_retries=0) as client:
        whole = await client.completions.create(**BODY, seed=1)
        stream = await client.completions.create(**BODY, seed=1, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == whole.choices[0].text
        with pytest.raises(BadRequestError):
            await client.completions.create(model="stand-in", prompt="", max_tokens=4)


async def test_prometheus_discovers_the_agents(stage: Stage) -> None:
    prefill, decode = await stage.agent("prefill", overrides={"name": "p-0"}), await stage.agent("decode")
    async with stage.http.get(f"{stage.proxy.url}/nodes/targets") as response:
        assert response.content_type == "application/json", "Prometheus insists on it"
        groups = await response.json()
    found = {tuple(group["targets"]): group["labels"] for group in groups}
    at = {agent.role: f"{agent.host}:{agent.port}" for agent in (prefill, decode)}
    shared = {"__scheme__": "http", "model_name": "stand-in"}
    assert found == {
        (at["prefill"],): {"role": "prefill", "name": "p-0", **shared},
        (at["decode"],): {"role": "decode", "name": at["decode"], **shared},
    }, "an agent without a name has its address as one, as on the operator's page"

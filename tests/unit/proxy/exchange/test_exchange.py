# SPDX-License-Identifier: Apache-2.0
"""One request through a pair: what the client sees, and that nothing is left, however it ends.

Every test ends with `Stage.assert_quiescent`: no slot, phase, drop, lease or handler may remain.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from itertools import product
from typing import Any

import aiohttp
import pytest

from kvferry.common.telemetry.logs import Facts
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.dialects.native import drop_request
from kvferry.proxy.ids import TransferId
from kvferry.proxy.server import running_proxy
from tests.helpers.waiting import until
from tests.standins.agents import STOP_AT_ONCE, UNEVEN, Fault, StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage, Streamed, side_by_side

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 5, "seed": 7}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "seed": 7}


SHORT_S = 0.5
"""Of a deadline that passes."""

Reference = Callable[..., Awaitable[dict[str, Any]]]


def tries(stage: Stage) -> int:
    """How often a request is tried before its first event."""
    return 1 + stage.proxy.services.config.retries


def transfer_ids(agent: StandInAgent) -> list[str]:
    return [asked.body["kv_transfer_params"]["transfer_id"] for asked in agent.asked]


@pytest.fixture
async def reference() -> AsyncIterator[Callable[..., Awaitable[dict[str, Any]]]]:
    """`reference(body)`: the answer of one agent with role `both`, asked directly."""
    async with StandInAgent("both") as agent, aiohttp.ClientSession() as http:

        async def ask(body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
            async with http.post(f"{agent.address}/v1/{path}", json=body) as response:
                return await response.json()

        yield ask


@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"max_tokens": 1}, {"max_completion_tokens": 3}])
@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_a_pair_answers_as_one_agent_alone_does(
    stage: Stage, reference: Reference, path: str, body: dict[str, Any], extra: dict[str, Any]
) -> None:
    """I4, X1 (chat goes to chat), X26 (no token short), R10 (both limits honoured; 1 means 1)."""
    prefill, decode = await stage.pair()
    asked = body | extra
    expected = await reference(asked, path)
    status, answer = await stage.ask(asked, path)
    assert status == 200
    assert answer["choices"] == expected["choices"]
    assert answer["usage"] == expected["usage"]
    streamed = await stage.stream(asked, path)
    for choice in expected["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert streamed.text(choice["index"]) == text
    assert {asked.path for asked in prefill.asked + decode.asked} == {f"/v1/{path}"}


async def test_a_choice_ends_once_and_the_ids_of_all_chunks_agree(stage: Stage) -> None:
    await stage.pair()
    streamed = await stage.stream({**BODY, "n": 2, "stream_options": {"include_usage": True}})
    assert len({(event["id"], event["created"], event["model"]) for event in streamed.events}) == 1
    reasons = [choice["finish_reason"] for event in streamed.events for choice in event["choices"]]
    assert sorted(filter(None, reasons)) == ["length", "length"]
    assert streamed.events[-1]["usage"]["completion_tokens"] == 10


@pytest.mark.parametrize("settings", [{}, {"stream_pull_min_tokens": 1}], ids=["after", "early"])
async def test_the_first_token_does_not_wait_for_the_decode_leg(
    start_stage: StartStage, settings: dict[str, Any]
) -> None:
    """TTFT is the prefill's, also where the decode leg begins before the prefill has ended."""
    stage = await start_stage(**settings)
    _, decode = await stage.pair()
    decode.faults.append(Fault("decode", "hang"))
    async with stage.post({**BODY, "stream": True}) as response:
        first = await response.content.readuntil(b"\n\n")
        assert b'"text":" ' in first
    await decode.until(lambda: decode.aborted)


async def test_a_limit_of_one_token_is_one_leg_without_a_transfer(stage: Stage) -> None:
    """R10: nothing is pinned, and the decode agent is not bothered."""
    prefill, decode = await stage.pair()
    _, answer = await stage.ask({**BODY, "max_tokens": 1})
    assert answer["usage"]["completion_tokens"] == 1
    assert [asked.leg for asked in prefill.asked] == ["alone"] and not decode.asked
    assert "kv_transfer_params" not in prefill.asked[0].body


PROMPTS = ["a b c", "d", f"{UNEVEN} e", "f g"]


async def expected_of_each(reference: Reference, body: dict[str, Any]) -> tuple[list[Any], dict[str, int]]:
    """The choices and the usage of all prompts of a body, each asked by itself."""
    wholes = [await reference({**body, "prompt": prompt}) for prompt in body["prompt"]]
    choices = [choice for whole in wholes for choice in whole["choices"]]
    usage = {name: sum(whole["usage"][name] for whole in wholes) for name in wholes[0]["usage"]}
    return [{**choice, "index": index} for index, choice in enumerate(choices)], usage


@pytest.mark.parametrize("body", [{}, {"n": 2}, {"prompt": [[1, 2], [3]]}, {"max_tokens": 1}], ids=str)
async def test_each_of_several_prompts_gets_the_answer_that_it_gets_by_itself(
    stage: Stage, reference: Reference, body: dict[str, Any]
) -> None:
    """As one response, and each prompt is a transfer of its own."""
    prefill, _ = await stage.pair()
    asked = {**BODY, "prompt": PROMPTS, **body}
    choices, usage = await expected_of_each(reference, asked)
    status, whole = await stage.ask(asked)
    assert (status, whole["choices"], whole["usage"]) == (200, choices, usage)
    if "max_tokens" not in body:
        assert len(set(transfer_ids(prefill))) == len(prefill.asked) == len(asked["prompt"])
    streamed = await stage.stream({**asked, "stream_options": {"include_usage": True}})
    assert [streamed.text(choice["index"]) for choice in choices] == [choice["text"] for choice in choices]
    *events, last = streamed.events
    assert (last["choices"], last["usage"]) == ([], usage)
    ended = [each["index"] for event in events for each in event["choices"] if each["finish_reason"]]
    assert sorted(ended) == list(range(len(choices)))
    assert len({(event["id"], event["created"]) for event in streamed.events}) == 1


async def test_a_prompt_of_several_may_end_with_its_first_token(stage: Stage) -> None:
    await stage.pair()
    body = {**BODY, "prompt": ["a b", STOP_AT_ONCE], "n": 2}
    _, whole = await stage.ask(body)
    streamed = await stage.stream({**body, "stream_options": {"include_usage": True}})
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["length"] * 2 + ["stop"] * 2
    assert [choice["text"] for choice in whole["choices"]] == [streamed.text(index) for index in range(4)]
    assert streamed.events[-1]["usage"] == whole["usage"]


async def test_a_prompt_that_ended_with_its_first_token_is_not_shown_again_when_another_is_retried(
    stage: Stage,
) -> None:
    for _ in range(2):
        await stage.pair()
    body = {**BODY, "prompt": [STOP_AT_ONCE, "a b"], "max_tokens": 8}
    _, whole = await stage.ask(body)
    fail_once(stage.agents, Fault("decode", "cut", after_events=3))
    streamed = await stage.stream(body)
    assert [streamed.text(index) for index in range(2)] == [choice["text"] for choice in whole["choices"]]
    ends = [
        choice["index"] for event in streamed.events for choice in event["choices"] if choice["finish_reason"]
    ]
    assert sorted(ends) == [0, 1]


async def test_an_error_of_one_prompt_ends_the_stream_of_all(stage: Stage) -> None:
    _, decode = await stage.pair(interval_s=0.05)
    decode.faults.append(Fault("decode", "error"))
    streamed = await stage.stream({**BODY, "prompt": ["a b", "c d"], "max_tokens": 8})
    assert streamed.error is not None and streamed.error["code"] == "gone"
    assert "error" in streamed.events[-1]


async def test_several_prompts_without_a_seed_are_sampled_differently(stage: Stage) -> None:
    await stage.pair()
    body = {key: value for key, value in BODY.items() if key != "seed"}
    _, whole = await stage.ask({**body, "prompt": ["a"] * 3})
    assert len({choice["text"] for choice in whole["choices"]}) == 3


async def test_an_agent_that_is_lost_with_several_prompts_is_not_noticed(
    start_stage: StartStage, reference: Reference
) -> None:
    """Prompts that are complete are not asked for again."""
    asked = {**BODY, "prompt": PROMPTS}
    choices, _ = await expected_of_each(reference, asked)

    async def check(case: tuple[Any, bool]) -> None:
        leg, stream = case
        stage = await start_stage()
        for _ in range(2):
            await stage.pair()
        fail_once(stage.agents, Fault(leg, "reset"))
        if stream:
            streamed = await stage.stream(asked)
            texts = [streamed.text(index) for index in range(len(choices))]
        else:
            texts = [choice["text"] for choice in (await stage.ask(asked))[1]["choices"]]
        assert texts == [choice["text"] for choice in choices]

    await side_by_side(check, product(["prefill", "decode"], [True, False]))


async def test_a_rejection_of_one_prompt_is_the_answer_to_all(stage: Stage) -> None:
    prefill, _ = await stage.pair()
    prefill.faults.append(Fault("prefill", "status", status=422))
    status, error = await stage.ask({**BODY, "prompt": PROMPTS})
    assert (status, error["error"]["code"]) == (422, "as_told")


@pytest.mark.parametrize(
    "asked", [{"max_tokens": 0}, {"echo": True, "logprobs": 1}, {"prompt_logprobs": 0}], ids=str
)
async def test_what_asks_for_the_prompt_itself_is_served_by_one_agent(
    stage: Stage, asked: dict[str, Any]
) -> None:
    prefill, decode = await stage.pair()
    assert (await stage.ask({**BODY, **asked}))[0] == 200
    assert [leg.leg for leg in decode.asked] == ["alone"] and not prefill.asked


@pytest.mark.parametrize("n", [1, 2])
async def test_a_first_token_that_ends_the_answer_means_no_decode_leg(stage: Stage, n: int) -> None:
    """X29: nothing may be emitted after the end of sequence."""
    _, decode = await stage.pair()
    body = {**BODY, "prompt": STOP_AT_ONCE, "n": n}
    _, whole = await stage.ask(body)
    streamed = await stage.stream({**body, "stream_options": {"include_usage": True}})
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * n
    assert [choice["text"] for choice in whole["choices"]] == [streamed.text(index) for index in range(n)]
    assert [event["choices"][0]["finish_reason"] for event in streamed.events[:-1]] == ["stop"] * n
    assert streamed.events[-1]["usage"] == whole["usage"]
    assert not decode.asked


async def test_a_single_agent_with_role_both_serves_alone(stage: Stage) -> None:
    both = await stage.agent("both")
    await stage.ask(BODY)
    await stage.stream(BODY)
    assert [asked.leg for asked in both.asked] == ["alone", "alone"]


async def test_the_legs_carry_the_clients_settings_and_one_seed(stage: Stage) -> None:
    """Unknown fields pass through, the seed is minted once, and the answer's id is the proxy's (X5, X30)."""
    prefill, decode = await stage.pair()
    body = {key: value for key, value in BODY.items() if key != "seed"}
    settings = {"temperature": 0.5, "n": 2, "stream_options": {"include_usage": True}, "of_the_future": [1]}
    await stage.stream(body | settings)
    [first], [second] = prefill.asked, decode.asked
    assert first.body["stream"] is False and first.body["max_tokens"] == 1
    assert "stream_options" not in first.body
    assert first.body["kv_transfer_params"]["client_max_tokens"] == 5
    assert first.body["seed"] == second.body["seed"] >= 0
    assert second.body["max_tokens"] == 5 and second.body["stream"] is True
    for asked in (first, second):
        assert {**asked.body, "temperature": 0.5, "n": 2, "of_the_future": [1]} == asked.body
        assert "Authorization" not in asked.headers
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"]
    assert first.headers["X-Kvferry-Answer-Id"] == second.headers["X-Kvferry-Answer-Id"]


EARLY_DEATHS = [
    Fault("prefill", "status", status=500),
    Fault("prefill", "status", status=503),
    Fault("prefill", "reset"),
    Fault("decode", "status", status=500),
    Fault("decode", "reset"),
]


def fail_once(agents: list[StandInAgent], fault: Fault) -> None:
    """Whichever agent is the first to be asked for the fault's leg fails."""
    shared = [fault]
    for agent in agents:
        agent.faults = shared


@pytest.mark.parametrize("pairs", [1, 2], ids=["on the same pair", "on another pair"])
@pytest.mark.parametrize("fault", EARLY_DEATHS, ids=lambda fault: f"{fault.leg}-{fault.kind}-{fault.status}")
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_an_agent_lost_before_its_first_event_is_retried_unseen(
    stage: Stage, reference: Reference, fault: Fault, stream: bool, pairs: int
) -> None:
    """Once, with a fresh transfer id; nothing is repeated, lost or different, and the first KV is dropped."""
    for _ in range(pairs):
        await stage.pair()
    fail_once(stage.agents, fault)
    expected = (await reference(BODY))["choices"][0]["text"]
    if stream:
        assert (await stage.stream(BODY)).text() == expected
    else:
        assert (await stage.ask(BODY))[1]["choices"][0]["text"] == expected
    prefills = [agent for agent in stage.agents if agent.role == "prefill"]
    ids = [transfer_id for agent in prefills for transfer_id in transfer_ids(agent)]
    assert len(set(ids)) == len(ids) == 2
    asked = [agent for agent in stage.agents if any(leg.leg == fault.leg for leg in agent.asked)]
    assert len(asked) == pairs
    await stage.proxy.services.drops.settle()
    assert len([dropped for agent in prefills for dropped in agent.dropped]) == 1
    assert stage.metric(f'kvferry_proxy_retries_total{{leg="{fault.leg}"}}') == 1


async def test_the_lost_agent_is_avoided_on_the_retry(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other requests take turns meanwhile, so the next turn alone may lead to the same agent."""
    await stage.pair()
    lost, _ = await stage.pair()
    avoided = []
    router = stage.proxy.fleet.router
    choose = router.choose

    def spy(snapshot: Any, ask: Any, turns: Any, exclude: frozenset[Any], **how: bool) -> Any:
        avoided.append(exclude)
        return choose(snapshot, ask, turns, exclude, **how)

    monkeypatch.setattr(router, "choose", spy)
    lost.faults.append(Fault("prefill", "reset"))
    for _ in range(2):
        assert (await stage.ask(BODY))[0] == 200
    assert avoided.count(frozenset()) == 2
    assert avoided.count(frozenset({lost.incarnation})) == 1


async def test_a_retry_after_the_first_token_never_begins_again_alone(
    stage: Stage, reference: Reference
) -> None:
    """Agents of role `both` may serve alone, but then token 1 would come twice."""
    agents = [await stage.agent("both") for _ in range(2)]
    expected = (await reference(BODY))["choices"][0]["text"]
    fail_once(agents, Fault("decode", "reset"))
    for _ in range(4):
        assert (await stage.stream(BODY)).text() == expected
    assert stage.metric('kvferry_proxy_retries_total{leg="decode"}') == 1


async def test_a_decode_stream_without_any_event_is_retried(stage: Stage, reference: Reference) -> None:
    """Never HTTP 200 with nothing in it (I5)."""
    await stage.pair()
    fail_once(stage.agents, Fault("decode", "empty"))
    streamed = await stage.stream(BODY)
    assert streamed.text() == (await reference(BODY))["choices"][0]["text"]


async def test_a_lone_agents_empty_stream_is_retried_and_then_a_502(stage: Stage) -> None:
    both = await stage.agent("both")
    both.faults += [Fault("alone", "empty") for _ in range(tries(stage))]
    status, answer = await stage.ask({**BODY, "stream": True})
    assert (status, answer["error"]["code"]) == (502, "agent_lost")


async def test_a_refused_connection_takes_the_agent_out_at_once(stage: Stage) -> None:
    """The pings go on, yet nobody is sent there."""
    await stage.pair()
    lost, _ = await stage.pair()
    await lost.close_http()
    for _ in range(4):
        status, _ = await stage.ask(BODY)
        assert status == 200
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        nodes = {node["address"]: node["state"] for node in (await response.json())["nodes"]}
    assert nodes[lost.address] == "refusing"
    assert stage.metric('kvferry_proxy_retries_total{leg="prefill"}') == 1


async def test_the_last_agent_gone_is_a_503_and_not_a_502(stage: Stage) -> None:
    _, decode = await stage.pair()
    await decode.close_http()
    async with stage.post(BODY) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "1"
        assert (await response.json())["error"]["code"] == "no_agent"


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize(("said", "told"), [(500, 502), (503, 503), (504, 504)])
async def test_an_agent_that_keeps_failing_is_a_typed_error(
    stage: Stage, leg: str, said: int, told: int
) -> None:
    """X6: the status tells what happened, and the body is OpenAI's error shape."""
    prefill, decode = await stage.pair()
    failing = prefill if leg == "prefill" else decode
    failing.faults += [Fault(leg, "status", status=said)] * tries(stage)  # type: ignore[arg-type]
    status, answer = await stage.ask(BODY)
    assert status == told
    assert answer["error"]["code"] == ("agent_busy" if said == 503 else "agent_lost")
    assert "as it was told to fail" in answer["error"]["message"]
    assert len(failing.asked) == tries(stage)


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("said", [400, 404, 429])
async def test_an_agents_4xx_passes_through_and_is_not_retried(stage: Stage, leg: str, said: int) -> None:
    """X6, row 16 of docs/sources.md#failures: a refused leg ends the other, and what it pinned is dropped."""
    prefill, decode = await stage.pair()
    failing = prefill if leg == "prefill" else decode
    failing.faults.append(Fault(leg, "status", status=said))  # type: ignore[arg-type]
    status, answer = await stage.ask(BODY)
    assert status == said
    assert answer["error"]["code"] == "as_told"
    assert len(failing.asked) == 1
    await stage.proxy.services.drops.settle()
    assert prefill.dropped == (transfer_ids(prefill) if leg == "decode" else [])


LATE_DEATHS = [
    (Fault("decode", "cut"), "stream_broken"),
    (Fault("decode", "no_done"), "stream_broken"),
    (Fault("decode", "stall"), "agent_timeout"),
    (Fault("decode", "status", status=429), "as_told"),
    (Fault("decode", "error"), "gone"),
]


@pytest.mark.parametrize(("fault", "code"), LATE_DEATHS, ids=lambda value: getattr(value, "kind", ""))
async def test_a_failure_in_mid_stream_is_an_error_event_and_done(
    start_stage: StartStage, fault: Fault, code: str
) -> None:
    """I5, R1: whole events only, then a typed error, then `[DONE]`; X6: no 200 that just ends."""
    stage = await start_stage(idle_timeout_s=SHORT_S, migrations=0)
    _, decode = await stage.pair()
    decode.faults.append(fault)
    streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == code
    assert streamed.events[-1] == {"error": streamed.error}
    assert len(streamed.events) == (2 if fault.kind == "status" else 4)
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="200"}') == 0


async def test_a_retried_prefill_that_draws_another_token_fails_typed(stage: Stage) -> None:
    """What the client has must not be contradicted."""
    prefill, decode = await stage.pair()
    decode.faults.append(Fault("decode", "reset"))

    def differ() -> bool:
        if len(prefill.asked) == 1 and not prefill.faults:
            prefill.faults.append(Fault("prefill", "other_tokens"))
        return bool(prefill.faults)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prefill.until(differ))
        streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "answer_diverged"
    assert len(streamed.events) == 2


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_agent_that_answers_nonsense_is_a_502(stage: Stage, leg: str) -> None:
    prefill, decode = await stage.pair()
    (prefill if leg == "prefill" else decode).faults.append(Fault(leg, "garbage"))  # type: ignore[arg-type]
    if leg == "prefill":
        status, answer = await stage.ask(BODY)
        assert (status, answer["error"]["code"]) == (502, "bad_agent_answer")
    else:
        streamed = await stage.stream(BODY)
        assert streamed.error is not None and streamed.error["code"] == "bad_agent_answer"


async def test_a_hung_agent_is_a_504(start_stage: StartStage) -> None:
    """R32: the first-byte deadline, configurable; the agent sees that nobody waits any more."""

    async def check(leg: Any) -> None:
        stage = await start_stage(first_byte_timeout_s=SHORT_S)
        agents = [await stage.agent("both")] if leg == "alone" else await stage.pair()
        failing = next(agent for agent in agents if agent.role in (leg, "both"))
        failing.faults.append(Fault(leg, "hang"))
        if leg == "decode":
            error = (await stage.stream(BODY)).error
        else:
            status, answer = await stage.ask({**BODY, "stream": True})
            assert status == 504
            error = answer["error"]
        assert error is not None and error["code"] == "agent_timeout"
        await failing.until(lambda: failing.aborted == 1)

    await side_by_side(check, ["prefill", "decode", "alone"])


async def test_an_answer_of_headers_alone_is_a_504(start_stage: StartStage) -> None:
    """A prefill response that never ends, and a stream that never begins: headers are not a first event."""

    async def check(case: tuple[Any, bool]) -> None:
        leg, stream = case
        stage = await start_stage(
            **{"first_byte_timeout_s" if leg == "prefill" else "idle_timeout_s": SHORT_S}
        )
        agents = await stage.pair() if leg == "prefill" else [await stage.agent("both")]
        agents[0].faults.append(Fault(leg, "silent"))
        status, answer = await stage.ask({**BODY, "stream": stream})
        assert (status, answer["error"]["code"]) == (504, "agent_timeout")

    await side_by_side(check, [("prefill", True), ("prefill", False), ("alone", True)])


async def test_the_total_deadline_ends_a_request_that_makes_progress(start_stage: StartStage) -> None:
    """R32: a stream may be lively and still too long."""

    async def check(stream: bool) -> None:
        stage = await start_stage(total_timeout_s=SHORT_S)
        await stage.pair(interval_s=0.05 if stream else 5.0)
        if stream:
            error = (await stage.stream({**BODY, "max_tokens": 1000})).error
        else:
            status, answer = await stage.ask(BODY)
            assert status == 504
            error = answer["error"]
        assert error is not None and error["code"] == "agent_timeout"

    await side_by_side(check, [True, False])


async def test_an_unreachable_address_is_tried_no_longer_than_the_connect_deadline(
    start_stage: StartStage,
) -> None:
    stage = await start_stage(connect_timeout_s=SHORT_S, retries=0)
    # A listener whose backlog is full completes no more connections.
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    port = full.getsockname()[1]
    fillers = []
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(("127.0.0.1", port))
        fillers.append(filler)
    await stage.agent("both", overrides={"address": f"http://127.0.0.1:{port}"})
    status, answer = await stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (504, "agent_lost")
    for sock in (full, *fillers):
        sock.close()


LEAVING = [
    ("prefill", Fault("prefill", "hang"), False, 3),
    ("prefill", Fault("prefill", "hang"), True, 3),
    ("decode", Fault("decode", "hang"), False, 3),
    ("decode", Fault("decode", "hang"), True, 3),
    ("decode", Fault("decode", "stall"), True, 3),
    ("alone", Fault("alone", "hang"), True, 3),
    ("alone", Fault("alone", "stall"), True, 3),
    # Past 64 KiB uvicorn stops reading, and whoever does not read sees nobody leave.
    ("prefill", Fault("prefill", "hang"), False, 70_000),
    ("prefill", Fault("prefill", "hang"), False, 200_000),
    ("decode", Fault("decode", "hang"), True, 200_000),
]


@pytest.mark.parametrize(
    ("leg", "fault", "stream", "size"),
    LEAVING,
    ids=[f"{leg}-{fault.kind}-{'streamed' if s else 'whole'}-{size}" for leg, fault, s, size in LEAVING],
)
async def test_a_client_that_leaves_ends_the_leg_and_drops_the_kv(
    stage: Stage, leg: str, fault: Fault, stream: bool, size: int
) -> None:
    """X7, at every stage: the agent sees the disconnect, the prefill agent gets the drop, nothing is left."""
    agents = [await stage.agent("both")] if leg == "alone" else await stage.pair()
    busy = next(agent for agent in agents if agent.role in (leg, "both"))
    busy.faults.append(fault)

    async def ask() -> None:
        async with stage.post({**BODY, "prompt": "x" * size, "stream": stream}) as response:
            await response.read()

    task = asyncio.get_running_loop().create_task(ask())
    await busy.until(lambda: busy.running)
    if fault.kind == "stall":
        # The client is in the midst of the stream when it leaves.
        await until(lambda: stage.metric('kvferry_proxy_requests_in_flight{phase="decode"}'))
    task.cancel()
    await asyncio.wait([task])
    await busy.until(lambda: busy.aborted == 1)
    await until(lambda: stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="499"}'))
    await stage.proxy.services.drops.settle()
    if leg != "alone":
        assert agents[0].dropped == transfer_ids(agents[0])
        assert stage.metric('kvferry_proxy_drops_total{outcome="delivered"}') == 1


async def test_a_slow_client_is_waited_for(start_stage: StartStage) -> None:
    """Back-pressure, not memory; and the agent's silence meanwhile is not counted against it."""
    stage = await start_stage(idle_timeout_s=SHORT_S)
    wordy = "x" * 1024  # in every event, so that no socket buffer holds the whole stream
    _, decode = await stage.pair(model=wordy)
    body = {**BODY, "model": wordy, "max_tokens": 2500, "stream": True, "n": 8}
    async with stage.post(body) as response:
        await response.content.readuntil(b"\n\n")
        await decode.until(lambda: decode.running)
        await asyncio.sleep(2 * SHORT_S)
        assert decode.running, "the agent is held back by the client, through the proxy"
        rest = await response.read()
    assert rest.endswith(b"data: [DONE]\n\n") and b'"error"' not in rest


async def test_connections_to_agents_are_kept_and_used_again(stage: Stage) -> None:
    """X4: one pooled session, not one per request; a finished stream gives its connection back."""
    prefill, decode = await stage.pair()
    for _ in range(3):
        decode.faults.append(Fault("decode", "late_end"))
        await stage.stream(BODY)
        await stage.ask(BODY)
    for agent in (prefill, decode):
        assert len({asked.connection for asked in agent.asked}) == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_large_body_reaches_both_agents_whole(stage: Stage, stream: bool) -> None:
    """Beyond 1 MiB, where aiohttp wants it in pieces; also when it is sent twice."""
    prefill, decode = await stage.pair()
    prefill.faults.append(Fault("prefill", "reset"))
    body = {**BODY, "prompt": "x" * 3_000_000, "stream": stream}
    async with stage.post(io.BytesIO(json.dumps(body).encode())) as response:
        assert response.status == 200
        await response.read()
    assert {asked.body["prompt"] for asked in prefill.asked + decode.asked} == {body["prompt"]}


async def test_the_agents_server_timing_is_passed_on(stage: Stage) -> None:
    await stage.pair()
    async with stage.post(BODY) as response:
        assert "decode.decode;dur=1" in response.headers["Server-Timing"].split(", ")


@pytest.mark.parametrize("max_tokens", [2, 40])
async def test_the_times_of_both_legs_are_told(stage: Stage, max_tokens: int) -> None:
    """In the header as far as they are known, and in a stream's last event if the client asks for it."""
    await stage.pair(interval_s=0.01)
    body = {**BODY, "max_tokens": max_tokens}
    async with stage.post(body) as response:
        legs = dict(part.split(";dur=") for part in response.headers["Server-Timing"].split(", "))
        assert float(legs["prefill"]) > 0 and float(legs["decode"]) > 10
    answer = await stage.stream({**body, "kvferry_timing": True})
    assert (
        answer.headers["Server-Timing"].startswith("route;dur=")
        and "prefill" in answer.headers["Server-Timing"]
    )
    timing = answer.events[-1]["kvferry_timing"]
    assert timing["queue_s"] == 0.25 and timing["legs_s"]["prefill"] > 0
    assert timing["legs_s"]["decode"] > (max_tokens - 1) * 0.01


async def test_fields_that_the_proxy_does_not_know_reach_both_legs_untouched(stage: Stage) -> None:
    unknown = {"guided": {"a": [1, {"b": None}], "c": 1e-300, "d": 2**60, "e": "\u2028"}, "k": []}
    for agent, leg in zip(await stage.pair(), ("prefill", "decode"), strict=True):
        await stage.ask({**BODY, **unknown})
        asked = next(each for each in agent.asked if each.leg == leg)
        assert {name: asked.body[name] for name in unknown} == unknown


@pytest.mark.full
@pytest.mark.timeout(180)
async def test_a_stream_may_last_longer_than_a_minute(start_stage: StartStage) -> None:
    """Quart, uvicorn and aiohttp each have limits of their own that a stream would meet by then."""
    stage = await start_stage(total_timeout_s=150.0)
    await stage.pair(interval_s=1.0)
    body = {**BODY, "max_tokens": 70, "stream": True}
    async with stage.post(body, timeout=aiohttp.ClientTimeout(total=150)) as response:
        answer = Streamed(response.status, response.headers, await response.read())
    assert answer.error is None and len(answer.text().split()) == 70


async def test_ipv6_agents_are_served(stage: Stage) -> None:
    """X9."""
    await stage.pair(host="::1")
    status, _ = await stage.ask(BODY)
    assert status == 200


async def test_a_drop_that_fails_is_counted_and_forgotten(stage: Stage) -> None:
    prefill, decode = await stage.pair()
    decode.faults += [Fault("decode", "status", status=400)]
    prefill.incarnation, real = "another", prefill.incarnation
    try:
        await stage.ask(BODY)
        await stage.proxy.services.drops.settle()
    finally:
        prefill.incarnation = real
    assert stage.metric('kvferry_proxy_drops_total{outcome="failed"}') == 1
    prefill.leases.clear()


async def test_a_stopping_proxy_sees_its_drops_through() -> None:
    async with StandInAgent("prefill", drop_delay_s=0.2) as agent:
        async with running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy:
            server = agent.registration()
            proxy.services.drops.send(server, drop_request(TransferId("t"), server.incarnation))
            assert proxy.services.drops.pending == 1
        assert agent.dropped == ["t"]


async def test_every_request_is_logged_once_without_its_prompt(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    await stage.pair()
    with caplog.at_level("INFO", logger="kvferry.proxy.telemetry.request_log"):
        await stage.stream({**BODY, "prompt": "a secret"})
        await stage.ask({**BODY, "max_tokens": -1})
    lines = [json.loads(record.getMessage().removeprefix("request ")) for record in caplog.records]
    assert [(line["status"], line.get("code")) for line in lines] == [(200, None), (400, "invalid_request")]
    assert len(lines[0]["transfer_ids"]) == 1
    assert set(lines[0]["phases_s"]) == {"route", "prefill", "decode_wait", "decode"}
    assert "secret" not in caplog.text


async def test_prompts_are_logged_when_that_is_asked_for(
    start_stage: StartStage, caplog: pytest.LogCaptureFixture
) -> None:
    """`--log-prompts`, and then only so much of each."""
    stage = await start_stage(log_prompts=True)
    await stage.pair()
    with caplog.at_level("INFO", logger="kvferry.proxy.telemetry.request_log"):
        await stage.stream({**BODY, "prompt": "no secret " * 1000})
        await stage.ask(
            {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}]}, "chat/completions"
        )
    text, chat = [json.loads(record.getMessage().removeprefix("request ")) for record in caplog.records]
    assert text["prompt"].startswith('"no secret no secret') and len(text["prompt"]) == 4096
    assert chat["prompt"] == '[{"role": "user", "content": "hi"}]'


def logged(caplog: pytest.LogCaptureFixture) -> Mapping[str, object]:
    """The facts in the log line of the only request."""
    [args] = [record.args for record in caplog.records if record.msg == "request %s"]
    assert isinstance(args, tuple) and isinstance(args[0], Facts)
    return args[0].facts


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_an_agents_4xx_keeps_its_code_and_message_everywhere(
    stage: Stage, caplog: pytest.LogCaptureFixture, leg: str, stream: bool, path: str
) -> None:
    """The answer or error event, the request's log line and the operator's page say what the agent said."""
    prefill, decode = await stage.pair()
    failing = prefill if leg == "prefill" else decode
    failing.faults.append(Fault(leg, "status", status=422))  # type: ignore[arg-type]
    said = "déjà vu: as it was told to fail"
    asked: dict[str, Any] = {"model": "stand-in", "max_tokens": 5, "stream": stream}
    match path:
        case "completions":
            asked["prompt"] = "a b"
        case "responses":
            asked = {"model": "stand-in", "input": "a b", "max_output_tokens": 5, "stream": stream}
        case _:
            asked["messages"] = [{"role": "user", "content": "a b"}]
    with caplog.at_level(logging.INFO, "kvferry"):
        async with stage.post(asked, path) as response:
            assert said in (await response.read()).decode()
    facts = logged(caplog)
    assert (facts["status"], facts["code"], facts["error"]) == (422, "as_told", said)
    failed, *_ = stage.proxy.services.failures.latest()
    assert (failed.last.status, failed.last.code, failed.last.message) == (422, "as_told", said)


async def test_an_error_event_of_an_agents_keeps_its_code_and_message(
    stage: Stage, caplog: pytest.LogCaptureFixture
) -> None:
    """What an agent says of the request in mid-stream is no fault of a server, as no 4xx is."""
    _, decode = await stage.pair(interval_s=0.05)
    decode.faults.append(Fault("decode", "error"))
    with caplog.at_level(logging.INFO, "kvferry"):
        streamed = await stage.stream(BODY)
    assert streamed.error == {"message": "no more", "code": "gone", "type": "invalid_request_error"}
    facts = logged(caplog)
    assert (facts["status"], facts["code"], facts["error"]) == (400, "gone", "no more")

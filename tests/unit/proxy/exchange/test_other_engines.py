# SPDX-License-Identifier: Apache-2.0
"""Requests through pairs of other engines' servers: what the client sees, what the servers were told, and
that nothing is left, however it ends. A server that was told anything wrong notes it in `Fabric.wrongs`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp
import pytest

from kvferry.proxy.exchange import attempt
from kvferry.proxy.exchange.kv_lifetime import SURE_S
from kvferry.proxy.wire.dialects import KV_UNREAD
from tests.standins.agents import Fault
from tests.standins.engines import (
    CACHED_AT_PREFILL,
    NOT_KNOWN_HERE,
    SERVERS,
    STOPS_AT_ONCE,
    Fabric,
    StandInServer,
    VllmKvferryServer,
)
from tests.unit.proxy.conftest import Stage, StartStage, Streamed, side_by_side

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 4, "seed": 7}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "seed": 7}

KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "atom": ("atom", {}),
    "atom-seed": ("atom", {"head": False}),
    "sglang": ("sglang", {}),
    "vllm-kvferry": ("vllm-kvferry", {}),
    "vllm-mooncake": ("vllm-mooncake", {}),
    "vllm-moriio-read": ("vllm-moriio", {}),
    "vllm-moriio-write": ("vllm-moriio", {"writes": True}),
    "vllm-nixl-pull": ("vllm-nixl", {}),
    "vllm-nixl-push": ("vllm-nixl", {"pushes": True}),
}


@dataclass(slots=True)
class Fleet:
    """A proxy with a pair of one engine's servers, and where their wrongs are noted."""

    stage: Stage
    fabric: Fabric
    kind: str

    async def server(self, role: Any, **settings: Any) -> StandInServer:
        dialect, fixed = KINDS[self.kind]
        made = SERVERS[dialect](
            role=role, proxies=(self.stage.discovery,), fabric=self.fabric, **(fixed | settings)
        )
        return await self.stage.bring(made)

    async def pair(self, **settings: Any) -> tuple[StandInServer, StandInServer]:
        return await self.server("prefill", **settings), await self.server("decode", **settings)


@pytest.fixture
async def stage(start_stage: StartStage, request: pytest.FixtureRequest) -> Stage:
    """A proxy; a test can give its settings as the fixture's parameter."""
    return await start_stage(**({"moriio_lease_s": 60.0} | getattr(request, "param", {})))


@pytest.fixture
async def fleet(request: pytest.FixtureRequest, stage: Stage) -> AsyncIterator[Fleet]:
    fleet = Fleet(stage, Fabric(), request.param)
    yield fleet
    assert not fleet.fabric.wrongs


every_kind = pytest.mark.parametrize("fleet", KINDS, indirect=True)
every_kind_that_fans_out = pytest.mark.parametrize(
    "fleet", [kind for kind in KINDS if not SERVERS[KINDS[kind][0]].forks], indirect=True
)


def only(*kinds: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fleet", kinds, indirect=True)


async def reference(body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """What one server alone answers."""
    [answer] = await references([body], path)
    return answer


async def references(bodies: list[dict[str, Any]], path: str = "completions") -> list[dict[str, Any]]:
    answers = []
    async with SERVERS["vllm-nixl"](role="both", fabric=Fabric()) as server, aiohttp.ClientSession() as http:
        for body in bodies:
            headers = {"X-Request-Id": "reference"}
            async with http.post(f"{server.address}/v1/{path}", json=body, headers=headers) as response:
                answers.append(await response.json())
    return answers


def transfers(server: StandInServer) -> list[str]:
    """What tells one attempt's leg from another's: a request id, or SGLang's room."""
    return [str(asked.body.get("bootstrap_room", asked.headers["X-Request-Id"])) for asked in server.asked]


@every_kind
@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_a_pair_answers_as_one_server_alone_does(fleet: Fleet, path: str, body: dict[str, Any]) -> None:
    """A1, rows 7, 9 of docs/sources.md#failures: n singles, one prompt counted, cached tokens of prefill."""
    await fleet.pair()
    for extra in ({}, {"n": 3}):
        await check_equal(fleet, body | extra, path)


@every_kind
@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_tokens_are_counted_by_model_streamed_or_not(
    fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    """By what the answer reports; a stream whose client has not asked for that has no event of it."""
    await fleet.pair()
    asked = body | {"n": 2}
    usage = (await fleet.stage.ask(asked, path))[1]["usage"]
    streamed = await fleet.stage.stream(asked, path)
    assert all(event["choices"] for event in streamed.events)
    for name, counted in (("prompt", usage["prompt_tokens"]), ("generation", usage["completion_tokens"])):
        metric = f'kvferry_proxy_{name}_tokens_total{{model_name="{body["model"]}"}}'
        assert fleet.stage.metric(metric) == 2 * counted > 0


@every_kind
async def test_an_engines_own_fields_are_no_clients(fleet: Fleet) -> None:
    """N6: they reached both servers as they were, `rid` n times the same."""
    servers = await fleet.pair()
    for path, body in (("completions", BODY | {"n": 2}), ("chat/completions", CHAT | {"max_tokens": 1})):
        for field in ("disagg_prefill_dp_rank", "rid", "vllm_xargs", "priority", "session_params"):
            status, answer = await fleet.stage.ask(body | {field: {"x": 1}}, path)
            assert (status, answer["error"]["param"]) == (400, field)
    assert not any(server.asked for server in servers)


@pytest.mark.parametrize("stage", [{"allow_fields": ("rid,session_params",)}], indirect=True)
@every_kind
async def test_an_operator_may_let_clients_send_more(fleet: Fleet) -> None:
    servers = await fleet.pair()
    status, answer = await fleet.stage.ask(BODY | {"session_params": {"id": "x"}})
    assert status == 200, answer
    assert all(asked.body["session_params"] == {"id": "x"} for server in servers for asked in server.asked)
    status, answer = await fleet.stage.ask(BODY | {"session_params": {"id": "x"}, "priority": 1})
    assert (status, answer["error"]["param"]) == (400, "priority")


async def check_equal(fleet: Fleet, asked: dict[str, Any], path: str) -> None:
    expected = await reference(asked, path)
    status, answer = await fleet.stage.ask(asked, path)
    assert status == 200, answer
    assert answer["choices"] == expected["choices"]
    streamed = await fleet.stage.stream({**asked, "stream_options": {"include_usage": True}}, path)
    assert streamed.error is None
    for choice in expected["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert streamed.text(choice["index"]) == text
    counts = {name: count for name, count in expected["usage"].items() if name.endswith("_tokens")}
    if fleet.kind.startswith("atom"):  # which adds times of its own, and says nothing of cached tokens
        assert streamed.events[-1]["usage"] == counts and answer["usage"].items() >= counts.items()
    else:
        # Only a SGLang decode server is told by its partner how much was cached there.
        cached = CACHED_AT_PREFILL if fleet.kind.startswith("vllm") else NOT_KNOWN_HERE
        told = counts | {"prompt_tokens_details": {"cached_tokens": cached}}
        assert answer["usage"] == streamed.events[-1]["usage"] == told
    assert [event for event in streamed.events if event.get("usage")] == streamed.events[-1:]


@every_kind
async def test_what_the_client_sees_is_the_proxys_and_the_engines_never_the_transfers(fleet: Fleet) -> None:
    """Ids are minted here. Members that nobody here knows pass as they came."""
    await fleet.pair()
    _, answer = await fleet.stage.ask({**BODY, "n": 2})
    streamed = await fleet.stage.stream({**BODY, "n": 2})
    assert answer["of_the_engine"] == {"kept": 1.50}
    assert len({(event["id"], event["created"]) for event in streamed.events}) == 1
    for told in (answer, *streamed.events):
        assert told["id"].startswith("cmpl-") and told["created"] > 1
        assert "kv_transfer_params" not in told


@every_kind
async def test_batched_prompts_are_answered_in_order(fleet: Fleet) -> None:
    """SGLang #26486, vLLM #38900: one transfer per prompt, and the indices of one batch."""
    await fleet.pair()
    body = {**BODY, "prompt": ["a b", "c", STOPS_AT_ONCE], "n": 2}
    expected = await reference(body)
    _, answer = await fleet.stage.ask(body)
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert answer["choices"] == expected["choices"]
    ends = 2 if fleet.kind.startswith("atom") else 0  # ATOM counts the end of sequence as a token
    assert answer["usage"]["total_tokens"] == expected["usage"]["total_tokens"] + ends
    streamed = await fleet.stage.stream(body)
    assert [streamed.text(index) for index in range(6)] == [choice["text"] for choice in expected["choices"]]


@every_kind
async def test_an_answer_that_ends_at_token_1_is_empty_and_strands_nothing(fleet: Fleet) -> None:
    """X29, row 8 (vllm #46008): the prefill hands over all the same, or its answer is the whole one."""
    await fleet.pair()
    body = {**BODY, "prompt": STOPS_AT_ONCE}
    _, answer = await fleet.stage.ask(body)
    streamed = await fleet.stage.stream({**body, "stream_options": {"include_usage": True}})
    assert [(each["text"], each["finish_reason"]) for each in answer["choices"]] == [("", "stop")]
    reasons = [choice["finish_reason"] for event in streamed.events for choice in event["choices"]]
    assert [reason for reason in reasons if reason] == ["stop"] and streamed.text() == ""
    # ATOM counts the end of sequence as a token.
    assert streamed.events[-1]["usage"]["completion_tokens"] == fleet.kind.startswith("atom")
    await fleet.stage.proxy.services.drops.settle()
    assert all(kept.read for key, kept in fleet.fabric.kept.items() if "first/" not in key)


@every_kind
async def test_one_token_is_one_token(fleet: Fleet) -> None:
    """R10, X26: no token less, and `max_completion_tokens` counts. One server serves it where one can."""
    prefill, decode = await fleet.pair()
    for limit in ("max_tokens", "max_completion_tokens"):
        _, answer = await fleet.stage.ask({"model": "stand-in", "prompt": "a b", limit: 1, "min_tokens": 1})
        assert answer["usage"]["completion_tokens"] == 1
    await fleet.stage.proxy.services.drops.settle()
    legs = [asked.leg for asked in (*prefill.asked, *decode.asked)]
    # ATOM's prefill server keeps what nobody fetches, so its decode server fetches it, unread.
    alone = fleet.kind.startswith("vllm")
    assert legs == (["alone"] * 2 if alone else ["prefill"] * 2 + ["decode"] * 2)


@every_kind
async def test_every_leg_has_a_rank_of_its_own_server(fleet: Fleet) -> None:
    """docs/sources.md#vllm: the toy proxy sends one rank to both. The servers check the range."""
    prefill = await fleet.server("prefill", dp_size=4)
    decode = await fleet.server("decode", dp_size=2)
    sixteen = {"prompt": [f"p{number}" for number in range(16)]} if prefill.forks else {"n": 16}
    await fleet.stage.ask({**BODY, **sixteen})
    ranks = [{asked.headers["X-data-parallel-rank"] for asked in each.asked} for each in (prefill, decode)]
    assert ranks[0] - {"0", "1"} and ranks[0] <= {"0", "1", "2", "3"}  # all sixteen below 2: one in 65,536
    assert ranks[1] <= {"0", "1"}


@only("atom", "atom-seed")
async def test_kv_is_read_from_the_rank_that_holds_it(fleet: Fleet) -> None:
    """I1: ATOM answers `dp_rank`. Another rank's memory holds other prompts' KV under the same block ids."""
    prefill = await fleet.server("prefill", dp_size=4)
    await fleet.server("decode", dp_size=2)
    for body in ({**BODY, "n": 8}, {**BODY, "prompt": ["a b", "c d", "e f"]}):
        _, answer = await fleet.stage.ask(body)
        assert answer["choices"] == (await reference(body))["choices"]
    assert len(prefill.asked) == 11


@only("atom-seed")
async def test_chat_that_takes_no_params_is_computed_where_it_is_decoded(fleet: Fleet) -> None:
    """An ATOM prefill server would keep that chat's KV for ever. What it costs is counted."""
    prefill, decode = await fleet.pair()
    _, answer = await fleet.stage.ask(CHAT, "chat/completions")
    assert answer["choices"] == (await reference(CHAT, "chat/completions"))["choices"]
    assert not prefill.asked and [asked.leg for asked in decode.asked] == ["alone"]
    assert fleet.stage.metric('kvferry_proxy_prompts_recomputed_total{dialect="atom"}') == 1


@every_kind
@pytest.mark.parametrize(("leg", "stream"), [("prefill", True), ("decode", False)])
async def test_a_lost_leg_means_another_attempt_with_fresh_ids(fleet: Fleet, leg: Any, stream: bool) -> None:
    """Rows 16 and 17 (sglang #9726, kthena #1423): the other leg is cancelled, and no id is used twice."""
    prefill, decode = await fleet.pair()
    (prefill if leg == "prefill" else decode).faults.append(Fault(leg, "status", status=500))
    expected = await reference(BODY)
    if stream:
        answered = (await fleet.stage.stream(BODY)).text()
    else:
        answered = (await fleet.stage.ask(BODY))[1]["choices"][0]["text"]
    assert answered == expected["choices"][0]["text"]
    assert fleet.stage.metric(f'kvferry_proxy_retries_total{{leg="{leg}"}}') == 1
    for server in (prefill, decode):
        ids = transfers(server)
        assert len(ids) == len(set(ids))
    await decode.until(lambda: not decode.running)


@only("sglang")
@pytest.mark.parametrize("stage", [{"breaker_failures": 1, "decode_policy": "session"}], indirect=True)
async def test_after_kv_that_was_not_read_the_retry_avoids_the_decode_server(fleet: Fleet) -> None:
    """Which the session would have it ask again. The prefill server is asked again: it is not to blame."""
    prefill, first = await fleet.pair()
    second = await fleet.server("decode")
    expected = (await reference(BODY))["choices"]
    for number in range(4):
        unread = Fault("prefill", "status", status=503, message=f"{KV_UNREAD}: the lease expired")
        prefill.faults.append(unread)
        async with fleet.stage.post(BODY, headers={"X-Session-Id": str(number)}) as response:
            assert (await response.json())["choices"] == expected
    assert (len(prefill.asked), len(first.asked), len(second.asked)) == (8, 4, 4)


@every_kind
async def test_a_verdict_on_the_request_ends_both_legs(fleet: Fleet) -> None:
    """Row 16 (sglang #30233): a prompt that the prefill server refuses must not go on at the other."""
    prefill, decode = await fleet.pair()
    prefill.faults.append(Fault("prefill", "status", status=422))
    status, answer = await fleet.stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (422, "as_told")
    await decode.until(lambda: not decode.running)
    assert fleet.stage.metric('kvferry_proxy_retries_total{leg="prefill"}') == 0


@every_kind
async def test_an_error_under_http_200_is_no_answer(fleet: Fleet) -> None:
    """Rows 5, 17 (smg #2382, kthena #984): finish_reason `error`, an error event, a stream of no events."""
    _, decode = await fleet.pair()
    kinds: tuple[Any, ...] = ("failure", "empty")
    for kind in kinds:
        decode.faults.append(Fault("decode", kind, after_events=0))
        streamed = await fleet.stage.stream(BODY)
        assert streamed.error is None and streamed.text(), kind
    decode.faults.append(Fault("decode", "error"))
    status, answer = await fleet.stage.ask(BODY)
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
    assert fleet.stage.metric('kvferry_proxy_retries_total{leg="decode"}') == 3


@every_kind
async def test_a_stream_that_breaks_off_ends_with_a_typed_error(fleet: Fleet) -> None:
    """I5: these engines cannot continue what another has begun."""
    _, decode = await fleet.pair()
    decode.interval_s = 0.02
    kinds: tuple[Any, ...] = ("cut", "no_done", "failure")
    for kind in kinds:
        decode.faults.append(Fault("decode", kind, after_events=2))
        streamed = await fleet.stage.stream(BODY)
        assert streamed.text() and streamed.error is not None, kind
        assert streamed.error["code"] == "stream_broken"


@only("vllm-nixl-pull", "vllm-moriio-write")
async def test_text_that_is_no_utf_8_is_never_passed_on(fleet: Fleet) -> None:
    """I5: no 200 that just ends, whether the client has something already or not."""
    _, decode = await fleet.pair()
    decode.interval_s = 0.02
    for after_events in (0, 2):
        decode.faults.append(Fault("decode", "latin_1", after_events=after_events))
        async with fleet.stage.post({**BODY, "stream": True}) as response:
            if not after_events:
                assert response.status == 502
                error = (await response.json())["error"]
            else:
                error = Streamed(response.status, response.headers, await response.read()).error
        assert error is not None and error["code"] == "bad_agent_answer"
    decode.faults.append(Fault("decode", "latin_1"))
    status, answer = await fleet.stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (502, "bad_agent_answer")


@only("vllm-nixl-pull")
@pytest.mark.parametrize(("said", "shown", "code"), [(422, 422, "agent_refused"), (500, 502, "agent_lost")])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_error_that_is_no_utf_8_is_an_error_all_the_same(
    fleet: Fleet, said: int, shown: int, code: str, stream: bool
) -> None:
    """What it says cannot be read; that it is one, its status tells."""
    prefill, _ = await fleet.pair()
    prefill.faults += [Fault("prefill", "status", status=said, encoding="latin-1")] * 9
    status, answer = await fleet.stage.ask({**BODY, "stream": stream})
    assert (status, answer["error"]["code"]) == (shown, code)


@every_kind
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_client_that_leaves_ends_both_legs(fleet: Fleet, leg: Any) -> None:
    """X7: whichever leg it is that hangs, no server goes on for nobody."""
    prefill, decode = await fleet.pair()
    hanging = prefill if leg == "prefill" else decode
    hanging.faults += [Fault(leg, "hang"), Fault(leg, "hang")]
    asking = asyncio.get_running_loop().create_task(fleet.stage.stream({**BODY, "n": 2}))
    legs = 1 if hanging.forks else 2
    await hanging.until(lambda: len([each for each in hanging.asked if each.leg == leg]) == legs)
    asking.cancel()
    await asyncio.wait([asking])
    await prefill.until(lambda: not prefill.running)
    await decode.until(lambda: not decode.running)
    await fleet.stage.proxy.services.drops.settle()


@pytest.mark.parametrize("stage", [{"max_connections": 2}, {"max_connections": 3}], indirect=True)
@only("sglang", "vllm-mooncake", "vllm-moriio-write")
async def test_legs_that_need_each_other_get_their_connections_together(fleet: Fleet) -> None:
    """I5: with all connections taken by decode legs, each would wait for a prefill leg that waits for one."""
    await fleet.pair()
    answers = await asyncio.gather(*(fleet.stage.ask({**BODY, "n": 2}) for _ in range(6)))
    assert [status for status, _ in answers] == [200] * 6


@only("vllm-nixl-pull", "sglang")
async def test_one_choice_may_stream_while_another_is_still_in_prefill(fleet: Fleet) -> None:
    """As with two real vLLM servers, of which the prefill side takes a few prompts at a time."""
    prefill, _ = await fleet.pair(stagger=asyncio.Event())
    async with fleet.stage.post({**BODY, "n": 3, "stream": True}) as response:
        assert response.status == 200, await response.text()
        first = await response.content.readuntil(b"\n\n")
        assert fleet.stage.metric('kvferry_proxy_requests_in_flight{phase="decode"}') == 1
        assert prefill.stagger is not None
        prefill.stagger.set()
        streamed = Streamed(200, response.headers, first + await response.read())
    assert streamed.error is None and all(streamed.text(index) for index in range(3))


@every_kind_that_fans_out
async def test_one_choice_that_fails_ends_them_all(fleet: Fleet) -> None:
    """An answer is whole or it is none; the other choices' legs are cancelled."""
    _, decode = await fleet.pair()
    decode.faults += [Fault("decode", "hang"), Fault("decode", "hang"), Fault("decode", "status", status=422)]
    status, _ = await fleet.stage.ask({**BODY, "n": 3})
    assert status == 422
    await decode.until(lambda: not decode.running)


@only("atom", "sglang")
async def test_what_cannot_be_answered_rightly_is_a_400_that_names_it(fleet: Fleet) -> None:
    """Row 10."""
    prefill, decode = await fleet.pair()
    fields: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 0}, {"best_of": 3}]
    for field in fields:
        status, answer = await fleet.stage.ask({**BODY, **field})
        assert status == 400 and answer["error"]["param"] in field
    assert not prefill.asked and not decode.asked


@only("vllm-nixl-pull", "vllm-moriio-write", "vllm-mooncake")
async def test_the_prompts_logprobs_are_computed_where_the_tokens_are_drawn(fleet: Fleet) -> None:
    """Row 10 (vllm #50792): KV that was pulled has no logits, so one decode server serves it alone."""
    prefill, decode = await fleet.pair()
    await fleet.stage.ask({**BODY, "prompt_logprobs": 1, "n": 2})
    assert [asked.leg for asked in decode.asked] == ["alone"] and not prefill.asked
    assert decode.asked[0].body == {**BODY, "prompt_logprobs": 1, "n": 2}


@only("vllm-nixl-pull")
async def test_a_prefill_that_hands_nothing_over_is_counted(fleet: Fleet) -> None:
    """docs/sources.md#vllm-nixl: the decode server computes the prompt, and the operator can see it."""
    prefill, decode = await fleet.pair()
    prefill.hands_over = False
    _, answer = await fleet.stage.ask(BODY)
    assert answer["choices"] == (await reference(BODY))["choices"]
    assert [asked.leg for asked in decode.asked] == ["alone"]
    assert fleet.stage.metric('kvferry_proxy_prompts_recomputed_total{dialect="vllm-nixl"}') == 1


@only("vllm-kvferry")
async def test_all_choices_of_a_prompt_come_from_one_transfer(fleet: Fleet) -> None:
    """I7: one prefill for one token, and one decode leg that draws all choices."""
    prefill, decode = await fleet.pair()
    for asked, prompts in ((BODY | {"n": 3}, 1), (BODY | {"n": 3, "prompt": ["a b", "c d"]}, 2)):
        prefill.asked.clear()
        decode.asked.clear()
        _, answer = await fleet.stage.ask(asked)
        assert answer["choices"] == (await reference(asked))["choices"]
        assert [each.body["n"] for each in prefill.asked] == [1] * prompts
        assert [each.body["n"] for each in decode.asked] == [3] * prompts
        ids = [each.body["kv_transfer_params"]["transfer_id"] for each in decode.asked]
        assert len(set(ids)) == prompts


@only("vllm-kvferry")
@pytest.mark.parametrize("stage", [{"keep_turns_s": 7.0, "prefix_pull_min_tokens": 64}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_is_kept_and_the_next_prefill_is_told_where(fleet: Fleet, stream: bool) -> None:
    prefill, decode = await fleet.pair()
    turn = {**BODY, "prompt": " ".join(f"word{index}" for index in range(100)), "stream": stream}
    for _ in range(2):
        async with fleet.stage.post(turn) as response:
            assert response.status == 200
            await response.read()
    assert [each.body["kv_transfer_params"]["keep_s"] for each in decode.asked] == [7.0, 7.0]
    first, second = [each.body["kv_transfer_params"] for each in prefill.asked]
    assert "prefix_source" not in first
    assert second["prefix_source"] == {
        "remote_engine_id": decode.incarnation, "remote_host": "127.0.0.1", "remote_port": decode.port,
        "remote_tp_size": 1, "remote_dp_rank": 0, "min_tokens": 64,
    }  # fmt: skip


@only("vllm-kvferry")
async def test_kv_that_no_decode_server_will_read_is_dropped(fleet: Fleet) -> None:
    """A decode leg that fails, or whose client leaves, before it has been answered; never one that was."""
    prefill, decode = await fleet.pair()
    assert isinstance(prefill, VllmKvferryServer)
    await fleet.stage.ask(BODY)
    assert not prefill.dropped
    decode.faults.append(Fault("decode", "status", status=422))
    status, _ = await fleet.stage.ask(BODY)
    await prefill.until(lambda: len(prefill.dropped) == 1)
    assert status == 422
    decode.faults.append(Fault("decode", "hang"))
    asking = asyncio.create_task(fleet.stage.ask(BODY))
    await decode.until(lambda: len(decode.asked) == 3)
    asking.cancel()
    await prefill.until(lambda: len(prefill.dropped) == 2)
    ids = [each.body["kv_transfer_params"]["transfer_id"] for each in decode.asked]
    assert prefill.dropped == ids[1:]
    await fleet.stage.proxy.services.drops.settle()
    assert fleet.stage.metric('kvferry_proxy_drops_total{outcome="delivered"}') == 2


@only("vllm-nixl-push")
async def test_a_push_is_concurrent_once_it_was_learned_and_until_a_failure(fleet: Fleet) -> None:
    """docs/sources.md#failures, row 4: what was learned of a server that fails is forgotten."""
    _, decode = await fleet.pair()

    def told() -> list[bool]:
        """Whether the decode legs were sent before the prefill had answered."""
        return ["remote_block_ids" not in asked.body["kv_transfer_params"] for asked in decode.asked]

    for _ in range(2):
        await fleet.stage.ask(BODY)
    assert told() == [False, True]
    decode.faults.append(Fault("decode", "status"))
    await fleet.stage.ask(BODY)
    assert told() == [False, True, True, False]


@only("vllm-nixl-push")
async def test_what_was_learned_in_an_attempt_that_failed_is_forgotten(fleet: Fleet) -> None:
    """The first leg to a pushing server is serial; its response says from where, and then it is lost."""
    prefill, decode = await fleet.pair()
    decode.faults.append(Fault("decode", "status"))
    status, _ = await fleet.stage.ask(BODY)
    assert status == 200 and len(prefill.asked) == 2
    assert ["remote_block_ids" in asked.body["kv_transfer_params"] for asked in decode.asked] == [True, True]


@only("vllm-mooncake")
async def test_a_restarted_prefill_server_is_looked_up_again(fleet: Fleet) -> None:
    """Row 4 (vllm #55471): the old engine id fails once, is forgotten, and the retry asks for the new one."""
    prefill: Any = (await fleet.pair())[0]
    for _ in range(2):
        await fleet.stage.ask(BODY)
    assert prefill.lookups == 1
    prefill.engine_id = "restarted"
    status, _ = await fleet.stage.ask(BODY)
    assert status == 200 and prefill.lookups == 2


LEASE_S = 1.2
"""Of the prefill servers' leases: nearly the shortest that there is. The proxy believes five sixths of it; a
decode leg that waits for longer is too late.
"""


async def test_late_reads_are_never_answers(start_stage: StartStage) -> None:
    """Row 3 (vllm #52234): HTTP 200 with another prompt's answer, whatever number the operator gave."""

    async def check_one(stream: bool) -> None:
        """Each retry has a fresh prefill. On a busy machine the first may be late too."""
        fleet = Fleet(await start_stage(nixl_lease_s=LEASE_S), Fabric(), "vllm-nixl-pull")
        prefill, decode = await fleet.pair(lease_s=LEASE_S)
        decode.hold_s = 1.1 * LEASE_S
        asking = asyncio.get_running_loop().create_task(
            fleet.stage.stream(BODY) if stream else fleet.stage.ask(BODY)
        )
        await decode.until(lambda: decode.asked)
        decode.hold_s = 0.0
        answered: Any = await asking
        text = answered.text() if stream else answered[1]["choices"][0]["text"]
        assert text == (await reference(BODY))["choices"][0]["text"]
        late = len(decode.asked) - 1
        assert len(prefill.asked) == late + 1 >= 2
        if not stream:
            assert fleet.fabric.expired == late
            assert fleet.stage.metric('kvferry_proxy_leases_judged_total{verdict="suspect"}') == late
        assert not fleet.fabric.wrongs

    async def check_many(nixl_lease_s: float | None, stream: bool) -> None:
        """Decode servers that stand still for up to two leases; each answer is right, or a typed 503."""
        fleet = Fleet(await start_stage(nixl_lease_s=nixl_lease_s), Fabric(), "vllm-nixl-pull")
        await check_late_reads(fleet, LEASE_S, trials=40, stream=stream)
        assert not fleet.fabric.wrongs

    unset, too_long, right = None, 30.0, LEASE_S
    await side_by_side(
        lambda case: case(),
        [
            *(partial(check_one, stream) for stream in (False, True)),
            *(
                partial(check_many, lease_s, stream)
                for lease_s, stream in [(unset, False), (unset, True), (too_long, False), (right, False)]
            ),
        ],
    )


@pytest.mark.full
@pytest.mark.timeout(300)
@only("vllm-nixl-pull")
@pytest.mark.parametrize("lease_s", [3.0, 6.0, 30.0])
@pytest.mark.parametrize(
    "stage",
    [
        {"total_timeout_s": 300.0, "first_byte_timeout_s": 200.0, "nixl_lease_s": flag}
        for flag in (None, 120.0, 3.0, 6.0, 30.0)
    ],
    indirect=True,
)
async def test_no_number_of_the_operators_makes_a_late_read_an_answer_at_length(
    fleet: Fleet, lease_s: float
) -> None:
    await check_late_reads(fleet, lease_s, trials=100, stream=False)


async def check_late_reads(fleet: Fleet, lease_s: float, *, trials: int, stream: bool) -> None:
    _, decode = await fleet.pair(lease_s=lease_s)
    decode.holds = [2 * lease_s * number / trials for number in range(trials)]
    bodies = [{**BODY, "prompt": f"prompt {number}"} for number in range(trials)]
    wanted = [answer["choices"][0]["text"] for answer in await references(bodies)]

    async def outcome(body: dict[str, Any]) -> str:
        url = f"{fleet.stage.proxy.url}/v1/completions"
        async with patient.post(url, json={**body, "stream": stream}) as response:
            if response.status == 503:
                return (await response.json())["error"]["code"]
            assert response.status == 200, await response.text()
            if stream:
                return Streamed(response.status, response.headers, await response.read()).text()
            return (await response.json())["choices"][0]["text"]

    timeout = aiohttp.ClientTimeout(total=10 * lease_s + 20)
    async with aiohttp.ClientSession(timeout=timeout) as patient, asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(body)) for body in bodies]
    answered = [task.result() for task in tasks]
    wrong = [one for one, right in zip(answered, wanted, strict=True) if one not in (right, "kv_unproven")]
    assert not wrong
    assert len(decode.asked) > 1.2 * trials, "reads were late"
    assert sum(one == right for one, right in zip(answered, wanted, strict=True)) > trials // 2


@only("vllm-nixl-pull")
@pytest.mark.parametrize("stage", [{"nixl_lease_s": 30.0}], indirect=True)
async def test_a_setting_that_the_servers_contradict_is_noticed(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = await fleet.pair(lease_s=LEASE_S)
    decode.holds = [1.2 * LEASE_S]
    _, answer = await fleet.stage.ask(BODY)
    assert answer["choices"] == (await reference(BODY))["choices"]
    assert fleet.stage.metric('kvferry_proxy_leases_judged_total{verdict="contradicted"}') == 1
    [said] = [each.message for each in caplog.records if "server's own lease is shorter" in each.message]
    assert prefill.address in said and "30 s" in said


@only("vllm-nixl-pull")
async def test_late_tokens_cost_one_reading_if_no_lease_has_expired(fleet: Fleet) -> None:
    """Requests that wait at the same time share it."""
    prefill, decode = await fleet.pair()
    decode.hold_s = SURE_S + 0.1
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(fleet.stage.ask(BODY)) for _ in range(8)]
    assert {task.result()[0] for task in asking} == {200}
    assert fleet.stage.metric('kvferry_proxy_leases_judged_total{verdict="proven"}') == 8
    # On a busy machine a reading may come too late for some, which are then tried again.
    assert prefill.counts_asked < 8 <= len(prefill.asked)


@only("vllm-nixl-pull")
@pytest.mark.parametrize("stage", [{"breaker_failures": 1, "retries": 1}], indirect=True)
async def test_late_tokens_are_not_passed_on_if_nobody_counts_leases(fleet: Fleet) -> None:
    """`--disable-log-stats`. Nobody is blamed: what comes in time is served as before."""
    prefill, decode = await fleet.pair()
    prefill.counts = False
    decode.hold_s = SURE_S + 0.1
    status, answer = await fleet.stage.ask(BODY)
    assert status == 503 and answer["error"]["code"] == "kv_unproven"
    assert prefill.address in answer["error"]["message"]
    decode.hold_s = 0.0
    status, answer = await fleet.stage.ask(BODY)
    assert status == 200 and answer["choices"] == (await reference(BODY))["choices"]


@only("vllm-nixl-pull")
async def test_a_prefill_server_that_was_restarted_proves_nothing(fleet: Fleet) -> None:
    """Its count is 0 again, or still."""
    prefill, decode = await fleet.pair()
    decode.holds = [SURE_S + 0.1]
    asking = asyncio.get_running_loop().create_task(fleet.stage.ask(BODY))
    await decode.until(lambda: decode.asked)
    prefill.started_at += 1.0
    _, answer = await asking
    assert answer["choices"] == (await reference(BODY))["choices"]
    assert len(prefill.asked) == 2


@only("vllm-moriio-read")
@pytest.mark.parametrize("stage", [{"moriio_lease_s": None}], indirect=True)
async def test_servers_that_say_nothing_of_their_leases_are_not_served_unasked(fleet: Fleet) -> None:
    prefill, decode = await fleet.pair()
    status, answer = await fleet.stage.ask(BODY)
    assert status == 503 and answer["error"]["code"] == "lease_unknown"
    assert "--moriio-lease-s" in answer["error"]["message"]
    assert not prefill.asked and not decode.asked


@only("vllm-moriio-read")
@pytest.mark.parametrize("stage", [{"moriio_lease_s": 1.0, "retries": 0}], indirect=True)
async def test_the_operators_number_vouches_but_proves_nothing(fleet: Fleet) -> None:
    """Where no counter says more, tokens that come after it are not passed on."""
    _, decode = await fleet.pair()
    decode.holds = [SURE_S + 0.1, 1.0]
    answers = await asyncio.gather(*(fleet.stage.ask(BODY) for _ in decode.holds))
    assert {status: answer.get("error", {}).get("code") for status, answer in answers} == {
        200: None,
        503: "kv_unproven",
    }
    assert fleet.stage.metric('kvferry_proxy_leases_judged_total{verdict="vouched"}') == 1


@only("vllm-nixl-pull", "vllm-moriio-read")
async def test_kv_that_nobody_will_read_is_fetched_for_one_token(fleet: Fleet) -> None:
    """Row 1 (vllm #50425): the client leaves when the decode server has hardly seen the leg."""
    _, decode = await fleet.pair()
    decode.faults.append(Fault("decode", "hang"))
    asking = asyncio.get_running_loop().create_task(fleet.stage.ask(BODY))
    await decode.until(lambda: decode.asked)
    asking.cancel()
    await asyncio.wait([asking])
    await decode.until(lambda: len(decode.asked) == 2)
    await fleet.stage.proxy.services.drops.settle()
    assert decode.asked[1].body["max_tokens"] == 1
    assert all(kept.read for kept in fleet.fabric.kept.values())


@only("vllm-nixl-pull", "vllm-moriio-read")
async def test_a_client_that_leaves_late_has_nothing_fetched_again(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its decode server has read the KV: another leg would double its load, and read after the lease."""
    monkeypatch.setattr(attempt, "ACCEPT_S", 0.05)
    _, decode = await fleet.pair()
    decode.faults.append(Fault("decode", "hang"))
    asking = asyncio.get_running_loop().create_task(fleet.stage.ask(BODY))
    await decode.until(lambda: decode.asked)
    await asyncio.sleep(2 * attempt.ACCEPT_S)
    asking.cancel()
    await asyncio.wait([asking])
    await decode.until(lambda: not decode.running)
    await fleet.stage.proxy.services.drops.settle()
    assert len(decode.asked) == 1


@every_kind
@pytest.mark.parametrize("stage", [{"breaker_failures": 1, "retries": 0}], indirect=True)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_busy_server_has_not_failed(fleet: Fleet, leg: Any, stream: bool) -> None:
    """F14: as SGLang answers while its queue is full."""
    servers = await fleet.pair()
    servers[leg == "decode"].faults.append(Fault(leg, "status", status=503, retry_after="7"))
    async with fleet.stage.post({**BODY, "stream": stream}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, "7")
        assert (await response.json())["error"]["code"] == "agent_busy"
    async with fleet.stage.http.get(f"{fleet.stage.proxy.url}/nodes") as response:
        assert {node["breaker"] for node in (await response.json())["nodes"]} == {"closed"}
    assert (await fleet.stage.ask(BODY))[0] == 200


@pytest.mark.parametrize("fleet", ["sglang"], indirect=True)
@pytest.mark.parametrize("stage", [{"breaker_failures": 1, "retries": 0}], indirect=True)
@pytest.mark.parametrize(
    ("status", "code", "state"), [(503, "agent_busy", "closed"), (500, "agent_lost", "open")]
)
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_busy_server_may_say_so_under_http_200(
    fleet: Fleet, leg: Any, status: int, code: str, state: str
) -> None:
    """F14: to a stream it answers with an event, whose code is what the status would be."""
    servers = await fleet.pair()
    told = servers[leg == "decode"]
    told.faults.append(Fault(leg, "failure", status=status, after_events=0))
    async with fleet.stage.post({**BODY, "stream": True}) as response:
        assert f'"code":"{code}"' in await response.text()
    async with fleet.stage.http.get(f"{fleet.stage.proxy.url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    assert [node["breaker"] for node in nodes if node["address"] == told.address] == [state]


@every_kind
@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_prefill_server_decode_servers_serve_alone(fleet: Fleet, stream: bool) -> None:
    """W2: where they can; SGLang's wait for a prefill server with whatever they are asked."""
    decode = await fleet.server("decode")
    dialect, _ = KINDS[fleet.kind]
    async with fleet.stage.http.get(f"{fleet.stage.proxy.url}/ready") as response:
        assert response.status == (503 if dialect == "sglang" else 200)
    if dialect == "sglang":
        status, answer = await fleet.stage.ask(BODY)
        assert (status, answer["error"]["code"]) == (503, "no_agent")
        return
    if stream:
        assert (await fleet.stage.stream(BODY)).error is None
    else:
        assert (await fleet.stage.ask(BODY))[0] == 200
    assert [asked.leg for asked in decode.asked] == ["alone"]
    assert fleet.stage.metric("kvferry_proxy_decode_only_requests_total") == 1


@only("vllm-nixl-pull")
@pytest.mark.parametrize("stage", [{"split_min_tokens": 50}], indirect=True)
async def test_a_short_prompt_goes_to_one_decode_server_alone(fleet: Fleet) -> None:
    prefill, decode = await fleet.pair()
    await fleet.stage.ask({**BODY, "n": 2})
    assert [asked.leg for asked in decode.asked] == ["alone"] and not prefill.asked

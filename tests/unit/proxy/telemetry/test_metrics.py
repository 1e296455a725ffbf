# SPDX-License-Identifier: Apache-2.0
"""What the proxy's metrics say of requests, by endpoint and model."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from kvferry.agent.api.metrics import AgentMetrics
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Capacity
from tests.helpers.waiting import until
from tests.standins.agents import Fault
from tests.unit.proxy.conftest import Stage, StartStage

MODEL = "stand-in"
APIS: dict[str, dict[str, Any]] = {
    "completions": {"prompt": "a b c", "max_tokens": 5},
    "chat/completions": {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5},
    "messages": {"messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5},
    "responses": {"input": "a b c", "max_output_tokens": 5},
}
every_api = pytest.mark.parametrize("api", APIS)
streamed = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def counted_tokens(stage: Stage, model: str = MODEL) -> tuple[float, float]:
    """The tokens of prompts and of answers that were counted for a model."""
    names = ("prompt", "generation")
    prompt, generated = (
        stage.metric(f'kvferry_proxy_{name}_tokens_total{{model_name="{model}"}}') for name in names
    )
    return prompt, generated


async def answered(stage: Stage, api: str, **fields: Any) -> str:
    """Ask for five tokens; the answer's body."""
    async with stage.post({"model": MODEL, **APIS[api], **fields}, api) as response:
        assert response.status == 200, await response.text()
        return (await response.read()).decode()


@streamed
@every_api
@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
async def test_tokens_are_counted_for_every_endpoint(
    stage: Stage, api: str, stream: bool, alone: bool
) -> None:
    await (stage.agent("both") if alone else stage.pair())
    await answered(stage, api, stream=stream)
    prompt, generated = counted_tokens(stage)
    assert prompt > 0 and generated == 5
    await answered(stage, api, stream=not stream)
    assert counted_tokens(stage) == (2 * prompt, 10), "the same, streamed or not"


@streamed
async def test_the_tokens_of_every_prompt_and_choice_are_counted(stage: Stage, stream: bool) -> None:
    await stage.pair()
    raw = await answered(stage, "completions", prompt=["a b", "c d e"], n=2, stream=stream)
    assert counted_tokens(stage)[1] == 20
    if not stream:
        usage = json.loads(raw)["usage"]
        assert counted_tokens(stage) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("api", ["completions", "chat/completions"])
async def test_a_client_that_does_not_ask_gets_no_usage_in_its_stream(stage: Stage, api: str) -> None:
    await stage.pair()
    assert "usage" not in await answered(stage, api, stream=True)
    asked = await answered(stage, api, stream=True, stream_options={"include_usage": True})
    assert asked.replace(" ", "").count('"usage":{') == 1


@streamed
@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_the_tokens_of_a_retried_request_are_counted_once(stage: Stage, leg: Any, stream: bool) -> None:
    for _ in range(2):
        await stage.pair()
    await answered(stage, "completions")
    once = counted_tokens(stage)
    assert once[1] == 5
    shared = [Fault(leg, "reset")]
    for agent in stage.agents:
        agent.faults = shared
    await answered(stage, "completions", stream=stream)
    assert stage.metric("kvferry_proxy_retries_total") == 1
    assert counted_tokens(stage) == (2 * once[0], 2 * once[1])


async def test_a_stream_that_its_client_leaves_counts_its_prompt_and_what_was_sent(stage: Stage) -> None:
    _, decode = await stage.pair(interval_s=0.05)
    await answered(stage, "completions")
    prompt, generated = counted_tokens(stage)
    body = {"model": MODEL, **APIS["completions"], "max_tokens": 1000, "stream": True}
    async with stage.post(body) as response:
        received = 0
        while received < 4:
            received += (await response.content.readuntil(b"\n\n")).count(b"data: ")
    await until(lambda: stage.metric('kvferry_proxy_requests_total{status="499"}'), 10)
    await decode.until(lambda: not decode.running)
    assert counted_tokens(stage)[0] == 2 * prompt
    assert 4 <= counted_tokens(stage)[1] - generated < 100


@streamed
@every_api
async def test_requests_are_counted_by_the_endpoint_that_was_asked(
    stage: Stage, api: str, stream: bool
) -> None:
    await stage.pair()
    await answered(stage, api, stream=stream)
    for other in APIS:
        line = f'kvferry_proxy_requests_total{{endpoint="{other}",model_name="{MODEL}",status="200"}}'
        assert stage.metric(line) == (other == api)


async def test_phases_queue_and_requests_in_flight_say_the_model(start_stage: StartStage) -> None:
    stage = await start_stage(queue_limit=5)
    agent = await stage.agent("both", max_running=1, interval_s=0.05)
    of_model = f'model_name="{MODEL}"'
    first = asyncio.ensure_future(answered(stage, "completions", stream=True, max_tokens=1000))
    await until(lambda: stage.metric(f'kvferry_proxy_requests_in_flight{{phase="decode",{of_model}}}'), 10)
    second = asyncio.ensure_future(stage.ask({"model": MODEL, **APIS["completions"]}))
    await until(lambda: stage.metric(f"kvferry_proxy_num_requests_waiting{{{of_model}}}"), 10)
    assert stage.metric(f'kvferry_proxy_requests_in_flight{{phase="route",{of_model}}}') == 1
    first.cancel()
    assert (await second)[0] == 200
    await agent.until(lambda: not agent.running)
    assert stage.metric(f"kvferry_proxy_num_requests_waiting{{{of_model}}}") == 0
    assert stage.metric(f"kvferry_proxy_queue_wait_seconds_count{{{of_model}}}") == 1
    for phase, count in {"route": 2, "decode_wait": 2, "decode": 1}.items():
        line = f'kvferry_proxy_phase_seconds_count{{phase="{phase}",{of_model}}}'
        assert stage.metric(line) == count, phase
    assert stage.metric('kvferry_proxy_phase_seconds_count{model_name=""}') == 0


async def test_objectives_of_a_request_do_not_count_as_the_fleets(start_stage: StartStage) -> None:
    stage = await start_stage(ttft_objective_s=0.0001, tpot_objective_s=1000.0)
    await stage.pair()
    headers = {"x-slo-ttft-ms": "60000", "X-SLO-TPOT-ms": "0.1"}
    body = {"model": MODEL, "stream": True, **APIS["completions"]}
    async with stage.post(body, headers=headers) as response:
        assert response.status == 200 and await response.read()
    missed = 'kvferry_proxy_missed_objectives_total{{objective="{}",model_name="{}"}}'
    assert [stage.metric(missed.format(each, MODEL)) for each in ("ttft", "tpot")] == [1, 0]


@pytest.mark.parametrize("header", ["x-slo-ttft-ms", "x-slo-tpot-ms"])
@pytest.mark.parametrize(
    "value", ["", "0", "-1", "nan", "inf", "1e3", "3600001", "0.01", "1_000", "1,5", "9" * 400]
)
async def test_an_objective_that_is_none_is_refused_by_name(stage: Stage, header: str, value: str) -> None:
    await stage.pair()
    body = {"model": MODEL, **APIS["completions"]}
    async with stage.post(body, headers={header: value}) as response:
        answer = await response.json()
    assert (response.status, answer["error"]["param"]) == (400, header)
    assert header in answer["error"]["message"] and len(answer["error"]["message"]) < 100


@pytest.mark.parametrize("alone", [False, True], ids=["pair", "alone"])
async def test_what_was_predicted_of_requests_is_compared_with_what_came(stage: Stage, alone: bool) -> None:
    capacity = Capacity(token_s=1e-4, step_s=1e-4, sequence_s=0.0, answers=1, answer_tokens=5)
    for role in ("both",) if alone else ("prefill", "decode"):
        await stage.agent(role, overrides={"capacity": capacity})
    await answered(stage, "completions", stream=True)
    for leg in ("prefill", "decode"):
        labels = f'{{leg="{leg}",model_name="{MODEL}"}}'
        assert stage.metric(f"kvferry_proxy_prediction_error_ratio_count{labels}") == 1
        assert 1 / 16 <= stage.metric(f"kvferry_proxy_prediction_error_ratio_sum{labels}") <= 16
    await answered(stage, "completions")
    whole = "kvferry_proxy_prediction_error_ratio_count"
    assert stage.metric(f'{whole}{{leg="prefill",model_name="{MODEL}"}}') == (1 if alone else 2)
    assert stage.metric(f'{whole}{{leg="decode",model_name="{MODEL}"}}') == 1, "no stream, no tokens"


@pytest.mark.parametrize("missed", ["none", "ttft", "tpot"])
@pytest.mark.parametrize("of_model", [False, True], ids=["fleet", "model"])
async def test_an_objective_may_be_any_time(start_stage: StartStage, missed: str, of_model: bool) -> None:
    """Not only a bound of a histogram: 3 s could not be alerted on."""
    limits = {"ttft": 7.3, "tpot": 0.33} | ({missed: 0.00013} if missed != "none" else {})
    if of_model:
        stage = await start_stage(model_objectives=(f"{MODEL}={limits['ttft']}/{limits['tpot']}",))
    else:
        stage = await start_stage(ttft_objective_s=limits["ttft"], tpot_objective_s=limits["tpot"])
    await stage.pair(interval_s=0.02)
    await answered(stage, "completions", stream=True)
    await answered(stage, "completions")
    for objective in ("ttft", "tpot"):
        line = f'kvferry_proxy_missed_objectives_total{{objective="{objective}",model_name="{MODEL}"}}'
        assert stage.metric(line) == (objective == missed)


async def test_requests_for_an_unknown_model_have_no_label(stage: Stage) -> None:
    await stage.pair()
    assert (await stage.ask({**APIS["completions"], "model": "unheard-of"}))[0] == 404
    assert stage.metric('kvferry_proxy_phase_seconds_count{phase="route",model_name=""}') == 1
    assert counted_tokens(stage, "") == (0, 0)
    assert "unheard-of" not in stage.proxy.services.metrics.exposition().decode()


def test_help_texts_are_in_the_words_of_the_field() -> None:
    text = (Metrics().exposition() + AgentMetrics(lambda: None).render()).decode()
    texts = [line for line in text.splitlines() if line.startswith("# HELP ")]
    assert not [line for line in texts if re.search(r"\b(legs|likewise|apart|knows|lent|of which)\b", line)]


def test_counters_have_no_second_series_of_when_they_were_created() -> None:
    assert b"_created" not in Metrics().exposition()
    assert b"_created" not in AgentMetrics(lambda: None).render()

# SPDX-License-Identifier: Apache-2.0
"""F14: a busy server's 503 is back-pressure, as a 429 is; errors name the circuit breakers that are open."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.standins.agents import Fault, Leg, StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 6, "seed": 7}
legs = pytest.mark.parametrize("leg", ["prefill", "decode"])
streamed = pytest.mark.parametrize("stream", [True, False])


async def stage_of(start_stage: StartStage, **settings: Any) -> Stage:
    """One on which each failure of an agent is to be seen."""
    return await start_stage(
        **({"breaker_failures": 1, "retries": 0, "decode_only_fallback": False} | settings)
    )


async def breakers(stage: Stage) -> list[str]:
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        return [node["breaker"] for node in (await response.json())["nodes"]]


async def ask(stage: Stage, stream: bool) -> tuple[int, str | None, dict[str, Any]]:
    """Status, Retry-After and error; of an error in a stream, its status is None."""
    async with stage.post({**BODY, "stream": stream}) as response:
        text, retry_after = await response.text(), response.headers.get("Retry-After")
        found = re.search(r'"code":"(\w+)"', text)
        return response.status, retry_after, {"code": found and found[1], "text": text}


@legs
@streamed
@pytest.mark.parametrize(
    ("bare", "retry_after", "told"),
    [(False, None, "1"), (False, "7", "7"), (True, "7", "7"), (True, "Wed, 21 Oct 2026 07:28:00 GMT", "1")],
)
async def test_a_busy_server_has_not_failed(
    start_stage: StartStage, leg: Leg, stream: bool, bare: bool, retry_after: str | None, told: str
) -> None:
    stage = await stage_of(start_stage)
    busy: StandInAgent = (await stage.pair())[leg == "decode"]
    for _ in range(3):
        busy.faults.append(Fault(leg, "status", status=503, bare=bare, retry_after=retry_after))
        status, header, error = await ask(stage, stream)
        assert error["code"] == "agent_busy" and "HTTP 503" in error["text"]
        if leg == "prefill" or not stream:
            assert (status, header) == (503, told)
    assert await breakers(stage) == ["closed", "closed"]
    assert (await ask(stage, stream))[0] == 200


@legs
@streamed
@pytest.mark.parametrize("status", [500, 502, 503, 504])
async def test_a_5xx_of_nobody_in_particular_is_a_failure(
    start_stage: StartStage, leg: Leg, stream: bool, status: int
) -> None:
    """As what is in front of a server answers for one that is gone."""
    stage = await stage_of(start_stage, breaker_pause_s=30.0)
    failing = (await stage.pair())[leg == "decode"]
    failing.faults.append(Fault(leg, "status", status=status, bare=True))
    assert (await ask(stage, stream))[2]["code"] == "agent_lost"
    assert "open" in await breakers(stage)


@streamed
async def test_a_busy_agent_s_request_is_served_by_another(start_stage: StartStage, stream: bool) -> None:
    stage = await stage_of(start_stage, retries=2)
    prefill, _ = await stage.pair()
    await stage.pair()
    prefill.faults.append(Fault("prefill", "status", status=503, retry_after="7"))
    for _ in range(2):
        assert (await ask(stage, stream))[0] == 200
    assert not prefill.faults and set(await breakers(stage)) == {"closed"}


@legs
@streamed
async def test_the_error_names_the_breaker_that_is_open(
    start_stage: StartStage, leg: Leg, stream: bool
) -> None:
    stage = await stage_of(start_stage, breaker_pause_s=4.0)
    failing = (await stage.pair())[leg == "decode"]
    failing.faults.append(Fault(leg, "status"))
    await ask(stage, stream)
    status, retry_after, error = await ask(stage, stream)
    assert (status, error["code"]) == (503, "no_agent")
    assert f"no {leg} agent is ready" in error["text"] and failing.address in error["text"]
    again = re.search(r"circuit breaker .* tried again in (\d\.\d) s", error["text"])
    assert again is not None and 3.0 < float(again[1]) <= 4.0 and retry_after == "4"


async def test_it_names_the_agent_by_its_name_and_counts_the_others(start_stage: StartStage) -> None:
    stage = await stage_of(start_stage, breaker_pause_s=20.0)
    await stage.agent("prefill")
    for number in range(2):
        failing = await stage.agent("decode", overrides={"name": f"decode-{number}"})
        failing.faults.append(Fault("decode", "status"))
        await stage.ask(BODY)
    text = (await ask(stage, False))[2]["text"]
    assert "circuit breaker of decode-0 (and 1 more) is open" in text

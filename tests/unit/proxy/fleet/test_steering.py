# SPDX-License-Identifier: Apache-2.0
"""Where requests go under load, on failure, and by policy: a real proxy and stand-in agents.

Every test ends with `Stage.assert_quiescent`: no slot is taken and nobody waits.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from kvferry.proxy.wire.registration import Capacity, WorkReport
from tests.helpers.waiting import until
from tests.standins.agents import Fault, StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
SLOW = {**BODY, "max_tokens": 40}


async def node(stage: Stage, agent: StandInAgent) -> dict[str, Any]:
    """What `/nodes` says of an agent."""
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    return next(each for each in nodes if each["incarnation"] == agent.incarnation)


async def command(stage: Stage, agent: StandInAgent, verb: str) -> dict[str, Any]:
    async with stage.http.post(f"{stage.proxy.url}/nodes/{agent.incarnation}/{verb}") as response:
        assert response.status == 200
        return await response.json()


def start_stream(stage: Stage, body: dict[str, Any]) -> asyncio.Task[Any]:
    return asyncio.get_running_loop().create_task(stage.stream(body))


async def until_waiting(stage: Stage, count: int) -> None:
    await until(lambda: stage.proxy.fleet.admission.waiting == count, 20)


async def test_slow_agents_mean_429_and_not_a_first_token_that_comes_ever_later(
    start_stage: StartStage,
) -> None:
    """Two run, two wait, the others are told to come back; the agent never has more than it can run."""
    stage = await start_stage(queue_limit=2)
    _, decode = await stage.pair(max_running=2, interval_s=0.02)
    running = [start_stream(stage, SLOW) for _ in range(4)]
    await until_waiting(stage, 2)
    for _ in range(6):
        async with stage.post({**BODY, "stream": True}) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["code"] == "overloaded"
    most = 0

    def watch() -> bool:
        nonlocal most
        most = max(most, decode.running)
        return all(task.done() for task in running)

    watching = asyncio.get_running_loop().create_task(decode.until(watch, timeout_s=10))
    for task in running:
        assert (await task).error is None
    watching.cancel()
    assert most == 2
    assert stage.metric('kvferry_proxy_rejections_total{reason="queue_full"}') == 6
    assert stage.metric("kvferry_proxy_queue_wait_seconds_count") == 2
    assert stage.metric("kvferry_proxy_num_requests_waiting") == 0


async def test_who_has_waited_for_the_whole_queue_timeout_gets_a_429(start_stage: StartStage) -> None:
    stage = await start_stage(queue_timeout_s=0.1)
    _, decode = await stage.pair(max_running=1)
    decode.faults.append(Fault("decode", "stall"))
    busy = start_stream(stage, SLOW)
    await decode.until(lambda: decode.running)
    status, answer = await stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (429, "overloaded")
    assert stage.metric('kvferry_proxy_rejections_total{reason="queue_timeout"}') == 1
    busy.cancel()
    await asyncio.wait([busy])


async def test_a_client_that_leaves_the_queue_is_not_served(stage: Stage) -> None:
    _, decode = await stage.pair(max_running=1, interval_s=0.02)
    busy = start_stream(stage, SLOW)
    await decode.until(lambda: decode.running)
    leaving = start_stream(stage, BODY)
    await until_waiting(stage, 1)
    leaving.cancel()
    await until_waiting(stage, 0)
    await busy
    assert len(decode.asked) == 1
    assert stage.metric('kvferry_proxy_requests_total{endpoint="completions",status="499"}') == 1


async def test_an_agent_that_joins_takes_over_from_the_queue(stage: Stage) -> None:
    _, decode = await stage.pair(max_running=1)
    decode.faults.append(Fault("decode", "stall"))
    busy = start_stream(stage, SLOW)
    await decode.until(lambda: decode.running)
    waiting = start_stream(stage, BODY)
    await until_waiting(stage, 1)
    joined = await stage.agent("decode", max_running=1)
    assert (await waiting).error is None
    assert len(joined.asked) == 1
    busy.cancel()
    await asyncio.wait([busy])


async def test_a_prefill_agent_is_free_again_while_its_requests_decode(stage: Stage) -> None:
    """Else one prefill agent could not feed several decode agents."""
    prefill = await stage.agent("prefill", max_running=1)
    decodes = [await stage.agent("decode", max_running=1, interval_s=0.02) for _ in range(3)]
    streams = [start_stream(stage, SLOW) for _ in decodes]
    for decode in decodes:
        await decode.until(lambda decode=decode: decode.running == 1)
    assert (await node(stage, prefill))["in_flight"] == 0
    for stream in streams:
        assert (await stream).error is None


async def test_an_operators_limit_counts_where_agents_report_none(start_stage: StartStage) -> None:
    stage = await start_stage(decode_limit=1, queue_limit=0)
    _, decode = await stage.pair(interval_s=0.02)
    busy = start_stream(stage, SLOW)
    await decode.until(lambda: decode.running)
    assert (await stage.ask(BODY))[0] == 429
    await busy


async def test_an_agent_that_keeps_failing_is_left_alone_until_a_probe_succeeds(
    start_stage: StartStage,
) -> None:
    """Closed → open after failures in a row; half open after the pause; closed by the probe."""
    stage = await start_stage(breaker_failures=3, breaker_pause_s=1.5)
    await stage.agent("prefill")
    failing, sound = [await stage.agent("decode") for _ in range(2)]
    failing.faults += [Fault("decode", "status")] * 3
    while failing.faults:
        assert (await stage.ask(BODY))[0] == 200, "retried elsewhere, unseen"
    told = await node(stage, failing)
    assert (told["state"], told["breaker"], told["not_paired"]) == ("tripped", "open", "its state is tripped")
    for _ in range(4):
        assert (await stage.ask(BODY))[0] == 200
    assert len(failing.asked) == 3 and len(sound.asked) >= 7
    async with asyncio.timeout(10):
        while (await node(stage, failing))["breaker"] != "closed":
            assert (await stage.ask(BODY))[0] == 200
            await asyncio.sleep(0.02)
    assert len(failing.asked) == 4, "the probe was enough"
    assert (await node(stage, failing))["not_paired"] is None


async def test_a_probe_that_fails_opens_the_breaker_again(start_stage: StartStage) -> None:
    stage = await start_stage(breaker_failures=1, breaker_pause_s=0.5, retries=0)
    prefill, decode = await stage.pair()
    decode.faults += [Fault("decode", "cut"), Fault("decode", "garbage")]
    for opened in range(2):
        assert (await stage.stream(SLOW)).error is not None
        assert (await node(stage, decode))["breaker"] == "open"
        status, answer = await stage.ask(BODY)
        assert (status, answer["error"]["code"]) == (503, "no_agent"), "no agent is bothered"
        assert len(prefill.asked) == opened + 1
        async with asyncio.timeout(20):
            while (await node(stage, decode))["state"] == "tripped":
                await asyncio.sleep(0.02)
    assert (await stage.stream(BODY)).error is None
    assert (await node(stage, decode))["breaker"] == "closed"


@pytest.mark.parametrize("passes", [True, False])
async def test_a_request_waits_for_the_outcome_of_a_trial(start_stage: StartStage, passes: bool) -> None:
    """When an agent dies, all come to the one that is left; its probe is no reason to refuse them."""
    stage = await start_stage(breaker_failures=1, breaker_pause_s=0.1, retries=0, decode_only_fallback=False)
    gate = asyncio.Event()
    gate.set()
    prefill = await stage.agent("prefill", prefill_gate=gate)
    await stage.agent("decode")
    prefill.faults.append(Fault("prefill", "status"))
    assert (await stage.ask(BODY))[0] == 502
    async with asyncio.timeout(20):
        while (await node(stage, prefill))["state"] == "tripped":
            await asyncio.sleep(0.01)
    gate.clear()
    if not passes:
        prefill.faults.append(Fault("prefill", "status"))
    probe = asyncio.ensure_future(stage.ask(BODY))
    await prefill.until(lambda: len(prefill.asked) == 2)
    assert (await node(stage, prefill))["state"] == "tripped"
    waiting = asyncio.ensure_future(stage.ask(BODY))
    await until_waiting(stage, 1)
    gate.set()
    assert (await probe)[0] == (200 if passes else 502)
    assert (await waiting)[0] == (200 if passes else 503)


async def test_what_clients_do_wrong_is_not_held_against_an_agent(start_stage: StartStage) -> None:
    stage = await start_stage(breaker_failures=1)
    prefill, decode = await stage.pair()
    prefill.faults.append(Fault("prefill", "status", status=400))
    assert (await stage.ask(BODY))[0] == 400
    decode.faults.append(Fault("decode", "stall"))
    leaving = start_stream(stage, BODY)
    await decode.until(lambda: decode.running)
    leaving.cancel()
    await decode.until(lambda: decode.aborted)
    for agent in (prefill, decode):
        assert (await node(stage, agent))["breaker"] == "closed"


async def test_retries_stop_when_their_budget_is_spent(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, _ = await stage.pair()
    monkeypatch.setattr(stage.proxy.services.exchanges.retry_budget, "_tokens", 0.0)
    prefill.faults.append(Fault("prefill", "reset"))
    assert (await stage.ask(BODY))[0] == 502
    assert len(prefill.asked) == 1
    assert stage.metric("kvferry_proxy_retries_denied_total") == 1


async def test_a_cordoned_agent_finishes_and_gets_nothing_new(stage: Stage) -> None:
    _, cordoned = await stage.pair(interval_s=0.02)
    other = await stage.agent("decode")
    streams = [start_stream(stage, SLOW) for _ in range(2)]
    await cordoned.until(lambda: cordoned.running)
    told = await command(stage, cordoned, "cordon")
    assert (told["state"], told["in_flight"]) == ("cordoned", 1)
    assert told["not_paired"] == "its state is cordoned"
    acks = cordoned.acks
    await cordoned.until(lambda: cordoned.acks > acks + 1)  # its pings say ready all the while
    for _ in range(4):
        assert (await stage.ask(BODY))[0] == 200
    for stream in streams:
        assert (await stream).error is None
    assert len(cordoned.asked) == 1 and len(other.asked) == 5
    assert (await node(stage, cordoned))["in_flight"] == 0
    assert (await command(stage, cordoned, "uncordon"))["state"] == "ready"
    for _ in range(2):
        await stage.ask(BODY)
    assert len(cordoned.asked) == 2


async def test_cordoning_the_last_agent_tells_those_who_wait_at_once(stage: Stage) -> None:
    """Long before its next ping."""
    _, decode = await stage.pair(max_running=1, interval_s=0.05, ping_interval_s=30.0)
    busy = start_stream(stage, SLOW)
    await decode.until(lambda: decode.running)
    waiting = asyncio.get_running_loop().create_task(stage.ask(BODY))
    await until_waiting(stage, 1)
    await command(stage, decode, "cordon")
    async with asyncio.timeout(10.0):
        status, answer = await waiting
    assert (status, answer["error"]["code"]) == (503, "no_agent")
    assert (await busy).error is None


async def test_nobody_can_be_cordoned_by_a_wrong_name(stage: Stage) -> None:
    async with stage.http.post(f"{stage.proxy.url}/nodes/http://10.0.0.1:1/cordon") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "not_found")


async def test_nodes_say_what_their_work_takes(stage: Stage) -> None:
    measured = Capacity(token_s=0.001, step_s=0.01, sequence_s=0.002, answers=2, answer_tokens=10)
    agent = await stage.agent("both", overrides={"capacity": measured, "prefill_chunk": 256})
    told = await node(stage, agent)
    assert told["prefill_chunk"] == 256
    assert told["work"] == {
        "token_s": 0.001, "step_s": 0.01, "sequence_s": 0.002, "answer_tokens": 5.0, "pull_s": 0.0,
        "prompt_step_s": None, "prompt_token_s": None, "prefill_share": 0.0, "decode_share": 0.0,
    }  # fmt: skip
    new = await stage.agent("both", overrides={"model": "other"})
    assert (await node(stage, new))["work"]["token_s"] is None


async def test_nodes_say_which_transfers_failed(stage: Stage) -> None:
    report = WorkReport(pulls=(2, 1), failures={"lease_gone": 3})
    agent = await stage.agent("decode", overrides={"work": report})
    told = await node(stage, agent)
    assert (told["pulls"], told["failed_pulls"]) == (3, {"lease_gone": 3})
    told = await node(stage, await stage.agent("decode", overrides={"work": None}))
    assert (told["pulls"], told["failed_pulls"]) == (0, {})


async def test_nodes_say_why_they_are_not_paired(stage: Stage) -> None:
    lonely = await stage.agent("prefill")
    assert (await node(stage, lonely))["not_paired"] == "no decode agent is ready"
    unlike = await stage.agent("decode", overrides={"layout": "other"})
    for agent in (lonely, unlike):
        assert (await node(stage, agent))["not_paired"] == "different KV layouts"
    await stage.agent("decode")
    assert (await node(stage, lonely))["not_paired"] is None
    assert (await node(stage, unlike))["not_paired"] == "different KV layouts"


async def test_a_session_stays_with_its_agents(start_stage: StartStage) -> None:
    stage = await start_stage(prefill_policy="session", decode_policy="session")
    for _ in range(3):
        await stage.pair()
    for _ in range(5):
        async with stage.post(BODY, headers={"X-Session-Id": "mine"}) as response:
            assert response.status == 200
    assert Counter(len(agent.asked) for agent in stage.agents) == {5: 2, 0: 4}


async def test_prompts_that_begin_alike_go_to_the_same_agents(start_stage: StartStage) -> None:
    stage = await start_stage(prefill_policy="prefix_aware", decode_policy="prefix_aware")
    for _ in range(3):
        await stage.pair()
    for index in range(5):
        assert (await stage.ask({**BODY, "prompt": f"{'long ' * 200}{index}"}))[0] == 200
    assert Counter(len(agent.asked) for agent in stage.agents) == {5: 2, 0: 4}


@pytest.mark.parametrize("policy", ["least_work"])
async def test_requests_go_round_a_busy_agent(start_stage: StartStage, policy: str) -> None:
    stage = await start_stage(decode_policy=policy)
    _, busy = await stage.pair()
    busy.faults.append(Fault("decode", "stall"))
    stuck = start_stream(stage, SLOW)
    await busy.until(lambda: busy.running)
    idle = await stage.agent("decode")
    for _ in range(6):
        await stage.ask(BODY)
    assert len(busy.asked) == 1 and len(idle.asked) == 6
    stuck.cancel()
    await asyncio.wait([stuck])


@pytest.mark.parametrize("stream", [True, False])
async def test_a_short_prompt_is_not_split(start_stage: StartStage, stream: bool) -> None:
    stage = await start_stage(split_min_tokens=50)
    prefill, decode = await stage.pair()
    for prompt in ("short", "long " * 100):
        body = {**BODY, "prompt": prompt}
        if stream:
            await stage.stream(body)
        else:
            await stage.ask(body)
    assert [asked.leg for asked in prefill.asked] == ["prefill"]
    assert [asked.leg for asked in decode.asked] == ["alone", "decode"]

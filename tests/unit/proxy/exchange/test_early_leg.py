# SPDX-License-Identifier: Apache-2.0
"""A decode leg that is sent together with its prefill leg: what the client sees, and that nothing is left.

As in `test_exchange`, every test ends with `Stage.assert_quiescent`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from kvferry.proxy.dialects.base import Prefilled
from kvferry.proxy.errors import AgentError, AgentLost, AgentRejected
from kvferry.proxy.exchange import attempt
from kvferry.proxy.exchange.attempt import EarlyLeg
from kvferry.proxy.exchange.relay import OpeningEvent
from kvferry.proxy.wire.registration import Incarnation
from tests.standins.agents import STOP_AT_ONCE, UNEVEN, Fault, StandInAgent
from tests.unit.proxy.conftest import FAST, Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 5, "seed": 7}
DECODE = Incarnation("decode")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", 0.2)


@pytest.fixture
async def stage(start_stage: StartStage) -> Stage:
    """A proxy that streams the pull of every prompt."""
    return await start_stage(stream_pull_min_tokens=1)


async def slow_pair(stage: Stage) -> tuple[StandInAgent, StandInAgent]:
    """A pair whose prefill waits for its gate."""
    prefill = await stage.agent("prefill", prefill_gate=asyncio.Event())
    return prefill, await stage.agent("decode")


def legs(agents: list[StandInAgent]) -> list[tuple[str, bool]]:
    """Every leg that was asked for, and whether it was to begin before the prefill's end."""
    asked = [leg for agent in agents for leg in agent.asked]
    return [(leg.leg, bool(leg.body.get("kv_transfer_params", {}).get("streamed"))) for leg in asked]


async def expected(body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
    """The answer of one agent with role `both`, asked directly."""
    async with (
        StandInAgent("both") as agent,
        aiohttp.ClientSession() as http,
        http.post(f"{agent.address}/v1/{path}", json=body) as response,
    ):
        return await response.json()  # type: ignore[no-any-return]


# The answer.


@pytest.mark.parametrize(
    ("prompt", "extra"), [("a b c", {}), ("a b c", {"n": 3}), (UNEVEN, {"n": 3, "max_tokens": 3})]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_the_answer_is_the_one_of_one_agent_alone(
    stage: Stage, path: str, prompt: str, extra: dict[str, Any]
) -> None:
    """I4; the uneven answer's third choice ends with token 1."""
    agents = list(await stage.pair())
    asked = {**BODY, **extra, "prompt": prompt, "return_token_ids": True}
    if path != "completions":
        asked["messages"] = [{"role": "user", "content": asked.pop("prompt")}]
    theirs = await expected(asked, path)
    status, answer = await stage.ask(asked, path)
    assert status == 200
    assert (answer["choices"], answer["usage"]) == (theirs["choices"], theirs["usage"])
    streamed = await stage.stream({**asked, "stream_options": {"include_usage": True}}, path)
    assert streamed.error is None and b": first" not in streamed.raw
    for choice in theirs["choices"]:
        text = choice["text"] if path == "completions" else choice["message"]["content"]
        assert streamed.text(choice["index"]) == text
    assert streamed.events[-1]["usage"] == theirs["usage"]
    reasons = [each["finish_reason"] for event in streamed.events for each in event["choices"]]
    assert sorted(filter(None, reasons)) == sorted(each["finish_reason"] for each in theirs["choices"])
    assert legs(agents).count(("decode", True)) == 2
    assert ("decode", False) not in legs(agents)


async def test_an_answer_that_ends_with_token_1_gives_the_decode_leg_up(stage: Stage) -> None:
    """X29: nothing may be emitted after the end of sequence."""
    _, decode = await stage.pair()
    body = {**BODY, "prompt": STOP_AT_ONCE, "n": 2}
    _, whole = await stage.ask(body)
    streamed = await stage.stream(body)
    assert [choice["finish_reason"] for choice in whole["choices"]] == ["stop"] * 2
    assert [choice["text"] for choice in whole["choices"]] == [streamed.text(index) for index in range(2)]
    await decode.until(lambda: decode.aborted == 2)


@pytest.mark.parametrize(("places", "streamed"), [(1, 0), (2, 1), (3, 1)])
async def test_a_decode_leg_takes_no_place_that_a_prefill_leg_needs(
    start_stage: StartStage, places: int, streamed: int
) -> None:
    """I5: with all places taken by decode legs, each would wait for a prefill leg that waits for a place."""
    stage = await start_stage(stream_pull_min_tokens=1, max_connections=places)
    await stage.pair()
    async with asyncio.timeout(FAST["first_byte_timeout_s"] / 2):
        answers = await asyncio.gather(*(stage.ask(BODY) for _ in range(6)))
    assert [status for status, _ in answers] == [200] * 6
    assert stage.metric("kvferry_proxy_streamed_pulls_total") >= streamed


async def test_the_decode_leg_is_there_before_the_prefill_has_ended(stage: Stage) -> None:
    """It has the transfer and the address; what only the prefill knows is not there."""
    prefill, decode = await slow_pair(stage)
    asking = asyncio.ensure_future(stage.stream(BODY))
    await decode.until(lambda: decode.asked)
    assert not prefill.leases
    [leg] = decode.asked
    assert leg.body["kv_transfer_params"] == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "streamed": True,
        "transfer_id": prefill.asked[0].body["kv_transfer_params"]["transfer_id"],
        "remote_engine_id": prefill.incarnation,
        "remote_host": "127.0.0.1",
        "remote_port": prefill.port,
        "remote_tp_size": 1,
        "remote_dp_rank": 0,
    }
    assert leg.body["seed"] == prefill.asked[0].body["seed"]
    assert prefill.prefill_gate is not None
    prefill.prefill_gate.set()
    assert (await asking).text() == (await expected(BODY))["choices"][0]["text"]
    assert stage.metric("kvferry_proxy_streamed_pulls_total") == 1


async def test_a_limit_of_one_token_is_one_leg(stage: Stage) -> None:
    agents = list(await stage.pair())
    await stage.ask({**BODY, "max_tokens": 1})
    assert legs(agents) == [("alone", False)]


async def test_a_short_prompt_takes_the_plain_way(start_stage: StartStage) -> None:
    """By default what fits one chunk is short. Of an agent that does not say what does, every prompt is."""
    stage = await start_stage()
    agents = list(await stage.pair())
    await stage.ask({**BODY, "prompt": [1] * 1000})
    agents += await stage.pair(model="other", overrides={"prefill_chunk": 64})
    for length in (64, 65):
        await stage.ask({**BODY, "model": "other", "prompt": [1] * length})
    assert [streamed for leg, streamed in legs(agents) if leg == "decode"] == [False, False, True]


async def test_an_agent_that_names_no_control_port_takes_the_plain_way(stage: Stage) -> None:
    agents = list(await stage.pair(overrides={"control": "tcp://host:any"}))
    await stage.ask(BODY)
    assert legs(agents) == [("prefill", False), ("decode", False)]


# Failure.


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", ["reset", "status"])
async def test_a_prefill_that_fails_ends_both_legs_and_the_retry_takes_the_plain_way(
    stage: Stage, kind: Any, stream: bool
) -> None:
    """With a fresh transfer; the client sees nothing of it, and the decode agent works for nobody."""
    prefill, decode = await slow_pair(stage)
    prefill.faults.append(Fault("prefill", kind))
    text = (await expected(BODY))["choices"][0]["text"]
    asking = asyncio.ensure_future(stage.stream(BODY) if stream else stage.ask(BODY))
    await decode.until(lambda: decode.asked)
    assert prefill.prefill_gate is not None
    prefill.prefill_gate.set()
    answer: Any = await asking
    assert (answer.text() if stream else answer[1]["choices"][0]["text"]) == text
    await decode.until(lambda: decode.aborted == 1)
    assert legs([prefill, decode]) == [
        ("prefill", False), ("prefill", False), ("decode", True), ("decode", False),
    ]  # fmt: skip
    ids = {leg.body["kv_transfer_params"]["transfer_id"] for leg in prefill.asked + decode.asked}
    assert len(ids) == 2
    assert stage.metric('kvferry_proxy_retries_total{leg="prefill"}') == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", ["reset", "status"])
async def test_a_decode_leg_that_fails_early_ends_the_prefill(stage: Stage, kind: Any, stream: bool) -> None:
    """Its KV is dropped, and another pair is asked before the client has anything."""
    prefill, decode = await slow_pair(stage)
    decode.faults.append(Fault("decode", kind))
    text = (await expected(BODY))["choices"][0]["text"]
    asking = asyncio.ensure_future(stage.stream(BODY) if stream else stage.ask(BODY))
    await prefill.until(lambda: prefill.aborted == 1)
    assert prefill.prefill_gate is not None
    prefill.prefill_gate.set()
    answer: Any = await asking
    assert (answer.text() if stream else answer[1]["choices"][0]["text"]) == text
    await stage.proxy.services.drops.settle()
    assert prefill.dropped == [prefill.asked[0].body["kv_transfer_params"]["transfer_id"]]
    assert stage.metric('kvferry_proxy_retries_total{leg="decode"}') == 1


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_leg_that_is_refused_ends_the_other_and_is_not_retried(stage: Stage, leg: Any) -> None:
    """X6: an agent's verdict on the request passes through."""
    prefill, decode = await slow_pair(stage)
    (prefill if leg == "prefill" else decode).faults.append(Fault(leg, "status", status=400))
    if leg == "prefill":
        assert prefill.prefill_gate is not None
        prefill.prefill_gate.set()
    status, answer = await stage.ask(BODY)
    assert (status, answer["error"]["code"]) == (400, "as_told")
    other = decode if leg == "prefill" else prefill
    await other.until(lambda: other.aborted == 1)
    assert len(prefill.asked) == len(decode.asked) == 1


BREAKS = [Fault("decode", "cut", after_events=count) for count in (0, 2)] + [Fault("decode", "empty")]


@pytest.mark.parametrize("fault", BREAKS, ids=["before token 2", "after token 3", "without an event"])
async def test_a_decode_leg_that_breaks_later_is_followed_by_another(stage: Stage, fault: Fault) -> None:
    """Token 1 is known by then: it is not repeated, and the next leg goes on from what the client has."""
    prefill, decode = await stage.pair()
    undisturbed = await stage.stream({**BODY, "n": 2})
    decode.faults.append(Fault(**{name: getattr(fault, name) for name in ("leg", "kind", "after_events")}))
    streamed = await stage.stream({**BODY, "n": 2})
    assert streamed.error is None
    assert [streamed.text(index) for index in range(2)] == [undisturbed.text(index) for index in range(2)]
    assert legs([prefill, decode])[-2:] == [("decode", True), ("decode", False)]


async def test_a_decode_leg_with_other_first_tokens_is_not_believed(stage: Stage) -> None:
    """I4: it computed the prompt itself, and drew another token than the client has. Others must go on."""
    _, decode = await stage.pair()
    undisturbed = await stage.stream({**BODY, "n": 2})
    decode.faults.append(Fault("decode", "other_tokens"))
    streamed = await stage.stream({**BODY, "n": 2})
    assert streamed.error is None
    assert [streamed.text(index) for index in range(2)] == [undisturbed.text(index) for index in range(2)]
    assert stage.metric('kvferry_proxy_retries_total{leg="decode"}') == 1


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_without_budget_a_lost_leg_is_a_typed_error(stage: Stage, stream: bool) -> None:
    """I5."""
    _, decode = await stage.pair()
    while stage.proxy.services.exchanges.retry_budget.try_withdraw():
        pass
    decode.faults.append(Fault("decode", "reset"))
    async with stage.post({**BODY, "stream": stream}) as response:
        if response.status == 200:  # token 1 was there first
            assert b'"code":"agent_lost"' in await response.read()
        else:
            assert (await response.json())["error"]["code"] == "agent_lost"


async def test_a_hung_decode_leg_ends_at_its_deadline(start_stage: StartStage) -> None:
    stage = await start_stage(
        stream_pull_min_tokens=1, first_byte_timeout_s=0.3, total_timeout_s=60.0, retries=0
    )
    _, decode = await stage.pair()
    decode.faults.append(Fault("decode", "hang"))
    streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "agent_timeout"
    await decode.until(lambda: decode.aborted == 1)


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_client_that_leaves_ends_both_legs(stage: Stage, stream: bool) -> None:
    """X7: both agents see it, and the prefill agent gets the drop."""
    prefill, decode = await slow_pair(stage)

    async def ask() -> None:
        async with stage.post({**BODY, "stream": stream}) as response:
            await response.read()

    asking = asyncio.ensure_future(ask())
    await decode.until(lambda: decode.asked)
    await prefill.until(lambda: prefill.asked)
    asking.cancel()
    await asyncio.wait([asking])
    await prefill.until(lambda: prefill.aborted == 1)
    await decode.until(lambda: decode.aborted == 1)
    await prefill.until(lambda: prefill.dropped)
    assert prefill.dropped == [prefill.asked[0].body["kv_transfer_params"]["transfer_id"]]


# Of two failures, which is the cause.


class ScriptedLeg:
    """One leg that a test lets answer or fail; `given_up` says how it was left."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.left: BaseException | str | None = "not yet"

    @asynccontextmanager
    async def post(self) -> AsyncIterator[Any]:
        answer = await self.answer
        try:
            yield answer
        except BaseException as error:
            self.left = error
            raise
        self.left = None

    async def prefill(self) -> Prefilled:
        return await self.answer  # type: ignore[no-any-return]


def refused(code: str) -> AgentRejected:
    return AgentRejected(409, AgentError(code=code))


async def beside(script: Callable[[ScriptedLeg, ScriptedLeg], None]) -> tuple[Any, ScriptedLeg]:
    """What comes of two legs of which a `script` decides the end; and the decode leg."""
    prefill, decode = ScriptedLeg(), ScriptedLeg()
    async with EarlyLeg(decode.post(), DECODE) as early:
        asyncio.get_running_loop().call_soon(script, prefill, decode)
        try:
            return await early.run_beside(prefill.prefill()), decode
        except (AgentLost, AgentRejected) as error:
            return error, decode


async def test_a_prefill_that_ends_in_time_outweighs_the_other_legs_failure() -> None:
    """An answer that ends with token 1 leaves nothing to pull, and a decode agent may say so first."""

    def script(prefill: ScriptedLeg, decode: ScriptedLeg) -> None:
        decode.answer.set_exception(AgentLost("nothing to pull", DECODE))
        asyncio.get_running_loop().call_later(0.05, prefill.answer.set_result, "whole")

    assert (await beside(script))[0] == "whole"


async def test_a_prefill_that_withdrew_its_lease_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has ended well, and its answer, which may be long, is the client's: the decode leg's 409 is not."""
    monkeypatch.setattr(attempt, "CAUSE_TIMEOUT_S", 0.01)

    def script(prefill: ScriptedLeg, decode: ScriptedLeg) -> None:
        decode.answer.set_exception(refused("transfer_withdrawn"))
        asyncio.get_running_loop().call_later(0.1, prefill.answer.set_result, "whole")

    assert (await beside(script))[0] == "whole"


async def test_a_dropped_prefill_is_told_by_who_dropped_it() -> None:
    """A decode agent without room gives its hold up: the client gets 429, not the prefill's 409."""
    no_room = AgentRejected(429, None)

    def script(prefill: ScriptedLeg, decode: ScriptedLeg) -> None:
        prefill.answer.set_exception(refused("transfer_dropped"))
        asyncio.get_running_loop().call_later(0.05, decode.answer.set_exception, no_room)

    assert (await beside(script))[0] is no_room


async def test_a_prefill_dropped_for_no_told_reason_is_asked_again() -> None:
    """The decode agent may compute what it could not read, but token 1 was to come from the prefill."""
    dropped = refused("transfer_dropped")
    lost, _ = await beside(lambda prefill, _: prefill.answer.set_exception(dropped))
    assert isinstance(lost, AgentLost) and lost.agent == DECODE


async def test_another_409_is_the_prefills_own() -> None:
    other = refused("duplicate_transfer")
    error, _ = await beside(lambda prefill, _: prefill.answer.set_exception(other))
    assert isinstance(error, AgentRejected) and error.status == 409


async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    """That says nothing about its agent: only an error of its own would count against it."""

    def script(prefill: ScriptedLeg, decode: ScriptedLeg) -> None:
        decode.answer.set_result("headers")
        error = AgentLost("the prefill agent died", Incarnation("prefill"))
        asyncio.get_running_loop().call_later(0.05, prefill.answer.set_exception, error)

    error, decode = await beside(script)
    assert isinstance(error, AgentLost) and error.agent == "prefill"
    assert isinstance(decode.left, asyncio.CancelledError)


async def test_an_error_while_an_answer_is_read_is_that_legs() -> None:
    decode = ScriptedLeg()
    decode.answer.set_result("headers")
    failure = AgentLost("broke off", DECODE)
    with pytest.raises(AgentLost):
        async with EarlyLeg(decode.post(), DECODE) as early, early.opened() as answer:
            assert answer == "headers"
            raise failure
    assert decode.left is failure


# The event that tells the first tokens.

EVENT = b": first 7,8\n\n"


@pytest.mark.parametrize("size", [1, 5, len(EVENT), len(EVENT) + 3, 100])
def test_the_first_event_is_taken_off_however_it_is_cut(size: int) -> None:
    raw = EVENT + b"data: x\n\n: first 7,8\n\n"
    first = OpeningEvent(EVENT, DECODE)
    assert b"".join(first.strip(raw[at : at + size]) for at in range(0, len(raw), size)) == raw[len(EVENT) :]


@pytest.mark.parametrize("raw", [b": first 7,9\n\n", b": first 7,8,9\n", b": first 7\n\n", b"data: x\n\n"])
def test_a_stream_that_begins_otherwise_is_refused_at_once(raw: bytes) -> None:
    with pytest.raises(AgentLost) as lost:
        OpeningEvent(EVENT, DECODE).strip(raw)
    assert lost.value.agent == DECODE


async def test_a_prefill_leg_names_who_decoded_the_beginning_and_a_retry_does_not(
    start_stage: StartStage,
) -> None:
    """Nothing that made an attempt fail can make the next one fail again."""
    stage = await start_stage(prefix_pull_min_tokens=64)
    prefill, decode = await stage.pair()
    turn = {**BODY, "prompt": " ".join(f"word{index}" for index in range(100))}
    for _ in range(2):
        status, _ = await stage.ask(turn)
        assert status == 200
    first, second = [
        leg.body["kv_transfer_params"]
        for leg in prefill.asked
        if leg.body["kv_transfer_params"]["do_remote_decode"]
    ]
    assert "prefix_source" not in first
    assert second["prefix_source"] == {
        "remote_engine_id": decode.incarnation,
        "remote_host": "127.0.0.1",
        "remote_port": decode.port,
        "remote_tp_size": 1,
        "min_tokens": 64,
    }
    assert stage.metric("kvferry_proxy_prefix_sources_total") == 1
    prefill.asked.clear()
    prefill.faults.append(Fault("prefill", "reset"))
    status, _ = await stage.ask(turn)
    assert status == 200
    named = ["prefix_source" in leg.body["kv_transfer_params"] for leg in prefill.asked]
    assert named == [True, False]

# SPDX-License-Identifier: Apache-2.0
"""A stream whose agent is lost in mid-answer goes on elsewhere, and the client cannot tell."""

from __future__ import annotations

from typing import Any

import pytest

from tests.standins.agents import HELD_BACK, UNEVEN, Fault, StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage, Streamed

BODY = {
    "model": "stand-in",
    "prompt": "a b c",
    "max_tokens": 6,
    "seed": 7,
    "stream_options": {"include_usage": True},
}
CHAT = {**BODY, "messages": [{"role": "user", "content": "hi"}]}
BREAKS = ["cut", "no_done", "failure"]


def by_choice(streamed: Streamed) -> dict[int, list[dict[str, Any]]]:
    choices: dict[int, list[dict[str, Any]]] = {}
    for event in streamed.events:
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
    return choices


def assert_same(ours: Streamed, theirs: Streamed) -> None:
    """Event by event: nothing repeated, lost or different, and usage counted once."""
    assert ours.error is None
    assert b": t " not in ours.raw
    assert by_choice(ours) == by_choice(theirs)
    assert ours.events[-1]["usage"] == theirs.events[-1]["usage"]
    assert len({(event["id"], event["created"]) for event in ours.events}) == 1


def break_once(agents: list[StandInAgent], fault: Fault) -> None:
    """Whichever agent is the first to be asked for the fault's leg breaks off."""
    shared = [fault]
    for agent in agents:
        agent.faults = shared


@pytest.mark.parametrize("pairs", [1, 2], ids=["on the same pair", "on another pair"])
@pytest.mark.parametrize("kind", BREAKS)
@pytest.mark.parametrize("extra", [{}, {"n": 3}, {"return_token_ids": True}], ids=str)
@pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])
async def test_a_broken_stream_goes_on_unseen(
    stage: Stage, path: str, body: dict[str, Any], extra: dict[str, Any], kind: Any, pairs: int
) -> None:
    """I4, docs/architecture.md#one-request."""
    for _ in range(pairs):
        await stage.pair()
    asked = body | extra
    undisturbed = await stage.stream(asked, path)
    break_once(stage.agents, Fault("decode", kind, after_events=3))
    assert_same(await stage.stream(asked, path), undisturbed)
    assert stage.metric("kvferry_proxy_migrations_total") == 1
    assert stage.metric(f'kvferry_proxy_requests_total{{endpoint="{path}",status="200"}}') == 2


@pytest.mark.parametrize("after_events", [0, 1, 2, 4, 7, 11, 12, 13, 15, 16])
@pytest.mark.parametrize("prompt", ["a b c", UNEVEN, HELD_BACK, f"{UNEVEN} {HELD_BACK}"])
async def test_a_stream_may_break_anywhere(stage: Stage, prompt: str, after_events: int) -> None:
    """Between choices, with choices that have ended, with text held back, with usage or `[DONE]` left."""
    await stage.pair()
    await stage.pair()
    body = {**BODY, "prompt": prompt, "n": 3}
    undisturbed = await stage.stream(body)
    break_once(stage.agents, Fault("decode", "cut", after_events=after_events))
    assert_same(await stage.stream(body), undisturbed)


async def test_the_next_decode_agent_is_told_what_the_client_has(stage: Stage) -> None:
    """Ids of every choice; a fresh transfer; the same seed; not the agent that was lost."""
    await stage.pair()
    await stage.pair()
    break_once(stage.agents, Fault("decode", "cut", after_events=4))
    body = {**BODY, "prompt": UNEVEN, "n": 2, "max_tokens": 4, "return_token_ids": True}
    streamed = await stage.stream(body)
    decodes = [agent for agent in stage.agents if agent.role == "decode"]
    assert [len(agent.asked) for agent in decodes] == [1, 1]
    legs = [agent.asked[0].body for agent in decodes]
    [before] = [leg for leg in legs if "resume" not in leg]
    [after] = [leg for leg in legs if "resume" in leg]
    ids = {index: [part["token_ids"][0] for part in parts] for index, parts in by_choice(streamed).items()}
    assert after["resume"] == [
        {"output_ids": ids[0][:3], "finish_reason": None},
        {"output_ids": ids[1][:3], "finish_reason": "stop"},
    ]
    assert before["seed"] == after["seed"] == 7
    transfers = [leg["kv_transfer_params"]["transfer_id"] for leg in (before, after)]
    assert len(set(transfers)) == 2


@pytest.mark.parametrize("after_events", range(5))
async def test_an_agent_alone_that_is_lost_is_followed_by_a_pair(stage: Stage, after_events: int) -> None:
    """Even between the first tokens of its choices."""
    for _ in range(3):
        await stage.agent("both")
    body = {**BODY, "n": 2}
    undisturbed = await stage.stream(body)
    break_once(stage.agents, Fault("alone", "cut", after_events=after_events))
    for _ in range(9):  # by then each agent has had its turn to serve alone
        assert_same(await stage.stream(body), undisturbed)
    assert not stage.agents[0].faults


async def test_a_second_break_is_survived_too(stage: Stage) -> None:
    await stage.pair()
    await stage.pair()
    undisturbed = await stage.stream(BODY)
    for agent in stage.agents:
        agent.faults.append(Fault("decode", "cut", after_events=1))
    assert_same(await stage.stream(BODY), undisturbed)
    assert stage.metric("kvferry_proxy_migrations_total") == 2


async def test_a_stream_that_breaks_everywhere_ends_typed(stage: Stage) -> None:
    """A request that kills its agents must not take the whole fleet down."""
    _, decode = await stage.pair()
    decode.faults += [Fault("decode", "cut", after_events=1) for _ in range(9)]
    streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "stream_broken"
    assert len(decode.asked) == 1 + stage.proxy.services.config.migrations == 4


async def test_without_budget_a_broken_stream_ends_typed(stage: Stage) -> None:
    _, decode = await stage.pair()
    while stage.proxy.services.exchanges.retry_budget.try_withdraw():
        pass
    decode.faults.append(Fault("decode", "cut"))
    streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "stream_broken"
    assert "broken" in streamed.error["message"]


@pytest.mark.parametrize("field", ["weights", "tokenizer", "layout"])
async def test_a_stream_goes_on_only_where_the_same_tokens_are_drawn(stage: Stage, field: str) -> None:
    """I4: in the midst of an upgrade the other agents would give another answer."""
    _, decode = await stage.pair()
    decode.faults.append(Fault("decode", "cut"))
    seen = await stage.stream({**BODY, "max_tokens": 1})
    assert seen.error is None
    others = [await stage.agent(role, overrides={field: "other"}) for role in ("prefill", "decode")]
    undisturbed = None
    for _ in range(2):  # one of the two begins on the old pair
        streamed = await stage.stream(BODY)
        undisturbed = undisturbed or streamed
        assert_same(streamed, undisturbed)
    assert all("resume" not in leg.body for agent in others for leg in agent.asked)
    assert stage.metric("kvferry_proxy_migrations_total") == 1


async def test_an_error_of_the_request_itself_is_no_reason_to_go_on(start_stage: StartStage) -> None:
    stage = await start_stage()
    _, decode = await stage.pair()
    decode.faults.append(Fault("decode", "error"))
    streamed = await stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "gone"
    assert len(decode.asked) == 1


async def test_a_whole_answer_that_breaks_is_asked_for_again(stage: Stage) -> None:
    _, decode = await stage.pair()
    expected = (await stage.ask({**BODY, "stream_options": None}))[1]
    decode.faults.append(Fault("decode", "reset"))
    status, answer = await stage.ask({**BODY, "stream_options": None})
    assert status == 200
    assert (answer["choices"], answer["usage"]) == (expected["choices"], expected["usage"])

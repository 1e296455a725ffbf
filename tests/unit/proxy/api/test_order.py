# SPDX-License-Identifier: Apache-2.0
"""What a client's headers, fields and API key say of when its request is served, and how long it is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy.api.auth import ANONYMOUS, ApiKeys, BadKeyFile
from kvferry.proxy.fleet.fleet import MEASURE_S
from kvferry.proxy.request import MAX_PRIORITY, MIN_PRIORITY
from kvferry.proxy.wire.registration import Capacity
from tests.helpers.waiting import until
from tests.standins.agents import StandInAgent
from tests.standins.engines import Fabric, VllmKvferryServer
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": [1, 2, 3], "max_tokens": 3}
PLAIN, URGENT, BATCH = "plain-key-0123456789", "urgent-key-0123456789", "batch-key-0123456789"
NONE = "none-kept-key-0123456789"
LONG_S = 60.0
"""How long an answer takes that others wait for."""
KEYS = f"{PLAIN}\n{URGENT} priority=-5 requests=100/s\n{BATCH} priority=7\n"
MEASURED = Capacity(token_s=1.0, step_s=1e-4, sequence_s=0.0, answers=1, answer_tokens=5)
"""The prompt above takes 3 s, as predicted."""


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return path


async def ask(stage: Stage, headers: dict[str, str], **fields: Any) -> tuple[int, dict[str, Any], str | None]:
    async with stage.post(BODY | fields, headers=headers) as response:
        return response.status, await response.json(), response.headers.get("Retry-After")


async def waiting_priorities(stage: Stage, agent: StandInAgent, asked: list[dict[str, Any]]) -> list[int]:
    """Have requests wait behind one that runs; returns their priorities and leaves."""
    admission = stage.proxy.fleet.admission
    await agent.until(lambda: agent.running)
    tasks = []
    for at, each in enumerate(asked):
        tasks.append(asyncio.ensure_future(ask(stage, each["headers"], **each.get("body", {}))))
        await until(lambda at=at: admission.waiting == at + 1, 10)  # type: ignore[misc]
    found = [each.priority for each in admission.waiting_for("stand-in")]
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    return sorted(found)


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


async def vllm_servers(stage: Stage) -> list[VllmKvferryServer]:
    """A prefill and a decode server, ready."""
    fabric, roles = Fabric(), ("prefill", "decode")
    made = [VllmKvferryServer(role=role, proxies=(stage.discovery,), fabric=fabric) for role in roles]
    return [await stage.bring(server) for server in made]


async def test_a_priority_goes_as_far_as_the_key_allows(start_stage: StartStage, key_file: Path) -> None:
    stage = await start_stage(api_keys=key_file)
    _, decode = await stage.pair(max_running=1)
    decode.interval_s = LONG_S
    busy = asyncio.ensure_future(ask(stage, key(PLAIN)))
    asked = [{"headers": key(name) | {"x-priority": "-9"}} for name in (PLAIN, URGENT, BATCH)]
    asked += [{"headers": key(BATCH)}, {"headers": key(PLAIN) | {"X-Priority": "3"}}]
    assert await waiting_priorities(stage, decode, asked) == sorted([0, -5, 7, 7, 3])
    busy.cancel()
    await asyncio.wait([busy])


async def test_a_field_that_reaches_servers_has_what_the_key_allows(
    start_stage: StartStage, key_file: Path
) -> None:
    stage = await start_stage(api_keys=key_file, allow_fields=("priority",))
    servers = await vllm_servers(stage)
    for name, field, header, reaches in (
        (PLAIN, -9, {}, 0),
        (URGENT, -4, {}, -4),
        (URGENT, -4, {"x-priority": "2"}, 2),
        (BATCH, 0, {}, 7),
        (BATCH, None, {"x-priority": "8"}, None),
    ):
        assert (await ask(stage, key(name) | header, prompt="a b", priority=field))[0] == 200
        assert [server.asked[-1].body["priority"] for server in servers] == [reaches] * 2


async def test_a_turn_is_kept_for_as_long_as_the_client_says_and_its_key_allows(
    start_stage: StartStage, tmp_path: Path
) -> None:
    path = tmp_path / "keys"
    path.write_text(f"{PLAIN}\n{URGENT} cache-ttl=600\n{BATCH} cache-ttl=10\n{NONE} cache-ttl=0\n")
    stage = await start_stage(api_keys=path, keep_turns_s=30.0)
    _, decode = await vllm_servers(stage)
    clients: list[str | None] = []
    for name, field, header, kept in (
        (PLAIN, None, {}, 30.0),
        (PLAIN, 12.5, {}, 12.5),
        (PLAIN, 30, {"x-cache-ttl-s": "0"}, None),
        (URGENT, 1, {"X-Cache-TTL-s": "600"}, 600.0),
        (URGENT, None, {}, 30.0),
        (BATCH, None, {}, 10.0),
        (NONE, None, {}, None),
    ):
        assert (await ask(stage, key(name) | header, prompt="a b", cache_ttl_s=field))[0] == 200
        params = decode.asked[-1].body["kv_transfer_params"]
        assert params.get("keep_s") == kept
        clients.append(params.get("keep_for"))
        assert "cache_ttl_s" not in decode.asked[-1].body
    plain, again, _, urgent, also_urgent, batch, _ = clients
    assert plain == again and urgent == also_urgent and len({plain, urgent, batch}) == 3
    for name, asked, most in ((PLAIN, 31, "30"), (URGENT, 601, "600"), (NONE, 1, "0")):
        status, answer, _ = await ask(stage, key(name), cache_ttl_s=asked)
        assert (status, answer["error"]["param"]) == (400, "cache_ttl_s")
        assert f"may be {most} at most" in answer["error"]["message"]


async def test_a_turn_that_nobody_would_keep_is_refused(start_stage: StartStage) -> None:
    """By a proxy without --keep-turns-s, and for servers that keep none. 0 is what they do anyway."""
    for settings in ({}, {"keep_turns_s": 30.0}):
        stage = await start_stage(**settings)
        await stage.pair()
        status, answer, _ = await ask(stage, {}, cache_ttl_s=5)
        assert (status, answer["error"]["param"]) == (400, "cache_ttl_s")
        assert "is not supported" in answer["error"]["message"]
        assert (await ask(stage, {"x-cache-ttl-s": "0"}))[0] == 200


async def test_our_agents_have_no_priorities(stage: Stage) -> None:
    for agent in await stage.pair():
        assert (await ask(stage, {}, priority=-3))[0] == 200
        assert "priority" not in agent.asked[-1].body


async def test_without_keys_a_header_may_say_any_priority(stage: Stage) -> None:
    _, decode = await stage.pair(max_running=1)
    decode.interval_s = LONG_S
    busy = asyncio.ensure_future(ask(stage, {}))
    values = [MIN_PRIORITY, -1, 0, MAX_PRIORITY]
    asked = [{"headers": {"x-priority": str(value)}} for value in values]
    assert await waiting_priorities(stage, decode, asked) == values
    busy.cancel()
    await asyncio.wait([busy])


@pytest.mark.parametrize(
    ("header", "value"),
    [
        *[("x-priority", each) for each in ("", "x", "1.0", "+1", "1e3", "nan", "0x1", "-", "2147483648")],
        *[("x-priority", each) for each in ("-2147483649", "9" * 5000, "1_0", "1 2")],
        *[("x-slo-reject", each) for each in ("", "1", "yes", "TRUE", "x" * 5000)],
        *[("x-cache-ttl-s", each) for each in ("", "-1", "3601", "1e3", "nan", "9" * 5000)],
    ],
)  # fmt: skip
async def test_nonsense_is_refused_by_name(stage: Stage, header: str, value: str) -> None:
    status, answer, _ = await ask(stage, {header: value})
    assert (status, answer["error"]["param"]) == (400, header)
    assert len(answer["error"]["message"]) < 100


@pytest.mark.parametrize("value", [1.5, "1", True, 2**31, -(2**63), [1], {}])
async def test_a_field_that_is_no_priority_is_refused_by_name(start_stage: StartStage, value: object) -> None:
    stage = await start_stage(allow_fields=("priority",))
    status, answer, _ = await ask(stage, {}, priority=value)
    assert (status, answer["error"]["param"]) == (400, "priority")


@pytest.mark.parametrize("value", ["5", -1, 3600.5, True, [1], {}])
async def test_a_field_that_is_no_time_to_live_is_refused_by_name(stage: Stage, value: object) -> None:
    status, answer, _ = await ask(stage, {}, cache_ttl_s=value)
    assert (status, answer["error"]["param"]) == (400, "cache_ttl_s")


@pytest.mark.parametrize(
    "words",
    [
        *("priority", "priority=", "priority=x", "priority=1 priority=1", "priority=9999999999"),
        *("cache-ttl", "cache-ttl=", "cache-ttl=-1", "cache-ttl=3601", "cache-ttl=1 cache-ttl=1"),
    ],
)
def test_a_key_files_line_with_a_mistake_is_refused(tmp_path: Path, words: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# keys\n{PLAIN} {words}\n")
    with pytest.raises(BadKeyFile, match="line 2") as caught:
        ApiKeys.read(path)
    assert PLAIN not in str(caught.value)


def test_keys_have_limits_of_their_own(key_file: Path) -> None:
    keys = ApiKeys.read(key_file)
    assert [keys.client(f"Bearer {name}", "GET").min_priority for name in (PLAIN, URGENT, BATCH)] == [
        0,
        -5,
        7,
    ]
    assert ANONYMOUS.min_priority == MIN_PRIORITY


async def test_what_is_predicted_to_be_late_is_rejected_if_the_client_wants_that(stage: Stage) -> None:
    for role in ("prefill", "decode"):
        await stage.agent(role, overrides={"capacity": MEASURED})  # type: ignore[arg-type]
    late = {"x-slo-reject": "true", "x-slo-ttft-ms": "1100"}
    status, answer, retry_after = await ask(stage, late)
    assert (status, answer["error"]["code"], retry_after) == (429, "overloaded", "2")
    assert stage.metric('kvferry_proxy_rejections_total{reason="objective"}') == 1
    assert (await ask(stage, {"x-slo-reject": "true"}))[0] == 429, "the proxy's own objective"
    for headers in (
        {"x-slo-ttft-ms": "1000"},
        {"x-slo-ttft-ms": "1000", "x-slo-reject": "false"},
        {"x-slo-ttft-ms": "3600000", "x-slo-reject": "true"},
    ):
        assert (await ask(stage, headers))[0] == 200
    stage.proxy.fleet._measured_at -= MEASURE_S
    assert (await ask(stage, late))[0] == 200, "an idle agent is measured again, as it may have become faster"
    assert (await ask(stage, late))[0] == 429
    await stage.assert_quiescent()


async def test_policies_that_do_not_compare_predictions_reject_by_none(start_stage: StartStage) -> None:
    stage = await start_stage(prefill_policy="round_robin")
    for role in ("prefill", "decode"):
        await stage.agent(role, overrides={"capacity": MEASURED})  # type: ignore[arg-type]
    assert (await ask(stage, {"x-slo-reject": "true", "x-slo-ttft-ms": "1100"}))[0] == 200


async def test_what_nobody_can_predict_is_served(stage: Stage) -> None:
    await stage.pair()
    assert (await ask(stage, {"x-slo-reject": "true", "x-slo-ttft-ms": "100"}))[0] == 200


async def test_no_more_than_the_objective_is_waited_for_a_slot(stage: Stage) -> None:
    _, decode = await stage.pair(max_running=1)
    decode.interval_s = LONG_S
    busy = asyncio.ensure_future(ask(stage, {}))
    await decode.until(lambda: decode.running)
    status, answer, retry_after = await ask(stage, {"x-slo-reject": "true", "x-slo-ttft-ms": "50"})
    assert (status, answer["error"]["code"]) == (429, "overloaded") and int(retry_after or 0) >= 1
    assert not stage.proxy.fleet.admission.waiting
    busy.cancel()
    await asyncio.wait([busy])

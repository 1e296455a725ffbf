# SPDX-License-Identifier: Apache-2.0
"""N3: requests of different API keys share no prefix, at agents or in routing, unless the operator says so.

Whatever legs a request has, each carries one salt, which follows from the key and from the client's own one;
but decode legs whose KV may be gone when it is read have one each.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy.request import MAX_CACHE_SALT_CHARS
from tests.standins.agents import Fault
from tests.standins.engines import SERVERS, Fabric
from tests.unit.proxy.conftest import Stage, StartStage
from tests.unit.proxy.exchange.test_other_engines import KINDS

A, B = "the-key-of-client-a", "the-key-of-client-b"
PROMPT = "One prompt for everybody. " * 30
COMPLETION = {"model": "stand-in", "prompt": PROMPT, "max_tokens": 6}
MESSAGES = [{"role": "user", "content": PROMPT}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "completions": COMPLETION,
    "chat/completions": {"model": "stand-in", "messages": MESSAGES, "max_tokens": 6},
    "messages": {"model": "stand-in", "messages": MESSAGES, "max_tokens": 6},
    "responses": {"model": "stand-in", "input": PROMPT, "max_output_tokens": 6},
}
LEASED = ("vllm-nixl-pull", "vllm-moriio-read")
SALTS: tuple[Any, ...] = (None, "a", "b", "ab", A, B, "\0", "\N{GRINNING FACE}", "x" * MAX_CACHE_SALT_CHARS)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"{A}\n{B} admin\n")
    return path


async def ask(stage: Stage, key: str, path: str = "completions", **fields: Any) -> int:
    headers = {"X-Api-Key": key} if path == "messages" else {"Authorization": f"Bearer {key}"}
    async with stage.post(ENDPOINTS[path] | fields, path, headers=headers) as response:
        await response.read()
        return int(response.status)


def salts(stage: Stage, *legs: str) -> set[Any]:
    """Those of all legs, which the agents then forget; the legs must be these."""
    asked = [each for agent in stage.agents for each in agent.asked]
    assert not legs or {each.leg for each in asked} == {*legs}
    for agent in stage.agents:
        agent.asked.clear()
    assert not any(key in json.dumps([each.body, dict(each.headers)]) for each in asked for key in (A, B))
    return {each.body.get("cache_salt") for each in asked}


def leased_salts(stage: Stage) -> list[str]:
    """Those of decode legs whose KV may be gone when it is read, which are then forgotten."""
    found = []
    for agent in stage.agents:
        legs = [each for each in agent.asked if each.leg == "decode"]
        found += [each.body["cache_salt"] for each in legs]
        agent.asked = [each for each in agent.asked if each not in legs]
    return found


async def salt_of(stage: Stage, key: str, path: str = "completions", **fields: Any) -> Any:
    assert await ask(stage, key, path, **fields) == 200
    (salt,) = salts(stage)
    return salt


async def derived_salt(stage: Stage, key: str, **fields: Any) -> str:
    salt = await salt_of(stage, key, **fields)
    assert isinstance(salt, str) and salt != fields.get("cache_salt")
    return salt


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ENDPOINTS)
async def test_each_key_has_a_salt_at_every_endpoint(
    start_stage: StartStage, key_file: Path, path: str, stream: bool
) -> None:
    stage = await start_stage(api_keys=key_file)
    await stage.pair()
    one, other = [await salt_of(stage, key, path, stream=stream) for key in (A, B)]
    assert None not in (one, other) and one != other
    assert one == await salt_of(stage, A), "an endpoint is no other client"


async def test_a_salt_is_the_same_in_every_proxy_and_after_a_restart(
    start_stage: StartStage, key_file: Path, tmp_path: Path
) -> None:
    """Whatever else the file says, and in which order."""
    (tmp_path / "others").write_text(f"# {A}\nanother-key-0123456789\n{B} tokens=9000/s\n{A} admin\n")
    found = []
    for path in (key_file, tmp_path / "others"):
        stage = await start_stage(api_keys=path)
        await stage.pair()
        found.append([await salt_of(stage, key, cache_salt=own) for key in (A, B) for own in (None, "a")])
    assert found[0] == found[1] and len(set(found[0])) == 4


async def test_no_client_can_name_anothers_salt(start_stage: StartStage, key_file: Path) -> None:
    """Not by its key, nor by the salt that agents see, nor by both; with one salt its requests share."""
    stage = await start_stage(api_keys=key_file)
    await stage.pair()
    found = {own: await salt_of(stage, A, cache_salt=own) for own in SALTS}
    tried = [*SALTS, *found.values()]
    others = [await salt_of(stage, B, cache_salt=own) for own in tried]
    assert len({*found.values(), *others}) == len(found) + len(others)
    assert others == [await salt_of(stage, B, cache_salt=own) for own in tried]
    assert await salt_of(stage, A, cache_salt=None) == await salt_of(stage, A)


@pytest.mark.parametrize("bad", ["", 1, ["a"], {}, True, "x" * (MAX_CACHE_SALT_CHARS + 1)])
async def test_a_salt_that_agents_would_refuse_is_refused(
    start_stage: StartStage, key_file: Path, bad: Any
) -> None:
    stage = await start_stage(api_keys=key_file)
    await stage.pair()
    async with stage.post(
        COMPLETION | {"cache_salt": bad}, headers={"Authorization": f"Bearer {A}"}
    ) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "cache_salt"
    assert not salts(stage)


@pytest.mark.parametrize("own", [None, "mine"])
@pytest.mark.parametrize("settings", [{}, {"share_prefixes": True}], ids=str)
async def test_without_keys_or_with_shared_prefixes_a_salt_is_the_clients(
    start_stage: StartStage, key_file: Path, settings: dict[str, Any], own: str | None
) -> None:
    stage = await start_stage(**settings, **({"api_keys": key_file} if settings else {}))
    await stage.pair()
    given = {} if own is None else {"cache_salt": own}
    assert {await salt_of(stage, key, **given) for key in (A, B)} == {own}


@pytest.mark.parametrize(
    ("fields", "settings", "legs"),
    [
        ({"n": 3}, {}, ("prefill", "decode")),
        ({"prompt": [PROMPT, "another"]}, {}, ("prefill", "decode")),
        ({"prompt": [*range(200)]}, {}, ("prefill", "decode")),
        ({"prompt": [[*range(200)], [1]], "n": 2}, {}, ("prefill", "decode")),
        ({"echo": True, "logprobs": 1}, {}, ("alone",)),
        ({}, {"split_min_tokens": 10_000}, ("alone",)),
        ({}, {"stream_pull_min_tokens": 1}, ("prefill", "decode")),
        ({"prompt": "x" * 100_000}, {}, ("prefill", "decode")),
    ],
    ids=["n", "prompts", "ids", "lists of ids", "undivided", "short", "early decode leg", "large"],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_all_legs_of_a_request_have_one_salt(
    start_stage: StartStage, key_file: Path, fields: dict[str, Any], settings: dict[str, Any],
    legs: tuple[str, ...], stream: bool,
) -> None:  # fmt: skip
    stage = await start_stage(api_keys=key_file, **settings)
    await stage.pair(overrides={"max_model_len": 200_000})
    expected = await derived_salt(stage, A)
    assert await ask(stage, A, **fields, stream=stream) == 200
    assert salts(stage, *legs) == {expected}


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_has_the_salt_too(
    start_stage: StartStage, key_file: Path, leg: Any, stream: bool
) -> None:
    stage = await start_stage(api_keys=key_file)
    await stage.pair()
    await stage.pair()
    expected = await derived_salt(stage, A, cache_salt="mine")
    faults = [Fault(leg, "reset")]
    for agent in stage.agents:
        agent.faults = faults
    assert await ask(stage, A, cache_salt="mine", stream=stream) == 200
    assert not faults and stage.metric("kvferry_proxy_retries_total") > 0
    assert salts(stage) == {expected}


async def test_a_stream_that_goes_on_elsewhere_has_the_salt_too(
    start_stage: StartStage, key_file: Path
) -> None:
    stage = await start_stage(api_keys=key_file)
    await stage.pair()
    await stage.pair()
    expected = await derived_salt(stage, A)
    faults = [Fault("decode", "cut", after_events=3)]
    for agent in stage.agents:
        agent.faults = faults
    assert await ask(stage, A, stream=True, n=2) == 200
    assert stage.metric("kvferry_proxy_migrations_total") == 1
    assert salts(stage) == {expected}


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stream": True}, {"prompt": ["a b", "c"]}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
async def test_servers_of_every_engine_get_it(
    start_stage: StartStage, key_file: Path, kind: str, fields: dict[str, Any]
) -> None:
    """What they make of it: docs/security.md. Where KV is read under a lease that may have ended, each decode
    leg has a salt of its own.
    """
    stage = await start_stage(api_keys=key_file, moriio_lease_s=60.0)
    dialect, fixed = KINDS[kind]
    fabric = Fabric()
    for role in ("prefill", "decode"):
        await stage.bring(SERVERS[dialect](role=role, proxies=(stage.discovery,), fabric=fabric, **fixed))
    assert await ask(stage, A) == 200  # says how KV moves
    salts(stage)
    expected, own = [], []
    for key in (A, B, A, B):
        assert await ask(stage, key, **fields) == 200
        own += leased_salts(stage) if kind in LEASED else []
        [salt] = salts(stage)
        expected.append(salt)
    one, other = expected[:2]
    assert None not in (one, other) and one != other and expected[2:] == [one, other]
    assert len({*own, one, other}) == len(own) + 2 and bool(own) == (kind in LEASED)
    assert not fabric.wrongs


async def test_kv_that_nobody_reads_is_fetched_under_the_salt_of_its_leg(
    start_stage: StartStage, key_file: Path
) -> None:
    """The decode server keeps it in its prefix cache, maybe after its lease has ended."""
    stage = await start_stage(api_keys=key_file)
    fabric = Fabric()
    for role in ("prefill", "decode"):
        await stage.bring(SERVERS["vllm-nixl"](role, (stage.discovery,), fabric=fabric))
    decode = stage.agents[1]
    decode.faults.append(Fault("decode", "hang"))
    asking = asyncio.get_running_loop().create_task(ask(stage, A))
    await decode.until(lambda: decode.asked)
    asking.cancel()
    await asyncio.wait([asking])
    await decode.until(lambda: len(decode.asked) == 2)
    await stage.proxy.services.drops.settle()
    assert decode.asked[1].body["max_tokens"] == 1
    own, again = leased_salts(stage)
    assert own == again and own not in salts(stage)


async def test_a_stream_of_vllm_that_goes_on_from_its_ids_has_the_salt_too(
    start_stage: StartStage, key_file: Path
) -> None:
    stage = await start_stage(api_keys=key_file)
    fabric = Fabric()
    for role in ("prefill", "decode", "decode"):
        await stage.bring(SERVERS["vllm-kvferry"](role, (stage.discovery,), fabric=fabric))
    fields = {"temperature": 0, "stream": True}
    expected = await derived_salt(stage, A, **fields)
    faults = [Fault("decode", "cut", after_events=3)]
    for agent in stage.agents:
        agent.faults = faults
    assert await ask(stage, A, **fields) == 200
    assert stage.metric("kvferry_proxy_migrations_total") == 1
    assert salts(stage) == {expected}


async def test_routing_by_prefix_does_not_tell_keys_of_each_other(
    start_stage: StartStage, key_file: Path
) -> None:
    """Another client's prompt draws to no agent, and names none to pull from."""
    policies = {"prefill_policy": "round_robin", "decode_policy": "prefix_aware"}
    stage = await start_stage(api_keys=key_file, prefix_pull_min_tokens=64, **policies)
    for _ in range(2):
        await stage.pair()

    async def route(key: str) -> tuple[str, bool]:
        """Who decodes, and whether a prefix is to be pulled."""
        assert await ask(stage, key) == 200
        asked = {each.leg: (agent, each) for agent in stage.agents for each in agent.asked}
        salts(stage, "prefill", "decode")
        source = asked["prefill"][1].body["kv_transfer_params"].get("prefix_source")
        return asked["decode"][0].incarnation, source is not None

    at, known = await route(A)
    assert not known
    elsewhere, known = await route(B)
    assert not known and elsewhere != at
    assert [await route(key) for key in (A, B, A, B)] == [(at, True), (elsewhere, True)] * 2

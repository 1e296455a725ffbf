# SPDX-License-Identifier: Apache-2.0
"""The tokens of a key are counted whatever becomes of a request (N5)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy.api.rate_limit import Rate, RateLimit
from kvferry.proxy.api.token_reservation import TOKENS_PER_S, RequestEnd, TokenReservation
from kvferry.proxy.errors import RateLimited
from kvferry.proxy.request import ReportedUsage, parse_request
from kvferry.proxy.wire.registration import Role
from tests.helpers.waiting import until
from tests.standins.agents import STOP_AT_ONCE, Fault, StandInAgent
from tests.standins.engines import SERVERS, Fabric
from tests.unit.proxy.conftest import Stage, StartStage

KEY, OTHER = "client-key-0123456789", "another-key-0123456789"
BODY = {"model": "stand-in", "prompt": [1, 2, 3], "max_tokens": 5}
TEXT = BODY | {"prompt": "a b c"}
CHAT = {"model": "stand-in", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5}


def reserved(
    limit: RateLimit, now: float = 0.0, context: int | None = None, **fields: Any
) -> TokenReservation:
    body = BODY | fields
    request = parse_request("completions", json.dumps(body).encode())
    return TokenReservation(limit, request, context, now)


def end(**known: Any) -> RequestEnd:
    legs: dict[str, float] = {"route": 0.1, "prefill": 0.1, "decode": 3.0}
    plain = {"usage": None, "sent": 0, "unseen": True, "refused": False, "leg_seconds": legs}
    return RequestEnd(**(plain | known))


def wait_s(limit: RateLimit, now: float = 0.0) -> int:
    """Seconds to wait; 0 when a request is admitted."""
    try:
        limit.admit(now)
    except RateLimited as error:
        return int(error.headers["Retry-After"])
    return 0


@pytest.mark.parametrize(
    ("fields", "context", "taken"),
    [
        ({}, None, 3 + 5),
        ({"n": 4}, None, 3 + 20),
        ({"prompt": [[1, 2], [3, 4, 5]], "n": 2}, None, 5 + 20),
        ({"prompt": ["a", "b", "c"]}, None, 1 + 15),
        ({"max_tokens": 1900, "n": 60}, None, 3 + 300),
        ({"max_tokens": 7, "max_completion_tokens": 9}, None, 3 + 9),
        ({"max_tokens": None}, None, 3 + 300),
        ({"max_tokens": None, "n": 2}, 100, 3 + 200),
        ({"max_tokens": 0}, None, 3),
    ],
)
def test_what_a_request_may_use_is_reserved(fields: dict[str, Any], context: int | None, taken: int) -> None:
    """At most a full bucket for the answer: then a key with a small rate can still send any request."""
    limit = RateLimit(None, Rate.parse("300/min"))
    tokens = reserved(limit, context=context, **fields)
    assert wait_s(limit) == (max(1, round((taken - 299) / 5)) if taken > 299 else 0)
    tokens.settle(end(usage=ReportedUsage(prompt_tokens=3, completion_tokens=297)), 0.0)
    assert wait_s(limit) == 1, "300 were used"


def test_requests_that_come_together_do_not_share_what_is_left() -> None:
    limit = RateLimit(Rate.parse("9/h"), Rate.parse("8/h"))
    for _ in range(3):
        limit.admit(0.0)
    first = reserved(limit)
    for _ in range(2):
        with pytest.raises(RateLimited, match="limit of tokens"):
            reserved(limit)
    first.settle(end(usage=ReportedUsage(prompt_tokens=3, completion_tokens=1)), 0.0)
    for _ in range(8):  # those two were not charged as requests
        assert wait_s(limit) == 0
    assert wait_s(limit) == 400


@pytest.mark.parametrize(
    ("known", "fields", "used"),
    [
        ({"usage": ReportedUsage(prompt_tokens=4, completion_tokens=2)}, {}, 6),
        ({"leg_seconds": {"route": 9.0}}, {}, 0),
        ({"refused": True}, {}, 0),
        ({}, {}, 3 + 5),
        ({}, {"n": 4}, 3 + 20),
        ({}, {"n": 60, "max_tokens": 1900}, 3 + 60 * 1900),
        ({}, {"max_tokens": None}, 3 + 1 + 3 * TOKENS_PER_S),
        ({"leg_seconds": {"prefill": 3.0}}, {}, 3 + 1),
        ({"leg_seconds": {"prefill": 3.0}}, {"n": 2}, 3 + 10),
        ({"leg_seconds": {"decode": 0.001}}, {"max_tokens": 1000}, 3 + 3),
        ({"sent": 2, "unseen": False}, {}, 3 + 2),
        ({"sent": 2}, {}, 3 + 5),
        ({"sent": 7}, {}, 3 + 7),
    ],
)
def test_what_may_have_been_made_is_not_given_back(
    known: dict[str, Any], fields: dict[str, Any], used: int
) -> None:
    limit = RateLimit(None, Rate.parse("1000000/s"))
    reserved(limit, **fields).settle(end(**known), 0.0)
    limit.charge(1_000_000 - used - 1, 0.0)
    assert wait_s(limit) == 0
    limit.charge(1, 0.0)
    assert wait_s(limit) == 1


# Through a proxy.


def client_of(stage: Stage) -> RateLimit:
    keys = stage.proxy.services.api_keys
    assert keys is not None
    return keys.client(f"Bearer {KEY}", "POST").rate_limit


async def limited(start_stage: StartStage, tmp_path: Path, rate: str) -> Stage:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} tokens={rate}\n{OTHER}\n")
    return await start_stage(api_keys=keys, retries=0)


def post(stage: Stage, body: dict[str, Any], path: str = "completions", key: str = KEY) -> Any:
    return stage.post(body, path, headers={"Authorization": f"Bearer {key}"})


async def status(stage: Stage, body: dict[str, Any] = BODY, path: str = "completions", key: str = KEY) -> int:
    async with post(stage, body, path, key) as response:
        await response.read()
        assert response.status != 429 or int(response.headers["Retry-After"]) > 0
        return response.status


async def leave(
    stage: Stage, agent: StandInAgent, body: dict[str, Any], path: str = "completions", key: str = KEY
) -> None:
    """Send a request that is admitted, and leave when an agent has worked on its answer for a while."""
    task = asyncio.ensure_future(status(stage, body, path, key))
    await until(lambda: agent.running or task.done(), 10)
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled(), task.result()
    await agent.until(lambda: not agent.running)


@pytest.mark.parametrize("path", ["completions", "chat/completions", "messages", "responses"])
async def test_an_answer_that_nobody_waits_for_counts(
    start_stage: StartStage, tmp_path: Path, path: str
) -> None:
    """Six of them, each left after 3 s, made 26,520 tokens at 300 a minute."""
    stage = await limited(start_stage, tmp_path, "60/h")
    _, decode = await stage.pair(interval_s=60.0)
    body = {
        "completions": BODY | {"n": 60, "max_tokens": 1900},
        "chat/completions": CHAT | {"n": 60, "max_tokens": 1900},
        "messages": CHAT | {"max_tokens": 1900},
        "responses": {"model": "stand-in", "input": "a", "max_output_tokens": 1900},
    }[path]
    await leave(stage, decode, body, path)
    for again in (body, {**body, "stream": True}):
        assert await status(stage, again, path) == 429
    await leave(stage, decode, body, path, OTHER)


async def test_of_requests_that_come_together_one_is_admitted(
    start_stage: StartStage, tmp_path: Path
) -> None:
    stage = await limited(start_stage, tmp_path, "300/h")
    await stage.pair(interval_s=0.2)
    body = BODY | {"n": 60, "max_tokens": 1900}
    came = await asyncio.gather(*(status(stage, body) for _ in range(6)))
    assert sorted(came) == [200] + 5 * [429]


async def test_what_was_not_made_is_given_back(start_stage: StartStage, tmp_path: Path) -> None:
    """Also without `max_tokens`: another request is admitted as soon as this one has ended."""
    stage = await limited(start_stage, tmp_path, "300/h")
    prefill, _ = await stage.pair()
    ended = {"model": "stand-in", "prompt": STOP_AT_ONCE}
    for body in (ended, ended | {"max_tokens": 1000, "n": 8}, ended | {"stream": True}):
        for _ in range(5):
            assert await status(stage, body) == 200
    for _ in range(3):
        assert await status(stage, BODY | {"model": "none", "max_tokens": 1900}) == 404
        prefill.faults.append(Fault("prefill", "status", status=503))
        assert await status(stage, BODY | {"max_tokens": 900}) == 503
    assert await status(stage, BODY) == 200


async def pair_of(stage: Stage, dialect: str) -> None:
    fabric = Fabric()
    roles: tuple[Role, Role] = ("prefill", "decode")
    for role in roles:
        await stage.bring(SERVERS[dialect](role=role, proxies=(stage.discovery,), fabric=fabric))


@pytest.mark.parametrize("dialect", ["native", "vllm-nixl", "vllm-kvferry", "sglang", "atom"])
@pytest.mark.parametrize(("path", "body"), [("completions", TEXT), ("chat/completions", CHAT)])
async def test_a_stream_counts_with_its_usage(
    start_stage: StartStage, tmp_path: Path, dialect: str, path: str, body: dict[str, Any]
) -> None:
    """Not with its events, of which one may have many tokens. Who has not asked for usage gets none."""
    stage = await limited(start_stage, tmp_path, "1000/h")
    await (stage.pair() if dialect == "native" else pair_of(stage, dialect))

    async def stream(**fields: Any) -> list[dict[str, Any]]:
        async with post(stage, body | {"stream": True, "n": 2} | fields, path) as response:
            assert response.status == 200
            *events, done, rest = (await response.text()).split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]

    *chunks, last = await stream(stream_options={"include_usage": True})
    assert not last["choices"] and last["usage"]["completion_tokens"] == 10
    for chunk in (*chunks, *await stream()):
        assert chunk["choices"] and not chunk.get("usage")
    client, now = client_of(stage), asyncio.get_running_loop().time()
    client.charge(1000 - 2 * last["usage"]["total_tokens"] - 2, now)
    assert wait_s(client, now) == 0
    client.charge(2, now)
    assert wait_s(client, now) > 0


async def test_a_stream_that_is_left_counts_with_what_was_relayed(
    start_stage: StartStage, tmp_path: Path
) -> None:
    stage = await limited(start_stage, tmp_path, "500/h")
    await stage.pair(interval_s=0.01)
    for _ in range(3):
        async with post(stage, BODY | {"max_tokens": 1900, "stream": True}) as response:
            assert response.status == 200
            await response.content.readuntil(b"\n\n")
            response.close()
        await asyncio.sleep(0.1)


async def test_a_stream_that_is_not_read_counts_with_what_may_have_been_made(
    start_stage: StartStage, tmp_path: Path
) -> None:
    """Its agents go on while nothing is relayed."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} tokens=20000/h\n")
    stage = await start_stage(api_keys=keys, client_stall_s=0.5)
    wordy = "x" * 1024  # in every event, so that no socket buffer holds the whole stream
    agent = await stage.agent("both", model=wordy)
    raw = json.dumps(BODY | {"model": wordy, "max_tokens": 4000, "n": 64, "stream": True}).encode()
    _, writer = await asyncio.open_connection("127.0.0.1", stage.proxy.port, limit=4096)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    writer.write(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
    await agent.until(lambda: agent.aborted == 1)
    writer.transport.abort()
    assert await status(stage, BODY | {"model": wordy}) == 429

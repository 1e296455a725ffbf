# SPDX-License-Identifier: Apache-2.0
"""vLLM servers with our connector: a stream begins with the prefill's token, and goes on elsewhere when its
decode server is lost. The stand-ins note ids that were not drawn from the prompt (`Fabric.wrongs`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.proxy.dialects import sent_tokens
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import BadResponse
from tests.standins.agents import Fault
from tests.standins.engines import STOPS_AT_ONCE, Fabric, VllmKvferryServer, ids_of
from tests.unit.proxy.conftest import Stage, Streamed

TOKENIZER = Path(__file__).parents[4] / "deploy/models/ferry-tiny/tokenizer.json"
PROMPT = "a b c"
BODY = {
    "model": "stand-in",
    "prompt": PROMPT,
    "max_tokens": 6,
    "temperature": 0,
    "stream_options": {"include_usage": True},
}
CHAT = {name: value for name, value in BODY.items() if name != "prompt"} | {
    "messages": [{"role": "user", "content": "hi"}]
}
each_endpoint = pytest.mark.parametrize(("path", "body"), [("completions", BODY), ("chat/completions", CHAT)])


class Fleet:
    """A proxy, and servers of one fabric behind it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.fabric = Fabric()
        self.servers: list[VllmKvferryServer] = []

    async def server(self, role: Any, **settings: Any) -> VllmKvferryServer:
        made = VllmKvferryServer(role=role, proxies=(self.stage.discovery,), fabric=self.fabric, **settings)
        self.servers.append(await self.stage.bring(made))
        return self.servers[-1]

    async def pair(self, **settings: Any) -> tuple[VllmKvferryServer, VllmKvferryServer]:
        return await self.server("prefill", **settings), await self.server("decode", **settings)

    def legs(self, leg: str) -> list[dict[str, Any]]:
        return [asked.body for server in self.servers for asked in server.asked if asked.leg == leg]

    def break_once(self, fault: Fault) -> None:
        """Whichever server is the first to be asked for the fault's leg breaks off."""
        shared = [fault]
        for server in self.servers:
            server.faults = shared


@pytest.fixture
async def fleet(stage: Stage) -> AsyncIterator[Fleet]:
    fleet = Fleet(stage)
    yield fleet
    assert not fleet.fabric.wrongs


async def plain(body: dict[str, Any], path: str) -> Streamed:
    """What one server alone streams."""
    async with (
        VllmKvferryServer(role="both", fabric=Fabric()) as server,
        aiohttp.ClientSession() as http,
        http.post(
            f"{server.address}/v1/{path}", json=body | {"stream": True}, headers={"X-Request-Id": "r"}
        ) as response,
    ):
        return Streamed(response.status, response.headers, await response.read())


def shown(streamed: Streamed) -> tuple[Any, ...]:
    """What must be equal: choices event by event, but for members that say nothing, and usage."""
    choices = [
        {name: value for name, value in choice.items() if value is not None}
        for event in streamed.events
        for choice in event["choices"]
    ]
    usage = streamed.events[-1].get("usage")
    counts = None if usage is None else {name: usage[name] for name in usage if name.endswith("_tokens")}
    return choices, counts, len({(event["id"], event["created"]) for event in streamed.events})


@each_endpoint
async def test_the_first_token_is_the_prefills_and_comes_before_the_decode_server_answers(
    fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    _, decode = await fleet.pair()
    wanted = await plain(body, path)
    decode.faults.append(Fault("decode", "hang"))
    async with fleet.stage.post(body | {"stream": True}, path) as response:
        assert response.status == 200
        texts = []
        while not any(texts):
            event = json.loads((await response.content.readuntil(b"\n\n")).removeprefix(b"data: "))
            (choice,) = event["choices"]
            texts.append(choice["text"] if "text" in choice else choice["delta"]["content"])
    assert texts[-1] == next(text for text in (_text(each) for each in wanted.events) if text)
    assert shown(await fleet.stage.stream(body, path)) == shown(wanted)


def _text(event: dict[str, Any]) -> str:
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "")
        for choice in event["choices"]
    )


async def test_the_prefill_draws_as_the_client_asked_and_the_decode_server_goes_on(fleet: Fleet) -> None:
    """No token is drawn twice, so that no two servers can disagree about one."""
    await fleet.pair()
    body = BODY | {"min_tokens": 3, "top_p": 0.5, "stop_token_ids": [7], "cache_salt": "s"}
    await fleet.stage.stream(body)
    (prefill,), (decode,) = fleet.legs("prefill"), fleet.legs("decode")
    assert prefill["max_tokens"] == prefill["min_tokens"] == 1 and not prefill["stream"]
    assert decode["prompt"][: len(ids_of(PROMPT))] == ids_of(PROMPT)
    assert len(decode["prompt"]) == len(ids_of(PROMPT)) + 1
    assert (decode["max_tokens"], decode["min_tokens"]) == (5, 2)
    for name in ("temperature", "top_p", "stop_token_ids", "cache_salt", "model"):
        assert prefill[name] == decode[name] == body[name]
    assert "messages" not in decode


@pytest.mark.parametrize(
    ("path", "body", "kind", "after_events", "pairs"),
    [
        ("completions", BODY, "cut", 0, 1),
        ("completions", BODY, "no_done", 3, 2),
        ("completions", BODY, "cut", 5, 1),
        ("chat/completions", CHAT, "failure", 3, 1),
        ("chat/completions", CHAT, "cut", 5, 1),
    ],
)
async def test_a_broken_stream_goes_on_unseen(
    fleet: Fleet, path: str, body: dict[str, Any], kind: Any, after_events: int, pairs: int
) -> None:
    """I4. After the last event there is nothing left but usage and `[DONE]`, which are known."""
    for _ in range(pairs):
        await fleet.pair()
    fleet.break_once(Fault("decode", kind, after_events=after_events))
    streamed = await fleet.stage.stream(body, path)
    assert streamed.error is None
    assert shown(streamed) == shown(await plain(body, path))
    last = 5  # of the decode server's five
    assert fleet.stage.metric("kvferry_proxy_migrations_total") == (after_events != last)
    legs = fleet.legs("decode")
    assert len(legs) == 1 + (after_events != last)
    if len(legs) > 1:
        lengths = sorted(len(leg["prompt"]) for leg in legs)
        assert lengths[1] - lengths[0] == after_events
        assert len({leg["kv_transfer_params"]["transfer_id"] for leg in legs}) == 2


async def test_what_is_drawn_at_random_without_a_seed_goes_on_too(fleet: Fleet) -> None:
    """Any continuation of what the client has is an answer that one server might have given."""
    await fleet.pair()
    body = {name: value for name, value in BODY.items() if name != "temperature"}
    fleet.break_once(Fault("decode", "cut", after_events=2))
    streamed = await fleet.stage.stream(body)
    assert streamed.error is None and len(streamed.text().split()) == 6


async def test_sixteen_streams_go_on_when_their_decode_server_dies(fleet: Fleet) -> None:
    """Each with the text of an undisturbed run."""
    await fleet.server("prefill")
    first = await fleet.server("decode")
    bodies = [BODY | {"prompt": f"prompt {number}", "max_tokens": 40} for number in range(16)]
    wanted = [shown(await plain(body, "completions")) for body in bodies]
    first.faults += [Fault("decode", "cut", after_events=3 + number) for number in range(16)]
    first.interval_s = 0.02
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(fleet.stage.stream(body)) for body in bodies]
        await first.until(lambda: len(first.asked) == 16)
        await fleet.server("decode")
    assert [shown(task.result()) for task in asking] == wanted
    assert fleet.stage.metric("kvferry_proxy_migrations_total") == 16


@pytest.mark.parametrize("extra", [{"temperature": 0.5, "seed": 7}, {"n": 2}, {"stop": ["x"]}], ids=str)
async def test_what_would_not_be_exact_is_drawn_by_one_server_and_ends_typed(
    fleet: Fleet, extra: dict[str, Any]
) -> None:
    """`test_dialects.py` has the other fields."""
    await fleet.pair()
    fleet.break_once(Fault("decode", "cut", after_events=2))
    streamed = await fleet.stage.stream(BODY | extra)
    assert streamed.error is not None and streamed.error["code"] == "stream_broken"
    assert all(leg["min_tokens"] == 1 for leg in fleet.legs("prefill"))
    assert all(leg["prompt"] == PROMPT for leg in fleet.legs("decode"))


@pytest.mark.parametrize(
    "settings",
    [
        {"continuable": False},
        {"overrides": {"max_model_len": 8}},
        {"overrides": {"max_model_len": 0}},
        {"hands_over": False},
    ],
    ids=["has a reasoning parser", "too long for the server", "of unknown length", "hands nothing over"],
)
async def test_a_server_that_might_not_go_on_draws_it_all(fleet: Fleet, settings: dict[str, Any]) -> None:
    await fleet.pair(**settings)
    await fleet.stage.stream(BODY)
    (leg,) = [*fleet.legs("decode"), *fleet.legs("alone")]
    assert leg["prompt"] == PROMPT


@each_endpoint
async def test_an_answer_that_ends_with_the_prefills_token_is_whole_and_leaves_no_lease(
    fleet: Fleet, path: str, body: dict[str, Any]
) -> None:
    prefill, decode = await fleet.pair()
    body = dict(body)
    if path == "completions":
        body["prompt"] = STOPS_AT_ONCE
    else:
        body["messages"] = [{"role": "user", "content": STOPS_AT_ONCE}]
    streamed, wanted = await fleet.stage.stream(body, path), await plain(body, path)
    assert shown(streamed)[1:] == shown(wanted)[1:]
    assert streamed.events[-2]["choices"][0]["finish_reason"] == "stop" and not streamed.text()
    await prefill.until(lambda: prefill.dropped)
    assert not decode.asked


async def test_a_server_alone_is_followed_by_nothing_that_begins_anew(fleet: Fleet) -> None:
    """It was not asked for ids, so nobody knows what the client has."""
    await fleet.server("both")
    fleet.break_once(Fault("alone", "cut", after_events=2))
    streamed = await fleet.stage.stream(BODY)
    assert streamed.error is not None and streamed.error["code"] == "stream_broken"


async def test_a_stream_of_a_pair_goes_on_at_a_server_alone(fleet: Fleet) -> None:
    _, decode = await fleet.pair()
    decode.faults.append(Fault("decode", "cut", after_events=3))
    decode.interval_s = 0.05
    asking = asyncio.create_task(fleet.stage.stream(BODY))
    await decode.until(lambda: decode.asked)
    await fleet.server("both")
    assert shown(await asking) == shown(await plain(BODY, "completions"))


async def test_a_prefill_server_that_tells_no_ids_leaves_no_lease_of_a_stream_that_cannot_go_on(
    fleet: Fleet,
) -> None:
    """I2: an older version may take the prefill server's place."""
    prefill, decode = await fleet.pair()
    decode.faults.append(Fault("decode", "cut", after_events=3))
    decode.interval_s = 0.05
    asking = asyncio.create_task(fleet.stage.stream(BODY))
    await decode.until(lambda: decode.asked)
    prefill.tells_ids = False
    streamed = await asking
    assert streamed.error is not None and streamed.error["code"] == "stream_broken"
    await prefill.until(lambda: prefill.dropped)


def test_ids_without_a_text_are_drawn_again() -> None:
    """Half of a character: the server that goes on could not make a whole one of it."""
    sent = SentTokens()
    assert not sent.begun
    for ids, has_text in ((b"5", True), (b"6,7", False), (b"8", True), (b"9", False)):
        sent.add(ids, has_text=has_text)
    assert (sent.ids, sent.count, sent.count_sampled) == (b"5,6,7,8", 4, 5)
    sent.go_on_elsewhere()
    assert (sent.ids, sent.count_sampled) == (b"5,6,7,8", 4)


def test_a_server_that_goes_on_makes_the_same_text_wherever_another_was_lost() -> None:
    """As vLLM makes text of ids: by a stream that was given the prompt's. After half of a character that
    would repeat the prompt.
    """
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    prompt, ids = tokenizer.encode("abc").ids, tokenizer.encode("417 é日本 ok 😀!").ids
    for lost_after in range(1, len(ids)):
        sent, shown, stream = SentTokens(), "", DecodeStream(ids=prompt, skip_special_tokens=True)
        for token_id in ids[:lost_after]:
            text = stream.step(tokenizer, token_id) or ""
            sent.add(b"%d" % token_id, has_text=bool(text))
            shown += text
        stream = DecodeStream(ids=[*prompt, *json.loads(b"[%b]" % sent.ids)], skip_special_tokens=True)
        rest = [stream.step(tokenizer, token_id) or "" for token_id in ids[sent.count :]]
        assert shown + "".join(rest) == "417 é日本 ok 😀!"


def test_the_ids_of_a_stream_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent_tokens, "MAX_LINES_BYTES", 13)
    sent = SentTokens()
    sent.add(b"123456", has_text=True)
    for has_text in (True, False):
        with pytest.raises(BadResponse):
            sent.add(b"12345678", has_text=has_text)

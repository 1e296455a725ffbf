# SPDX-License-Identifier: Apache-2.0
"""Fields of a body through a proxy and a pair: none is ignored, and apart gives what one agent gives (I4)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.agent.api.fields import HARMLESS, REFUSED
from kvferry.agent.api.openai_schema import HONOURED, ChatBody, CompletionBody
from kvferry.deploy.launcher import Cluster
from tests.helpers.client import heldout

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

EOS_ID = 935
TOKENS = 24
BASE: dict[str, Any] = {
    "model": "ferry-tiny",
    "prompt": heldout(task="recall")[3].prompt,
    "temperature": 1.0,
    "seed": 5,
    "max_tokens": TOKENS,
    "ignore_eos": True,
    "logprobs": 1,
    "return_token_ids": True,
}
CHAT: dict[str, Any] = {
    **{name: value for name, value in BASE.items() if name != "prompt"},
    "messages": [
        {"role": "user", "content": heldout(task="addition")[0].prompt},
        {"role": "assistant", "content": "1"},
    ],
    "logprobs": True,
}


@dataclass(frozen=True)
class Servers:
    """A pair behind a proxy, and one agent that, asked directly, does everything."""

    apart: str
    together: str
    http: aiohttp.ClientSession

    async def ask(self, url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        path = "chat/completions" if "messages" in body else "completions"
        async with self.http.post(f"{url}/v1/{path}", json=body) as response:
            return response.status, await response.json()

    async def answer(self, url: str, body: dict[str, Any]) -> dict[str, Any]:
        """What a client sees of an answer, but for its ids and what a cache held."""
        status, answer = await self.ask(url, body)
        assert status == 200, answer
        usage = {name: value for name, value in answer["usage"].items() if name.endswith("_tokens")}
        return {"choices": answer["choices"], "usage": usage}

    async def events(self, url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        if "messages" in body:
            body = {name: value for name, value in body.items() if name != "prompt"}
        path = "chat/completions" if "messages" in body else "completions"
        async with self.http.post(f"{url}/v1/{path}", json={**body, "stream": True}) as response:
            assert response.status == 200
            lines = [line async for line in response.content]
        data = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: {")]
        return [json.loads(each) for each in data]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(shared_cluster: Cluster) -> AsyncIterator[Servers]:
    async with aiohttp.ClientSession() as http:
        yield Servers(shared_cluster.url, shared_cluster.agents["decode-0"].url, http)


async def both(servers: Servers, body: dict[str, Any]) -> dict[str, Any]:
    """The answer of the pair, which is that of one agent."""
    urls = (servers.apart, servers.together)
    apart, together = await asyncio.gather(*(servers.answer(url, body) for url in urls))
    assert apart == together
    return apart


async def test_every_honoured_field_changes_the_answer_and_does_so_on_a_pair_too(servers: Servers) -> None:
    plain = await both(servers, BASE)
    (choice,) = plain["choices"]
    word = next(token.strip() for token in choice["logprobs"]["tokens"][1:] if token.strip())
    assert len(choice["text"]) > 4
    stop = {"stop": [choice["text"][2:4]]}
    ended = {"logit_bias": {str(EOS_ID): 100}}
    changes: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"bad_words": [word]}),
        ({}, {"allowed_token_ids": [5, 6, 7, 8]}),
        ({}, {"truncate_prompt_tokens": 3}),
        (stop, {"include_stop_str_in_output": True}),
        (ended, {"skip_special_tokens": False}),
    ]
    for context, field in changes:
        for sampled in ({}, {"temperature": 0.0}, {"n": 3}):
            before = await both(servers, {**BASE, **context, **sampled})
            after = await both(servers, {**BASE, **context, **sampled, **field})
            if not sampled:
                assert after != before, field
    for salt in ("mine", "theirs"):
        assert await both(servers, {**BASE, "cache_salt": salt}) == plain
    assert (await both(servers, {**BASE, "truncate_prompt_tokens": 3}))["usage"]["prompt_tokens"] == 3
    shown = await both(servers, {**BASE, **ended, "skip_special_tokens": False})
    assert shown["choices"][0]["text"] == "<|end|>" * TOKENS


async def test_a_chat_ends_as_its_fields_say(servers: Servers) -> None:
    plain = await both(servers, CHAT)
    bare = await both(servers, {**CHAT, "add_generation_prompt": False})
    continued = await both(servers, {**CHAT, "continue_final_message": True})
    lengths = [each["usage"]["prompt_tokens"] for each in (plain, bare, continued)]
    assert lengths == [lengths[0], lengths[0] - 1, lengths[0] - 2]
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "low"}):
        status, error = await servers.ask(servers.apart, {**CHAT, **fields})
        assert status == 400
        assert "does not read" in error["error"]["message"]
    status, error = await servers.ask(servers.apart, {**CHAT, "chat_template": "{{ messages }}"})
    assert (status, error["error"]["param"]) == (400, "chat_template")


LONG = max(heldout(task="recall"), key=lambda each: each.prompt_tokens).prompt
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
STREAMS: dict[str, dict[str, Any]] = {
    "a pair": {},
    "without ids": {"return_token_ids": False, "logprobs": None},
    "a chat": CHAT,
    "a chat without ids": {**CHAT, "return_token_ids": False, "logprobs": None},
    "a streamed pull": {"prompt": LONG},
    "a stop string": {"stop": ["1", "2"], "ignore_eos": False},
    "one token": {"max_tokens": 1},
    "bytes of characters": {"allowed_token_ids": list(range(128, 256)), "return_token_ids": False},
}


@pytest.mark.parametrize("name", STREAMS)
async def test_running_usage_is_in_every_event_of_a_choice(servers: Servers, name: str) -> None:
    body = {**BASE, **STREAMS[name], "n": 3, **USAGE}
    for url in (servers.apart, servers.together):
        *events, last = await servers.events(url, body)
        total = last["usage"]
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for event in events:
            (choice,) = event["choices"]
            usage = event["usage"]
            assert usage["prompt_tokens"] == total["prompt_tokens"]
            seen[choice["index"]].append(usage["completion_tokens"])
        for counts in seen.values():
            assert counts == sorted(set(counts)), (url, seen)
        assert sum(counts[-1] for counts in seen.values()) == total["completion_tokens"]
        if body["return_token_ids"] and "stop" not in body:
            assert all(counts == list(range(1, len(counts) + 1)) for counts in seen.values())


ENDED = {"logit_bias": {str(EOS_ID): 100}}
ALONE: dict[str, tuple[dict[str, Any], Any]] = {
    "allowed_token_ids": ({}, [5, 6, 7, 8]),
    "bad_words": ({"allowed_token_ids": [97, 98]}, ["a"]),
    "best_of": ({}, 2),
    "echo": ({}, True),
    "frequency_penalty": ({}, 2.0),
    "guided_choice": ({}, ["x"]),
    "guided_grammar": ({}, 'start: "x"'),
    "guided_json": ({}, {"const": 7}),
    "guided_json_object": ({}, True),
    "guided_regex": ({}, "x"),
    "guided_whitespace_pattern": ({"guided_json": {"const": [1, 2]}}, " {3}"),
    "ignore_eos": (ENDED, True),
    "include_stop_str_in_output": ({"guided_regex": "xy", "stop": "y"}, True),
    "kvferry_timing": ({}, True),
    "logit_bias": ({}, {"97": 100}),
    "logprobs": ({}, 3),
    "max_completion_tokens": ({"max_tokens": None}, 3),
    "max_tokens": ({}, 3),
    "min_p": ({}, 1.0),
    "min_tokens": (ENDED, 4),
    "model": ({}, "another"),
    "n": ({}, 2),
    "presence_penalty": ({}, 2.0),
    "prompt": ({}, "another"),
    "prompt_logprobs": ({}, 1),
    "repetition_penalty": ({}, 2.0),
    "response_format": ({}, {"type": "json_object"}),
    "return_token_ids": ({"return_token_ids": False}, True),
    "return_tokens_as_token_ids": ({"logprobs": 1}, True),
    "seed": ({}, 6),
    "skip_special_tokens": ({**ENDED, "ignore_eos": True}, False),
    "stop": ({"guided_regex": "xy"}, "y"),
    "stop_token_ids": ({"allowed_token_ids": [97]}, [97]),
    "stream": ({}, True),
    "stream_options": ({}, {"include_usage": True}),
    "structured_outputs": ({}, {"regex": "x"}),
    "temperature": ({}, 0.0),
    "top_k": ({}, 1),
    "top_p": ({}, 0.01),
    "truncate_prompt_tokens": ({}, 3),
}
"""By honoured field: in which other fields' company, and a value that cannot be without effect."""
ALONE_IN_CHAT: dict[str, tuple[dict[str, Any], Any]] = {
    "add_generation_prompt": ({}, False),
    "chat_template": ({}, "{{ messages }}"),
    "chat_template_kwargs": ({}, {"enable_thinking": False}),
    "continue_final_message": ({}, True),
    "messages": ({}, [{"role": "user", "content": "another"}]),
    "reasoning_effort": ({}, "low"),
    "tool_choice": ({}, "required"),
    "tools": ({}, [{"type": "function", "function": {"name": "f"}}]),
    "top_logprobs": ({}, 2),
}
SHOWN_ELSEWHERE = {
    "add_special_tokens": "the bundled model's tokenizer adds none: tests/unit/agent/api/text",
    "cache_salt": "it changes no answer, but what is shared: tests/system/test_prefix_reuse.py",
    "include_reasoning": "the bundled model does not reason: tests/unit/agent/api/message",
    "kvferry_hints": "it makes no error of what has no effect: tests/unit/agent/api/test_server.py",
    "parallel_tool_calls": "the bundled model calls no tools: tests/system/test_tools.py",
    "separate_reasoning": "as include_reasoning",
}


async def test_each_honoured_field_alone_changes_the_answer_or_is_refused(servers: Servers) -> None:
    """Refused: what this model has nothing for, or a proxy says to agents alone. A field that is new in the
    table must be here as well.
    """
    own = {"kv_transfer_params", "kvferry_first_choice", "kvferry_token_lines", "resume"}
    assert HONOURED[CompletionBody] - own == ALONE.keys() | (
        SHOWN_ELSEWHERE.keys() & HONOURED[CompletionBody]
    )
    in_chat = HONOURED[ChatBody] - HONOURED[CompletionBody]
    assert in_chat == ALONE_IN_CHAT.keys() | (SHOWN_ELSEWHERE.keys() & in_chat)

    limit = asyncio.Semaphore(8)

    async def raw(body: dict[str, Any]) -> tuple[int, str, Any]:
        path = "chat/completions" if "messages" in body else "completions"
        async with limit, servers.http.post(f"{servers.apart}/v1/{path}", json=body) as response:
            answer: Any = await response.read()
            if response.content_type == "application/json":
                answer = json.loads(answer)
                for name in ("id", "created"):
                    answer.pop(name, None)
            return response.status, response.content_type, answer

    async def check(base: dict[str, Any], fields: dict[str, tuple[dict[str, Any], Any]]) -> None:
        base = {**base, "max_tokens": 8, "ignore_eos": None}
        plain = await raw(base)
        bodies = [{**base, **context, name: value} for name, (context, value) in fields.items()]
        answers = await asyncio.gather(*map(raw, bodies))
        for (name, (context, _)), answer in zip(fields.items(), answers, strict=True):
            without = await raw({**base, **context}) if context else plain
            assert without[0] == 200, (name, without)
            assert answer != without, name
            assert answer[0] in (200, 400, 404), (name, answer)

    await asyncio.gather(check(BASE, ALONE), check(CHAT, ALONE_IN_CHAT))
    for name in own:
        status, _, answer = await raw({**BASE, name: {"do_remote_decode": True}})
        assert status == 400, (name, answer)


async def test_no_field_is_ignored_unless_it_is_harmless(servers: Servers) -> None:
    plain = await servers.answer(servers.apart, BASE)
    for name in HARMLESS:
        if name != "include_obfuscation":
            assert await servers.answer(servers.apart, {**BASE, name: {"a": "b"}}) == plain
    for name in (*REFUSED, "temprature"):
        status, error = await servers.ask(servers.apart, {**BASE, name: {"a": "b"}})
        assert status == 400, name
        assert name in error["error"]["message"] or error["error"]["param"] == name

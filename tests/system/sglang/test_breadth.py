# SPDX-License-Identifier: Apache-2.0
"""What requests may ask for: a pair of SGLang servers behind the proxy answers as one plain server does,
whatever the field (`make test-sglang`).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from tests.helpers.client import heldout
from tests.system.sglang.servers import MARKS, MODEL, sglang_server
from tests.system.sglang.test_kvferry import Stack, started
from tests.system.test_tools import NAMED, TOOLS, VALIDATORS

REQUESTS = 50
WORDS = (
    *("--tool-call-parser", "qwen25", "--chunked-prefill-size", "64", "--page-size", "16"),
    "--constrained-json-disable-any-whitespace",
)
"""Prompts of several chunks, whose last page is part full."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "one", "schema": SCHEMA, "strict": True}}
SAMPLED = {"temperature": 1, "top_k": 1}
"""Drawn from one token."""
SEED = 11
SEEDS = {"KVFERRY_TEST_SEEDS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""SGLang uses seeds only in its deterministic mode, which CPUs have only in these tests."""
LONG = " ".join(str(number) for number in range(150))
CASES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "json_schema": {"chat": True, "response_format": FORMAT, "max_tokens": 120},
        "regex": {"regex": "[a-d]{5,9}z", "max_tokens": 24},
        "tools, required": {"chat": True, "tools": TOOLS, "tool_choice": "required", "max_tokens": 200},
        "tools, named": {"chat": True, "tools": TOOLS, "tool_choice": NAMED, "max_tokens": 200},
        "three choices": {"n": 3, **SAMPLED},
        "three choices of a chat": {"chat": True, "n": 3, **SAMPLED},
        "logprobs": {"logprobs": 5},
        "logprobs of a chat": {"chat": True, "logprobs": True, "top_logprobs": 4},
        "stop": {"stop": ["1", "e"]},
        "one token": {"max_tokens": 1},
        "penalties and bias": {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"5": 3}},
        "long": {"before": LONG},
    }
)

pytestmark = MARKS


def request(prompt: str, fields: Mapping[str, Any], *, stream: bool) -> tuple[str, dict[str, Any]]:
    """The path and the body of one."""
    rest = {name: value for name, value in fields.items() if name not in ("chat", "before")}
    prompt = f"{fields.get('before', '')}{prompt}"
    chat = bool(fields.get("chat"))
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    streamed = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {"model": MODEL, "max_tokens": 16, "temperature": 0, **asked, **rest, **streamed}
    return "/v1/chat/completions" if chat else "/v1/completions", body


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: dict[str, Any]) -> dict[int, Any]:
    """What was answered, by choice, in one form whether it was streamed; and the usage, by -1."""
    async with http.post(url + path, json=body) as response:
        text = await response.text()
        assert response.status == 200, text
    told = [json.loads(text)] if "stream" not in body else []
    for line in text.splitlines() if not told else ():
        if line.startswith("data: {"):
            told.append(json.loads(line.removeprefix("data: ")))
    found: dict[int, Any] = {}
    for each in told:
        if each.get("usage"):
            usage = each["usage"]
            found[-1] = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in each["choices"]:
            part = choice.get("message") or choice.get("delta") or choice
            have = found.setdefault(choice["index"], {"text": "", "calls": {}, "why": None, "logprobs": []})
            have["text"] += part.get("text", part.get("content")) or ""
            have["why"] = choice["finish_reason"] or have["why"]
            for number, call in enumerate(part.get("tool_calls") or ()):
                one = have["calls"].setdefault(call.get("index") or number, ["", ""])
                one[0] += call["function"].get("name") or ""
                one[1] += call["function"].get("arguments") or ""
            logprobs = choice.get("logprobs") or {}
            have["logprobs"] += [each["logprob"] for each in logprobs.get("content") or ()]
            have["logprobs"] += logprobs.get("token_logprobs") or ()
    return found


def assert_same(found: dict[int, Any], wanted: dict[int, Any]) -> None:
    """Logprobs are equal but for the order in which a batch is summed."""
    assert found.keys() == wanted.keys() and found[-1] == wanted[-1]
    for index in found.keys() - {-1}:
        for name in ("text", "calls", "why"):
            assert found[index][name] == wanted[index][name]
        assert found[index]["logprobs"] == pytest.approx(wanted[index]["logprobs"], abs=1e-3)


def check(name: str, answer: dict[int, Any]) -> None:
    """That the answer is what was asked for."""
    for index in answer.keys() - {-1}:
        choice = answer[index]
        if name == "json_schema" and choice["why"] == "stop":
            jsonschema_rs.validate(SCHEMA, json.loads(choice["text"]))
        if name.startswith("tools") and choice["why"] == "tool_calls":
            for function, arguments in choice["calls"].values():
                VALIDATORS[function].validate(json.loads(arguments))
        if "logprobs" in name:
            assert len(choice["logprobs"]) == answer[-1][1]


@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_each_field_does_what_it_does_at_one_server(transfer: str, tmp_path: Path) -> None:
    prompts = [prompt.prompt for prompt in heldout(REQUESTS)]
    failed = []
    async with (
        sglang_server("plain", None, tmp_path, words=WORDS) as plain,
        started(tmp_path, transfer=transfer, words=WORDS) as stack,
    ):
        for name, fields in CASES.items():
            for stream in (False, True):
                both = [request(prompt, fields, stream=stream) for prompt in prompts]
                wanted = await answered(stack.http, plain.url, both)
                found = await answered(stack.http, stack.proxy_url, both)
                try:
                    for one, other in zip(found, wanted, strict=True):
                        check(name, other)
                        assert_same(one, other)
                except AssertionError as error:
                    failed.append((name, stream, str(error)[:600]))
                    print(*failed[-1], flush=True)
                whys = sorted({str(each[0]["why"]) for each in wanted})
                print(f"{name}, {stream=}: {len({str(each) for each in wanted})} answers, {whys}", flush=True)
        await asyncio.gather(*(refused(stack, plain.url, *each) for each in wrong(prompts[0])))
        await several_prompts(stack, plain.url, prompts[:3])
        await stack.settled()
    assert not failed


async def answered(
    http: aiohttp.ClientSession, url: str, asked: list[tuple[str, dict[str, Any]]]
) -> list[dict[int, Any]]:
    gate = asyncio.Semaphore(4)

    async def one(path: str, body: dict[str, Any]) -> dict[int, Any]:
        async with gate:
            return await ask(http, url, path, body)

    return await asyncio.gather(*(one(*each) for each in asked))


def wrong(prompt: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests that no server takes."""
    return [
        request("1 " * 4000, {}, stream=False),
        request(prompt, {"temperature": -3}, stream=False),
        request(prompt, {"max_tokens": -1}, stream=False),
    ]


async def refused(stack: Stack, plain: str, path: str, body: dict[str, Any]) -> None:
    statuses = []
    for url in (plain, stack.proxy_url):
        async with stack.http.post(url + path, json=body) as response:
            statuses.append(response.status)
            assert response.status == 400, await response.text()
    assert statuses == [400, 400]


async def several_prompts(stack: Stack, plain: str, prompts: list[str]) -> None:
    """A batch, as texts."""
    path, body = request("", {}, stream=False)
    asked = {**body, "prompt": prompts}
    assert_same(
        await ask(stack.http, stack.proxy_url, path, asked), await ask(stack.http, plain, path, asked)
    )


async def test_seeds_draw_what_they_draw_at_one_server(tmp_path: Path) -> None:
    """The proxy has choices drawn with seeds that follow one another."""
    prompts = [prompt.prompt for prompt in heldout(REQUESTS)]
    mode: dict[str, Any] = {"words": (*WORDS, "--enable-deterministic-inference"), "settings": SEEDS}
    async with sglang_server("plain", None, tmp_path, **mode) as plain, started(tmp_path, **mode) as stack:
        for chat, stream in product((False, True), repeat=2):
            wanted = []
            for seed in range(SEED, SEED + 3):
                asked = seeded(prompts, chat=chat, stream=stream, seed=seed)
                wanted.append(await answered(stack.http, plain.url, asked))
            texts = [[each[0]["text"] for each in one] for one in wanted]
            differ = sum(len(set(each)) == 3 for each in zip(*texts, strict=True))
            print(f"{chat=} {stream=}: of {len(prompts)} prompts {differ} have three answers", flush=True)
            assert differ > len(prompts) // 2
            for fields in ({}, {"n": 3}):
                asked = seeded(prompts, chat=chat, stream=stream, seed=SEED, **fields)
                found = await answered(stack.http, stack.proxy_url, asked)
                for choice in range(len(found[0]) - 1):
                    assert [each[choice]["text"] for each in found] == texts[choice]
        await stack.settled()


def seeded(
    prompts: list[str], *, chat: bool, stream: bool, seed: int, **fields: Any
) -> list[tuple[str, dict[str, Any]]]:
    """What follows the answer that the model has learnt is open."""
    asked = {"chat": chat, "temperature": 1.5, "seed": seed, "max_tokens": 48, "ignore_eos": True, **fields}
    return [request(prompt, asked, stream=stream) for prompt in prompts]

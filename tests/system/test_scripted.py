# SPDX-License-Identifier: Apache-2.0
"""Answers that a model gives seldom, from real agents: what a pair says of them is right, whole and streamed.

It is what one agent says that does everything itself (I4).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import session
from tests.standins.parrot import make_parrot, prompt
from tests.system.conftest import StartCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FERRY_TINY = Path(__file__).parents[2] / "deploy/models/ferry-tiny"
CALL = '<tool_call>\n{"name": "get", "arguments": {"id": 42}}\n</tool_call>'
SAID = 'a "q" </tool_call> } {\n é 🎉 日本 <tool_call>'
SAID_ARGUMENTS = json.dumps({"text": SAID}, ensure_ascii=False)
THOUGHT = "\nI could do that here.\n"
SCRIPTS: dict[str, Any] = {
    "two calls": f"{CALL}\n{CALL}",
    "mark in a string": f'<tool_call>\n{{"name": "say", "arguments": {SAID_ARGUMENTS}}}\n</tool_call>',
    "cut": '<tool_call>\n{"name": "get", "arguments": {"id": 4',
    "cut after a call": f'{CALL}\n<tool_call>\n{{"name": "get", "arguments": {{"id": 4',
    "parameters": '<tool_call>\n{"name": "get", "parameters": {"id": 42}}\n</tool_call>',
    "another name": '<tool_call>\n{"name": "get", "args": {"id": 42}}\n</tool_call>',
    "reasoning": f"<think>{THOUGHT}</think>\n\nThe answer is 🎉.",
    "reasoning alone": "<think>\nonly thinking",
    "mark in an answer": "Write `<think>x</think>` around it.",
    "three bytes": [{0xC3: 30.0, 0xE6: 29.0, 0xF0: 28.5}, {0xA9: 30.0}],
    "characters": "日本=é",
    "plain": "x y z",
}
_ENCODED = Tokenizer.from_file(str(FERRY_TINY / "tokenizer.json")).encode(SCRIPTS["reasoning"])
THOUGHT_TOKENS = sum(7 <= begin < 7 + len(THOUGHT) for begin, _ in _ENCODED.offsets)
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("get", "say")
]


@dataclass(frozen=True)
class Parrot:
    """A pair behind its proxy. Asked directly, its decode agent does everything itself."""

    cluster: Cluster
    starts: dict[str, int]

    @property
    def urls(self) -> tuple[str, str]:
        return self.cluster.url, self.cluster.agents["decode-0"].url

    def asked(self, name: str, **fields: Any) -> dict[str, Any]:
        message = {"role": "user", "content": prompt(self.starts[name])}
        return {"model": "parrot", "messages": [message], "temperature": 0, "max_tokens": 200, **fields}


@dataclass
class Said:
    """One choice of a chat, whole or put together of a stream."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning_tokens: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        part = choice.get("delta") or choice.get("message") or {}
        self.content += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or ""
        for number, call in enumerate(part.get("tool_calls") or ()):
            if "name" in call["function"]:
                assert call.get("index", number) == len(self.calls)
                self.calls.append([call["function"]["name"], ""])
            self.calls[-1][1] += call["function"]["arguments"]
        if choice["finish_reason"] is not None:
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice["stop_reason"]


async def chat(url: str, body: dict[str, Any]) -> Said:
    said = Said()
    async with session() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        lines = (await response.text()).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith(("data: {", "{"))]
    for event in map(json.loads, events):
        for choice in event["choices"]:
            said.add(choice)
        if event.get("usage"):
            said.reasoning_tokens = event["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return said


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def parrot(
    start_cluster: StartCluster, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Parrot]:
    directory = tmp_path_factory.mktemp("models") / "parrot"
    starts = make_parrot(directory, FERRY_TINY, SCRIPTS)
    async with start_cluster(model=str(directory)) as cluster:
        yield Parrot(cluster, starts)


async def everywhere(parrot: Parrot, name: str, **fields: Any) -> Said:
    """What is said apart and together, whole and streamed, which must be one."""
    said = []
    for url in parrot.urls:
        for stream in ({}, {"stream": True, "stream_options": {"include_usage": True}}):
            said.append(await chat(url, parrot.asked(name, **fields, **stream)))
    assert said[1:] == said[:-1], name
    return said[0]


async def test_calls_are_whole_or_none(parrot: Parrot) -> None:
    got = ["get", '{"id": 42}']
    for choice in ("auto", "required"):
        asked = {"tools": TOOLS, "tool_choice": choice}
        said = await everywhere(parrot, "two calls", **asked)
        assert (said.calls, said.finish_reason) == ([got, got], "tool_calls")
        said = await everywhere(parrot, "mark in a string", **asked)
        (call,) = said.calls
        assert (json.loads(call[1]), said.content, said.finish_reason) == ({"text": SAID}, "", "tool_calls")
    named = {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "say"}}}
    said = await everywhere(parrot, "mark in a string", **named)
    assert json.loads(said.calls[0][1]) == {"text": SAID}

    said = await everywhere(parrot, "parameters", tools=TOOLS)
    assert (said.calls, said.finish_reason) == ([got], "tool_calls")
    said = await everywhere(parrot, "another name", tools=TOOLS)
    assert (said.calls, said.content, said.finish_reason) == ([], SCRIPTS["another name"], "stop")


async def test_a_cut_call_is_not_called(parrot: Parrot) -> None:
    for name, num_whole in (("cut", 0), ("cut after a call", 1)):
        said = await everywhere(parrot, name, tools=TOOLS)
        assert (len(said.calls), said.calls[-1][1], said.finish_reason) == (num_whole + 1, '{"id": 4', "stop")
    said = await everywhere(parrot, "two calls", tools=TOOLS, stop=["2}"])
    assert (said.finish_reason, said.stop_reason, said.calls) == ("stop", "2}", [["get", '{"id": 4']])
    said = await everywhere(parrot, "two calls", tools=TOOLS, max_tokens=20)
    assert said.finish_reason == "length"


async def test_a_cut_call_over_other_apis(parrot: Parrot) -> None:
    url = parrot.cluster.url
    message: Any = parrot.asked("cut")["messages"]
    tools: Any = [{"name": "get", "input_schema": {"type": "object"}}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        made = await client.messages.create(
            model="parrot", max_tokens=200, messages=message, tools=tools, extra_body={"temperature": 0}
        )
        assert made.stop_reason == "end_turn"
        assert [block.type for block in made.content] == ["text"]
        stopped = await client.messages.create(
            model="parrot",
            max_tokens=200,
            messages=message,
            extra_body={"temperature": 0},
            stop_sequences=["arg"],
        )
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "arg")
        async with client.messages.stream(
            model="parrot",
            max_tokens=200,
            messages=message,
            extra_body={"temperature": 0},
            stop_sequences=["arg"],
        ) as stream:
            streamed = await stream.get_final_message()
        assert (streamed.stop_reason, streamed.stop_sequence) == ("stop_sequence", "arg")
        counted = await client.messages.count_tokens(model="parrot", messages=message)
        assert counted.input_tokens == parrot.starts["cut"]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        functions: Any = [
            {"type": "function", "name": "get", "parameters": {"type": "object"}, "strict": False}
        ]
        asked: Any = {"model": "parrot", "input": message, "tools": functions, "temperature": 0}
        response = await client.responses.create(**asked)
        (item,) = response.output
        assert (item.type, item.status, response.status) == ("function_call", "incomplete", "incomplete")
        again: Any = [*message, item.to_dict(), *message]
        assert (await client.responses.create(**{**asked, "input": again})).output
        thought = await client.responses.create(
            model="parrot",
            input=parrot.asked("reasoning")["messages"],
            temperature=0,
            reasoning={"effort": "low"},
        )
        assert thought.usage is not None
        assert thought.usage.output_tokens_details.reasoning_tokens == THOUGHT_TOKENS


async def test_reasoning_is_what_a_message_begins_with_and_is_counted(parrot: Parrot) -> None:
    said = await everywhere(parrot, "reasoning")
    assert (said.reasoning, said.content) == (THOUGHT.strip(), "The answer is 🎉.")
    assert said.reasoning_tokens == THOUGHT_TOKENS
    said = await everywhere(parrot, "reasoning alone")
    assert (said.reasoning, said.content, said.finish_reason) == ("only thinking", "", "stop")
    said = await everywhere(parrot, "mark in an answer")
    assert (said.content, said.reasoning) == (SCRIPTS["mark in an answer"], "")


async def test_an_answer_of_reasoning_alone_is_taken_back(parrot: Parrot) -> None:
    body = parrot.asked("reasoning alone")
    async with (
        session() as http,
        http.post(f"{parrot.cluster.url}/v1/chat/completions", json=body) as response,
    ):
        message = (await response.json())["choices"][0]["message"]
    assert message["content"] is None
    again = {**body, "messages": [*body["messages"], message, *body["messages"]]}
    assert (await chat(parrot.cluster.url, again)).reasoning == "only thinking"


async def complete(url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session() as http, http.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        choice: dict[str, Any] = (await response.json())["choices"][0]
        return choice


async def test_tokens_that_are_no_text_and_where_tokens_begin(parrot: Parrot) -> None:
    asked = {"model": "parrot", "temperature": 0, "max_tokens": 9, "logprobs": 3, "stop_token_ids": [0xA9]}
    for url in parrot.urls:
        bytes_alone = {**asked, "prompt": prompt(parrot.starts["three bytes"]), "max_tokens": 1}
        choice = await complete(url, bytes_alone)
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == ["bytes:\\xc3"]
        assert list(logprobs["top_logprobs"][0]) == ["bytes:\\xc3", "bytes:\\xe6", "bytes:\\xf0"]
        assert logprobs["top_logprobs"][0]["bytes:\\xc3"] == logprobs["token_logprobs"][0]
        by_id = await complete(url, {**bytes_alone, "return_tokens_as_token_ids": True})
        assert by_id["logprobs"]["tokens"] == [f"token_id:{0xC3}"]
        ended = await complete(url, {**bytes_alone, "max_tokens": 9})
        assert (ended["finish_reason"], ended["stop_reason"]) == ("stop", 0xA9)

        told = {**asked, "prompt": prompt(parrot.starts["characters"]), "echo": True, "stop_token_ids": None}
        choice = await complete(url, told)
        start = parrot.starts["characters"]
        assert choice["text"] == prompt(start) + "日本=é"
        offsets = [start + at for at in (0, 0, 0, 1, 1, 1, 2, 3, 3)]
        assert choice["logprobs"]["text_offset"] == [*range(start), *offsets]

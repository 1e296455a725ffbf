# SPDX-License-Identifier: Apache-2.0
"""Calls of tools: valid, and the same apart, together and after a death (I4); and the official client.

"Together" is what the decode agent answers that is asked directly: it does everything itself.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import jsonschema_rs
import openai
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import heldout, session
from tests.helpers.metrics import scrape, total, wait_one_running
from tests.standins.chat_templates import HERMES
from tests.system.conftest import StartCluster
from tests.system.test_migration import kill_rank

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FERRY_TINY = Path(__file__).parents[2] / "deploy/models/ferry-tiny"
LEASE_S = 2.0
RUNNING_BEFORE = 3
BYTE = {"type": "integer", "minimum": 0, "maximum": 255}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "description": f"It does {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS = [
    tool("add", a=BYTE, b=BYTE),
    tool("list_bytes", values={"type": "array", "items": BYTE, "minItems": 30, "maxItems": 32}),
]
VALIDATORS = {
    each["function"]["name"]: jsonschema_rs.validator_for(each["function"]["parameters"]) for each in TOOLS
}
NAMED = {"type": "function", "function": {"name": "list_bytes"}}


@dataclass
class Call:
    id: str
    name: str
    arguments: str = ""


@dataclass
class Message:
    """One choice of a chat, as I4 compares it. The ids of calls are its own."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def same(self) -> tuple[object, ...]:
        calls = tuple((call.name, call.arguments) for call in self.calls)
        return self.content, self.reasoning, calls, tuple(self.token_ids), self.finish_reason

    def add(self, choice: dict[str, Any]) -> None:
        """Add a chunk's choice, or a whole one."""
        part = choice.get("delta") or choice.get("message") or {}
        self.content += part.get("content") or ""
        self.reasoning += part.get("reasoning_content") or ""
        for number, call in enumerate(part.get("tool_calls") or ()):
            index, function = call.get("index", number), call["function"]
            if "name" in function:
                assert index == len(self.calls), "a call begins twice, or out of turn"
                assert call["type"] == "function"
                self.calls.append(Call(call["id"], function["name"]))
            assert index == len(self.calls) - 1
            self.calls[index].arguments += function.get("arguments", "")
        self.token_ids += choice.get("token_ids") or []
        if choice["finish_reason"] is not None:
            assert self.finish_reason is None
            self.finish_reason = choice["finish_reason"]


async def chat(url: str, body: dict[str, Any]) -> list[Message]:
    """Return the choices of one chat; streamed if the body says so."""
    messages = [Message() for _ in range(body.get("n", 1))]
    async with session() as http, http.post(f"{url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        if not body.get("stream"):
            for choice in (await response.json())["choices"]:
                messages[choice["index"]].add(choice)
            return messages
        done = False
        async for line in response.content:
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: "):
                event = json.loads(line[len(b"data: ") :])
                for choice in event["choices"]:
                    messages[choice["index"]].add(choice)
        assert done
        return messages


def bodies(count: int) -> list[dict[str, Any]]:
    """Chats whose answers must call: streamed and whole, greedy and sampled, one choice and three."""
    made = []
    for number, prompt in enumerate(heldout(task="addition")[:count]):
        made.append(
            {
                "model": "tools",
                "messages": [{"role": "user", "content": prompt.prompt}],
                "max_tokens": 700,
                "seed": number,
                "temperature": (0.0, 1.0)[number % 2],
                "n": (1, 3)[number // 2 % 2],
                "stream": number % 4 != 3,
                "tools": TOOLS,
                "tool_choice": ("required", NAMED)[number // 4 % 2],
                "parallel_tool_calls": number % 3 == 0,
                "return_token_ids": True,
            }
        )
    return made


def check_valid(asked: dict[str, Any], messages: Sequence[Message]) -> None:
    for message in messages:
        assert (message.finish_reason, message.content) == ("tool_calls", ""), message
        assert message.calls
        if not asked["parallel_tool_calls"] or asked["tool_choice"] is NAMED:
            assert len(message.calls) == 1
        for call in message.calls:
            assert VALIDATORS[call.name].is_valid(json.loads(call.arguments)), call
            if asked["tool_choice"] is NAMED:
                assert call.name == "list_bytes"
    ids = [call.id for message in messages for call in message.calls]
    assert len(set(ids)) == len(ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model with a chat template that has tools."""
    directory = tmp_path_factory.mktemp("models") / "tools"
    shutil.copytree(FERRY_TINY, directory)
    (directory / "chat_template.jinja").write_text(HERMES)
    return str(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(start_cluster: StartCluster, model: str) -> AsyncIterator[Cluster]:
    async with start_cluster(decode=2, args=("--lease-s", str(LEASE_S)), model=model) as cluster:
        yield cluster


async def test_calls_are_valid_and_equal_apart_together_and_after_a_death(cluster: Cluster) -> None:
    asked = bodies(8)
    together = await asyncio.gather(*(chat(cluster.agents["decode-1"].url, body) for body in asked))
    apart = await asyncio.gather(*(chat(cluster.url, body) for body in asked))
    for body, ours, theirs in zip(asked, apart, together, strict=True):
        check_valid(body, ours)
        assert [each.same() for each in ours] == [each.same() for each in theirs], body

    streams = [{**body, "stream": True} for body in asked]
    running = asyncio.gather(*(chat(cluster.url, body) for body in streams))
    doomed = cluster.agents[await wait_one_running(cluster.agents, RUNNING_BEFORE)]
    kill_rank(doomed)
    await doomed.process.wait()
    for body, ours, theirs in zip(streams, await running, together, strict=True):
        check_valid(body, ours)
        assert [each.same() for each in ours] == [each.same() for each in theirs], body
    assert total(await scrape(cluster.url), "kvferry_proxy_migrations_total") >= 1


async def test_the_official_client_reads_streamed_calls(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {
            "model": "tools",
            "messages": [{"role": "user", "content": "417+52="}],
            "tools": [{**each, "function": {**each["function"], "strict": True}} for each in TOOLS],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 700,
            "seed": 3,
        }
        async with client.chat.completions.stream(**asked) as stream:
            pieces = [event async for event in stream if event.type == "tool_calls.function.arguments.delta"]
            streamed = (await stream.get_final_completion()).choices[0]
        whole = (await client.chat.completions.create(**asked)).choices[0]
        [call], [again] = streamed.message.tool_calls or [], whole.message.tool_calls or []
        assert len(pieces) > 1
        assert (streamed.finish_reason, whole.finish_reason) == ("tool_calls", "tool_calls")
        assert (streamed.message.content, whole.message.content) == (None, None)
        assert (call.function.name, call.function.arguments) == (
            again.function.name,
            again.function.arguments,
        )
        assert call.function.parsed_arguments == json.loads(call.function.arguments)
        followed = await client.chat.completions.create(
            model="tools",
            messages=[
                *asked["messages"],
                whole.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": again.id, "content": "469"},
            ],
            tools=asked["tools"],
            max_tokens=8,
        )
        assert followed.choices[0].finish_reason in ("length", "stop")


async def test_anthropics_client_reads_streamed_calls(cluster: Cluster) -> None:
    async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key="none", max_retries=0) as client:
        function = TOOLS[1]["function"]
        asked: Any = {
            "model": "tools",
            "max_tokens": 700,
            "messages": [{"role": "user", "content": "417+52="}],
            "tools": [{"name": function["name"], "input_schema": function["parameters"]}],
            "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        }
        async with client.messages.stream(**asked) as stream:
            pieces = [event.partial_json async for event in stream if event.type == "input_json"]
            message = await stream.get_final_message()
        (block,) = message.content
        assert block.type == "tool_use" and message.stop_reason == "tool_use"
        assert len(pieces) > 1 and json.loads("".join(pieces)) == block.input
        assert VALIDATORS["list_bytes"].is_valid(block.input)
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "done"}
        said = [*asked["messages"], {"role": "assistant", "content": [block.to_dict()]}]
        more: Any = {**asked, "messages": [*said, {"role": "user", "content": [result]}], "max_tokens": 8}
        followed = await client.messages.create(**{**more, "tool_choice": {"type": "auto"}})
        assert followed.stop_reason in ("max_tokens", "end_turn")

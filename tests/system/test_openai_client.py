# SPDX-License-Identifier: Apache-2.0
"""The official `openai` and `anthropic` clients against the proxy, streamed and not; and bad input."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import anthropic
import openai
import pydantic
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.helpers.client import heldout
from tests.helpers.metrics import scrape, total


class Verdict(pydantic.BaseModel):
    right: bool


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(shared_cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{shared_cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_completion(client: openai.AsyncOpenAI) -> None:
    prompt = heldout(task="recall")[0]
    answer = await client.completions.create(
        model="ferry-tiny", prompt=prompt.prompt, temperature=0, max_tokens=16
    )
    assert answer.choices[0].text == prompt.answer
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == prompt.prompt_tokens


async def test_streamed_completion(client: openai.AsyncOpenAI) -> None:
    prompt = heldout(task="recall")[1]
    stream = await client.completions.create(
        model="ferry-tiny", prompt=prompt.prompt, temperature=0, max_tokens=16, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == prompt.answer
    assert len({chunk.id for chunk in chunks}) == 1
    assert len({chunk.created for chunk in chunks}) == 1


async def test_chat(client: openai.AsyncOpenAI) -> None:
    prompt = heldout(task="addition")[0]
    answer = await client.chat.completions.create(
        model="ferry-tiny", messages=[{"role": "user", "content": prompt.prompt}], temperature=0
    )
    assert answer.choices[0].message.content == prompt.answer
    assert answer.choices[0].message.role == "assistant"


async def test_streamed_chat_with_usage(client: openai.AsyncOpenAI) -> None:
    prompt = heldout(task="recall")[2]
    stream = await client.chat.completions.create(
        model="ferry-tiny",
        messages=[{"role": "user", "content": prompt.prompt}],
        temperature=0,
        n=2,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for index in range(2):
        deltas = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(delta.delta.content or "" for delta in deltas) == prompt.answer
        assert [delta.delta.role for delta in deltas if delta.delta.role] == ["assistant"]
        assert deltas[-1].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 2 * (len(prompt.answer) + 1)


async def test_response(client: openai.AsyncOpenAI) -> None:
    prompt = heldout(task="recall")[2]
    answer = await client.responses.create(
        model="ferry-tiny", input=prompt.prompt, temperature=0, metadata={"for": "a test"}
    )
    assert (answer.output_text, answer.status, answer.metadata) == (
        prompt.answer,
        "completed",
        {"for": "a test"},
    )
    assert answer.usage is not None
    assert answer.usage.output_tokens == len(prompt.answer) + 1
    chat = await client.chat.completions.create(
        model="ferry-tiny", messages=[{"role": "user", "content": prompt.prompt}], temperature=0
    )
    assert chat.usage is not None and chat.usage.prompt_tokens == answer.usage.input_tokens
    again = await client.responses.create(
        model="ferry-tiny",
        input=[
            {"role": "user", "content": prompt.prompt},
            *cast(Any, answer.output),
            {"role": "user", "content": "1+1="},
        ],
        temperature=0,
    )
    assert again.usage is not None and again.usage.input_tokens > answer.usage.total_tokens


async def test_streamed_response(client: openai.AsyncOpenAI) -> None:
    """The helper checks the order of events and puts the response together."""
    prompt = heldout(task="recall")[2]
    async with client.responses.stream(
        model="ferry-tiny", input=prompt.prompt, temperature=0, max_output_tokens=64
    ) as stream:
        events = [event async for event in stream]
        response = await stream.get_final_response()
    texts = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(texts) == response.output_text == prompt.answer
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert response.usage is not None and response.usage.output_tokens == len(prompt.answer) + 1


async def test_streamed_response_of_a_schema(client: openai.AsyncOpenAI) -> None:
    """`text_format` becomes a JSON schema; the answer, constrained to it, is parsed."""
    async with client.responses.stream(
        model="ferry-tiny", input="417+52=", temperature=0, text_format=Verdict, max_output_tokens=200
    ) as stream:
        response = await stream.get_final_response()
    assert isinstance(response.output_parsed, Verdict)


async def test_a_response_that_cannot_be_given(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="nothing is stored") as caught:
        await client.responses.create(model="ferry-tiny", input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError, match="context"):
        await client.responses.create(model="ferry-tiny", input="7" * 5000)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def claude(shared_cluster: Cluster) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=shared_cluster.url, api_key="none", max_retries=0) as client:
        yield client


async def test_message(claude: anthropic.AsyncAnthropic) -> None:
    prompt = heldout(task="recall")[2]
    answer = await claude.messages.create(
        model="ferry-tiny",
        max_tokens=32,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": prompt.prompt}],
    )
    (block,) = answer.content
    assert block.type == "text" and block.text == prompt.answer
    assert answer.stop_reason == "end_turn"
    assert answer.usage.output_tokens == len(prompt.answer) + 1
    assert answer.usage.input_tokens > prompt.prompt_tokens  # the template adds some


async def test_streamed_message(claude: anthropic.AsyncAnthropic) -> None:
    """The helper checks the order of events and puts the message together."""
    prompt = heldout(task="recall")[2]
    async with claude.messages.stream(
        model="ferry-tiny",
        max_tokens=2,
        extra_body={"temperature": 0},
        messages=[{"role": "user", "content": prompt.prompt}],
    ) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == prompt.answer[:2]
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": prompt.answer[:2]}]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 2)


async def test_a_message_that_cannot_be_answered(claude: anthropic.AsyncAnthropic) -> None:
    asked: Any = {"max_tokens": 4, "messages": [{"role": "user", "content": "1+1="}]}
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        await claude.messages.create(model="claude-9", **asked)
    with pytest.raises(anthropic.BadRequestError, match="context"):
        await claude.messages.create(model="ferry-tiny", **(asked | {"max_tokens": 9_000}))


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["ferry-tiny"]


BAD: list[tuple[str, Any, int, str]] = [
    ("bad JSON", b"{", 400, ""),
    ("not an object", [], 400, ""),
    ("no model", {"prompt": "1+1="}, 400, "model"),
    ("no prompt", {"model": "ferry-tiny"}, 400, "prompt"),
    ("empty prompt", {"model": "ferry-tiny", "prompt": ""}, 400, "prompt"),
    ("wrong type", {"model": "ferry-tiny", "prompt": 7}, 400, "prompt"),
    ("max_tokens negative", {"model": "ferry-tiny", "prompt": "1+1=", "max_tokens": -1}, 400, "max_tokens"),
    ("max_tokens text", {"model": "ferry-tiny", "prompt": "1+1=", "max_tokens": "5"}, 400, "max_tokens"),
    ("max_tokens fraction", {"model": "ferry-tiny", "prompt": "1+1=", "max_tokens": 1.5}, 400, "max_tokens"),
    ("prompt beyond context", {"model": "ferry-tiny", "prompt": "7" * 5000}, 400, "context"),
    (
        "answer beyond context",
        {"model": "ferry-tiny", "prompt": "1+1=", "max_tokens": 100000},
        400,
        "context",
    ),
    ("ids beyond context", {"model": "ferry-tiny", "prompt": [65] * 5000}, 400, "context"),
    ("unknown model", {"model": "gpt-9", "prompt": "1+1="}, 404, "gpt-9"),
    ("n 0", {"model": "ferry-tiny", "prompt": "1+1=", "n": 0}, 400, "n"),
    ("body over the limit", io.BytesIO(b" " * 10_000_000), 413, ""),
]


@pytest.mark.parametrize(
    ("body", "status", "word"), [case[1:] for case in BAD], ids=[case[0] for case in BAD]
)
async def test_bad_input(shared_cluster: Cluster, body: Any, status: int, word: str) -> None:
    """The right 4xx with an OpenAI-style error body, streamed or not, and nothing left behind."""
    async with aiohttp.ClientSession() as http:
        sent = {"data": body} if isinstance(body, bytes | io.BytesIO) else {"json": body}
        headers = {"Content-Type": "application/json"}
        async with http.post(f"{shared_cluster.url}/v1/completions", headers=headers, **sent) as response:
            assert response.status == status
            error = (await response.json())["error"]
    assert error.keys() >= {"message", "type", "param", "code"}
    assert word in error["message"]
    for agent in shared_cluster.agents.values():
        assert total(await scrape(agent.url), "kvferry_agent_num_requests_running") == 0

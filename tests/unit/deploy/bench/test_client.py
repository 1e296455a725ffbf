# SPDX-License-Identifier: Apache-2.0
"""What a client sees of one request, whatever the server does with it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

import pytest
import pytest_asyncio

from kvferry.deploy.bench.client import BenchFailed, Observation, connected_client
from kvferry.deploy.bench.config import BenchConfig, Target
from kvferry.deploy.bench.workload import PlannedRequest
from tests.standins.token_stream import MODEL, Misbehaviour, TokenStream, token_stream


@pytest_asyncio.fixture
async def server() -> AsyncIterator[TokenStream]:
    async with token_stream() as running:
        yield running


async def send(server: TokenStream, prompt: str, config: BenchConfig, tokens: int = 3) -> Observation:
    async with connected_client(Target("one", server.url), config) as client:
        return await client.send(PlannedRequest(0.0, prompt, tokens), time.perf_counter())


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_events_with_text_are_counted(server: TokenStream, api: Literal["completions", "chat"]) -> None:
    """Not the first event of a chat, which has the role alone, nor the last, which has the usage."""
    seen = await send(server, "two words", BenchConfig(api=api))
    assert (seen.failure, len(seen.events_s), seen.prompt_tokens, seen.output_tokens) == ("", 3, 11, 3)
    assert 0 < seen.ttft_s <= seen.events_s[-1] <= seen.end_s
    assert seen.tpot_s == (seen.events_s[-1] - seen.events_s[0]) / 2
    assert server.bodies[-1]["model"] == MODEL
    assert server.bodies[-1]["ignore_eos"] is True


async def test_what_is_sent_follows_the_options(server: TokenStream, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    await send(server, "words", BenchConfig(model="other", ignore_eos=False, key=key))
    assert server.bodies[-1]["model"] == "other"
    assert "ignore_eos" not in server.bodies[-1]
    assert server.headers[-1]["Authorization"] == "Bearer secret"


async def test_its_id_is_in_the_observation(server: TokenStream) -> None:
    seen = await send(server, "words", BenchConfig())
    assert server.headers[-1]["X-Request-Id"] == seen.request_id != ""


async def test_events_without_text_are_counted_if_that_is_wanted(server: TokenStream) -> None:
    async with connected_client(Target("one", server.url), BenchConfig(), count_empty=True) as client:
        seen = await client.send(PlannedRequest(0.0, Misbehaviour.NO_TEXT, 3), time.perf_counter())
    assert (seen.failure, len(seen.events_s)) == ("", 3)


async def test_one_token_has_no_time_per_token(server: TokenStream) -> None:
    assert (await send(server, "words", BenchConfig(), tokens=1)).tpot_s is None


@pytest.mark.parametrize(
    ("misbehaviour", "failure"),
    [
        (Misbehaviour.REFUSES, "HTTP 400: too long"),
        (Misbehaviour.ERROR_IN_STREAM, "error in the stream: agent lost"),
        (Misbehaviour.NO_DONE, "the stream ended without [DONE]"),
        (Misbehaviour.NO_TEXT, "the answer has no text"),
        (Misbehaviour.HANGS, "no end within 0.3 s"),
        (Misbehaviour.NO_JSON, "the answer cannot be read: "),
        (Misbehaviour.CLOSES, "its answer breaks off"),
    ],
)
async def test_a_failure_is_in_the_observation(
    server: TokenStream, misbehaviour: Misbehaviour, failure: str
) -> None:
    timeout_s = 0.3 if misbehaviour is Misbehaviour.HANGS else 30.0
    seen = await send(server, misbehaviour, BenchConfig(timeout_s=timeout_s))
    assert seen.failure.startswith(failure)
    assert seen.end_s > 0


async def test_an_answer_ends_with_done_whatever_its_body_does(server: TokenStream) -> None:
    seen = await send(server, Misbehaviour.KEEPS_OPEN, BenchConfig(timeout_s=5.0))
    assert (seen.failure, len(seen.events_s)) == ("", 3)
    assert seen.events_s[-1] <= seen.end_s


async def test_a_server_that_is_not_there() -> None:
    with pytest.raises(BenchFailed, match=r"http://127\.0\.0\.1:9/v1/models cannot be reached"):
        async with connected_client(Target("one", "http://127.0.0.1:9"), BenchConfig()):
            pass
    async with connected_client(Target("one", "http://127.0.0.1:9"), BenchConfig(model="m")) as client:
        seen = await client.send(PlannedRequest(0.0, "words", 2), time.perf_counter())
    assert seen.failure == "Connection refused"


async def test_a_server_that_refuses_the_longest_prompt_ends_the_run(server: TokenStream) -> None:
    async with connected_client(Target("one", server.url), BenchConfig()) as client:
        assert await client.count_tokens("two words") == 11
        with pytest.raises(BenchFailed, match="answered 400: too long"):
            await client.count_tokens(Misbehaviour.REFUSES)

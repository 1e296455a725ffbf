# SPDX-License-Identifier: Apache-2.0
"""The API process over real HTTP, with a stand-in for the engine process behind the real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import psutil
import pytest
import pytest_asyncio
import zmq
import zmq.asyncio
from prometheus_client.parser import text_string_to_metric_families

from kvferry.agent.api.text.tokenizer import Tokenizer
from kvferry.common.http.server import MAX_HEAD_BYTES
from kvferry.proxy.wire.registration import Ack, Bye, Register, decode_agent_message, encode
from tests.helpers.deaths import assert_within, exit_s
from tests.standins.checkpoint import byte_level_tokenizer, write_checkpoint
from tests.standins.engine import CACHED_TOKENS, CONTROL_PORT, MAX_MODEL_LEN, Seed

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROOT = Path(__file__).parents[4]
START = (
    "import os, sys; from kvferry.common.child_process import die_with_parent; "
    "die_with_parent(os.getppid()); "
    "from kvferry.agent.__main__ import main; "
    "sys.exit(main(sys.argv[1:], engine_module='tests.standins.engine'))"
)
DEADLINE_S = 20.0
TEXT = "the quick brown fox jumps over the lazy dog"
CHAT = [{"role": "user", "content": TEXT}]
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "transfer_id": "t1",
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "client_max_tokens": None,
}
STREAMED = {
    "do_remote_prefill": True,
    "streamed": True,
    "transfer_id": "t1",
    "remote_engine_id": "e" * 16,
    "remote_host": "localhost",
    "remote_port": 6301,
    "remote_tp_size": 1,
}


@dataclass(frozen=True)
class Agent:
    """One running agent and a client for it."""

    process: asyncio.subprocess.Process
    http: aiohttp.ClientSession
    url: str
    incarnation: str
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any], Any]:
        """Status, answer and headers of a POST whose answer is JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=data, headers=headers) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json(), response.headers

    async def get_status(self, path: str) -> int:
        async with self.http.get(self.url + path) as response:
            return response.status

    async def complete(self, path: str = "/v1/completions", **fields: Any) -> dict[str, Any]:
        status, answer, _ = await self.post(path, self.body(**fields))
        assert status == 200, answer
        return answer

    async def stream(self, path: str = "/v1/completions", **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream, which must end with `[DONE]`."""
        body = self.body(stream=True, **fields)
        async with self.http.post(self.url + path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.content_type == "text/event-stream"
            lines = (await response.text()).split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]

    def body(self, **fields: Any) -> dict[str, Any]:
        prompt = {} if "messages" in fields else {"prompt": TEXT}
        return {"model": "tiny", **prompt, "max_tokens": 6, **fields}

    async def told(self, what: str) -> float:
        """How often the engine was told to submit, abort, stop or drop."""
        async with self.http.get(self.url + "/metrics") as response:
            page = await response.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
            if sample.name == "kvferry_transfer_failures_total" and sample.labels["reason"] == what
        )

    async def wait_told(self, what: str, count: float) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while await self.told(what) < count:
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("m") / "tiny", byte_level_tokenizer())


@asynccontextmanager
async def running(model: Path, *args: str, ready: bool = True) -> AsyncIterator[Agent]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, "--model", str(model), "--port", "0", "--control-port", "0", *args,
        stdout=asyncio.subprocess.PIPE, cwd=ROOT,
        env={**os.environ, "TMPDIR": str(model.parent)},  # killed agents leave their socket directory behind
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
        listening = json.loads(line)["listening"]
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as http:
            agent = Agent(process, http, listening["url"], listening["incarnation"], Tokenizer(model))
            async with asyncio.timeout(DEADLINE_S):
                while ready and await agent.get_status("/ready") != 200:
                    await asyncio.sleep(0.02)
            yield agent
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def agent(model: Path) -> AsyncIterator[Agent]:
    async with running(model, "--max-body-bytes", "100000", "--advertise-host", "localhost") as started:
        yield started


def text_of(choice: dict[str, Any]) -> str:
    """The text of a choice, whole or of one event, of either endpoint."""
    message = choice.get("message") or choice.get("delta")
    text: str = choice["text"] if message is None and "text" in choice else (message or {}).get("content", "")
    return text


def joined(parts: list[dict[str, Any]], key: str) -> list[Any]:
    return [item for part in parts for item in part[key]]


# Whole requests.


async def test_a_completion(agent: Agent) -> None:
    answer = await agent.complete(return_token_ids=True)
    (choice,) = answer["choices"]
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert choice["text"] == TEXT[: len(choice["text"])] != ""
    assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 6)
    prompt_tokens = len(agent.ids(TEXT)) + 1  # with BOS
    assert answer["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 6,
        "total_tokens": prompt_tokens + 6,
        "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS},
    }


async def test_a_chat_adds_special_tokens_once(agent: Agent) -> None:
    answer = await agent.complete("/v1/chat/completions", messages=CHAT, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert answer["usage"]["prompt_tokens"] == len(agent.ids(f"<|bos|><|user|>{TEXT}<|assistant|>"))
    assert choice["token_ids"][:3] == agent.ids("<|bos|><|user|>the")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_says_what_the_answer_says(agent: Agent, path: str) -> None:
    fields = {"n": 2, "return_token_ids": True, "logprobs": True if "chat" in path else 1, "stop": ["jum"]}
    if "chat" in path:
        fields["messages"] = CHAT
    answer = await agent.complete(path, **fields, max_tokens=12)
    events = await agent.stream(path, **fields, max_tokens=12, stream_options={"include_usage": True})
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == answer["usage"]
    for choice in answer["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        text = "".join(text_of(part) for part in parts)
        assert text == text_of(choice)
        assert joined(parts, "token_ids") == choice["token_ids"]
        assert joined(parts, "margins") == choice["margins"]
        key = "content" if "chat" in path else "token_logprobs"
        assert joined([part["logprobs"] for part in parts], key) == choice["logprobs"][key]
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"] == "stop"
        assert all(part["finish_reason"] is None for part in parts[:-1])


async def test_a_stop_string_ends_its_choice_in_the_engine_too(agent: Agent) -> None:
    stops = await agent.told("stop")
    answer = await agent.complete(stop=" fox", max_tokens=400, kvferry_timing=True)
    assert answer["choices"][0]["text"] == "the quick brown"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(agent.ids("the quick brown fox")) + 1
    assert answer["kvferry_timing"]["queue_s"] == 0.25
    assert await agent.told("stop") == stops + 1


async def test_max_tokens_1_is_one_token(agent: Agent) -> None:
    """R10."""
    answer = await agent.complete(max_tokens=1, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 1
    answer = await agent.complete(max_completion_tokens=2, max_tokens=None, return_token_ids=True)
    assert len(answer["choices"][0]["token_ids"]) == 2


async def test_eos_ends_a_choice_without_text_and_ignore_eos_goes_on(agent: Agent) -> None:
    prompt = agent.ids("the<|end|> fox")
    ended = await agent.complete(prompt=prompt, return_token_ids=True, max_tokens=3)
    assert ended["choices"][0]["text"] == "the"
    assert (ended["choices"][0]["finish_reason"], ended["usage"]["completion_tokens"]) == ("stop", 2)
    on = await agent.complete(prompt=prompt, ignore_eos=True, max_tokens=3)
    assert (on["choices"][0]["text"], on["choices"][0]["finish_reason"]) == ("the fox", "length")


async def test_a_long_prompt_is_encoded_beside_the_event_loop(agent: Agent) -> None:
    text = "the quick brown fox " * 300
    status, answer, _ = await agent.post("/v1/completions", agent.body(prompt=text))
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert str(MAX_MODEL_LEN) in answer["error"]["message"]


async def test_the_openai_client_understands_everything(agent: Agent) -> None:
    async with openai.AsyncOpenAI(base_url=agent.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        completion = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=4, logprobs=2)
        assert completion.choices[0].text == "the quick brown"
        assert completion.choices[0].logprobs is not None
        chunks = await client.completions.create(model="tiny", prompt=TEXT, max_tokens=4, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in chunks]) == "the quick brown"
        messages: Any = CHAT
        chat = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, logprobs=True, top_logprobs=2
        )
        assert chat.choices[0].message.content == "the quick"
        stream = await client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=4, stream=True, stream_options={"include_usage": True}
        )
        seen = [chunk async for chunk in stream]
        assert "".join(c.choices[0].delta.content or "" for c in seen if c.choices) == "the quick"
        assert seen[-1].usage is not None and seen[-1].usage.completion_tokens == 4
        with pytest.raises(openai.NotFoundError, match="gpt-9"):
            await client.completions.create(model="gpt-9", prompt="x")


@pytest.mark.parametrize(
    ("sent", "first"),
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nX-Pad: ".ljust(MAX_HEAD_BYTES + 1, b"a"), b"HTTP/1.1 431 "),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" * 2000, b""),
    ],
    ids=["a head without end", "a flood of pipelined requests"],
)
async def test_a_client_is_disconnected_that_sends_too_much(agent: Agent, sent: bytes, first: bytes) -> None:
    """D1, D6."""
    host, _, port = agent.url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    received = b""
    async with asyncio.timeout(DEADLINE_S):
        with suppress(ConnectionResetError):
            while more := await reader.read(2**16):
                received += more
    writer.close()
    assert received.startswith(first)
    assert received.count(b"HTTP/1.1 ") <= 100


# Web pages (N4).

EVIL = "http://evil.example"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example:8000"}, "host_not_allowed"),
        ({"Origin": EVIL}, "cross_site"),
        ({"Sec-Fetch-Site": "cross-site"}, "cross_site"),
    ],
    ids=["rebinding", "origin", "fetch"],
)
async def test_a_web_page_does_not_operate_an_agent(agent: Agent, headers: dict[str, str], code: str) -> None:
    """Any page could read all, and end the agent by `POST /drain`."""
    gone = {"transfer_id": "t", "incarnation": agent.incarnation}
    for path, body in (("/drain", {}), ("/kv/drop", gone), ("/v1/completions", agent.body())):
        status, answer, _ = await agent.post(path, body, **headers)
        assert (status, answer["error"]["code"]) == (403, code)
    for path in ("/metrics", "/v1/models", "/health"):
        async with agent.http.get(agent.url + path, headers=headers) as response:
            assert response.status == (200 if code == "cross_site" else 403)
    assert await agent.get_status("/ready") == 200


async def test_an_agent_is_called_by_its_names(model: Path) -> None:
    names = ("--advertise-host", "gpu-7.example.com", "--allowed-hosts", "other.example.com")
    async with running(model, *names, ready=False) as agent:
        local = agent.url.replace("gpu-7.example.com", "127.0.0.1")
        for host, status in (("GPU-7.example.com:1", 200), ("other.example.com", 200), ("evil.example", 403)):
            async with agent.http.get(f"{local}/health", headers={"Host": host}) as response:
                assert response.status == status


# Legs of a request (docs/architecture.md#one-request).


@pytest.mark.parametrize("stream", [False, True])
async def test_http_1_0_gets_no_chunks(agent: Agent, stream: bool) -> None:
    """F12."""
    host, _, port = agent.url.removeprefix("http://").partition(":")
    body = json.dumps(agent.body(stream=stream)).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    async with asyncio.timeout(DEADLINE_S):
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    if stream:
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"}\n\ndata: [DONE]\n\n")
    else:
        assert json.loads(answer)["choices"][0]["text"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_two_legs_give_the_answer_of_one_agent(agent: Agent, path: str, stream: bool) -> None:
    """I4, through both legs as a proxy sends them: token 1 from the prefill, the rest from the decode leg."""
    asked: dict[str, Any] = {"n": 2, "seed": 5, "return_token_ids": True, "stop": ["ps ov"], "max_tokens": 9}
    asked |= {"logprobs": True, "top_logprobs": 2, "messages": CHAT} if "chat" in path else {"logprobs": 2}
    whole = await agent.complete(path, **asked)
    prefill = await agent.complete(
        path, **{**asked, "max_tokens": 1}, kv_transfer_params={**PREFILL, "client_max_tokens": 9}
    )
    params = prefill["kv_transfer_params"]
    first = params["first_tokens"]
    assert params["remote_engine_id"] == agent.incarnation
    assert (params["remote_host"], params["remote_port"]) == ("localhost", CONTROL_PORT)
    assert params["remote_num_tokens"] == len(params["prompt_token_ids"]) == prefill["usage"]["prompt_tokens"]
    assert [choice["finish_reason"] for choice in prefill["choices"]] == ["length", "length"]
    if not stream:
        decode = await agent.complete(path, **asked, kv_transfer_params=params)
        assert decode["choices"] == whole["choices"]
        assert decode["usage"] == whole["usage"]
        return
    events = await agent.stream(
        path, **asked, kv_transfer_params=params, stream_options={"include_usage": True}
    )
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        begun = first[choice["index"]]
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        text = "".join(text_of(part) for part in parts)
        assert begun["text"] + text == text_of(choice)
        assert all("role" not in part.get("delta", {}) for part in parts)
        assert [begun["id"], *joined(parts, "token_ids")] == choice["token_ids"]
        assert [begun["margin"], *joined(parts, "margins")] == choice["margins"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_streamed_decode_leg_leaves_token_1_to_the_prefill_leg(
    agent: Agent, path: str, stream: bool
) -> None:
    """Its engine says token 1 like any other; a whole answer has it, and a stream only names its ids."""
    asked: dict[str, Any] = {"n": 2, "seed": 5, "return_token_ids": True, "stop": ["ps ov"], "max_tokens": 9}
    asked |= {"logprobs": True, "top_logprobs": 2, "messages": CHAT} if "chat" in path else {"logprobs": 2}
    whole = await agent.complete(path, **asked)
    asked["kv_transfer_params"] = STREAMED
    if not stream:
        decode = await agent.complete(path, **asked)
        assert (decode["choices"], decode["usage"]) == (whole["choices"], whole["usage"])
        return
    body = agent.body(stream=True, stream_options={"include_usage": True}, **asked)
    async with agent.http.post(agent.url + path, json=body) as response:
        first, *raw, done, _ = (await response.text()).split("\n\n")
    assert done == "data: [DONE]"
    assert first == ": first " + ",".join(str(choice["token_ids"][0]) for choice in whole["choices"])
    events = [json.loads(event.removeprefix("data: ")) for event in raw]
    assert events[-1]["usage"] == whole["usage"]
    for choice in whole["choices"]:
        parts = [part for event in events for part in event["choices"] if part["index"] == choice["index"]]
        assert all("role" not in part.get("delta", {}) for part in parts)
        assert joined(parts, "token_ids") == choice["token_ids"][1:]
        assert joined(parts, "margins") == choice["margins"][1:]
        assert text_of(choice).endswith("".join(text_of(part) for part in parts))
        assert [part["finish_reason"] for part in parts][-1] == choice["finish_reason"]


@pytest.mark.parametrize(
    "wrong", [{"remote_engine_id": None}, {"first_tokens": [{"id": 1}]}, {"prompt_token_ids": [1]}]
)
async def test_a_streamed_leg_brings_where_and_nothing_that_it_cannot_know(
    agent: Agent, wrong: dict[str, Any]
) -> None:
    status, answer, _ = await agent.post(
        "/v1/completions", agent.body(kv_transfer_params={**STREAMED, **wrong})
    )
    assert status == 400
    assert answer["error"]["param"] == f"kv_transfer_params.{next(iter(wrong))}"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("events_before", [2, 5, 11, 17])
async def test_a_resumed_stream_goes_on_where_the_broken_one_ended(
    agent: Agent, path: str, events_before: int
) -> None:
    """I4 across a migration: the events before the break and those after it are the unbroken stream's."""
    asked: dict[str, Any] = {"n": 3, "seed": 5, "return_token_ids": True, "stop": ["ps ov"], "max_tokens": 9}
    asked |= {"logprobs": True, "top_logprobs": 1, "messages": CHAT} if "chat" in path else {"logprobs": 1}
    asked |= {"kvferry_token_lines": True, "stream": True, "stream_options": {"include_usage": True}}
    whole, _ = await token_lines(agent, path, agent.body(**asked))
    first = {**asked, "max_tokens": 1, "stream": False, "stream_options": None}
    prefill = await agent.complete(path, **first, kv_transfer_params={**PREFILL, "client_max_tokens": 9})
    params = prefill["kv_transfer_params"]
    begun, lines = await token_lines(agent, path, agent.body(**asked, kv_transfer_params=params))
    sent = [{"output_ids": [token["id"]], "finish_reason": None} for token in params["first_tokens"]]
    for index, ids, finish in lines[:events_before]:
        sent[index]["output_ids"] += ids
        sent[index]["finish_reason"] = finish
    body = agent.body(**asked, kv_transfer_params=params, resume=sent)
    rest, lines = await token_lines(agent, path, body)
    shown = [part for event in rest for part in event["choices"]]
    assert lines == [(part["index"], part["token_ids"], part["finish_reason"]) for part in shown]
    assert all("role" not in part.get("delta", {}) for part in shown)
    assert by_choice(begun[:events_before] + rest) == by_choice(begun)
    assert rest[-1]["usage"] == begun[-1]["usage"] == whole[-1]["usage"]


def by_choice(events: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    choices: dict[int, list[dict[str, Any]]] = {}
    for event in events:
        for part in event["choices"]:
            choices.setdefault(part["index"], []).append(part)
    return choices


Line = tuple[int, list[int], str | None]


async def token_lines(
    agent: Agent, path: str, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], list[Line]]:
    """The events of a stream, and what the line before each of them tells."""
    events, lines = [], []
    async with agent.http.post(agent.url + path, json=body) as response:
        assert response.status == 200, await response.text()
        *blocks, done, end = (await response.text()).split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    for block in blocks:
        if block.startswith(": t end"):
            assert block is blocks[-1]
            block = block.removeprefix(": t end\n")
        if block.startswith(": t "):
            line, _, block = block.partition("\n")
            index, ids, *finish = line.removeprefix(": t ").split(" ")
            lines.append((int(index), [int(each) for each in ids.split(",")], finish[0] if finish else None))
        events.append(json.loads(block.removeprefix("data: ")))
    return events, lines


@pytest.mark.parametrize(
    ("known", "fields"),
    [
        ([0], {"kv_transfer_params": None}),
        ([0], {"stream": False}),
        ([], {}),
        ([1], {}),
        ([0, 10**6], {}),
        ([0, 0], {"max_tokens": 2}),
    ],
)
async def test_a_resume_that_fits_no_leg_is_refused(
    agent: Agent, known: list[int], fields: dict[str, Any]
) -> None:
    prefill = await agent.complete(max_tokens=1, kv_transfer_params=PREFILL)
    params = prefill["kv_transfer_params"]
    assert params["first_tokens"][0]["id"] == 0
    asked = {"stream": True, "kv_transfer_params": params, "resume": [{"output_ids": known}], **fields}
    status, answer, _ = await agent.post("/v1/completions", agent.body(**asked))
    assert (status, answer["error"]["param"][:6]) == (400, "resume")


async def test_a_choice_finished_by_the_prefill_shows_in_the_whole_answer_only(agent: Agent) -> None:
    prompt = agent.ids(" fox<|end|>the quick brown")
    asked = {"prompt": prompt, "n": 2, "max_tokens": 4, "return_token_ids": True}
    whole = await agent.complete(**asked)
    prefill = await agent.complete(**{**asked, "max_tokens": 1}, kv_transfer_params=PREFILL)
    params = prefill["kv_transfer_params"]
    assert [each["finish_reason"] for each in params["first_tokens"]] == [None, "stop"]
    decode = await agent.complete(**asked, kv_transfer_params=params)
    assert decode["choices"] == whole["choices"]
    assert decode["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    events = await agent.stream(**asked, kv_transfer_params=params)
    assert {part["index"] for event in events for part in event["choices"]} == {0}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "<|end|>"},  # EOS at once
        {"kv_transfer_params": {**PREFILL, "client_max_tokens": 1}},  # a limit of one token
        {"stop": "the"},  # a stop string in token 1, which the engine cannot see
    ],
)
async def test_a_prefill_leg_that_ends_the_request_pins_nothing(agent: Agent, fields: dict[str, Any]) -> None:
    drops = await agent.told("drop")
    if fields.get("prompt"):
        fields = {"prompt": agent.ids(fields["prompt"])}
    elif "stop" in fields:
        fields = {"prompt": agent.ids(TEXT), **fields}
    answer = await agent.complete(**{"max_tokens": 1, "kv_transfer_params": PREFILL, **fields})
    assert "kv_transfer_params" not in answer
    assert answer["choices"][0]["finish_reason"] == ("length" if "kv_transfer_params" in fields else "stop")
    if "stop" in fields:
        assert answer["choices"][0]["text"] == ""
        await agent.wait_told("drop", drops + 1)


async def test_drop_is_idempotent_and_only_for_this_start_of_the_agent(agent: Agent) -> None:
    drops = await agent.told("drop")
    body = {"transfer_id": "t9", "incarnation": agent.incarnation}
    for _ in range(2):
        assert (await agent.post("/kv/drop", body))[:2] == (200, {"dropped": True})
    await agent.wait_told("drop", drops + 2)
    status, answer, _ = await agent.post("/kv/drop", {**body, "incarnation": "0" * 16})
    assert (status, answer["error"]["code"]) == (409, "wrong_incarnation")
    for transfer_id in (5, "", "t" * 129):
        assert (await agent.post("/kv/drop", {**body, "transfer_id": transfer_id}))[0] == 400


async def test_a_role_refuses_the_other_roles_leg(model: Path) -> None:
    async with running(model, "--role", "decode") as decode:
        body = decode.body(max_tokens=1, kv_transfer_params=PREFILL)
        status, answer, _ = await decode.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (400, "wrong_role")
        assert (await decode.complete())["choices"]


# Ids, bad input, failures.


async def test_ids_minted_by_a_proxy_are_used_and_the_request_id_is_echoed(agent: Agent) -> None:
    minted = {"X-Request-Id": "r-1", "X-Kvferry-Answer-Id": "cmpl-proxy", "X-Kvferry-Created": "77"}
    status, answer, headers = await agent.post("/v1/completions", agent.body(), **minted)
    assert (status, answer["id"], answer["created"]) == (200, "cmpl-proxy", 77)
    assert headers["X-Request-Id"] == "r-1"
    assert "queue;dur=250" in headers["Server-Timing"]


async def test_the_id_of_an_answer_carries_the_request_id_and_is_unique(agent: Agent) -> None:
    answers = [await agent.post("/v1/completions", agent.body(), **{"X-Request-Id": "r-1"}) for _ in range(2)]
    first, second = (answer["id"] for _, answer, _ in answers)
    assert first.startswith("cmpl-r-1-") and second.startswith("cmpl-r-1-") and first != second


async def test_an_unprintable_request_id_is_not_echoed(agent: Agent) -> None:
    _, _, headers = await agent.post("/v1/completions", agent.body(), **{"X-Request-Id": "x" * 129})
    assert len(headers["X-Request-Id"]) == 32
    status, answer, _ = await agent.post("/v1/completions", agent.body(), **{"X-Kvferry-Created": "soon"})
    assert (status, answer["error"]["param"]) == (400, "X-Kvferry-Created")


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", {"model": "tiny"}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": "p", "max_tokens": -1}, 400, "max_tokens"),
        ("/v1/completions", {"model": "tiny", "prompt": ""}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": []}, 400, "prompt"),
        ("/v1/completions", {"model": "tiny", "prompt": [99999]}, 400, "prompt"),
        ("/v1/completions", b'{"model": "tiny", "prompt": "\\ud800"}', 400, None),
        ("/v1/completions", b'{"model": "tiny", "prompt": "x", "stop": "\xff"}', 400, None),
        ("/v1/completions", {"model": "other", "prompt": "p"}, 404, "model"),
        ("/v1/completions", b" " * 100_001, 413, None),
        ("/v1/chat/completions", {"model": "tiny", "messages": []}, 400, "messages"),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": [{"role": "nobody", "content": "x"}]},
            400,
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]},
            400,
            "tools",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": CHAT, "chat_template_kwargs": {"enable_thinking": False}},
            400,
            "chat_template_kwargs",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": CHAT, "reasoning_effort": "high"},
            400,
            "reasoning_effort",
        ),
        (
            "/v1/chat/completions",
            {"model": "tiny", "messages": CHAT, "max_completion_tokens": 10**6},
            400,
            "max_completion_tokens",
        ),
        ("/tokenize", b'{"prompt": "\xff"}', 400, None),
        ("/tokenize", b'{"messages": [{"role": "assistant", "tool_calls": ["\xff"]}]}', 400, None),
        ("/detokenize", b'{"tokens": [1], "model": "\xff"}', 400, None),
        ("/kv/drop", b'{"transfer_id": "\xff", "incarnation": ""}', 400, None),
        ("/v1/embeddings", {}, 404, None),
        ("/metrics", {}, 405, None),
    ],
)
async def test_bad_input_gets_its_status_and_openais_error_shape(
    agent: Agent, path: str, body: Any, status: int, param: str | None
) -> None:
    got, answer, _ = await agent.post(path, body)
    assert (got, answer["error"]["param"]) == (status, param)
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    if param == "model":
        assert answer["error"]["message"] == "this agent does not serve the model 'other', but 'tiny'"


@pytest.mark.parametrize(
    ("path", "raw", "status", "message"),
    [
        ("/v1/embeddings", b"{}", 404, "there is nothing at this path"),
        ("/v1/completions/", b"{}", 404, "there is nothing at this path"),
        ("/metrics", b"{}", 405, "POST is not allowed for this path"),
        ("/v1/models", b"{}", 405, "POST is not allowed for this path"),
        ("/v1/completions", b" " * 100_001, 413, "the body is too large"),
    ],
)
async def test_what_the_framework_refuses_is_said_in_words_for_an_api(
    agent: Agent, path: str, raw: bytes, status: int, message: str
) -> None:
    """F15: "If you entered the URL manually please check your spelling", it said."""
    got, answer, _ = await agent.post(path, raw)
    assert (got, answer["error"]["message"]) == (status, message)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/kv/drop"]
)
async def test_a_compressed_body_is_a_415(agent: Agent, path: str) -> None:
    """F15: it was called invalid JSON."""
    raw = gzip.compress(json.dumps(agent.body()).encode())
    status, answer, headers = await agent.post(path, raw, **{"Content-Encoding": "gzip"})
    assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
    assert "gzip" in answer["error"]["message"]
    assert headers["Accept-Encoding"] == "identity"
    for coding in ("identity", "", "Identity, identity "):
        status, _, _ = await agent.post("/v1/completions", agent.body(), **{"Content-Encoding": coding})
        assert status == 200


async def test_an_effort_that_no_template_reads_may_be_a_hint(agent: Agent) -> None:
    """Clients of `/v1/responses` send one to every model; a chat's is refused by name."""
    plain = await agent.complete("/v1/chat/completions", messages=CHAT)
    hint = {"reasoning_effort": "high", "kvferry_hints": ["reasoning_effort"]}
    hinted = await agent.complete("/v1/chat/completions", messages=CHAT, **hint)
    assert hinted["usage"] == plain["usage"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_what_ended_an_answer_is_said_whole_and_streamed(agent: Agent, path: str) -> None:
    fields: dict[str, Any] = {} if path == "/v1/completions" else {"messages": CHAT}
    asked = {**fields, "max_tokens": 30, "stop": ["brown"]}
    (whole,) = (await agent.complete(path, **asked))["choices"]
    (last,) = (await agent.stream(path, **asked))[-1]["choices"]
    for choice in (whole, last):
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "brown")
    (whole,) = (await agent.complete(path, **{**asked, "stop": None, "max_tokens": 1}))["choices"]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("length", None)


async def test_tokens_are_named_by_their_ids_if_that_is_wanted(agent: Agent) -> None:
    asked: dict[str, Any] = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    (choice,) = (await agent.complete(logprobs=1, **asked))["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{each}" for each in choice["token_ids"]]
    chat = await agent.complete("/v1/chat/completions", messages=CHAT, logprobs=True, **asked)
    (choice,) = chat["choices"]
    named = [entry["token"] for entry in choice["logprobs"]["content"]]
    assert named == [f"token_id:{each}" for each in choice["token_ids"]]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_keeps_its_status(agent: Agent, stream: bool) -> None:
    status, answer, headers = await agent.post(
        "/v1/completions", agent.body(seed=int(Seed.REFUSE), stream=stream)
    )
    assert (status, answer["error"]["code"]) == (429, "busy")
    assert headers["Retry-After"]


async def test_a_failure_in_mid_stream_is_an_event(agent: Agent) -> None:
    """I5: what was begun ends in an error event and `[DONE]`, never in silence."""
    events = await agent.stream(seed=int(Seed.FAIL_AT_THIRD_TOKEN), return_token_ids=True)
    assert len(events) == 3
    assert events[-1]["error"]["code"] == "lost"


@pytest.mark.parametrize(("seed", "stream"), [(Seed.SILENT, False), (Seed.SILENT, True), (Seed.SLOW, True)])
async def test_a_client_that_goes_away_ends_its_request(agent: Agent, seed: Seed, stream: bool) -> None:
    """X7: hung before the first token, or in the middle of a stream; nothing goes on in the engine."""
    submits, aborts = await agent.told("submit"), await agent.told("abort")
    body = agent.body(seed=int(seed), stream=stream, max_tokens=400)
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(agent.url + "/v1/completions", json=body))
        if seed == Seed.SLOW:
            response = await asking
            await response.content.readline()
            response.close()
        else:
            await agent.wait_told("submit", submits + 1)
            asking.cancel()
            await asyncio.wait({asking})
        await agent.wait_told("abort", aborts + 1)


async def test_health_and_metrics(agent: Agent) -> None:
    assert await agent.get_status("/health") == 200
    async with agent.http.get(agent.url + "/metrics") as response:
        assert response.content_type == "text/plain"
        assert 'kvferry_agent_kv_blocks{state="free"} 60.0' in await response.text()


# Start, end and fate.


async def test_an_agent_that_still_loads_is_alive_but_not_ready(model: Path) -> None:
    async with running(model, "--load-format", "dummy", ready=False) as agent:
        assert await agent.get_status("/health") == 200
        assert await agent.get_status("/ready") == 503
        assert await agent.get_status("/v1/models") == 200
        assert await agent.get_status("/metrics") == 200
        status, answer, headers = await agent.post("/v1/completions", agent.body())
        assert (status, answer["error"]["code"]) == (503, "starting")
        assert headers["Retry-After"]
        agent.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(agent.process.wait(), DEADLINE_S) == 0


async def test_sigterm_finishes_what_is_under_way_and_leaves_nothing(model: Path) -> None:
    async with running(model) as agent:
        (engine,) = psutil.Process(agent.process.pid).children(recursive=True)
        run_dir = Path(engine.cmdline()[-1])
        assert run_dir.stat().st_mode & 0o777 == 0o700
        streaming = asyncio.ensure_future(
            agent.stream(seed=int(Seed.SLOW), max_tokens=8, return_token_ids=True)
        )
        await agent.wait_told("submit", 1)
        agent.process.send_signal(signal.SIGTERM)
        assert len(await streaming) == 8
        async with asyncio.timeout(DEADLINE_S):
            assert await agent.process.wait() == 0
        assert not engine.is_running()
        assert not run_dir.exists()


async def test_what_is_still_on_its_way_to_a_draining_agent_is_served(model: Path) -> None:
    """Its proxy says how much that is, with every ack: a decode leg may come seconds after its routing."""
    context = zmq.asyncio.Context()
    proxy = context.socket(zmq.ROUTER)
    try:
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        async with running(model, "--proxy", f"127.0.0.1:{port}") as agent:

            async def ack(in_flight: int) -> str:
                async with asyncio.timeout(DEADLINE_S):
                    peer, frame = await proxy.recv_multipart()
                ping = decode_agent_message(frame)
                if isinstance(ping, Bye):
                    return "bye"
                await proxy.send_multipart(
                    [peer, encode(Ack(proxy="p", index=ping.index, in_flight=in_flight))]
                )
                return ping.state

            while await ack(1) != "ready":
                pass
            await ack(1)  # sent when the first has been read
            async with agent.http.post(agent.url + "/drain") as response:
                assert response.status == 202
            while await ack(1) != "draining":
                pass
            for _ in range(10):  # each may be answered by its end, if it did not wait
                assert await ack(1) == "draining"
            assert await agent.get_status("/ready") == 503
            assert (await agent.complete())["choices"]
            assert (await agent.post("/kv/drop", {"transfer_id": "t", "incarnation": agent.incarnation}))[
                0
            ] == 200
            assert await ack(1) == "draining"
            while await ack(0) != "bye":
                pass
            assert await agent.process.wait() == 0
    finally:
        context.destroy(linger=0)


async def test_a_second_signal_ends_a_draining_agent_at_once(model: Path) -> None:
    async with running(model) as agent:
        asking = asyncio.ensure_future(agent.post("/v1/completions", agent.body(seed=int(Seed.SILENT))))
        await agent.wait_told("submit", 1)
        agent.process.send_signal(signal.SIGTERM)
        while await agent.get_status("/ready") != 503:
            await asyncio.sleep(0.01)
        assert not asking.done()
        agent.process.send_signal(signal.SIGTERM)
        status, answer, _ = await asking
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert await agent.process.wait() == 0


async def test_the_drain_command_waits_for_the_agents_end(model: Path) -> None:
    async with running(model) as agent:
        streaming = asyncio.ensure_future(
            agent.stream(seed=int(Seed.SLOW), max_tokens=8, return_token_ids=True)
        )
        await agent.wait_told("submit", 1)
        command = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry.deploy", "drain", agent.url),
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        said, _ = await asyncio.wait_for(command.communicate(), DEADLINE_S)
        assert (command.returncode, b"has drained and ended" in said) == (0, True)
        assert len(await streaming) == 8
        assert await asyncio.wait_for(agent.process.wait(), DEADLINE_S) == 0
        again = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvferry.deploy", "drain", agent.url),
            stderr=asyncio.subprocess.PIPE,
            cwd=ROOT,
        )
        _, said = await asyncio.wait_for(again.communicate(), DEADLINE_S)
        assert again.returncode == 1
        assert said.startswith(f"kvferry drain: {agent.url} cannot be reached: Connection refused".encode())


async def test_sigterm_cuts_what_does_not_finish_with_a_typed_error(model: Path) -> None:
    async with running(model, "--drain-s", "1") as agent:
        asking = asyncio.ensure_future(agent.post("/v1/completions", agent.body(seed=int(Seed.SILENT))))
        await agent.wait_told("submit", 1)
        agent.process.send_signal(signal.SIGTERM)
        while (await agent.post("/v1/completions", agent.body()))[0] == 200:
            await asyncio.sleep(0.01)
        status, answer, _ = await agent.post("/v1/completions", agent.body())
        assert (status, answer["error"]["code"]) == (503, "draining")
        status, answer, _ = await asking
        assert (status, answer["error"]["code"]) == (503, "draining")
        assert await agent.process.wait() == 0


async def test_the_engines_death_ends_the_agent_within_a_second(model: Path) -> None:
    """I8: streams get a typed error first, and the exit status says that something went wrong."""

    async def death_s() -> float:
        async with running(model) as agent:
            (engine,) = psutil.Process(agent.process.pid).children()
            body = agent.body(seed=int(Seed.SLOW), max_tokens=400, stream=True)
            async with agent.http.post(agent.url + "/v1/completions", json=body) as response:
                assert b"choices" in await response.content.readline()
                died = time.monotonic()
                engine.kill()
                rest = (await response.text()).split("\n\n")
            assert json.loads(rest[-3].strip().removeprefix("data: "))["error"]["code"] == "engine_died"
            assert rest[-2:] == ["data: [DONE]", ""]
            assert await agent.process.wait() == 1
            return time.monotonic() - died

    await assert_within(death_s, 1.0)


@pytest.mark.parametrize("ended_by", ["engine", "signal"])
async def test_an_agent_that_ends_answers_typed_or_not_at_all(model: Path, ended_by: str) -> None:
    """I5: uvicorn's own 500 for a request that is cut, in plain text, would tell nobody anything."""
    async with running(model) as agent:
        (engine,) = psutil.Process(agent.process.pid).children()
        host, _, port = agent.url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        # Its body never comes to an end, so it is under way to the last.
        writer.write(b"POST /kv/drop HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        await agent.complete()  # by now the agent has read that
        if ended_by == "engine":
            engine.kill()
        else:
            agent.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(DEADLINE_S):
            said = await reader.read()
            assert await agent.process.wait() == (ended_by == "engine")
        writer.close()
    assert said == b"" or b'"code":' in said, said


async def test_an_engine_that_dies_of_a_request_is_no_empty_200(model: Path) -> None:
    async with running(model) as agent:
        status, answer, _ = await agent.post("/v1/completions", agent.body(seed=int(Seed.DIE)))
        assert (status, answer["error"]["code"]) == (500, "engine_died")
        assert await agent.process.wait() == 1


async def test_the_agents_death_takes_the_engine_along(model: Path) -> None:
    async def death_s() -> float:
        async with running(model) as agent:
            (engine,) = psutil.Process(agent.process.pid).children()
            handle = os.pidfd_open(engine.pid)
            agent.process.kill()
            return await exit_s([handle])

    await assert_within(death_s, 1.0)


async def test_a_taken_port_ends_the_agent_with_a_message(model: Path, agent: Agent) -> None:
    port = agent.url.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", START, "--model", str(model), "--port", port,
        stderr=asyncio.subprocess.PIPE, cwd=ROOT,
    )  # fmt: skip
    _, errors = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert process.returncode == 1
    assert b"cannot start" in errors and b"Address already in use" in errors


async def test_an_ipv6_host_is_spelled_in_brackets_wherever_it_is_told(model: Path) -> None:
    """X9."""
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this host has no IPv6")
    async with running(model, "--host", "::1") as agent:
        assert agent.url.startswith("http://[::1]:")
        assert (await agent.complete())["choices"]


async def test_a_proxy_hears_starting_ready_draining_and_bye(model: Path) -> None:
    context = zmq.asyncio.Context()
    proxy = context.socket(zmq.ROUTER)
    try:
        port = proxy.bind_to_random_port("tcp://127.0.0.1")
        async with running(model, "--proxy", f"127.0.0.1:{port}", "--role", "prefill") as agent:

            async def hear() -> Register | Bye:
                async with asyncio.timeout(DEADLINE_S):
                    return decode_agent_message((await proxy.recv_multipart())[1])

            ping = await hear()
            while isinstance(ping, Register) and (ping.state == "starting" or not ping.load.kv_blocks_leased):
                assert ping.address == agent.url
                ping = await hear()
            assert isinstance(ping, Register)
            assert (ping.state, ping.role, ping.incarnation) == ("ready", "prefill", agent.incarnation)
            assert ping.control == f"tcp://127.0.0.1:{CONTROL_PORT}"
            assert (ping.model, ping.tokenizer) == ("tiny", agent.tokenizer.fingerprint)
            assert (ping.load.kv_blocks_free, ping.load.kv_blocks_leased) == (60, 1)
            agent.process.send_signal(signal.SIGTERM)
            while isinstance(ping, Register):
                last, ping = ping, await hear()
            assert last.state == "draining"
            assert ping == Bye(incarnation=agent.incarnation)
            assert await agent.process.wait() == 0
    finally:
        context.destroy(linger=0)


async def test_an_idle_agent_costs_next_to_nothing(model: Path) -> None:
    """R24: nothing spins."""
    async with running(model) as agent:
        process = psutil.Process(agent.process.pid)
        before, start = sum(process.cpu_times()[:2]), time.monotonic()
        await asyncio.sleep(1.5)
        used = sum(process.cpu_times()[:2]) - before
        assert used / (time.monotonic() - start) < 0.1

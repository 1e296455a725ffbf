# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages as a chat, and back."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import pytest
from aiohttp import web

from kvferry.proxy import sse
from kvferry.proxy.api.translations.chat import MAX_OBJECTS
from kvferry.proxy.api.translations.messages import MessagesRewriter, chat_request, tokenize_request
from kvferry.proxy.errors import BadResponse, InvalidRequest
from tests.standins.agents import StandInAgent
from tests.unit.proxy.conftest import Stage, StartStage

USER = {"role": "user", "content": "hi"}
BODY: dict[str, Any] = {"model": "m", "max_tokens": 5, "messages": [USER]}
WEATHER = {"name": "weather", "description": "of a city", "input_schema": {"type": "object"}}


def chat(**fields: Any) -> dict[str, Any]:
    rewritten: dict[str, Any] = json.loads(chat_request(json.dumps(BODY | fields).encode()))
    return rewritten


def test_a_plain_request() -> None:
    assert chat() == {"model": "m", "max_tokens": 5, "messages": [USER], "stream": False}
    harmless = {"metadata": {"user_id": "u"}, "service_tier": "auto", "thinking": {"type": "disabled"}}
    assert chat(**harmless) == chat()


def test_settings_have_other_names() -> None:
    asked = chat(stop_sequences=["a"], temperature=0.5, top_k=3, top_p=0.9, system="be brief", stream=True)
    assert {name: asked[name] for name in ("stop", "temperature", "top_k", "top_p")} == {
        "stop": ["a"], "temperature": 0.5, "top_k": 3, "top_p": 0.9,
    }  # fmt: skip
    assert asked["messages"] == [{"role": "system", "content": "be brief"}, USER]
    assert asked["stream_options"]["include_usage"] is True
    text = {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}
    assert chat(system=[text, text])["messages"][0]["content"] == "be brief\nbe brief"


def test_tools_their_calls_and_results() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    failed = {"type": "tool_result", "tool_use_id": "t1", "content": "no net", "is_error": True}
    conversation = [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call]},
        {"role": "user", "content": [failed, {"type": "text", "text": "again"}]},
    ]
    asked = chat(
        messages=conversation, tools=[WEATHER], tool_choice={"type": "any", "disable_parallel_tool_use": True}
    )
    made = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    assert asked["messages"][1:] == [
        {"role": "assistant", "content": "I look.", "tool_calls": [made]},
        {"role": "tool", "tool_call_id": "t1", "content": "Error: no net"},
        {"role": "user", "content": "again"},
    ]  # fmt: skip
    (tool,) = asked["tools"]
    assert tool["function"] == {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object"},
    }
    assert (asked["tool_choice"], asked["parallel_tool_calls"]) == ("required", False)
    named = chat(tools=[WEATHER], tool_choice={"type": "tool", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}


def test_an_answer_that_was_begun_is_gone_on_with() -> None:
    asked = chat(messages=[USER, {"role": "assistant", "content": "The answer is"}])
    assert (asked["continue_final_message"], asked["add_generation_prompt"]) == (True, False)


def test_a_null_is_a_field_left_out_and_what_else_answers_have_is_taken_back() -> None:
    """A conversation that Anthropic's own servers began has more in its blocks than ours."""
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1"}
    said = {"type": "text", "text": "x"}
    thought = {"type": "thinking", "thinking": "hm"}

    def asked(**more: Any) -> dict[str, Any]:
        blocks = [thought | more.get("thought", {}), said | more.get("said", {}), call | more.get("call", {})]
        turns = [USER, {"role": "assistant", "content": blocks}]
        turns.append({"role": "user", "content": [result | more.get("result", {})]})
        tool, choice = WEATHER | more.get("tool", {}), {"type": "auto"} | more.get("choice", {})
        return chat(messages=turns, tools=[tool], tool_choice=choice, **more.get("body", {}))

    names = ("system", "stream", "stop_sequences", "temperature", "metadata", "thinking", "container")
    plain = asked()
    assert asked(body=dict.fromkeys(names)) == plain
    assert asked(thought={"signature": None}, result={"content": None, "is_error": None}) == plain
    assert asked(choice={"disable_parallel_tool_use": None}, tool={"type": None, "strict": None}) == plain
    assert asked(call={"caller": {"type": "direct"}, "toolset_name": None}, said={"citations": [{}]}) == plain
    assert chat(tools=[{**WEATHER, "description": None}]) == chat(tools=[{**WEATHER, "description": ""}])


@pytest.mark.parametrize("more", [{}, {"budget_tokens": 1024}, {"budget_tokens": 9, "display": "omitted"}])
@pytest.mark.parametrize("kind", ["enabled", "disabled", "adaptive"])
def test_thinking_is_a_hint_in_all_its_forms(kind: str, more: dict[str, Any]) -> None:
    """Whether a model reasons is up to its chat template: clients send this to every model."""
    assert chat(thinking={"type": kind, **more}) == chat()


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "t", "name": "f", "input": [1]}]}]}, "input of a tool_use"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "temprature.*did you mean temperature"),
        ({"thinking": {"type": "always"}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "system", "content": [{"type": "thinking", "thinking": "a"}]}]}, "system"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config"),
        ({"messages": [{"role": "user", "content": [{}] * (MAX_OBJECTS + 1)}]}, "objects"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        chat(**fields)


def answer(choice: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = {"id": "chatcmpl-1", "model": "m", "choices": [choice], **fields}
    rewritten: dict[str, Any] = json.loads(MessagesRewriter().whole(json.dumps(body).encode()))
    return rewritten


def test_an_answer() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 2}}
    message = {"role": "assistant", "content": "ab"}
    assert answer({"message": message, "finish_reason": "length"}, usage=usage) == {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [{"type": "text", "text": "ab"}], "stop_reason": "max_tokens", "stop_sequence": None,
        "usage": {
            "input_tokens": 7, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 0,
            "output_tokens": 4,
        },
    }  # fmt: skip
    ended = answer({"message": message, "finish_reason": "stop", "stop_reason": "b"})
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "b")
    call: dict[str, Any] = {"id": "t1", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    called = answer({"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"})
    assert called["stop_reason"] == "tool_use"
    assert called["content"] == [
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    ]
    call["function"] = {"name": "weather", "arguments": '{"city": "Os'}
    call["function"] = {"name": "weather", "arguments": ""}
    (block,) = answer({"message": {"tool_calls": [call]}, "finish_reason": "tool_calls"})["content"]
    assert block["input"] == {}
    with pytest.raises(BadResponse):
        MessagesRewriter().whole(b'{"choices": []}')


@pytest.mark.parametrize(
    ("ended", "reason"), [("length", "max_tokens"), ("stop", "end_turn"), ("tool_calls", "end_turn")]
)
def test_a_call_that_was_cut_off_is_text(ended: str, reason: str) -> None:
    """As a tool's input it would be one that the model did not give."""
    whole = {"id": "t1", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
    call = {"id": "t2", "function": {"name": "weather", "arguments": '{"city": "Os'}}
    cut = answer({"message": {"tool_calls": [whole, call]}, "finish_reason": ended})
    assert cut["stop_reason"] == reason
    assert cut["content"] == [
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
        {"type": "text", "text": '{"name": "weather", "arguments": {"city": "Os'},
    ]
    pieces = [
        delta({"tool_calls": [{"index": 0, **whole}]}),
        delta(
            {"tool_calls": [{"index": 1, "id": "t2", "function": {"name": "weather", "arguments": '{"ci'}}]}
        ),
        delta({"tool_calls": [{"index": 1, "function": {"arguments": 'ty": "Os'}}]}, ended),
    ]
    assert streamed(*pieces)[-2]["delta"]["stop_reason"] == reason
    assert streamed(*pieces[:1], delta({}, "tool_calls"))[-2]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize("name", ["stop_reason", "matched_stop"])
def test_the_sequence_that_ended_an_answer_is_said(name: str) -> None:
    """By vLLM's name for it, which kvferry's agents have too, and by SGLang's. A token is no sequence."""
    message = {"role": "assistant", "content": "ab"}
    for stop, expected in (
        ("b", ("stop_sequence", "b")),
        (7, ("end_turn", None)),
        (None, ("end_turn", None)),
    ):
        ended = answer({"message": message, "finish_reason": "stop", name: stop})
        assert (ended["stop_reason"], ended["stop_sequence"]) == expected
        last = streamed({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", name: stop}]})[-2]
        assert last["delta"] == {"stop_reason": expected[0], "stop_sequence": expected[1]}


def streamed(*chunks: dict[str, Any]) -> list[dict[str, Any]]:
    """What events these become, one by one."""
    rewriting = MessagesRewriter()
    events = [sse.event(json.dumps({"id": "chatcmpl-1", "model": "m", **chunk}).encode()) for chunk in chunks]
    rewritten = b"".join(rewriting.events(event) for event in [*events, sse.DONE]).decode()
    parsed = []
    for event in rewritten.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
    return parsed


def delta(fields: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}]}


def test_a_stream_of_thoughts_text_and_a_call() -> None:
    def call(**function: str) -> dict[str, Any]:
        return {
            "tool_calls": [{"index": 0, "id": "t1" if "name" in function else None, "function": function}]
        }

    events = streamed(
        delta({"role": "assistant", "content": ""}) | {"usage": {"prompt_tokens": 9, "completion_tokens": 0}},
        delta({"reasoning_content": "hm"}),
        delta({"content": "a"}),
        delta({"content": "b"}),
        delta(call(name="weather", arguments="")),
        delta(call(arguments='{"city":')),
        delta(call(arguments='"Oslo"}'), "tool_calls"),
        {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}},
    )
    assert events[0]["message"]["usage"]["input_tokens"] == 9
    pieces = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert pieces == [
        {"type": "thinking_delta", "thinking": "hm"},
        {"type": "text_delta", "text": "a"},
        {"type": "text_delta", "text": "b"},
        {"type": "input_json_delta", "partial_json": '{"city":'},
        {"type": "input_json_delta", "partial_json": '"Oslo"}'},
    ]
    kinds = [(event["type"], event["index"]) for event in events if "content_block_st" in event["type"]]
    assert kinds == [(f"content_block_{what}", index) for index in range(3) for what in ("start", "stop")]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 6
    assert events[-1] == {"type": "message_stop"}


def test_a_stream_that_fails_ends_with_an_error_alone() -> None:
    events = streamed(delta({"content": "a"}), {"error": {"message": "lost"}})
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "lost"}}


HINTS: dict[str, Any] = {
    "thinking": {"type": "adaptive", "display": "summarized"},
    "output_config": {"effort": "xhigh"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "speed": "standard",
    "metadata": {"user_id": "u"},
}
"""What Claude Code adds to its requests."""
CODING_TOOL = {
    **WEATHER,
    "type": "custom",
    "eager_input_streaming": True,
    "defer_loading": True,
    "allowed_callers": ["direct"],
    "input_examples": [{"city": "Oslo"}],
    "cache_control": {"type": "ephemeral"},
}


def test_hints_have_no_effect() -> None:
    assert chat(**HINTS) == chat()
    assert chat(tools=[CODING_TOOL]) == chat(tools=[WEATHER])
    assert chat(tools=[{**WEATHER, "strict": True}])["tools"][0]["function"]["strict"] is True


def test_system_messages_are_one_at_the_front() -> None:
    said = [
        {"role": "system", "content": "Env: linux."},
        USER,
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
    ]
    told = {"role": "system", "content": "You help.\n\nEnv: linux.\n\nBe brief."}
    assert chat(system="You help.", messages=said)["messages"] == [told, USER]
    assert chat(messages=said[:2])["messages"][0]["content"] == "Env: linux."


def test_a_format_is_the_chats() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = chat(output_config={"format": {"type": "json_schema", "schema": schema}, "effort": "low"})
    assert asked["response_format"]["json_schema"]["schema"] == schema


@pytest.mark.parametrize("rewrite", [chat_request, tokenize_request])
@pytest.mark.parametrize("part", [
    b'{"role": "user", "content": "\xff"}',
    b'{"role": "user", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"a": "\xff"}}]}',
    b'{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"a": "\xff"}}]}',
    b'{"role": "user", "content": "\\ud800"}',
])  # fmt: skip
def test_what_is_no_unicode_is_refused(rewrite: Callable[[bytes], bytes], part: bytes) -> None:
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        rewrite(b'{"model": "m", "messages": [%b]}' % part)
    with pytest.raises(InvalidRequest, match="not valid JSON"):
        rewrite(b'{"model": "m", "messages": [], "metadata": "\xff"}')


class CountingAgent(StandInAgent):
    """An agent with a tokenizer: a token a message."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.counted: list[dict[str, Any]] = []

    def add_routes(self, router: web.UrlDispatcher) -> None:
        super().add_routes(router)
        router.add_post("/tokenize", self._tokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.counted.append(body)
        if body["messages"][-1]["content"] == "too long":
            return web.json_response({"error": {"message": "the context holds 9 tokens"}}, status=400)
        return web.json_response({"count": len(body["messages"]), "max_model_len": 9, "tokens": []})


async def counting(stage: Stage) -> CountingAgent:
    return await stage.bring(CountingAgent("both", (stage.discovery,)))


async def test_anthropics_client_sends_what_claude_code_sends(stage: Stage) -> None:
    agent = await counting(stage)
    async with anthropic.AsyncAnthropic(base_url=stage.proxy.url, api_key="none", max_retries=0) as client:
        asked: Any = {
            "model": "stand-in",
            "system": [{"type": "text", "text": "You code.", "cache_control": {"type": "ephemeral"}}],
            "messages": [{"role": "system", "content": "Env: linux."}, {"role": "user", "content": "a b c"}],
            "thinking": {"type": "adaptive"},
            "output_config": {"effort": "high"},
            "context_management": HINTS["context_management"],
        }
        whole = await client.beta.messages.create(max_tokens=4, **asked)
        async with client.beta.messages.stream(max_tokens=4, **asked) as stream:
            streamed = await stream.get_final_message()
        assert whole.stop_reason == streamed.stop_reason == "max_tokens"
        assert (
            [block.type for block in streamed.content] == [block.type for block in whole.content] == ["text"]
        )
        counted = await client.beta.messages.count_tokens(tools=[CODING_TOOL], **asked)
        assert counted.input_tokens == 2
        assert [each["role"] for each in agent.counted[-1]["messages"]] == ["system", "user"]
        assert agent.counted[-1]["tools"][0]["function"]["name"] == "weather"
        none: Any = {"type": "none"}
        await client.messages.count_tokens(
            model="stand-in", messages=asked["messages"][1:], tools=[CODING_TOOL], tool_choice=none
        )
        assert "tools" not in agent.counted[-1]
        for refused, kind in (
            ({"model": "gpt-9", "messages": asked["messages"]}, anthropic.NotFoundError),
            ({"model": "stand-in", "messages": []}, anthropic.BadRequestError),
            ({"model": "stand-in", "messages": [{"role": "user", "content": "too long"}]},
             anthropic.BadRequestError),
        ):  # fmt: skip
            wrong: Any = refused
            with pytest.raises(kind) as caught:
                await client.messages.count_tokens(**wrong)
            body: Any = caught.value.body
            assert body["type"] == "error" and body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("GET", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_other_paths_and_methods_answer_as_anthropics_do(
    stage: Stage, method: str, path: str, status: int, kind: str
) -> None:
    async with stage.http.request(method, stage.proxy.url + path, data=b"{}") as response:
        error = await response.json()
        assert (response.status, error["type"], error["error"]["type"]) == (status, "error", kind)


@pytest.mark.parametrize("stream", [True, False])
async def test_through_the_proxy(stage: Stage, stream: bool) -> None:
    await stage.pair()
    body = {**BODY, "model": "stand-in", "messages": [{"role": "user", "content": "a b c"}], "stream": stream}
    async with stage.http.post(f"{stage.proxy.url}/v1/messages", json=body) as response:
        assert response.status == 200
        text = await response.text()
    assert ("event: message_stop" in text) == stream
    assert '"stop_reason":"max_tokens"' in text and "chat.completion" not in text


async def test_errors_and_keys_are_anthropics(start_stage: StartStage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789\n")
    stage = await start_stage(api_keys=keys)
    await counting(stage)
    await stage.pair()
    for path, (headers, status, kind) in itertools.product(("", "/count_tokens"), (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "client-key-0123456789"}, 404, "not_found_error"),
        ({"Authorization": "Bearer client-key-0123456789"}, 404, "not_found_error"),
    )):  # fmt: skip
        body = BODY if not path else {name: BODY[name] for name in ("model", "messages")}
        url = f"{stage.proxy.url}/v1/messages{path}"
        async with stage.http.post(url, json=body, headers=headers) as response:
            error = await response.json()
        assert (response.status, error["type"], error["error"]["type"]) == (status, "error", kind)

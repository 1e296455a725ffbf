# SPDX-License-Identifier: Apache-2.0
"""Anthropic's Messages as a chat, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.proxy import sse
from kvferry.proxy.api.translations.chat import MAX_OBJECTS
from kvferry.proxy.api.translations.messages import MessagesRewriter, chat_request
from kvferry.proxy.errors import BadResponse, InvalidRequest
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


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temprature": 1}, "temprature.*did you mean temperature"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"container": "c"}, "container"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"tool_choice": {"type": "any"}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools"),
        ({"messages": [{"role": "system", "content": "x"}]}, "role"),
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
    cut = answer({"message": {"tool_calls": [call]}, "finish_reason": "length"})
    assert (cut["stop_reason"], cut["content"][0]["input"]) == ("max_tokens", {})
    with pytest.raises(BadResponse):
        MessagesRewriter().whole(b'{"choices": []}')


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
    await stage.pair()
    for headers, status, kind in (
        ({}, 401, "authentication_error"),
        ({"x-api-key": "client-key-0123456789"}, 404, "not_found_error"),
        ({"Authorization": "Bearer client-key-0123456789"}, 404, "not_found_error"),
    ):
        async with stage.http.post(f"{stage.proxy.url}/v1/messages", json=BODY, headers=headers) as response:
            error = await response.json()
        assert (response.status, error["type"], error["error"]["type"]) == (status, "error", kind)

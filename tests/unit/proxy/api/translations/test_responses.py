# SPDX-License-Identifier: Apache-2.0
"""OpenAI's Responses as a chat, and back."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import TypeAdapter

from kvferry.proxy import sse
from kvferry.proxy.api.translations import response_items
from kvferry.proxy.api.translations.chat import MAX_OBJECTS
from kvferry.proxy.api.translations.responses import ResponsesRequest, ResponsesRewriter
from kvferry.proxy.errors import BadResponse, InvalidRequest
from tests.standins.agents import Fault
from tests.unit.proxy.conftest import Stage, StartStage

BODY: dict[str, Any] = {"model": "m", "input": "hi"}
USER = {"role": "user", "content": "hi"}
WEATHER = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True}
TIME = {"type": "function", "name": "time", "parameters": None, "strict": None}
CALLED = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Oslo"}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def chat(**fields: Any) -> dict[str, Any]:
    rewritten: dict[str, Any] = json.loads(
        ResponsesRewriter().chat_request(json.dumps(BODY | fields).encode())
    )
    return rewritten


def test_a_plain_request() -> None:
    assert chat() == {"model": "m", "messages": [USER], "stream": False}
    assert chat(stream=True) == chat() | {"stream": True, "stream_options": {"include_usage": True}}


def test_what_is_without_effect() -> None:
    harmless: dict[str, Any] = {
        "background": False, "include": ["reasoning.encrypted_content"], "max_tool_calls": 3,
        "metadata": {"a": "b"}, "previous_response_id": None, "prompt_cache_key": "k",
        "prompt_cache_options": {"mode": "implicit"}, "safety_identifier": "u", "service_tier": "auto",
        "store": False, "stream_options": {"include_obfuscation": False}, "truncation": "disabled",
        "user": "u", "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"summary": "auto"}, "tool_choice": "auto", "parallel_tool_calls": True,
    }  # fmt: skip
    assert chat(**harmless) == chat()


def test_settings_have_other_names() -> None:
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    asked = chat(
        max_output_tokens=5, temperature=0.5, top_p=0.9, seed=3, reasoning={"effort": "low"},
        text={"format": schema, "verbosity": "low"}, include=["message.output_text.logprobs"], top_logprobs=2,
    )  # fmt: skip
    assert asked == chat() | {
        "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 3, "reasoning_effort": "low",
        "kvferry_hints": ["reasoning_effort"],
        "verbosity": "low", "logprobs": True, "top_logprobs": 2,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True}
        },
    }  # fmt: skip
    assert chat(text={"format": {"type": "json_object"}})["response_format"] == {"type": "json_object"}


def test_items_become_messages() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = {"type": "output_text", "text": "I look.", "annotations": [], "logprobs": None}
    thought = {"type": "reasoning_text", "text": "hm"}
    asked = chat(
        instructions="be brief",
        input=[
            {"role": "developer", "content": "be kind"},
            {"type": "message", "role": "user", "content": parts},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [thought]},
            {
                "type": "message",
                "id": "msg_1",
                "role": "assistant",
                "status": "completed",
                "content": [said],
                "phase": None,
            },
            CALLED | {"id": "fc_1", "status": "completed"},
            CALLED | {"call_id": "c2"},
            RESULT,
            RESULT | {"call_id": "c2", "output": parts},
            {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
            CALLED | {"call_id": "c3"},
            {"role": "system", "content": "stop soon"},
        ],
    )
    function = {"name": "weather", "arguments": '{"city":"Oslo"}'}
    calls = [{"id": name, "type": "function", "function": function} for name in ("c1", "c2", "c3")]
    assert asked["messages"] == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": calls[:2],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "a\nb"},
        {"role": "assistant", "tool_calls": calls[2:]},
        {"role": "system", "content": "stop soon"},
    ]


def test_an_answer_can_be_sent_back_as_it_came() -> None:
    """Output items of the official client, as it dumps them, are input of the next turn."""
    call = {"id": "c1", "function": {"name": "weather", "arguments": "{}"}}
    came = answer({"reasoning_content": "hm", "content": "a", "tool_calls": [call]})
    items = [item.model_dump(by_alias=True) for item in Response.model_validate(came).output]
    again = chat(input=[USER, *items, RESULT])["messages"][1]
    assert (again["content"], again["reasoning_content"]) == ("a", "hm")
    assert again["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


def test_tools() -> None:
    weather = {"name": "weather", "parameters": {"type": "object"}, "strict": True}
    asked = chat(tools=[WEATHER, TIME], tool_choice="required", parallel_tool_calls=False)
    assert asked == chat() | {
        "tools": [
            {"type": "function", "function": weather},
            {"type": "function", "function": {"name": "time"}},
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    named = chat(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})
    assert named["tool_choice"] == {"type": "function", "function": {"name": "weather"}}
    only = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    allowed = chat(tools=[WEATHER, TIME], tool_choice=only)
    assert [tool["function"] for tool in allowed["tools"]] == [weather]
    assert allowed["tool_choice"] == "required"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temprature": 1}, "temprature.*did you mean temperature"),
        ({"x" * 100: 1}, "x"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [7]}, r"input\[0\]"),
        ({"input": [USER, {"type": "item_reference", "id": "x"}]}, r"input\[1\].*item_reference.*stored"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "web_search_call"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input_image.*input\[0\]"),
        ({"input": [USER | {"contnt": "x"}]}, r"input\[0\].*contnt.*did you mean content"),
        ({"input": [USER | {"role": "critic"}]}, "critic"),
        ({"input": [{}] * (MAX_OBJECTS + 1)}, "objects"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"metadata": {str(index): "" for index in range(17)}}, "metadata"),
        ({"store": True}, "store: nothing is stored"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"prompt_cache_options": {"prewarm": True}}, "prewarm"),
        ({"include": ["everything"]}, "include"),
        ({"text": {"format": {"type": "grammar"}}}, "grammar.*text.format"),
        ({"reasoning": {"mode": "pro"}}, "pro.*reasoning.mode"),
        ({"tools": [{"type": "web_search"}]}, "web_search.*tools"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "mcp.*tools"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [TIME], "tool_choice": {"type": "function", "name": "weather"}}, "weather"),
        ({"tools": [TIME], "tool_choice": {"type": "file_search"}}, "file_search"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        chat(**fields)


def test_every_field_of_openais_is_known() -> None:
    """Each field of the official client's types is honoured, without effect, or refused with a reason."""
    published = {*ResponseCreateParamsBase.__annotations__, "stream"}
    assert len(published) > 25
    assert published <= set(ResponsesRequest.__struct_fields__)


def test_the_page_has_every_field() -> None:
    page = (Path(__file__).parents[5] / "docs" / "responses.md").read_text()
    assert not [name for name in ResponsesRequest.__struct_fields__ if f"`{name}`" not in page]


def answer(
    message: dict[str, Any], finish_reason: str = "stop", request: dict[str, Any] = BODY, **choice: Any
) -> dict[str, Any]:
    rewriter = ResponsesRewriter()
    rewriter.chat_request(json.dumps(request).encode())
    body = {
        "id": "chatcmpl-1", "created": 7, "model": "m",
        "choices": [{"message": message, "finish_reason": finish_reason, **choice}],
        "usage": {
            "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 1},
        },
    }  # fmt: skip
    rewritten: dict[str, Any] = json.loads(rewriter.whole(json.dumps(body).encode()))
    Response.model_validate(rewritten)
    return rewritten


def test_an_answer() -> None:
    text = {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    request = BODY | {"metadata": {"a": "b"}, "tools": [TIME], "instructions": "be brief", "temperature": 0.5}
    assert answer({"content": "ab"}, request=request) == {
        "id": "resp_1", "object": "response", "created_at": 7, "status": "completed", "model": "m",
        "background": False, "error": None, "incomplete_details": None, "previous_response_id": None,
        "store": False, "truncation": "disabled", "instructions": "be brief", "max_output_tokens": None,
        "metadata": {"a": "b"}, "parallel_tool_calls": True, "reasoning": {"effort": None, "summary": None},
        "temperature": 0.5, "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto", "tools": [TIME], "top_logprobs": 0, "top_p": None,
        "output": [{
            "id": "msg_1_0", "type": "message", "role": "assistant", "status": "completed", "content": [text]
        }],
        "usage": {
            "input_tokens": 9, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
            "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 13,
        },
    }  # fmt: skip


def test_an_answer_that_was_cut_short() -> None:
    cut = answer({"content": "ab"}, "length")
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert cut["output"][0]["status"] == "incomplete"
    assert answer({"content": ""}, "content_filter")["incomplete_details"] == {"reason": "content_filter"}


@pytest.mark.parametrize("finish_reason", ["stop", "length", "tool_calls"])
def test_a_call_that_was_cut_off_is_incomplete(finish_reason: str) -> None:
    def calls(*arguments: str) -> list[dict[str, Any]]:
        return [
            {"index": index, "id": f"c{index}", "function": {"name": "weather", "arguments": text}}
            for index, text in enumerate(arguments)
        ]

    cut = answer({"tool_calls": calls('{"city":"Oslo"}', '{"city": "Os')}, finish_reason)
    assert [item["status"] for item in cut["output"]] == ["completed", "incomplete"]
    assert cut["status"] == "incomplete"
    reason = {"reason": "max_output_tokens"} if finish_reason == "length" else None
    assert cut["incomplete_details"] == reason
    whole = answer({"tool_calls": calls("{}")}, "tool_calls")
    assert (whole["status"], whole["output"][0]["status"]) == ("completed", "completed")

    chunks = [{"choices": [{"index": 0, "delta": {"tool_calls": calls('{"city": "Os')}}]}]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]})
    events = streamed(*chunks)
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["item"]["status"] for event in done] == ["incomplete"]
    assert events[-1]["type"] == "response.incomplete"


def test_what_was_cut_off_can_be_sent_back() -> None:
    cut = {**CALLED, "arguments": '{"city": "Os', "status": "incomplete"}
    sent = chat(input=[USER, cut, {**RESULT}, USER])["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "user"]
    assert sent[1] == {"role": "assistant", "content": '{"name": "weather", "arguments": {"city": "Os'}
    thoughts = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    sent = chat(input=[USER, thoughts, USER])["messages"]
    assert sent[1] == {"role": "assistant", "reasoning_content": "hm", "content": ""}


def test_what_is_no_unicode_is_refused() -> None:
    for body in (
        b'{"model": "m", "input": "\xff"}',
        b'{"model": "m", "input": [{"role": "user", "content": "\xff"}]}',
        b'{"model": "m", "input": [{"type": "\xff"}]}',
        b'{"model": "m", "input": "a", "user": "\xff"}',
        b'{"model": "m", "input": "a", "tools": [{"type": "function", "name": "f", "parameters": "\xff"}]}',
        b'{"model": "m", "input": "\\udc00"}',
    ):
        with pytest.raises(InvalidRequest, match="not valid JSON"):
            ResponsesRewriter().chat_request(body)


def test_what_is_no_answer() -> None:
    with pytest.raises(BadResponse):
        ResponsesRewriter().whole(b'{"choices": []}')


def streamed(
    *chunks: dict[str, Any], cuts: Iterable[int] = (), request: dict[str, Any] = BODY
) -> list[dict[str, Any]]:
    """What events these become, written in pieces of whole events, checked against the client's types."""
    rewriter = ResponsesRewriter()
    rewriter.chat_request(json.dumps(request).encode())
    head = {"id": "chatcmpl-1", "created": 7, "model": "m"}
    events = [sse.event(json.dumps({**head, **chunk}).encode()) for chunk in chunks]
    events = [*events, sse.DONE]
    bounds = [0, *sorted(cuts), len(events)]
    rewritten = b"".join(
        rewriter.events(b"".join(events[start:end])) for start, end in itertools.pairwise(bounds)
    ).decode()
    parsed = []
    for event in rewritten.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
        EVENT.validate_python(parsed[-1])
    assert [event["sequence_number"] for event in parsed] == list(range(len(parsed)))
    return parsed


def delta(fields: dict[str, Any], finish_reason: str | None = None, **choice: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason, **choice}]}


def call(index: int, **function: str) -> dict[str, Any]:
    begins = "name" in function
    made = {"index": index, "id": f"c{index}" if begins else None, "function": function}
    return {"tool_calls": [made | ({"type": "function"} if begins else {})]}


USAGE = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 6}}


def test_a_stream_of_text() -> None:
    events = streamed(
        delta({"role": "assistant", "content": ""}),
        delta({"content": "a"}),
        delta({"content": "b"}, "stop"),
        USAGE,
    )
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert {event["item_id"] for event in events if "item_id" in event} == {events[2]["item"]["id"]}
    assert events[-1]["response"]["usage"]["total_tokens"] == 15


def test_a_stream_of_thoughts_text_and_calls() -> None:
    events = streamed(
        delta({"role": "assistant", "content": ""}),
        delta({"reasoning_content": "h"}), delta({"reasoning": "m"}), delta({"content": "a"}),
        delta(call(0, name="weather", arguments="")),
        delta(call(0, arguments='{"a":')), delta(call(0, arguments="1}")),
        delta(call(1, name="time", arguments="{}"), "tool_calls"), USAGE,
    )  # fmt: skip
    shown = [
        (event["type"].removeprefix("response."), event.get("output_index"), event.get("delta"))
        for event in events
        if "delta" in event or "output_item" in event["type"]
    ]
    assert shown == [
        ("output_item.added", 0, None), ("reasoning_text.delta", 0, "h"), ("reasoning_text.delta", 0, "m"),
        ("output_item.done", 0, None), ("output_item.added", 1, None), ("output_text.delta", 1, "a"),
        ("output_item.done", 1, None), ("output_item.added", 2, None),
        ("function_call_arguments.delta", 2, '{"a":'), ("function_call_arguments.delta", 2, "1}"),
        ("output_item.done", 2, None), ("output_item.added", 3, None),
        ("function_call_arguments.delta", 3, "{}"), ("output_item.done", 3, None),
    ]  # fmt: skip
    done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert [event["arguments"] for event in done] == ['{"a":1}', "{}"]


def pieces(text: str, random_: random.Random) -> list[str]:
    cuts = sorted({0, len(text), *(random_.randrange(len(text) + 1) for _ in range(3))})
    return [text[start:end] for start, end in itertools.pairwise(cuts)]


@pytest.mark.parametrize("seed", range(40))
def test_a_stream_is_the_whole_answer_however_it_is_cut(seed: int) -> None:
    """Its last event, its deltas put together and its finished items are the answer that is not streamed."""
    random_ = random.Random(seed)
    message: dict[str, Any] = {}
    chunks: list[dict[str, Any]] = [delta({"role": "assistant", "content": ""})] * random_.randrange(2)
    for name, text in (("reasoning_content", "let me see"), ("content", "it is\n\n“so”")):
        if random_.random() < 0.7:
            message[name] = text
            chunks += [delta({name: piece}) for piece in pieces(text, random_)]
    message["tool_calls"] = []
    for index in range(random_.randrange(3)):
        function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
        message["tool_calls"].append({"id": f"c{index}", "function": function})
        first, *rest = pieces(function["arguments"], random_)
        chunks.append(delta(call(index, name="weather", arguments=first)))
        chunks += [delta(call(index, arguments=piece)) for piece in rest]
    reason = random_.choice(["stop", "length", "tool_calls"])
    whole = answer(message, reason)
    chunks += [delta({}, reason), {"choices": [], "usage": USAGE["usage"]}]
    events = streamed(*chunks, cuts=[random_.randrange(len(chunks)) for _ in range(4)])
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"]["output"] == whole["output"]
    finished = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert finished == whole["output"]
    for index, item in enumerate(whole["output"]):
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        deltas = [event["delta"] for event in events if "delta" in event and event["output_index"] == index]
        assert "".join(deltas) == text


def test_logprobs_wait_for_their_text() -> None:
    tokens = [{"token": text, "bytes": [97], "logprob": -0.5, "top_logprobs": []} for text in "abc"]
    events = streamed(
        delta({"content": ""}, logprobs={"content": tokens[:1]}),
        delta({"content": "ab"}, logprobs={"content": tokens[1:2]}),
        delta({"content": "c"}, "stop", logprobs={"content": tokens[2:]}),
    )
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [tokens[:2], tokens[2:]]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == tokens
    assert (
        answer({"content": "abc"}, logprobs={"content": tokens})["output"][0]["content"][0]["logprobs"]
        == tokens
    )


def test_a_stream_that_fails_ends_with_what_there_was() -> None:
    error = {"message": "lost", "type": "server_error", "code": "stream_broken"}
    events = streamed(delta({"content": "a"}), {"error": error})
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert response["error"] == {"code": "server_error", "message": "lost", "type": "stream_broken"}
    assert (response["status"], response["output"][0]["status"]) == ("failed", "incomplete")
    assert response["output"][0]["content"][0]["text"] == "a"
    (created, _, failed) = streamed({"error": {"message": "no", "type": "invalid_request_error"}})
    assert created["type"] == "response.created"
    assert failed["response"]["error"]["code"] == "invalid_prompt"


@pytest.mark.parametrize(
    "chunks",
    [
        [delta(call(0, arguments="{}"))],
        [delta(call(1, name="weather"))],
        [delta(call(0, name="a")), delta(call(1, name="b")), delta(call(0, arguments="{}"))],
    ],
)
def test_calls_that_are_mixed_up(chunks: list[dict[str, Any]]) -> None:
    with pytest.raises(BadResponse, match="mixed up"):
        streamed(*chunks)


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_items, "MAX_HELD_BYTES", 4096)
    streamed(delta({"content": "x" * 3000}, "stop"))
    with pytest.raises(BadResponse, match="exceeds"):
        streamed(delta({"content": "x" * 3000}), delta({"content": "x" * 1000}))
    with pytest.raises(BadResponse, match="exceeds"):
        streamed(*[delta({"content": "x"}), delta({"reasoning": "x"})] * 3)


@pytest.mark.parametrize("stream", [True, False])
async def test_through_the_proxy(stage: Stage, stream: bool) -> None:
    await stage.pair()
    body = {"model": "stand-in", "input": "a b c", "stream": stream, "max_output_tokens": 4}
    headers = {"X-Request-Id": "mine"}
    async with stage.http.post(f"{stage.proxy.url}/v1/responses", json=body, headers=headers) as response:
        assert (response.status, response.headers["X-Request-Id"]) == (200, "mine")
        text = await response.text()
    assert ("event: response.incomplete" in text) == stream
    assert '"reason":"max_output_tokens"' in text and "chat.completion" not in text and "[DONE]" not in text


async def test_an_agent_that_fails_in_mid_stream(start_stage: StartStage) -> None:
    stage = await start_stage(migrations=0)
    _, decode = await stage.pair()
    decode.faults.append(Fault("decode", "cut"))
    body = {"model": "stand-in", "input": "a b c", "stream": True}
    async with stage.http.post(f"{stage.proxy.url}/v1/responses", json=body) as response:
        text = await response.text()
    last = json.loads(text.rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["error"]["type"]) == ("response.failed", "stream_broken")


async def test_an_answer_that_is_too_long(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_items, "MAX_HELD_BYTES", 1100)
    await stage.pair()
    body = {"model": "stand-in", "input": "a b c", "stream": True, "max_output_tokens": 200}
    async with stage.http.post(f"{stage.proxy.url}/v1/responses", json=body) as response:
        text = await response.text()
    last = json.loads(text.rstrip().rsplit("data: ", 1)[1])
    assert (last["type"], last["response"]["error"]["type"]) == ("response.failed", "bad_agent_answer")


async def test_errors_are_openais(start_stage: StartStage, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789\n")
    stage = await start_stage(api_keys=keys)
    await stage.pair()
    key = {"Authorization": "Bearer client-key-0123456789"}
    for headers, fields, status, code, param in (
        ({}, {}, 401, "invalid_api_key", None),
        (key, {}, 404, "model_not_found", "model"),
        (key, {"store": True}, 400, "invalid_request", "store"),
        (key, {"temperature": 3}, 400, "invalid_request", "temperature"),
        (key, {"input": [{"role": "user"}]}, 400, "invalid_request", "input[0].content"),
    ):
        url = f"{stage.proxy.url}/v1/responses"
        async with stage.http.post(url, json=BODY | fields, headers=headers) as response:
            error = (await response.json())["error"]
        assert (response.status, error["code"], error["param"]) == (status, code, param)

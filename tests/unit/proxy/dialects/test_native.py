# SPDX-License-Identifier: Apache-2.0
"""The native dialect: pure rewriting of requests and answers."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvferry.proxy import sse
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import LegOrder, Prefilled, SubRequest
from kvferry.proxy.dialects.native import Native
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import BadResponse, InvalidRequest
from kvferry.proxy.exchange.sub_requests import whole_request
from kvferry.proxy.ids import AnswerId, Endpoint, Identity, RequestId, TransferId
from kvferry.proxy.request import ClientRequest, parse_request
from tests.unit.proxy.builders import registration

IDS = Identity(
    request_id=RequestId("r"), answer_id=AnswerId("cmpl-a"), created=12, seed=99, traceparent="00-t"
)
TRANSFER = TransferId("7" * 32)
PARAMS: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "transfer_id": TRANSFER,
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 6301,
    "remote_num_tokens": 3,
    "remote_tp_size": 1,
    "remote_dp_rank": 0,
    "remote_cached_tokens": 0,
    "first_tokens": [{"id": 5, "text": "a", "logprobs": None, "finish_reason": None, "margin": 0.5}],
    "prompt_token_ids": [1, 2, 3],
    "of_the_future": {"kept": True},
}
NATIVE = Native()
USAGE = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}


def request(endpoint: Endpoint = "completions", **fields: Any) -> ClientRequest:
    prompt = {"prompt": "p", "messages": [{"role": "user", "content": "p"}]}
    del prompt["messages" if endpoint == "completions" else "prompt"]
    return parse_request(endpoint, json.dumps({"model": "m", **prompt, **fields}).encode())


def sub_of(asked: ClientRequest) -> SubRequest:
    return whole_request(asked, IDS, TRANSFER)


def endpoints(asked: ClientRequest, **prefill: Any) -> Any:
    decode = registration("decode", 8001)
    return sub_of(asked).endpoints(registration("prefill", 8000, **prefill), decode, early=True)


def answer(**members: Any) -> bytes:
    choices = [{"index": 0, "text": "a", "finish_reason": "length", "logprobs": None}]
    return json.dumps({"choices": choices, "usage": USAGE, **members}).encode()


def events(raw: bytes) -> list[Any]:
    assert raw.endswith(b"\n\n")
    shown = [event.removeprefix(b"data: ") for event in raw.removesuffix(b"\n\n").split(b"\n\n")]
    return ["[DONE]" if event == b"[DONE]" else json.loads(event) for event in shown]


def test_the_prefill_body_asks_for_one_token_and_keeps_the_settings() -> None:
    settings = {"n": 2, "temperature": 0.3, "stop": ["x"], "max_completion_tokens": 9}
    asked = request(stream=True, stream_options={"include_usage": True}, **settings)
    assert json.loads(NATIVE.prefill_leg(sub_of(asked), endpoints(asked)).body) == {
        "model": "m",
        "prompt": "p",
        "n": 2,
        "temperature": 0.3,
        "stop": ["x"],
        "stream": False,
        "max_tokens": 1,
        "seed": 99,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": TRANSFER,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "client_max_tokens": 9,
        },
    }


def fields(asked: ClientRequest) -> dict[str, Any]:
    return msgspec.json.decode(msgspec.json.encode(asked.body), type=dict[str, Any])


def test_the_decode_body_is_the_clients_with_the_params_as_they_came() -> None:
    asked = request(stream=True, max_tokens=7)
    prefill = NATIVE.read_prefill(sub_of(asked), answer(kv_transfer_params=PARAMS))
    assert prefill.params is not None
    leg = NATIVE.decode_leg(sub_of(asked), endpoints(asked), prefill, None)
    assert json.loads(leg.body) == {
        **fields(asked), "seed": 99, "kvferry_token_lines": True, "kv_transfer_params": PARAMS,
    }  # fmt: skip


def test_a_streamed_decode_body_knows_only_where_the_kv_will_lie() -> None:
    asked = request(stream=True, max_tokens=7)
    prefill = registration("prefill", 8000, tp_size=2, control="tcp://[::1]:6301")
    assert native.control_address(prefill) == ("::1", 6301)
    ends = sub_of(asked).endpoints(prefill, registration("decode", 8001), early=True)
    assert NATIVE.leg_order(ends, None) is LegOrder.EARLY
    assert json.loads(NATIVE.early_leg(sub_of(asked), ends).body) == {
        **fields(asked), "seed": 99, "kvferry_token_lines": True,
        "kv_transfer_params": {
            "do_remote_prefill": True, "do_remote_decode": False, "streamed": True,
            "transfer_id": TRANSFER, "remote_engine_id": prefill.incarnation, "remote_host": "::1",
            "remote_port": 6301, "remote_tp_size": 2, "remote_dp_rank": 0,
        },
    }  # fmt: skip


@pytest.mark.parametrize("control", ["", "tcp://host", "tcp://:6301", "tcp://host:port", "tcp://[::1"])
def test_a_control_address_that_makes_no_sense_is_none(control: str) -> None:
    assert native.control_address(registration("prefill", 8000, control=control)) is None
    assert NATIVE.leg_order(endpoints(request(), control=control), None) is LegOrder.SERIAL


def test_the_first_tokens_are_told_by_an_event_without_data() -> None:
    params = {**PARAMS, "first_tokens": [{"id": 5, "text": ""}, {"id": 50, "text": ""}]}
    prefill = NATIVE.read_prefill(sub_of(request(n=2)), answer(kv_transfer_params=params))
    assert NATIVE.early_event(prefill) == b": first 5,50\n\n"


def test_a_resumed_decode_body_says_what_the_client_has() -> None:
    asked = request(stream=True, max_tokens=7)
    sent, prefilled = SentTokens(), Prefilled(params=msgspec.Raw(b"{}"))
    for resume in (None, [{"output_ids": [5, 6], "finish_reason": None}]):
        sent.strip(b": t 0 5\n\n" if resume is None else b": t 0 6\n\n")
        leg = NATIVE.continued_leg(sub_of(asked), endpoints(asked), prefilled, sent)
        assert json.loads(leg.body).get("resume") == resume


def test_token_lines_are_for_streams_only() -> None:
    for stream in (True, False):
        body = json.loads(NATIVE.alone_leg(sub_of(request(stream=stream)), None).body)
        assert body.get("kvferry_token_lines", False) is stream


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        ({"type": "server_error", "message": "died"}, True),
        ({"type": "invalid_request_error", "message": "no"}, False),
        ({"type": 7}, False),
        ({}, False),
    ],
)
def test_an_agents_own_failure_is_told_from_the_requests(error: dict[str, Any], failed: bool) -> None:
    before = sse.event({"choices": []})
    assert native.agent_failure(before) is None
    found = native.agent_failure(before + sse.event({"error": error}) + sse.DONE)
    assert found == ((before, "died") if failed else None)


def test_a_failure_that_is_no_utf_8_is_passed_on_as_it_came() -> None:
    assert native.agent_failure(b'data: {"error":{"type":"server_error","message":"d\xe9j\xe0"}}\n\n') is None


def test_building_the_legs_leaves_the_clients_body_alone() -> None:
    asked = request(stream=True, max_tokens=7)
    before = msgspec.json.encode(asked.body)
    NATIVE.prefill_leg(sub_of(asked), endpoints(asked))
    NATIVE.alone_leg(sub_of(asked), None)
    assert msgspec.json.encode(asked.body) == before


def test_the_headers_name_the_request_and_the_answer() -> None:
    assert native.headers(IDS) == {
        "Content-Type": "application/json",
        "X-Request-Id": "r",
        "X-Kvferry-Answer-Id": "cmpl-a",
        "X-Kvferry-Created": "12",
        "traceparent": "00-t",
    }


def test_first_events_show_one_token_of_every_choice() -> None:
    asked = request(n=2, return_token_ids=True, stream=True)
    tokens = [
        {"id": 5, "text": "a", "logprobs": {"a": 1}, "finish_reason": None, "margin": 0.5},
        {
            "id": 6,
            "text": "",
            "logprobs": {"b": 1},
            "finish_reason": "stop",
            "margin": None,
            "stop_reason": ";",
        },
    ]
    raw = answer(kv_transfer_params=PARAMS | {"first_tokens": tokens})
    prefill = NATIVE.read_prefill(sub_of(asked), raw)
    assert len(events(native.first_events(sub_of(asked), prefill, frozenset({1})))) == 1
    shown = events(native.first_events(sub_of(asked), prefill, frozenset({0, 1})))
    assert [event["choices"] for event in shown] == [
        [{"index": 0, "text": "a", "logprobs": {"a": 1}, "finish_reason": None,
          "token_ids": [5], "margins": [0.5]}],
        [{"index": 1, "text": "", "logprobs": {"b": 1}, "finish_reason": "stop", "stop_reason": ";",
          "token_ids": [6], "margins": [None]}],
    ]  # fmt: skip
    for event in shown:
        assert (event["id"], event["created"], event["object"]) == ("cmpl-a", 12, "text_completion")


def test_first_events_of_a_chat_begin_with_the_role() -> None:
    asked = request("chat/completions", stream=True)
    prefill = NATIVE.read_prefill(sub_of(asked), answer(kv_transfer_params=PARAMS))
    [event] = events(native.first_events(sub_of(asked), prefill, frozenset({0})))
    assert event["object"] == "chat.completion.chunk"
    assert event["choices"][0] == {
        "index": 0, "delta": {"role": "assistant", "content": "a"}, "logprobs": None, "finish_reason": None,
    }  # fmt: skip


def test_first_events_of_a_message_are_the_agents_own_deltas() -> None:
    """Calls are why it ended only where they are whole."""
    asked = request("chat/completions", n=3, stream=True)
    call = {"index": 0, "id": "1", "type": "function", "function": {"name": "f", "arguments": "{"}}
    deltas = [
        {"role": "assistant", "content": None, "reasoning_content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    tokens = [
        {"id": 5, "text": "a", "finish_reason": "stop", "delta": delta, "called": called}
        for delta, called in zip(deltas, (False, False, True), strict=True)
    ]
    prefill = NATIVE.read_prefill(sub_of(asked), answer(kv_transfer_params=PARAMS | {"first_tokens": tokens}))
    shown = [
        event["choices"][0]
        for event in events(native.first_events(sub_of(asked), prefill, frozenset({0, 1, 2})))
    ]
    assert [choice["delta"] for choice in shown] == deltas
    assert [choice["finish_reason"] for choice in shown] == ["stop", "stop", "tool_calls"]

    whole = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "reasoning_content": "a", "tool_calls": [whole]}
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls",
        "logprobs": None,
        "stop_reason": 7,
    }
    asked = request("chat/completions", stream=True)
    prefill = NATIVE.read_prefill(sub_of(asked), answer(choices=[choice]))
    [event] = events(native.first_events(sub_of(asked), prefill, frozenset({0})))
    assert event["choices"][0]["delta"] == {**message, "tool_calls": [{"index": 0, **whole}]}
    assert event["choices"][0]["finish_reason"] == "tool_calls"
    assert event["choices"][0]["stop_reason"] == 7


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_a_prefill_that_was_the_whole_answer_closes_the_stream(endpoint: Endpoint) -> None:
    """X29."""
    asked = request(endpoint, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
    shown = {"text": "a"} if endpoint == "completions" else {"message": {"role": "assistant", "content": "a"}}
    choice = {
        "index": 0,
        **shown,
        "finish_reason": "stop",
        "logprobs": None,
        "token_ids": [5],
        "margins": [0.25],
    }
    prefill = NATIVE.read_prefill(sub_of(asked), answer(choices=[choice], kvferry_timing={"x": 1}))
    assert prefill.params is None
    [first] = events(native.first_events(sub_of(asked), prefill, frozenset({0})))
    [made] = first["choices"]
    assert (made["finish_reason"], made["token_ids"], made["margins"]) == ("stop", [5], [0.25])
    assert (made["text"] if endpoint == "completions" else made["delta"]["content"]) == "a"
    last, done = events(native.closing_events(sub_of(asked), prefill))
    assert (last["choices"], last["usage"], last["kvferry_timing"]) == ([], USAGE, {"x": 1})
    assert done == "[DONE]"


def test_without_usage_asked_for_only_done_follows() -> None:
    asked = request(stream=True)
    prefill = NATIVE.read_prefill(sub_of(asked), answer())
    assert events(native.closing_events(sub_of(asked), prefill)) == ["[DONE]"]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"{}",
        b"\xff",
        b'{"choices": 3}',
        answer(choices=[]),
        answer(kv_transfer_params={}),
        answer(kv_transfer_params=PARAMS | {"transfer_id": "another"}),
        answer(kv_transfer_params=PARAMS | {"remote_engine_id": None}),
        answer(kv_transfer_params=PARAMS | {"first_tokens": []}),
        answer(kv_transfer_params=PARAMS | {"first_tokens": [{"id": "5"}]}),
        answer(kv_transfer_params=PARAMS | {"do_remote_prefill": False}),
    ],
)
def test_an_answer_out_of_the_dialect_is_refused(raw: bytes) -> None:
    """X27, and rows 3 and 8 of docs/sources.md#failures: params are of this attempt, whole, and typed."""
    with pytest.raises(BadResponse):
        NATIVE.read_prefill(sub_of(request()), raw)


@pytest.mark.parametrize(
    "fields", [{"kvferry_token_lines": True}, {"kvferry_first_choice": 1}, {"use_beam_search": True}], ids=str
)
def test_what_no_agent_can_answer_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        NATIVE.check(request(**fields))
    assert caught.value.param in fields


def test_hints_are_for_native_agents_alone() -> None:
    """Other engines have no such field, or refuse what they do not know."""
    asked = request("chat/completions", reasoning_effort="low", kvferry_hints=["reasoning_effort"])
    assert "kvferry_hints" not in asked.body
    for leg in (NATIVE.alone_leg(sub_of(asked), None), NATIVE.prefill_leg(sub_of(asked), endpoints(asked))):
        assert json.loads(leg.body)["kvferry_hints"] == ["reasoning_effort"]
    plain = NATIVE.alone_leg(sub_of(request("chat/completions")), None)
    assert "kvferry_hints" not in json.loads(plain.body)

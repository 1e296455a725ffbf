# SPDX-License-Identifier: Apache-2.0
"""Clients' bodies: what is refused, and how it is named."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.proxy.errors import MAX_MESSAGE_CHARS, InvalidRequest
from kvferry.proxy.request import ClientRequest, check_context, parse_request, split_prompts

COMPLETION: dict[str, Any] = {"model": "m", "prompt": "p"}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


def completion(**fields: Any) -> ClientRequest:
    return parse_request("completions", json.dumps(COMPLETION | fields).encode())


def decoded(request: ClientRequest) -> Any:
    return json.loads(msgspec.json.encode(request.body))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"model": None}, "model"),
        ({"model": 3}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", "b"], "n": 65}, "n"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", [1, 2]]}, "prompt"),
        ({"prompt": [[1, 2], "a"]}, "prompt"),
        ({"prompt": [1, -2]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": [[1], 2]}, "prompt"),
        ({"prompt": [1, [2]]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [[1], []]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [None]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 300}, "prompt"),
        ({"prompt": [[1]] * 300}, "prompt"),
        ({"model": "m" * 4097}, "model"),
        ({"best_of": "2"}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"logit_bias": {"1": "a"}}, "logit_bias"),
        ({"logit_bias": {str(token): 1.0 for token in range(9000)}}, "logit_bias"),
        ({"stop": ["a"] * 20000}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": "2"}, "n"),
        ({"stream": 1}, "stream"),
        ({"stream": "true"}, "stream"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": []}, "logit_bias"),
        ({"logprobs": -1}, "logprobs"),
        ({"stop": 3}, "stop"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"priority": 1}}, "stream_options.priority"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        ({"resume": [{"output_ids": [1]}]}, "resume"),
    ],
)
def test_a_wrong_field_is_a_400_that_names_it(fields: dict[str, Any], param: str) -> None:
    """R10 and issue 2, "Bad input": missing or wrong-typed fields, 0, negative, not an integer."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.param == param
    assert param.split(".")[0] in str(caught.value)
    error = json.loads(caught.value.body())["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"


def test_what_an_error_repeats_is_bounded() -> None:
    error = InvalidRequest("a" * 1_000_000, param="b" * 1_000_000)
    assert len(error.body()) < 3 * MAX_MESSAGE_CHARS and len(str(error)) == MAX_MESSAGE_CHARS


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_a_missing_field_is_named(missing: str) -> None:
    body = {key: value for key, value in COMPLETION.items() if key != missing}
    with pytest.raises(InvalidRequest) as caught:
        parse_request("completions", json.dumps(body).encode())
    assert caught.value.param == missing


@pytest.mark.parametrize(
    "messages", [[], None, "hi", [{}], [{"role": 1}], ["hi"], [{"content": "without a role"}]]
)
def test_wrong_messages_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_request("chat/completions", json.dumps(CHAT | {"messages": messages}).encode())


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"3", b"null", b"\xff\xfe", b'{"a":NaN}', b'{"a":"\\ud800"}', b"[" * 100000,
        b'{"model":"m","prompt":"\xff"}', b'{"model":"m","prompt":"p","a":"\xff"}',
        b'{"model":"m","prompt":"p","a":[1,]}', b'{"model":"m","prompt":"p","a":"\\ud800"}',
        b'{"model":"m","prompt":[1 2]}', b'{"model":"m","prompt":"p"} {}',
        b'{"model":"m","prompt":"p","a":' + b"[" * 100000 + b"]" * 100000 + b"}",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        parse_request("completions", raw)


@pytest.mark.parametrize(
    ("fields", "limit"),
    [
        ({}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 3}, 3),
        ({"max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": 4}, 4),
        ({"max_tokens": 3, "max_completion_tokens": None}, 3),
    ],
)
def test_both_names_of_the_limit_are_read(fields: dict[str, Any], limit: int | None) -> None:
    """R10: missing and null are fine."""
    assert completion(**fields).max_tokens == limit


def test_what_the_proxy_does_not_know_stays_in_the_body() -> None:
    request = completion(of_the_future={"a": [1, 2.5]}, temperature=None, kv_transfer_params=None)
    assert decoded(request) == COMPLETION | {"of_the_future": {"a": [1, 2.5]}, "temperature": None}


def test_chat_accepts_parts_tools_and_logprobs() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    body = CHAT | {"messages": [parts], "tools": [{}], "logprobs": True, "top_logprobs": 2}
    request = parse_request("chat/completions", json.dumps(body).encode())
    assert request.chat and decoded(request) == body


@pytest.mark.parametrize(
    ("prompt", "limit", "fits"),
    [
        ([1] * 9, 1, True),
        ([1] * 9, None, True),
        ([1] * 10, None, False),
        ([1] * 6, 5, False),
        ("x" * 50, 1, True),
    ],
)
def test_token_ids_that_leave_no_room_are_refused(prompt: Any, limit: int | None, fits: bool) -> None:
    """The proxy knows how long a prompt of ids is; text is for the agent to judge."""
    request = completion(prompt=prompt, max_tokens=limit)
    if fits:
        check_context(request, 10)
    else:
        with pytest.raises(InvalidRequest, match="10 tokens"):
            check_context(request, 10)


@pytest.mark.parametrize(
    ("prompt", "split", "longest"),
    [
        ("a, [b]", ["a, [b]"], None),
        (["a", 'b "c" \\', "ü"], ["a", 'b "c" \\', "ü"], None),
        (["\\" * 3, '"' * 900], ["\\" * 3, '"' * 900], None),
        ([1, 2, 3], [[1, 2, 3]], 3),
        ([[1, 2], [3, 4, 5]], [[1, 2], [3, 4, 5]], 3),
        ([[7]], [[7]], 1),
    ],
)
@pytest.mark.parametrize("indent", [None, 1])
def test_prompts_are_told_apart(prompt: Any, split: Any, longest: int | None, indent: int | None) -> None:
    request = parse_request(
        "completions", json.dumps(COMPLETION | {"prompt": prompt}, indent=indent).encode()
    )
    assert [json.loads(bytes(each)) for each in split_prompts(request.prompt)] == split
    assert (request.prompts, request.prompt_tokens) == (len(split), longest)


def large(prompt: bytes = b'"p"', rest: bytes = b"") -> bytes:
    return b'{"model":"m","prompt":' + prompt + rest + b"}"


SIZE = 2**22
BIASES = b"".join(b'"%d":0,' % index for index in range(SIZE // 11))
LARGE: dict[str, tuple[bytes, str | None]] = {
    "lists": (large(b"[" + b"[]," * (SIZE // 3) + b"[]]"), "prompt"),
    "objects": (large(b"[" + b"{}," * (SIZE // 3) + b"{}]"), "prompt"),
    "numbers": (large(b"[" + b"0.5," * (SIZE // 4) + b"0.5]"), "prompt"),
    "texts": (large(b"[" + b'"a",' * (SIZE // 4) + b'"a"]'), "prompt"),
    "backslashes": (large(b"[" + b'"\\\\",' * (SIZE // 5) + b'"a"]'), "prompt"),
    "members": (large(rest=b"".join(b',"%x":1' % index for index in range(SIZE // 10))), None),
    "biases": (large(rest=b',"logit_bias":{' + BIASES + b'"1":0}'), "logit_bias"),
    "stops": (large(rest=b',"stop":[' + b'"",' * (SIZE // 3) + b'""]'), "stop"),
}
FINE: dict[str, bytes] = {
    "a text": large(b'"' + b"ab, c: {d} " * (SIZE // 12) + b'"'),
    "ids": large(b"[" + b"12345," * 131072 + b"1]"),
    "something unknown": large(rest=b',"future":[' + b"[]," * (SIZE // 3) + b"[]]"),
}


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that `work` held at once in Python objects."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", [*LARGE, *FINE])
def test_a_large_body_is_judged_without_making_objects_of_it(name: str) -> None:
    """Issue 17: 8 MB of `[]` took 0.8 s of the event loop. All that is made now is two copies."""
    raw = LARGE[name][0] if name in LARGE else FINE[name]

    def judge() -> None:
        try:
            parse_request("completions", raw)
        except InvalidRequest as error:
            assert name in LARGE and error.param == LARGE[name][1]
        else:
            assert name in FINE

    assert peak_bytes(judge) < 2.1 * len(raw)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)


@given(
    value=st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3), max_leaves=5),
    field=st.sampled_from(["model", "prompt", "n", "seed", "stream", "stream_options", "stop", "logprobs"]),
)
def test_any_value_is_accepted_or_refused_and_never_breaks(value: Any, field: str) -> None:
    try:
        request = completion(**{field: value})
    except InvalidRequest as error:
        assert error.status == 400
    else:
        assert request.model


def test_a_completions_newer_limit_is_its_limit() -> None:
    """Other engines' servers would generate by their default, or by an older limit beside it."""
    request = completion(max_tokens=9, max_completion_tokens=3)
    assert request.max_tokens == 3
    assert decoded(request) == COMPLETION | {"max_tokens": 3}
    assert decoded(completion(max_tokens=9, max_completion_tokens=None))["max_tokens"] == 9


def test_any_64_bit_seed_is_one_and_minus_one_asks_for_none() -> None:
    for seed in (-(2**63), -2, 0, 2**63 - 1):
        assert completion(seed=seed).seed == seed
    assert completion(seed=-1).seed is None
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(InvalidRequest) as caught:
            completion(seed=seed)
        assert caught.value.param == "seed"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature must be a number, not a string"),
        ({"stop": 3}, "stop must be a string or a list, not an integer"),
        ({"n": 0}, "n must be at least 1"),
        ({"model": None}, "model must be a string, not null"),
    ],
)
def test_a_message_is_in_plain_words_and_names_the_field_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(**fields)
    assert caught.value.message == message

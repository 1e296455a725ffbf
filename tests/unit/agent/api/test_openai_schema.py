# SPDX-License-Identifier: Apache-2.0
"""Bodies: what is wrong is refused with the field's name, what is right becomes `SamplingParams`."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.agent.api.openai_schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    SamplingDefaults,
    chat_messages,
    check_chat_size,
    completion_prompt,
    decode_body,
    read_sampling_defaults,
    sampling_params,
    truncated,
)
from kvferry.agent.errors import ApiError
from kvferry.agent.messages.requests import SamplingParams

PREFILL = {"do_remote_decode": True, "transfer_id": "t1"}
DECODE = {
    "do_remote_prefill": True,
    "transfer_id": "t1",
    "remote_engine_id": "e",
    "remote_host": "h",
    "remote_port": 6301,
    "remote_num_tokens": 2,
    "remote_tp_size": 1,
    "first_tokens": [{"id": 5, "text": "x"}],
    "prompt_token_ids": [1, 2],
}


DEFAULTS = SamplingDefaults()


def completion(**fields: Any) -> CompletionBody:
    return decode_body(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), CompletionBody)


def chat(**fields: Any) -> ChatBody:
    body = {"model": "m", "messages": [{"role": "user", "content": "p"}], **fields}
    return decode_body(json.dumps(body).encode(), ChatBody)


def resolved(body: GenerationBody, prompt_len: int = 10) -> SamplingParams:
    return sampling_params(
        body, prompt_len=prompt_len, max_model_len=100, vocab_size=50, seed=7, defaults=DEFAULTS
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias[...]"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"seed": -(2**63) - 1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["é" * 256, "a" * 513]}, "stop"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
        ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": {"type": "json_schem"}}, "response_format.type"),
        ({"model": 5}, "model"),
        ({"model": None}, "model"),
        ({"model": "m" * 1025}, "model"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"kv_transfer_params": PREFILL, "echo": True, "logprobs": 1}, "kv_transfer_params"),
        ({"kv_transfer_params": PREFILL, "prompt_logprobs": 0}, "kv_transfer_params"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params.transfer_id"),
        ({"kv_transfer_params": {**PREFILL, "client_max_tokens": 0}}, "kv_transfer_params.client_max_tokens"),
        ({"kv_transfer_params": PREFILL, "stream": True}, "stream"),
        ({"kv_transfer_params": {**PREFILL, **DECODE}}, "kv_transfer_params"),
        ({"kv_transfer_params": {**DECODE, "remote_port": None}}, "kv_transfer_params.remote_port"),
        ({"kv_transfer_params": {**DECODE, "remote_num_tokens": 3}}, "kv_transfer_params.prompt_token_ids"),
        ({"kv_transfer_params": DECODE, "n": 2}, "kv_transfer_params.first_tokens"),
        (
            {"kv_transfer_params": {**DECODE, "remote_host": "h" * 256}},
            "kv_transfer_params.remote_host",
        ),
        (
            {"kv_transfer_params": {**DECODE, "remote_engine_id": "e" * 129}},
            "kv_transfer_params.remote_engine_id",
        ),
        (
            {"kv_transfer_params": {**DECODE, "first_tokens": [{"id": 5, "finish_reason": "stop"}]}},
            "kv_transfer_params.first_tokens",
        ),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(fields: dict[str, Any], param: str) -> None:
    """R10: `max_tokens` of 0, below 0 or not an integer is the client's error, not a crash."""
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "p"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"logprobs": 5}, "logprobs"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"3", b"null", b"\xff", b'{"a":' * 50_000, b'{"a": NaN}'])
def test_what_is_no_json_object_is_a_400(raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(raw, CompletionBody)
    assert caught.value.status == 400


@given(raw=st.binary(max_size=60))
def test_no_bytes_raise_anything_but_an_api_error(raw: bytes) -> None:
    with pytest.raises(ApiError):
        decode_body(raw, ChatBody)


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(b'{"prompt": "p"}', CompletionBody)
    assert (caught.value.param, caught.value.code) == ("model", "missing_field")


def test_harmless_fields_are_ignored_and_null_means_left_out() -> None:
    body = completion(user="u", metadata={"k": [1]}, max_tokens=None, n=None, stop=None, logit_bias=None)
    assert (body.limit, body.num_choices, body.stop_strings) == (None, 1, ())


def test_both_names_of_the_limit_are_honoured_and_none_means_what_the_context_holds() -> None:
    """R10."""
    assert resolved(completion(max_tokens=3)).max_tokens == 3
    assert resolved(completion(max_completion_tokens=4)).max_tokens == 4
    assert resolved(completion(max_completion_tokens=4, max_tokens=9)).max_tokens == 4
    assert resolved(completion()).max_tokens == 90


def test_a_prefill_leg_is_limited_by_the_client_and_never_by_its_own_one_token() -> None:
    """R10: the engine must know the client's limit, so that a choice whose limit is 1 ends for good."""
    assert resolved(completion(max_tokens=1, kv_transfer_params=PREFILL)).max_tokens == 90
    limited = {**PREFILL, "client_max_tokens": 12}
    assert resolved(completion(max_tokens=1, kv_transfer_params=limited)).max_tokens == 12


@pytest.mark.parametrize(
    ("fields", "prompt_len", "code"),
    [
        ({}, 100, "context_length_exceeded"),
        ({"max_tokens": 1}, 100, "context_length_exceeded"),
        ({"max_tokens": 91}, 10, "context_length_exceeded"),
        ({"max_tokens": 5}, 0, "invalid_value"),
        ({"max_tokens": 5, "min_tokens": 6}, 10, "invalid_value"),
        ({"stop_token_ids": [50]}, 10, "invalid_value"),
        ({"logit_bias": {"50": 1}}, 10, "invalid_value"),
    ],
)
def test_what_does_not_fit_the_model_is_refused(fields: dict[str, Any], prompt_len: int, code: str) -> None:
    with pytest.raises(ApiError) as caught:
        resolved(completion(**fields), prompt_len)
    assert (caught.value.status, caught.value.code) == (400, code)


def test_the_last_token_of_the_context_can_be_used() -> None:
    assert resolved(completion(max_tokens=90)).max_tokens == 90
    assert resolved(completion(), 99).max_tokens == 1


def test_every_setting_reaches_the_engine() -> None:
    """R28: no path may drop a sampling option."""
    body = completion(
        seed=2**63 - 1, n=3, max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.25, top_k=5, min_p=0.125,
        presence_penalty=-1, frequency_penalty=1, repetition_penalty=1.5, logit_bias={"7": -100}, logprobs=4,
        ignore_eos=True, stop_token_ids=[3, 4],
    )  # fmt: skip
    assert resolved(body) == SamplingParams(
        seed=2**63 - 1, n=3, max_tokens=9, min_tokens=2, temperature=0.5, top_p=0.25, top_k=5, min_p=0.125,
        presence_penalty=-1, frequency_penalty=1, repetition_penalty=1.5, logit_bias={7: -100}, logprobs=4,
        ignore_eos=True, stop_token_ids=(3, 4),
    )  # fmt: skip


def test_defaults_are_openais() -> None:
    assert resolved(completion()) == SamplingParams(seed=7, max_tokens=90)
    assert resolved(completion(temperature=0, top_k=-1)).temperature == 0
    assert resolved(completion(temperature=1e-6, top_k=-1)) == SamplingParams(
        seed=7, max_tokens=90, temperature=0.0
    )


def test_logprobs_of_both_apis() -> None:
    assert completion().num_alternatives is None
    assert completion(logprobs=0).num_alternatives == 0
    assert chat().num_alternatives is None
    assert chat(logprobs=True).num_alternatives == 0
    assert chat(logprobs=True, top_logprobs=3).num_alternatives == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("p", "p"), ([1, 2], (1, 2)), (["p"], "p"), ([[1, 2]], (1, 2)), ([], ()), ([[]], ())],
)
def test_prompts_in_every_shape(prompt: object, expected: object) -> None:
    assert completion_prompt(completion(prompt=prompt), 10) == expected


@pytest.mark.parametrize("prompt", [["a", "b"], [[1], [2]], [1, "a"], [-1], [1.5], [None], [{}], [[["a"]]]])
def test_prompts_that_are_not_one_prompt_are_refused(prompt: object) -> None:
    with pytest.raises(ApiError) as caught:
        completion_prompt(completion(prompt=prompt), 10)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "é" * 20},
        {"role": "user", "content": [{"type": "text", "text": "é" * 20}]},
        {"role": "r" * 40, "content": ""},
        {"role": "user", "content": "", "name": "n" * 40},
        {"role": "tool", "content": "", "tool_call_id": "i" * 40},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": "a" * 40}}]},
    ],
    ids=["content", "parts", "role", "name", "tool_call_id", "tool_calls"],
)
def test_whatever_a_template_may_show_counts_as_text(message: dict[str, Any]) -> None:
    """D2: a role or a tool call of any size was rendered on the event loop."""
    body = chat(messages=[message])
    assert 40 <= check_chat_size(body, 100, 1000) < 120
    with pytest.raises(ApiError) as caught:
        check_chat_size(body, 100, 9)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_message_parts_are_joined_and_other_fields_reach_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(messages=[{"role": "user", "content": parts, "name": "n", "extra": 1}])
    assert chat_messages(body) == [{"role": "user", "content": "a\nb", "name": "n"}]


@pytest.mark.parametrize("content", [None, [{"type": "image_url", "image_url": {}}], [{"type": "text"}]])
def test_content_that_is_not_text_is_refused(content: object) -> None:
    with pytest.raises(ApiError) as caught:
        chat_messages(chat(messages=[{"role": "user", "content": content}]))
    assert (caught.value.status, caught.value.param) == (400, "messages")


@pytest.mark.parametrize("fields", [{"echo": True}, {"max_tokens": 0}, {"max_completion_tokens": 0}], ids=str)
def test_a_chat_has_an_answer_and_does_not_repeat_its_messages(fields: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "p"}], **fields}
    with pytest.raises(ApiError) as caught:
        decode_body(json.dumps(body).encode(), ChatBody)
    assert caught.value.param in fields


SIZE = 2**22
CONTEXT = 4096
BIASES = b"".join(b'"%d":0,' % index for index in range(SIZE // 11))
LARGE: dict[str, tuple[type[GenerationBody], bytes, str]] = {
    "lists": (CompletionBody, b'"prompt":[' + b"[]," * (SIZE // 3) + b"[]]", "prompt"),
    "objects": (CompletionBody, b'"prompt":[' + b"{}," * (SIZE // 3) + b"{}]", "prompt"),
    "ids": (CompletionBody, b'"prompt":[' + b"1," * (SIZE // 2) + b"1]", "prompt"),
    "a list of ids": (CompletionBody, b'"prompt":[[' + b"1," * (SIZE // 2) + b"1]]", "prompt"),
    "texts": (CompletionBody, b'"prompt":[' + b'"a",' * (SIZE // 4) + b'"a"]', "prompt"),
    "biases": (
        CompletionBody, b'"prompt":"p","logit_bias":{' + BIASES + b'"1":0}', "logit_bias",
    ),
    "stops": (CompletionBody, b'"prompt":"p","stop":[' + b'"",' * (SIZE // 3) + b'""]', "stop"),
    "stop ids": (
        CompletionBody, b'"prompt":"p","stop_token_ids":[' + b"1," * (SIZE // 2) + b"1]", "stop_token_ids",
    ),
    "bad words": (
        CompletionBody, b'"prompt":"p","bad_words":[' + b'"a",' * (SIZE // 4) + b'"a"]', "bad_words",
    ),
    "allowed ids": (
        CompletionBody,
        b'"prompt":"p","allowed_token_ids":[' + b"1," * (SIZE // 2) + b"1]",
        "allowed_token_ids",
    ),
    "template variables": (
        ChatBody,
        b'"messages":[{"role":""}],"chat_template_kwargs":{"a":[' + b"[]," * (SIZE // 3) + b"[]]}",
        "chat_template_kwargs",
    ),
    "messages": (ChatBody, b'"messages":[' + b'{ "role":""},' * (SIZE // 13) + b'{"role":""}]', "messages"),
    "parts": (
        ChatBody,
        b'"messages":[{"role":"user","content":[' + b'{"type":""},' * (SIZE // 12) + b'{"type":""}]}]',
        "messages",
    ),
    "tools": (ChatBody, b'"messages":[{"role":""}],"tools":[' + b"[]," * (SIZE // 3) + b"[]]", "tools"),
}  # fmt: skip


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that `work` held at once in Python objects."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_is_refused_without_making_objects_of_it(name: str) -> None:
    """Issue 17: making them stopped the event loop for up to 0.8 s. All that is made now is two copies."""
    body_type, fields, param = LARGE[name]
    raw = b'{"model":"m",' + fields + b"}"

    def refuse() -> None:
        with pytest.raises(ApiError) as caught:
            decode_body(raw, body_type, CONTEXT)
        assert (caught.value.status, caught.value.param) == (400, param)

    assert peak_bytes(refuse) < 2.1 * len(raw)


@pytest.mark.parametrize(
    "prompt", ['ab { "c": [] } ' * 20_000, [*range(4000)], [[*range(4000)]], ["ab, " * 50_000]]
)
def test_a_large_prompt_that_may_fit_is_taken(prompt: Any) -> None:
    body = decode_body(json.dumps({"model": "m", "prompt": prompt}).encode(), CompletionBody, CONTEXT)
    taken = completion_prompt(body, CONTEXT)
    assert taken == (
        tuple(range(4000)) if isinstance(taken, tuple) else prompt if isinstance(prompt, str) else prompt[0]
    )


@pytest.mark.parametrize("digits", [1, 100_000], ids=["short ids", "long ids"])
def test_a_list_that_is_truncated_may_exceed_the_context_whatever_its_size(digits: int) -> None:
    raw = json.dumps({"model": "m", "prompt": [digits] * 5000, "truncate_prompt_tokens": 100}).encode()
    body = decode_body(raw, CompletionBody, CONTEXT)
    assert completion_prompt(body, CONTEXT) == (digits,) * 5000
    far = {"model": "m", "prompt": [digits] * 400_000, "truncate_prompt_tokens": 100}
    with pytest.raises(ApiError, match="truncate"):
        decode_body(json.dumps(far).encode(), CompletionBody, CONTEXT)


def test_a_large_chat_that_may_fit_is_taken() -> None:
    arguments = {"a": [{"a": {}}] * 10_000}
    text = json.dumps(arguments)
    calls: list[Any] = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}]
    said = [{"role": "user", "content": text}, {"role": "assistant", "content": None, "tool_calls": calls}]
    body = decode_body(json.dumps({"model": "m", "messages": said}).encode(), ChatBody, CONTEXT)
    calls[0]["function"]["arguments"] = arguments
    assert chat_messages(body) == [said[0], {**said[1], "content": ""}]


def test_arguments_of_calls_are_what_templates_write_as_json() -> None:
    def shown(arguments: Any) -> Any:
        function = {"name": "f", "arguments": arguments}
        body = chat(messages=[{"role": "assistant", "content": "", "tool_calls": [{"function": function}]}])
        return chat_messages(body)[0]["tool_calls"][0]["function"]["arguments"]

    assert [shown(each) for each in ('{"a": [1]}', {"a": 1}, "")] == [{"a": [1]}, {"a": 1}, {}]
    assert [shown(each) for each in (None, "null", " {} ")] == [{}, {}, {}]
    for wrong in ("[1]", "7", "a"):
        with pytest.raises(ApiError, match="arguments"):
            shown(wrong)


@pytest.mark.parametrize("calls", [{}, "f", [[]] * 100_000])
def test_tool_calls_are_a_short_list(calls: Any) -> None:
    body = chat(messages=[{"role": "assistant", "content": "a", "tool_calls": calls}])
    with pytest.raises(ApiError) as caught:
        chat_messages(body)
    assert caught.value.param == "messages"


def test_what_is_left_out_comes_from_the_generation_config_and_what_is_given_wins(tmp_path: Path) -> None:
    config = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "max_new_tokens": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 3}))
    defaults = read_sampling_defaults(tmp_path, "auto")
    limits: dict[str, Any] = {"prompt_len": 10, "max_model_len": 100, "vocab_size": 50, "seed": 7}
    made = sampling_params(completion(), defaults=defaults, **limits)
    assert (made.temperature, made.top_k, made.top_p, made.min_p) == (0.6, 20, 0.95, 0.0)
    assert (made.repetition_penalty, made.max_tokens) == (1.1, 9)
    given = completion(temperature=0, top_k=-1, top_p=1.0, repetition_penalty=1.0, max_tokens=30)
    made = sampling_params(given, defaults=defaults, **limits)
    assert (made.temperature, made.top_k, made.top_p) == (0.0, 0, 1.0)
    assert (made.repetition_penalty, made.max_tokens) == (1.0, 30)
    assert read_sampling_defaults(tmp_path, "none") == SamplingDefaults()


def test_a_prompt_loses_its_beginning_and_never_more_than_was_asked_for() -> None:
    ids = tuple(range(40))
    assert truncated(ids, None, 30) == ids
    assert truncated(ids, 5, 30) == (35, 36, 37, 38, 39)
    assert truncated(ids, -1, 30) == ids[-29:]
    assert truncated(ids[:3], 5, 30) == ids[:3]
    with pytest.raises(ApiError, match="truncate_prompt_tokens"):
        truncated(ids, 30, 30)


def test_any_64_bit_seed_is_one_and_minus_one_asks_for_none() -> None:
    """OpenAI takes any; vLLM, whose -1 it is, samples at random then."""
    for seed in (-(2**63), -2, 0, 2**63 - 1):
        assert resolved(completion(seed=seed)).seed == seed
    assert resolved(completion(seed=-1)).seed == 7


@pytest.mark.parametrize("role", ["robot", "", "User", "ipython"])
def test_an_unknown_role_is_refused(role: str) -> None:
    with pytest.raises(ApiError, match="role") as caught:
        chat_messages(chat(messages=[{"role": role, "content": "a"}]))
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_all_of_openais_roles_are_known() -> None:
    for role in ("system", "developer", "user", "assistant", "tool", "function"):
        assert chat_messages(chat(messages=[{"role": role, "content": "a"}])) == [
            {"role": role, "content": "a"}
        ]


def test_an_assistant_may_have_said_nothing() -> None:
    """It reasoned until its limit, or refused."""
    for said, content in (
        ({"content": None, "reasoning_content": "hm"}, ""),
        ({}, ""),
        ({"content": None, "refusal": "I must not."}, "I must not."),
        ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
    ):
        (shown,) = chat_messages(chat(messages=[{"role": "assistant", **said}]))
        assert shown["content"] == content
    for role in ("user", "system", "tool"):
        with pytest.raises(ApiError, match="content"):
            chat_messages(chat(messages=[{"role": role, "content": None}]))


@pytest.mark.parametrize("arguments", ['{"a": ', '\n {"a": ', '{"a": 1e999}', '{"a": "\\ud800"}', "{" * 5000])
def test_a_call_that_was_cut_off_is_content(arguments: str) -> None:
    functions = [{"name": "f", "arguments": text} for text in ("{}", arguments)]
    calls = [{"id": "1", "type": None, "function": function} for function in functions]
    (shown,) = chat_messages(chat(messages=[{"role": "assistant", "content": "So:", "tool_calls": calls}]))
    assert [call["function"]["arguments"] for call in shown["tool_calls"]] == [{}]
    assert shown["content"] == f'So:\n{{"name": "f", "arguments": {arguments}'


def test_the_limit_that_does_not_fit_is_named() -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ApiError) as caught:
            resolved(completion(**{name: 200}))
        assert (caught.value.param, caught.value.code) == (name, "context_length_exceeded")


@pytest.mark.parametrize("body_type", [CompletionBody, ChatBody])
@pytest.mark.parametrize("raw", [
    b'{"model": "m", "prompt": "\xff"}',
    b'{"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "m", "messages": [{"role": "assistant", "tool_calls": [{"id": "\xff"}]}]}',
    b'{"model": "m", "prompt": "a", "user": "\xff"}',
    b'{"model": "m", "prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"\xff": 1}}}',
    b'{"\xff": 1}',
    b'{"model": "m", "prompt": "\\ud800"}',
    b'{"model": "m", "prompt": "a", "stop": ["\\udc00"]}',
])  # fmt: skip
def test_what_is_no_unicode_is_no_json(body_type: type[CompletionBody | ChatBody], raw: bytes) -> None:
    with pytest.raises(ApiError) as caught:
        decode_body(raw, body_type)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")

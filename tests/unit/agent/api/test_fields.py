# SPDX-License-Identifier: Apache-2.0
"""Every field is honoured, harmless or refused by name: none is ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.agent.api.fields import HARMLESS, REFUSED
from kvferry.agent.api.openai_schema import HONOURED, ChatBody, CompletionBody, GenerationBody, decode_body
from kvferry.agent.errors import ApiError
from tests.unit.agent.api.field_table import PAGE, with_tables
from tests.unit.agent.api.published_fields import CHAT, COMPLETION

BODIES: dict[type[GenerationBody], dict[str, Any]] = {
    CompletionBody: {"model": "m", "prompt": "p"},
    ChatBody: {"model": "m", "messages": [{"role": "user", "content": "p"}]},
}
KINDS = pytest.mark.parametrize("kind", BODIES)


def decode(kind: type[GenerationBody], **fields: Any) -> GenerationBody:
    return decode_body(json.dumps({**BODIES[kind], **fields}).encode(), kind)


def refused(kind: type[GenerationBody], **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as info:
        decode(kind, **fields)
    assert info.value.status == 400
    return info.value


@pytest.mark.parametrize(("kind", "published"), [(CompletionBody, COMPLETION), (ChatBody, CHAT)])
def test_each_published_field_is_in_one_class(
    kind: type[GenerationBody], published: dict[str, frozenset[str]]
) -> None:
    for server, names in published.items():
        unknown = names - HONOURED[kind] - HARMLESS.keys() - REFUSED.keys()
        assert not unknown, f"of {server}"
    assert not HARMLESS.keys() & REFUSED.keys()
    assert not HONOURED[kind] & (HARMLESS.keys() | REFUSED.keys())


@KINDS
@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_field_is_named_unless_it_asks_for_nothing(kind: type[GenerationBody], name: str) -> None:
    assert refused(kind, **{name: "what nobody would take"}).param == name
    assert refused(kind, **{name: {"a": ["long value"] * 100}}).param == name
    for value in (None, *REFUSED[name][1]):
        decode(kind, **{name: value})


@KINDS
def test_a_harmless_field_passes_with_any_value(kind: type[GenerationBody]) -> None:
    for name in HARMLESS:
        for value in (None, True, "x", {"a": 1}, ["x"] * 100):
            decode(kind, **{name: value})


@KINDS
def test_an_unknown_field_is_refused_with_the_nearest_name(kind: type[GenerationBody]) -> None:
    error = refused(kind, temprature=0.5)
    assert error.param == "temprature"
    assert "did you mean temperature?" in error.message
    assert "did you mean" not in refused(kind, qqqq=1).message
    assert len(refused(kind, **{"x" * 9999: 1}).message) < 200


def test_a_field_of_the_other_endpoint_is_refused() -> None:
    assert "not a field of this endpoint" in refused(CompletionBody, chat_template_kwargs={"a": 1}).message
    assert refused(ChatBody, prompt="p").param == "prompt"


@KINDS
def test_stream_options_are_known_too(kind: type[GenerationBody]) -> None:
    assert "stream_options" in str(refused(kind, stream=True, stream_options={"include_usge": True}).param)
    decode(kind, stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    both = {"include_usage": True, "continuous_usage_stats": True}
    decode(kind, stream=True, stream_options=both)
    refused(kind, stream=True, stream_options={"continuous_usage_stats": True})


# What clients send when their user names a model and a prompt, and no more.
DEFAULT_BODIES: dict[str, dict[str, Any]] = {
    "openai, streaming helper": {"stream": True, "stream_options": {"include_usage": True}},
    "langchain-openai": {"stream": False, "temperature": 0.7, "n": 1, "parallel_tool_calls": None},
    "litellm": {
        "stream": True, "stream_options": {"include_usage": True}, "user": "u", "metadata": {"k": "v"},
    },
    "vllm bench serve": {
        "repetition_penalty": 1.0, "temperature": 0.0, "max_tokens": 8, "logprobs": None, "stream": True,
        "stream_options": {"include_usage": True}, "ignore_eos": True,
    },
    "sglang bench_serving": {"temperature": 0.0, "max_tokens": 8, "stream": True, "ignore_eos": True},
    "guidellm": {
        "max_completion_tokens": 8, "stop": None, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
    "aiperf": {"stream": True, "max_completion_tokens": 8, "stream_options": {"include_usage": True}},
    "lm-eval, generate_until": {"max_tokens": 8, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
}  # fmt: skip


@KINDS
@pytest.mark.parametrize("client", DEFAULT_BODIES)
def test_what_clients_send_by_default_is_not_refused(kind: type[GenerationBody], client: str) -> None:
    decode(kind, **DEFAULT_BODIES[client])


def test_the_page_says_what_the_code_does() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run `make field-table`"

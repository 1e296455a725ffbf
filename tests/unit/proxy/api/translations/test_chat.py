# SPDX-License-Identifier: Apache-2.0
"""How large a body may be before it is decoded."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvferry.proxy.api.translations import messages, responses
from kvferry.proxy.api.translations.chat import MAX_COMMAS, MAX_OBJECTS
from kvferry.proxy.errors import InvalidRequest

USER = {"role": "user", "content": "hi"}


def anthropics(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "max_tokens": 5, "messages": [USER]} | fields).encode()


def openais(**fields: Any) -> bytes:
    return json.dumps({"model": "m", "input": "hi"} | fields).encode()


@pytest.mark.parametrize("text", ["if (x) { y(); }\n", '{"a": "\\\\"}, ', "\\", 'f({"', ",,"])
def test_what_is_in_a_text_is_not_counted(text: str) -> None:
    """Code and JSON in prompts, longer than one piece in which a body is looked at."""
    long = text * (MAX_COMMAS + 1)
    asked = json.loads(messages.chat_request(anthropics(messages=[{"role": "user", "content": long}])))
    assert asked["messages"] == [{"role": "user", "content": long}]
    assert json.loads(responses.chat_request(responses.parse(openais(input=long))))["messages"] == [
        {"role": "user", "content": long}
    ]


def test_escapes_at_any_place_are_read_right() -> None:
    """Backslashes and quotes fall on the edges of the pieces in which a body is looked at."""
    rng = random.Random(1)
    for _ in range(20):
        text = "{," * MAX_COMMAS + "".join(rng.choices('\\"{,ab', k=200_000))
        assert messages.chat_request(anthropics(system=text))


@pytest.mark.parametrize(
    "body",
    [
        openais(input=[1] * (MAX_COMMAS + 2)),
        openais(input=[{}] * (MAX_OBJECTS + 1)),
        openais(metadata={str(number): "" for number in range(MAX_COMMAS + 2)}),
        openais(input='"' * 100_000, include=[1] * (MAX_COMMAS + 2)),
    ],
)
def test_a_response_of_too_many_objects_or_elements_is_refused(body: bytes) -> None:
    """They are not made first: of 8 MiB `[1,1,…]` that took a second and 330 MB."""
    with pytest.raises(InvalidRequest, match="the body may have at most"):
        responses.parse(body)


@pytest.mark.parametrize(
    "fields",
    [{"stop_sequences": ["a"] * (MAX_COMMAS + 2)}, {"messages": [USER] * (MAX_OBJECTS + 1)}],
)
def test_a_message_of_too_many_objects_or_elements_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="the body may have at most"):
        messages.chat_request(anthropics(**fields))


@pytest.mark.parametrize(
    "fields", [{"tool_choice": "x" * 10_000}, {"`$." + "x" * 10_000: 1}], ids=["value", "name"]
)
def test_a_refusal_does_not_repeat_what_was_sent(fields: dict[str, Any]) -> None:
    """It has the place all the same; 8 MiB came back in it."""
    for parse, body in ((responses.parse, openais(**fields)), (messages.chat_request, anthropics(**fields))):
        with pytest.raises(InvalidRequest) as refused:
            parse(body)
        assert len(refused.value.body()) < 1000
        if "tool_choice" in fields:
            assert refused.value.param == "tool_choice"

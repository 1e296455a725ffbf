# SPDX-License-Identifier: Apache-2.0
"""What is wrong with JSON, said in words that a client has: none of msgspec's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from kvferry.common.exceptions import NOT_JSON
from kvferry.common.json_errors import JsonProblem, check_utf8, explain


class _Inner(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="a"):
    x: int = 0


class _Other(msgspec.Struct, tag_field="type", tag="b"):
    pass


class _Body(msgspec.Struct, forbid_unknown_fields=True):
    must: str
    n: Annotated[int, Meta(ge=1, le=5)] | None = None
    t: Annotated[float, Meta(gt=0, lt=1)] | None = None
    s: Annotated[str, Meta(min_length=1, max_length=2)] | None = None
    p: Annotated[str, Meta(pattern="^a$")] | None = None
    bias: Annotated[dict[int, float], Meta(max_length=1)] | None = None
    e: Literal["x", "y"] | None = None
    parts: Annotated[list[_Inner | _Other], Meta(min_length=1, max_length=2)] | None = None
    stop: str | list[str] | None = None
    b: bool | None = None
    no: None = None


def problem(raw: str | bytes, where: str = "") -> JsonProblem:
    raw = raw if isinstance(raw, bytes) else raw.encode()
    with pytest.raises(NOT_JSON) as caught:
        check_utf8(raw)
        msgspec.json.decode(raw, type=_Body)
    return explain(caught.value, where)


@pytest.mark.parametrize(
    ("member", "message", "code"),
    [
        ('"t": "hot"', "t must be a number, not a string", "invalid_type"),
        ('"n": 0', "n must be at least 1", "invalid_value"),
        ('"n": 6', "n must be at most 5", "invalid_value"),
        ('"n": 1.5', "n must be an integer, not a number", "invalid_type"),
        ('"t": 0', "t must be above 0", "invalid_value"),
        ('"t": 1', "t must be below 1", "invalid_value"),
        ('"s": ""', "s must have at least 1 characters", "invalid_value"),
        ('"s": "abc"', "s must have at most 2 characters", "invalid_value"),
        ('"p": "b"', "p must match ^a$", "invalid_value"),
        ('"parts": []', "parts must have at least 1 elements", "invalid_value"),
        ('"bias": {"1": 1, "2": 1}', "bias must have at most 1 members", "invalid_value"),
        ('"bias": {"a": 1}', "a key of bias must be an integer, not a string", "invalid_type"),
        ('"bias": {"1": "a"}', "a value of bias must be a number, not a string", "invalid_type"),
        ('"e": "z"', "'z' is not a value of e", "invalid_value"),
        ('"parts": [{"type": "c"}]', "'c' is not a value of parts[0].type", "invalid_value"),
        ('"parts": [{}]', "parts[0].type is missing", "missing_field"),
        ('"parts": [{"type": "a", "q": 1}]', "parts[0].q is not a known field", "unknown_field"),
        ('"stop": 3', "stop must be a string or a list, not an integer", "invalid_type"),
        ('"stop": [3]', "stop[0] must be a string, not an integer", "invalid_type"),
        ('"b": 1', "b must be true or false, not an integer", "invalid_type"),
        ('"no": 1', "no must be null, not an integer", "invalid_type"),
        ('"zz": 1', "zz is not a known field", "unknown_field"),
        ('"t": 1e999', "t is not valid: number out of range", "invalid_value"),
    ],
)
def test_what_is_wrong_is_said_once_and_in_plain_words(member: str, message: str, code: str) -> None:
    assert problem(f'{{"must": "", {member}}}')[1:] == (message, code)


@pytest.mark.parametrize(
    ("member", "field"),
    [
        ('"zz": 1', "zz"),
        ('"parts": [{"type": "a", "q": 1}]', "parts[0].q"),
        ('"n": 0', "n"),
        ('"parts": [{"type": "c"}]', "parts[0].type"),
        ('"bias": {"a": 1}', "bias"),
    ],
)
def test_the_field_is_named_apart(member: str, field: str) -> None:
    """As an error's `param`: that of an unknown field was null, or the object around it."""
    assert problem(f'{{"must": "", {member}}}').field == field
    assert problem(f'{{"must": "", {member}}}', "tools[1]").field == f"tools[1].{field}"


@pytest.mark.parametrize(
    ("raw", "message", "code"),
    [
        ("{}", "must is missing", "missing_field"),
        ("[]", "the body must be an object, not a list", "invalid_type"),
        ("", "the body is not valid JSON: it breaks off, or has half of a surrogate pair", "invalid_json"),
        ('{"must": tru}', "the body is not valid JSON: invalid character at byte 13", "invalid_json"),
        (b'{"must": "\xff"}', "the body is not valid JSON: it is not UTF-8", "invalid_json"),
    ],
)
def test_what_is_no_body(raw: str | bytes, message: str, code: str) -> None:
    assert problem(raw)[1:] == (message, code)


def test_what_is_nested_too_deeply_is_no_json_either() -> None:
    with pytest.raises(NOT_JSON) as caught:
        msgspec.json.decode("[" * 10_000)
    assert explain(caught.value).message == "the body is not valid JSON: it is nested too deeply"


def test_a_part_has_its_place_before_it() -> None:
    assert problem('{"must": "", "t": "hot"}', "input[2]")[:2] == (
        "input[2].t", "input[2].t must be a number, not a string",
    )  # fmt: skip
    assert problem("[]", "stop") == ("stop", "stop must be an object, not a list", "invalid_type")
    assert problem("{", "stop").field == "stop"


def test_little_of_what_a_client_sent_is_repeated() -> None:
    assert len(problem('{"must": "", "e": "%s"}' % ("z" * 10**6)).message) < 200
    assert len(problem('{"must": "", "%s": 1}' % ("z" * 10**6)).message) < 200


@given(st.dictionaries(st.sampled_from(_Body.__struct_fields__), st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "x", "1"]), inner),
    max_leaves=5,
)))  # fmt: skip
def test_no_word_of_the_library_is_in_any_message(body: dict[str, Any]) -> None:
    try:
        msgspec.json.decode(msgspec.json.encode(body), type=_Body)
    except NOT_JSON as error:
        found = explain(error)
        assert not re.search(r"`|\$\.|Expected|Object|\bstr\b|\bint\b|\barray\b", found.message), found
        assert found.field is None or found.field.removesuffix("[...]") in found.message

# SPDX-License-Identifier: Apache-2.0
"""What is wrong with JSON from outside, in plain words: msgspec speaks of its own types. Pure."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Literal, NamedTuple

import msgspec

_SHOWN_CHARS = 64
"""How much of a sender's value or name is repeated."""
_PLACE = re.compile(r" - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`", re.DOTALL)
_TYPE = re.compile(r"Expected `(?P<types>[^`]*)`(?:, got `(?P<got>[^`]*)`)?")
_LENGTH = re.compile(r"Expected `(?P<type>str|array|object)` of length (?P<op>[<>]=) (?P<bound>\d+)")
_BOUND = re.compile(r"Expected `(?:int|float)` (?P<op>[<>]=?) (?P<bound>\S+)")
_PATTERN = re.compile(r"Expected `str` matching regex '(?P<pattern>.*)'")
_VALUE = re.compile(r"Invalid (?:enum )?value (?P<value>.*)", re.DOTALL)
_MALFORMED = re.compile(r"JSON is malformed: (?P<what>.*) \(byte (?P<at>\d+)\)")
_WORDS = MappingProxyType(
    {
        "int": "an integer",
        "float": "a number",
        "str": "a string",
        "bool": "true or false",
        "array": "a list",
        "object": "an object",
        "null": "null",
    }
)
_BOUNDS = MappingProxyType({">=": "at least", "<=": "at most", ">": "above", "<": "below"})
_PARTS = MappingProxyType({"str": "characters", "array": "elements", "object": "members"})


def check_utf8(raw: bytes) -> None:
    """Raise `UnicodeDecodeError` for what is no UTF-8: decoding does not look at what it keeps as it is."""
    if not raw.isascii():
        str(raw, "utf-8")


ProblemCode = Literal["invalid_json", "invalid_type", "invalid_value", "missing_field", "unknown_field"]


class JsonProblem(NamedTuple):
    """What is wrong, and where: `field` is a place such as `messages[0].role`, None for all of it."""

    field: str | None
    message: str
    code: ProblemCode


def explain(error: BaseException, where: str = "", whole: str = "the body") -> JsonProblem:
    """Say what is wrong with JSON, of an error that is one of `NOT_JSON`.

    Args:
        error: The error.
        where: Where the JSON is a part of something larger: its place in that.
        whole: What it is, if it is no part.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        message = f"{where or whole} is not valid JSON: {_syntax(error)}"
        return JsonProblem(where or None, message, "invalid_json")
    place = _PLACE.search(text)
    path = place["path"] if place else ""
    text = text if place is None else text[: place.start()]
    field = _joined(where, path)
    if named := _MISSING.fullmatch(text):
        name = _joined(field, f".{named['name']}")
        return JsonProblem(name, f"{name} is missing", "missing_field")
    if named := _UNKNOWN.fullmatch(text):
        name = _joined(field, f".{_short(named['name'])}")
        return JsonProblem(name, f"{name} is not a known field", "unknown_field")
    name = field.removesuffix("[...]") or whole
    if value := _VALUE.fullmatch(text):
        return JsonProblem(
            field or None, f"{_short(value['value'])} is not a value of {name}", "invalid_value"
        )
    if place and (place["key"] or field.endswith("[...]")):
        name = f"a {'key' if place['key'] else 'value'} of {name}"
    code, what = _demand(text)
    return JsonProblem(field or None, f"{name} {what}", code)


def _joined(where: str, path: str) -> str:
    return where + path if where else path.removeprefix(".")


def _demand(text: str) -> tuple[ProblemCode, str]:
    """Return a code, and what the value must be."""
    if found := _LENGTH.fullmatch(text):
        return "invalid_value", f"must have {_BOUNDS[found['op']]} {found['bound']} {_PARTS[found['type']]}"
    if found := _BOUND.fullmatch(text):
        return "invalid_value", f"must be {_BOUNDS[found['op']]} {found['bound'].removesuffix('.0')}"
    if found := _PATTERN.fullmatch(text):
        return "invalid_value", f"must match {found['pattern']}"
    if found := _TYPE.fullmatch(text):
        # Null is the same as a field left out.
        types = [each for each in found["types"].split(" | ") if each != "null"] or ["null"]
        wanted = " or ".join(_WORDS.get(each, each) for each in types)
        got = f", not {_WORDS.get(found['got'], found['got'])}" if found["got"] else ""
        return "invalid_type", f"must be {wanted}{got}"
    return "invalid_value", f"is not valid: {text[0].lower()}{_short(text[1:])}"


def _syntax(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    if isinstance(error, UnicodeError):
        return "it has half of a surrogate pair"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if found := _MALFORMED.fullmatch(str(error)):
        return f"{found['what']} at byte {found['at']}"
    return "it breaks off, or has half of a surrogate pair"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"

# SPDX-License-Identifier: Apache-2.0
"""The fields of a body that constrain its answer, and the grammar that they ask for. Pure.

`response_format` is OpenAI's, `structured_outputs` and `guided_*` are vLLM's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from llguidance import LLMatcher
from msgspec import Meta, Raw

from kvferry.agent.errors import bad_request

MAX_GRAMMAR_BYTES = 64 * 1024
"""Largest value of each field, in bytes of JSON."""
_WHITESPACE = r"[ ]|\n[ ]{0,32}|\n\t{0,8}"
"""Between the parts of JSON: a space, or a line break with its indentation. Without a bound a model can go on
with spaces until its limit."""
MAX_CHOICE_TEXTS = 4096
_NULL = Raw(b"null")

Choices = Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICE_TEXTS)]


@dataclass(frozen=True, slots=True)
class Constraint:
    """What an answer must match: llguidance's JSON form, and the field that asked for it."""

    field: str
    grammar: str


class JsonSchemaFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A named schema. It holds whether `strict` is set or not."""

    schema: Raw = _NULL
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """As in vLLM, of which `structural_tag` and `disable_additional_properties` are not supported."""

    json: Raw = _NULL
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_fallback: bool | None = None


class ConstrainedBody(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that constrain an answer; at most one of them may."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Raw = _NULL
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    guided_json_object: bool | None = None
    guided_whitespace_pattern: str | None = None

    @property
    def is_constrained(self) -> bool:
        free = self.response_format is None or self.response_format.type == "text"
        others = (self.structured_outputs, self.guided_regex, self.guided_choice, self.guided_grammar)
        return not (
            free
            and all(each is None for each in others)
            and self.guided_json == _NULL
            and not self.guided_json_object
        )

    def constraint(self) -> Constraint | None:
        """Return what the answer must match, if anything. Raises `ApiError` 400."""
        asked = [*self._response_format(), *self._structured_outputs(), *self._guided()]
        if len(asked) > 1:
            names = " and ".join(each.field for each in asked)
            raise bad_request(f"an answer has one constraint; here are {names}", asked[1].field)
        return asked[0] if asked else None

    def _response_format(self) -> list[Constraint]:
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return []
        if wanted.type == "json_object":
            return [_of_schema("response_format", _ANY_OBJECT, _WHITESPACE)]
        if wanted.json_schema is None or wanted.json_schema.schema == _NULL:
            where = "response_format.json_schema"
            raise bad_request(f"{where}: a schema is needed", where, "missing_field")
        return [_of_schema("response_format.json_schema.schema", wanted.json_schema.schema, _WHITESPACE)]

    def _structured_outputs(self) -> list[Constraint]:
        wanted = self.structured_outputs
        if wanted is None:
            return []
        whitespace = None if wanted.disable_any_whitespace else wanted.whitespace_pattern or _WHITESPACE
        asked = _each(
            "structured_outputs.",
            schema=wanted.json,
            regex=wanted.regex,
            choice=wanted.choice,
            grammar=wanted.grammar,
            json_object=wanted.json_object,
            whitespace=whitespace,
        )
        if not asked:
            message = "structured_outputs needs json, regex, choice, grammar or json_object"
            raise bad_request(message, "structured_outputs")
        return asked

    def _guided(self) -> list[Constraint]:
        return _each(
            "guided_",
            schema=self.guided_json,
            regex=self.guided_regex,
            choice=self.guided_choice,
            grammar=self.guided_grammar,
            json_object=self.guided_json_object,
            whitespace=self.guided_whitespace_pattern or _WHITESPACE,
        )


_ANY_OBJECT = Raw(b'{"type": "object"}')


def _each(
    prefix: str,
    *,
    schema: Raw,
    regex: str | None,
    choice: Sequence[str] | None,
    grammar: str | None,
    json_object: bool | None,
    whitespace: str | None,
) -> list[Constraint]:
    asked = []
    if schema != _NULL:
        asked.append(_of_schema(f"{prefix}json", schema, whitespace))
    if json_object:
        asked.append(_of_schema(f"{prefix}json_object", _ANY_OBJECT, whitespace))
    if regex is not None:
        asked.append(Constraint(f"{prefix}regex", LLMatcher.grammar_from_regex(regex)))
    if choice is not None:
        # Strings are written in Lark as in JSON. One terminal, not rules: those are limited to 2,000.
        texts = " | ".join(json.dumps(each, ensure_ascii=False) for each in choice)
        asked.append(lark_constraint(f"{prefix}choice", f"start: TEXT\nTEXT: {texts}"))
    if grammar is not None:
        asked.append(lark_constraint(f"{prefix}grammar", grammar))
    return asked


def lark_constraint(field: str, grammar: str) -> Constraint:
    """Constrain to a grammar in Lark."""
    return Constraint(field, json.dumps({"grammars": [{"lark_grammar": grammar}]}))


def _of_schema(field: str, given: Raw, whitespace: str | None) -> Constraint:
    """Constrain to a JSON schema, or to one within a string; without `whitespace` to the shortest JSON."""
    text = bytes(given)
    try:
        if text.startswith(b'"'):
            text = msgspec.json.decode(text, type=str).encode()
        if not isinstance(msgspec.json.decode(text), dict):
            raise bad_request(f"{field}: a JSON schema is an object", field, "invalid_type")
        grammar = LLMatcher.grammar_from_json_schema(
            text.decode(),
            overrides={"whitespace_flexible": False}
            if whitespace is None
            else {"whitespace_pattern": whitespace},
        )
    except (ValueError, RecursionError) as error:
        raise bad_request(f"{field}: {error}", field) from error
    return Constraint(field, grammar)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from typing import Any

import pytest

from kvferry.agent.api.grammar.constraint import MAX_GRAMMAR_BYTES, Constraint
from kvferry.agent.api.openai_schema import CompletionBody, decode_body
from kvferry.agent.errors import ApiError

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}}}


def constraint(**fields: Any) -> Constraint | None:
    body = decode_body(json.dumps({"model": "m", "prompt": "p", **fields}).encode(), CompletionBody)
    found = body.constraint()
    assert body.is_constrained == (found is not None)
    return found


def named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


def test_without_such_a_field_nothing_is_constrained() -> None:
    assert constraint() is None
    assert constraint(response_format={"type": "text"}, guided_json_object=False, guided_regex=None) is None


def test_every_field_of_a_schema_asks_for_the_same() -> None:
    asked = [
        constraint(response_format=named(SCHEMA)),
        constraint(structured_outputs={"json": SCHEMA}),
        constraint(structured_outputs={"json": json.dumps(SCHEMA)}),
        constraint(guided_json=SCHEMA),
        constraint(guided_json=json.dumps(SCHEMA)),
    ]
    assert len({each.grammar for each in asked if each is not None}) == 1
    assert [each.field for each in asked if each is not None] == [
        "response_format.json_schema.schema",
        *["structured_outputs.json"] * 2,
        *["guided_json"] * 2,
    ]
    assert asked[0] is not None
    # Members come in the schema's order.
    assert asked[0].grammar.index('"b"') < asked[0].grammar.index('"a"')


def test_whitespace_is_what_the_client_says() -> None:
    plain = constraint(structured_outputs={"json": SCHEMA})
    compact = constraint(structured_outputs={"json": SCHEMA, "disable_any_whitespace": True})
    own = constraint(guided_json=SCHEMA, guided_whitespace_pattern="[ ]")
    assert plain and compact and own
    assert '"whitespace_flexible":false' in compact.grammar
    assert '"whitespace_pattern":"[ ]"' in own.grammar
    assert len({plain.grammar, compact.grammar, own.grammar}) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": named(None)}, "response_format.json_schema"),
        ({"response_format": named([1])}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_object", "schema": {}}}, "response_format.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"response_format": named(SCHEMA), "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": {"x-guidance": 3}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_json": 3}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"guided_regex": "a" * MAX_GRAMMAR_BYTES}, "guided_regex"),
        ({"guided_json": {"const": "a" * MAX_GRAMMAR_BYTES}}, "guided_json"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as info:
        constraint(**fields)
    assert (info.value.status, info.value.param) == (400, param), info.value.message

# SPDX-License-Identifier: Apache-2.0
"""What an agent says of an error, in whichever server's shape, as the client gets it."""

from __future__ import annotations

import json

import pytest

from kvferry.proxy.errors import MAX_AGENT_MESSAGE_CHARS, AgentRejected, ModelNotFound, agent_error

INVALID = {
    "type": "int_parsing",
    "loc": ["body", "n"],
    "msg": "Input should be a valid integer",
    "input": "x",
}


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"error": {"message": "no", "param": "n", "code": 4}}, "no", "n"),
        ({"object": "error", "message": "no", "param": None}, "no", None),
        ({"error": "no"}, "no", None),
        ({"detail": "Not Found"}, "Not Found", None),
        ({"detail": {"message": "no", "param": "n"}}, "no", "n"),
        ({"detail": [INVALID]}, "n: Input should be a valid integer", "n"),
        (
            {"detail": [INVALID, {"loc": ["body", "messages", 0, "role"], "msg": "wrong"}]},
            "n: Input should be a valid integer; messages.0.role: wrong",
            "n",
        ),
        ({"detail": [{"loc": ["body"], "msg": "JSON decode error"}]}, "JSON decode error", None),
    ],
)
def test_an_error_is_read_in_every_shape_that_servers_have(
    body: object, message: str, param: str | None
) -> None:
    error = agent_error(json.dumps(body).encode())
    assert error is not None
    assert (error.message, error.param) == (message, param)
    shown = json.loads(AgentRejected(422, error).body())["error"]
    assert (shown["message"], shown["param"]) == (message, param)


@pytest.mark.parametrize(
    "body", [{}, {"detail": []}, {"detail": None}, {"detail": 4}, {"error": ""}, [], "no"]
)
def test_a_body_without_an_error_has_none(body: object) -> None:
    assert agent_error(json.dumps(body).encode()) is None


def test_long_words_are_shortened() -> None:
    error = agent_error(json.dumps({"detail": "a" * 10**5}).encode())
    assert error is not None and len(error.message) == MAX_AGENT_MESSAGE_CHARS


def test_an_unknown_model_is_answered_with_the_first_models_only() -> None:
    served = [f"model-{number:02}" for number in range(20)]
    error = ModelNotFound("x", reversed(served))
    assert str(error).endswith(f"served now: {', '.join(map(repr, served[:10]))}, …")
    assert str(ModelNotFound("x", ())).endswith("served now: none")

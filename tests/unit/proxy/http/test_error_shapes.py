# SPDX-License-Identifier: Apache-2.0
"""Errors have the shape of the endpoint's API and words for its clients, whoever in the proxy makes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.abuse.raw import exchange
from tests.unit.proxy.conftest import StartStage

OPENAI = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/nodes/x/drain")
ANTHROPIC = (
    "/v1/messages",
    "/v1/messages?beta=true",
    "/v1/messages/count_tokens",
    "http://localhost/v1/messages",
)
HOST = "Host: localhost"
LARGE = 3000
CAUSES: dict[str, tuple[int, str, tuple[str, ...], bytes]] = {
    "another site": (403, "POST", (HOST, "Origin: http://evil.example", "Content-Length: 2"), b"{}"),
    "another name": (403, "POST", ("Host: evil.example", "Content-Length: 2"), b"{}"),
    "no host": (400, "POST", ("Content-Length: 2",), b"{}"),
    "another expectation": (417, "POST", (HOST, "Expect: cake", "Content-Length: 2"), b"{}"),
    "another coding": (400, "POST", (HOST, "Transfer-Encoding: gzip, chunked"), b"0\r\n\r\n"),
    "a WebSocket": (426, "GET", (HOST, "Connection: upgrade", "Upgrade: websocket"), b""),
}
"""By connections, before any application has the request: status, method, headers and body."""
FOREIGN = re.compile(
    r"werkzeug|browser|URL|msgspec|aiohttp|starlette|quart|Traceback|`|\bobject at\b", re.IGNORECASE
)


@pytest.mark.parametrize("path", [*OPENAI, *ANTHROPIC])
async def test_errors_of_a_connection_have_the_shape_of_the_endpoint(
    start_stage: StartStage, path: str
) -> None:
    """A client of Anthropic's API got OpenAI's from its connection."""
    stage = await start_stage()
    for cause, (status, method, headers, body) in CAUSES.items():
        head = "\r\n".join((f"{method} {path} HTTP/1.1", *headers, "", ""))
        reply = await exchange(stage.proxy.url, head.encode() + body)
        assert reply is not None and reply.status == status, cause
        check(path, json.loads(reply.body))


def check(path: str, answer: dict[str, Any]) -> None:
    error = answer["error"]
    if "/v1/messages" in path:
        assert answer.keys() == {"type", "error"} and answer["type"] == "error"
        assert error.keys() == {"type", "message"}
    else:
        assert answer.keys() == {"error"}
        assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"] and not FOREIGN.search(error["message"])


@pytest.mark.parametrize(
    ("method", "path", "size", "status"),
    [
        ("POST", "/v1/embeddings", 2, 404),
        ("POST", "/v1/messages/batches", 2, 404),
        ("PUT", "/v1/chat/completions", 2, 405),
        ("GET", "/v1/messages", 0, 405),
        ("DELETE", "/v1/models", 0, 405),
        ("POST", "/tokenize", LARGE, 413),
        ("POST", "/v1/messages/count_tokens", LARGE, 413),
        ("POST", "/v1/responses", LARGE, 413),
    ],
)
async def test_errors_of_the_application_speak_to_clients_of_an_api(
    start_stage: StartStage, method: str, path: str, size: int, status: int
) -> None:
    """They had werkzeug's words, about URLs that were entered manually."""
    stage = await start_stage(max_body_bytes=LARGE - 1)
    head = f"{method} {path} HTTP/1.1\r\n{HOST}\r\nContent-Length: {size}\r\n\r\n"
    reply = await exchange(stage.proxy.url, head.encode() + b" " * size)
    assert reply is not None and reply.status == status
    check(path, json.loads(reply.body))
    assert (b"\r\nallow: " in reply.head.lower()) == (status == 405)

# SPDX-License-Identifier: Apache-2.0
"""Pages of allowed origins may call the API from a browser; others, and the operator's pages, may not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.proxy.http.cors import CorsPolicy
from tests.unit.proxy.conftest import StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
CHAT, OTHER = "https://chat.example.com", "https://other.example.com"
ALLOWED = "Access-Control-Allow-Origin"


@pytest.mark.parametrize(
    "origin", ["https://a.example/", "a.example", "ftp://a.example", "https://", "null", ""]
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is no origin"):
        CorsPolicy([origin])


@pytest.mark.parametrize("stream", [True, False])
async def test_an_allowed_origin_may_read_answers_and_errors(start_stage: StartStage, stream: bool) -> None:
    stage = await start_stage(cors_origins=("http://localhost:3000", CHAT))
    await stage.pair()
    for body, status in ((BODY, 200), ({**BODY, "model": "no"}, 404)):
        async with stage.post({**body, "stream": stream}, headers={"Origin": CHAT}) as response:
            assert (response.status, response.headers[ALLOWED]) == (status, CHAT)
            assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
            assert response.headers["Vary"] == "origin"
        async with stage.post({**body, "stream": stream}, headers={"Origin": OTHER}) as response:
            assert response.status == 403 and ALLOWED not in response.headers
        async with stage.post({**body, "stream": stream}) as response:
            assert response.status == status and "Vary" not in response.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize"])
async def test_a_preflight_needs_no_key(start_stage: StartStage, tmp_path: Path, path: str) -> None:
    """Browsers send none with it."""
    keys = tmp_path / "keys"
    keys.write_text("client-key-0123456789\n")
    stage = await start_stage(cors_origins=("*",), api_keys=keys)
    asked = {
        "Origin": OTHER,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with stage.http.options(stage.proxy.url + path, headers=asked) as response:
        assert (response.status, await response.read()) == (200, b"")
        assert response.headers[ALLOWED] == "*"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization,content-type"
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
    async with stage.http.get(stage.proxy.url + "/v1/models", headers={"Origin": OTHER}) as response:
        assert (response.status, response.headers[ALLOWED]) == (401, "*")


@pytest.mark.parametrize(
    ("origins", "origin", "path"),
    [((CHAT,), OTHER, "/v1/completions"), ((), CHAT, "/v1/completions"), (("*",), CHAT, "/nodes/x/drain")],
    ids=["another origin", "no origins", "the operator's pages"],
)
async def test_nothing_else_is_allowed(
    start_stage: StartStage, origins: tuple[str, ...], origin: str, path: str
) -> None:
    stage = await start_stage(cors_origins=origins)
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    async with stage.http.options(stage.proxy.url + path, headers=asked) as response:
        assert ALLOWED not in response.headers and "Access-Control-Allow-Methods" not in response.headers

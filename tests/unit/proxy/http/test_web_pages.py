# SPDX-License-Identifier: Apache-2.0
"""A web page cannot operate a proxy that its reader's browser reaches (N4)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.proxy.config import ProxyConfig
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
EVIL = "http://evil.example"
READ = (
    "/nodes",
    "/nodes/targets",
    "/metrics",
    "/health",
    "/ready",
    "/ui",
    "/ui/events",
    "/v1/models",
    "/none",
)
CHANGED = ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/tokenize", "/health")
KEY = "client-key-0123456789"


CODES = {"name of this server": "host_not_allowed", "another site": "cross_site"}
"""Of errors in Anthropic's shape, which has none, by what they say."""


async def ask(stage: Stage, method: str, path: str, headers: dict[str, str]) -> tuple[int, str | None]:
    """The status and the code of the error."""
    async with stage.http.request(
        method, stage.proxy.url + path, json=BODY if method == "POST" else None, headers=headers
    ) as response:
        if response.status != 403:
            return response.status, None
        error = (await response.json())["error"]
        if path != "/v1/messages":
            return response.status, error["code"]
        assert error.keys() == {"type", "message"} and error["type"] == "permission_error"
        (code,) = (code for words, code in CODES.items() if words in error["message"])
        return response.status, code


@pytest.mark.parametrize("host", ["evil.example", f"evil.example:{10001}", "localhost.evil.example", ""])
async def test_a_keyless_proxy_does_not_answer_to_any_name(stage: Stage, host: str) -> None:
    """DNS rebinding: `/nodes` and all else could be read, and operated."""
    agent, _ = await stage.pair()
    refused = (403, "host_not_allowed")
    for path in READ:
        assert await ask(stage, "GET", path, {"Host": host}) == refused, path
    for path in (*CHANGED, f"/nodes/{agent.incarnation}/cordon", f"/nodes/{agent.incarnation}/drain"):
        assert await ask(stage, "POST", path, {"Host": host}) == refused, path
    assert await ask(stage, "OPTIONS", "/v1/completions", {"Host": host}) == refused


@pytest.mark.parametrize("host", ["localhost:1", "[::1]:10001", "10.0.0.7", "proxy", "named.example"])
async def test_its_own_names_are_served(start_stage: StartStage, host: str) -> None:
    stage = await start_stage(allowed_hosts=("named.example",))
    await stage.pair()
    assert await ask(stage, "GET", "/nodes", {"Host": host}) == (200, None)
    assert await ask(stage, "POST", "/v1/completions", {"Host": host}) == (200, None)


async def test_with_keys_any_name_is_served(start_stage: StartStage, tmp_path: Path) -> None:
    """No page has the key, which no browser sends unasked."""
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} admin\n")
    stage = await start_stage(api_keys=keys)
    headers = {"Host": "proxy.example.com", "Authorization": f"Bearer {KEY}"}
    assert await ask(stage, "GET", "/nodes", headers) == (200, None)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"},
        {"Origin": EVIL, "Content-Type": "text/plain"},
    ],
    ids=["origin", "null", "fetch", "another port", "a form"],
)
@pytest.mark.parametrize("origins", [(), ("https://chat.example.com",)], ids=["no origins", "another origin"])
async def test_another_sites_page_changes_nothing(
    start_stage: StartStage, headers: dict[str, str], origins: tuple[str, ...]
) -> None:
    stage = await start_stage(cors_origins=origins)
    agent, _ = await stage.pair()
    operated = [f"/nodes/{agent.incarnation}/{what}" for what in ("cordon", "uncordon", "drain")]
    for path in (*CHANGED, *operated):
        assert await ask(stage, "POST", path, headers) == (403, "cross_site"), path
    async with stage.http.get(f"{stage.proxy.url}/nodes") as response:
        assert {node["state"] for node in (await response.json())["nodes"]} == {"ready"}


async def test_an_origin_that_may_call_the_api_may_not_operate(start_stage: StartStage) -> None:
    stage = await start_stage(cors_origins=("*",))
    agent, _ = await stage.pair()
    headers = {"Origin": EVIL, "Sec-Fetch-Site": "cross-site"}
    assert await ask(stage, "POST", "/v1/completions", headers) == (200, None)
    cordon = f"/nodes/{agent.incarnation}/cordon"
    assert await ask(stage, "POST", cordon, headers) == (403, "cross_site")
    own = {"Origin": stage.proxy.url, "Sec-Fetch-Site": "same-origin"}
    assert await ask(stage, "POST", cordon, own) == (200, None)


def test_what_is_no_host_name_is_refused() -> None:
    with pytest.raises(ValueError, match="allowed_hosts: 'http://a' is no host name"):
        ProxyConfig(allowed_hosts=("http://a",))

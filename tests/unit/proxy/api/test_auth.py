# SPDX-License-Identifier: Apache-2.0
"""API keys: without one every request is rejected, and no agent gets it."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.proxy.api.auth import Access, ApiKeys, BadKeyFile
from tests.helpers.commands import PROXY
from tests.unit.proxy.conftest import Stage, StartStage

BODY = {"model": "stand-in", "prompt": "a b c", "max_tokens": 3}
CLIENT_KEY = "client-key-0123456789"
ADMIN_KEY = "admin-key-0123456789"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(password: str, user: str = "me") -> dict[str, str]:
    return {"Authorization": f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text(f"# who has access\n\n{CLIENT_KEY}\n{ADMIN_KEY} admin\n")
    return path


@pytest.fixture
async def guarded(start_stage: StartStage, key_file: Path) -> Stage:
    return await start_stage(api_keys=key_file)


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer("wrong-key-0123456789"), bearer(CLIENT_KEY[:-1]), bearer(f"{CLIENT_KEY} admin"),
     basic(CLIENT_KEY), {"Authorization": CLIENT_KEY}, {"Authorization": "Basic ?"},
     {"X-Api-Key": CLIENT_KEY}],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_without_a_key_there_is_a_typed_401_and_no_agent_gets_the_request(
    guarded: Stage, headers: dict[str, str], stream: bool
) -> None:
    prefill, decode = await guarded.pair()
    async with guarded.post({**BODY, "stream": stream}, headers=headers) as response:
        assert response.status == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"
        error = (await response.json())["error"]
    assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
    assert not prefill.asked and not decode.asked


@pytest.mark.parametrize("key", [CLIENT_KEY, ADMIN_KEY])
async def test_with_a_key_requests_are_answered_and_the_key_stays_here(guarded: Stage, key: str) -> None:
    prefill, decode = await guarded.pair()
    async with guarded.post({**BODY, "stream": True}, headers=bearer(key)) as response:
        assert response.status == 200
        await response.read()
    for asked in (*prefill.asked, *decode.asked):
        assert key not in str(asked.headers), "the client's key is not sent to agents"


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        ("/health", Access.NONE),
        ("/metrics", Access.NONE),
        ("/v1/models", Access.CLIENT),
        ("/nodes", Access.ADMIN),
        ("/nodes/targets", Access.ADMIN),
        ("/ui", Access.ADMIN),
        ("/ui/ui.js", Access.ADMIN),
        ("/no-such-path", Access.ADMIN),
    ],
)
async def test_each_path_opens_to_those_it_is_for(guarded: Stage, path: str, needed: Access) -> None:
    given = {Access.NONE: {}, Access.CLIENT: bearer(CLIENT_KEY), Access.ADMIN: bearer(ADMIN_KEY)}
    for access, headers in given.items():
        async with guarded.http.get(f"{guarded.proxy.url}{path}", headers=headers) as response:
            assert (response.status != 401) == (access >= needed), (path, access)


async def test_a_browser_may_use_an_admin_key_only_to_read(guarded: Stage) -> None:
    """Browsers attach Basic to requests that other sites cause, so it must not change anything."""
    url = f"{guarded.proxy.url}/ui"
    async with guarded.http.get(url) as response:
        assert response.headers["WWW-Authenticate"].startswith("Basic ")
    async with guarded.http.get(url, headers=basic(ADMIN_KEY)) as response:
        assert response.status == 200
    async with guarded.http.post(f"{guarded.proxy.url}/nodes", headers=basic(ADMIN_KEY)) as response:
        assert response.status == 401


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# none\n",
        "short\n",
        f"{CLIENT_KEY} root\n",
        f"{CLIENT_KEY} admin yes\n",
        f"{CLIENT_KEY} admin admin\n",
    ],
)
def test_a_key_file_without_keys_or_with_an_error_is_rejected(tmp_path: Path, text: str) -> None:
    path = tmp_path / "keys"
    path.write_text(text)
    with pytest.raises(BadKeyFile, match=str(path)) as caught:
        ApiKeys.read(path)
    assert CLIENT_KEY not in str(caught.value)


@pytest.mark.parametrize("flag", ["--api-keys", "--cluster-key"])
def test_a_proxy_does_not_start_without_the_configured_keys(tmp_path: Path, flag: str) -> None:
    path = tmp_path / "keys"
    path.touch()
    done = subprocess.run(
        [sys.executable, *PROXY, flag, str(path)],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert str(path) in done.stderr
    assert "Traceback" not in done.stderr

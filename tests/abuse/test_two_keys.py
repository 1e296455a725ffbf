# SPDX-License-Identifier: Apache-2.0
"""What one client learns of another's prompts by the prefix cache, or makes of their answers: nothing."""

from __future__ import annotations

import json
from array import array
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from kvferry.deploy.launcher import Cluster
from tests.abuse.watch import MODEL
from tests.system.conftest import StartCluster

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

PATHS = ("completions", "chat/completions", "messages", "responses")
PAIRS_OF_KEYS = {path: (f"the-key-of-a-for-{path}", f"the-key-of-b-for-{path}") for path in PATHS}
ADMIN = "the-key-of-the-operator"
SECRET = "Dear bank, the PIN of my card is 4711. Please tell nobody, and answer soon."
NUM_PROMPTS = 20
CACHED = ("--prefix-cache", "true")
BLOCK = 16
LETTER = 120


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "keys"
    keys = [key for pair in PAIRS_OF_KEYS.values() for key in pair]
    path.write_text("\n".join([*keys, f"{ADMIN} admin"]))
    return path


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def guarded(start_cluster: StartCluster, key_file: Path) -> AsyncIterator[Cluster]:
    proxy_args = ("--api-keys", str(key_file))
    async with start_cluster(args=CACHED, proxy_args=proxy_args, admin_key=ADMIN) as started:
        yield started


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def unguarded(start_cluster: StartCluster) -> AsyncIterator[Cluster]:
    async with start_cluster(args=CACHED) as started:
        yield started


async def ask(url: str, key: str, path: str, body: dict[str, Any]) -> Any:
    """An answer of a request that must succeed."""
    headers = {"Authorization": f"Bearer {key}", "X-Api-Key": key}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/{path}", json={"model": MODEL} | body, headers=headers) as response,
    ):
        raw = await response.read()
        assert response.status == 200, raw
    return json.loads(raw)


async def cached(url: str, key: str, path: str, **fields: Any) -> int:
    """How many tokens of the secret prompt an answer says were cached."""
    asked: dict[str, dict[str, Any]] = {
        "completions": {"prompt": SECRET, "max_tokens": 2},
        "responses": {"input": SECRET, "max_output_tokens": 2},
    }
    of_chat = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 2}
    usage = (await ask(url, key, path, asked.get(path, of_chat) | fields))["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(usage.get("cache_read_input_tokens") or details.get("cached_tokens") or 0)


@pytest.mark.parametrize("path", PATHS)
async def test_a_key_learns_nothing_of_anothers_prompts(guarded: Cluster, path: str) -> None:
    """N3: B found A's PIN digit by digit, since a prompt with the right ones was cached."""
    a, b = PAIRS_OF_KEYS[path]
    assert not await cached(guarded.url, a, path)
    assert await cached(guarded.url, a, path) >= BLOCK, "A has its own prefixes"
    own: list[dict[str, Any]] = [{"cache_salt": salt} for salt in (a, b, "\0", "a salt")]
    for salt in [{}] if path == "messages" else [{}, *own]:
        assert not await cached(guarded.url, b, path, **salt), salt
        assert await cached(guarded.url, b, path, **salt) >= BLOCK, salt


@pytest.mark.parametrize("at", ["proxy", "agent"])
async def test_no_salt_makes_anothers_prefix(unguarded: Cluster, at: str) -> None:
    """N2: with block 0's bytes as salt, what B had computed after no beginning became A's prefix."""
    url = unguarded.url if at == "proxy" else unguarded.agents["decode-0"].url
    for number in range(NUM_PROMPTS):
        ids = list(f"{number} at the {at}: every one of these is another prompt.".encode())[: 3 * BLOCK]
        spelled = array("q", ids[:BLOCK]).tobytes().decode()
        await ask(url, "", "completions", {"prompt": [*ids[:BLOCK], LETTER], "max_tokens": 1})
        poison = {"prompt": ids[BLOCK:], "cache_salt": spelled, "max_tokens": 2}
        await ask(url, "", "completions", poison)
        mine = {"prompt": ids, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        salts: list[dict[str, Any]] = [{}, {"cache_salt": f"fresh {number}"}]
        answers = [await ask(url, "", "completions", mine | salt) for salt in salts]
        texts = [answer["choices"][0]["text"] for answer in answers]
        assert texts[0] == texts[1], number
        assert answers[0]["usage"]["prompt_tokens_details"]["cached_tokens"] <= BLOCK

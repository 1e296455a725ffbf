# SPDX-License-Identifier: Apache-2.0
"""A cluster whose parts know one another by key, with real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from deploy.cli import main
from deploy.launcher import AgentSpec
from tests.system.client import Answer, complete_all, heldout
from tests.system.conftest import COMMON_ARGS, StartCluster

STRANGER_S = 4.0
"""How long a stranger may try: several of its pings."""


def test_keygen_never_overwrites_and_keeps_the_key_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    assert path.stat().st_mode & 0o077 == 0
    written = path.read_bytes()
    assert main(["keygen", str(path)]) == 1
    assert path.read_bytes() == written


@pytest.mark.timeout(180)
async def test_only_holders_of_the_key_take_part(start_cluster: StartCluster, tmp_path: Path) -> None:
    """An agent without the key, or with another, is never seen, and agents serve no stranger."""
    key, other = tmp_path / "cluster.key", tmp_path / "other.key"
    for path in (key, other):
        assert main(["keygen", str(path)]) == 0
    args = ("--cluster-key", str(key))
    async with start_cluster(args=args, proxy_args=args) as cluster:
        known = {agent.url for agent in cluster.agents.values()}
        strangers = {"without": (), "with-another": ("--cluster-key", str(other))}
        for name, flags in strangers.items():
            await cluster.start_agent(AgentSpec(name=name, role="decode", args=(*COMMON_ARGS, *flags)))

        bodies = [
            {
                "model": "ferry-tiny",
                "prompt": prompt.prompt,
                "max_tokens": 8,
                "ignore_eos": True,
                "stream": stream,
            }
            for prompt in heldout(2)
            for stream in (True, False)
        ]
        assert all(
            isinstance(answer, Answer) for answer in await complete_all(cluster.url, bodies, concurrency=2)
        )

        decode = cluster.agents["decode-0"].url
        async with aiohttp.ClientSession() as http:
            for headers in (
                {},
                {"Authorization": "Bearer "},
                {"Authorization": f"Bearer {key.read_text()[:-1]}"},
            ):
                async with http.post(f"{decode}/v1/completions", json=bodies[0], headers=headers) as response:
                    assert response.status == 401
                    assert (await response.json())["error"]["code"] == "unauthorized"
                async with http.post(f"{decode}/kv/drop", json={}, headers=headers) as response:
                    assert response.status == 401
            async with http.get(f"{decode}/health") as response:
                assert response.status == 200

            await asyncio.sleep(STRANGER_S)
            async with http.get(f"{cluster.url}/nodes") as response:
                assert {node["address"] for node in (await response.json())["nodes"]} == known

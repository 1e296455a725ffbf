# SPDX-License-Identifier: Apache-2.0
"""A cluster whose parts know one another by key, with real processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import zmq

from kvferry.common.curve import ClusterKey
from kvferry.deploy.cli import main
from kvferry.deploy.launcher import AgentSpec
from kvferry.transfer.control import messages
from kvferry.transfer.control.endpoints import ControlClient
from tests.helpers.client import Answer, complete_all, heldout, session
from tests.standins.certificates import make_certificate
from tests.system.conftest import COMMON_ARGS, StartCluster

STRANGER_S = 4.0
"""How long a stranger may try: several of its pings."""
REFUSED_S = 60.0
CONTROL_S = 1.0
SECRET = "Zanzibar "


def test_keygen_never_overwrites_and_keeps_the_key_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "cluster.key"
    assert main(["keygen", str(path)]) == 0
    assert path.stat().st_mode & 0o077 == 0
    written = path.read_bytes()
    assert main(["keygen", str(path)]) == 1
    assert path.read_bytes() == written


@pytest.mark.timeout(180)
async def test_only_holders_of_the_key_take_part(start_cluster: StartCluster, tmp_path: Path) -> None:
    """All locks at once.

    Agents with another key, or at an address outside the rules, are never paired; agents serve no stranger;
    everything HTTP is TLS; the KV moves over a locked control channel; and of all the logs, at the chattiest,
    only that of the agent which was told to says what was asked.
    """
    key, other = tmp_path / "cluster.key", tmp_path / "other.key"
    for path in (key, other):
        assert main(["keygen", str(path)]) == 0
    tls = make_certificate(tmp_path)
    args = ("--cluster-key", str(key), "--tls-cert", str(tls.cert), "--tls-key", str(tls.key),
            "--log-level", "debug")  # fmt: skip
    proxy_args = (*args, "--agent-ca", str(tls.cert), "--allow-address", "127.0.0.1")
    async with start_cluster(
        args=args, prefill_args=("--log-prompts", "true"), proxy_args=proxy_args, trust=tls.trust
    ) as cluster:
        known = {agent.url for agent in cluster.agents.values()}
        assert all(url.startswith("https://") for url in (cluster.url, *known))
        strangers = {
            "with-another": ("--cluster-key", str(other), *args[2:]),
            "elsewhere": (*args, "--advertise-host", "127.0.0.2"),
        }
        for name, flags in strangers.items():
            await cluster.start_agent(AgentSpec(name=name, role="decode", args=(*COMMON_ARGS, *flags)))

        bodies = [
            {
                "model": "ferry-tiny",
                "prompt": SECRET + prompt.prompt,
                "max_tokens": 8,
                "ignore_eos": True,
                "stream": stream,
            }
            for prompt in heldout(2)
            for stream in (True, False)
        ]
        for answer in await complete_all(cluster.url, bodies, concurrency=2, trust=tls.trust):
            assert isinstance(answer, Answer)
            assert answer.timing["pull_bytes"] and not answer.timing["recomputed"], "the locked channel works"

        async with session(tls.trust) as http:
            await strangers_are_turned_away(http, cluster.agents["decode-0"].url, key, bodies[0])
            async with asyncio.timeout(REFUSED_S):
                while not (page := await nodes(http, cluster.url))["rejected_agents"]:
                    await asyncio.sleep(0.1)
            assert page["rejected_agents"][0]["address"] == cluster.agents["elsewhere"].url
            await asyncio.sleep(STRANGER_S)
            admitted = (await nodes(http, cluster.url))["nodes"]
            assert {node["address"] for node in admitted} == known
            owned = ClusterKey.of(key.read_text().strip())
            for node in admitted:
                assert await control_answer(node["control"], None) is None
                assert await control_answer(node["control"], owned) is not None
        logs = {process.name: process.log.tail(10**6) for process in cluster.processes}
        assert {name for name, log in logs.items() if SECRET in log} == {"prefill-0"}
        assert all(key.read_text().strip() not in log for log in logs.values())


async def strangers_are_turned_away(
    http: aiohttp.ClientSession, agent: str, key: Path, body: Mapping[str, object]
) -> None:
    """Without the token that follows from the key, and with the key itself in its place."""
    for authorization in ("", "Bearer ", f"Bearer {key.read_text()[:-1]}"):
        headers = {"Authorization": authorization} if authorization else {}
        async with http.post(f"{agent}/v1/completions", json=body, headers=headers) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "unauthorized"
        async with http.post(f"{agent}/kv/drop", json={}, headers=headers) as response:
            assert response.status == 401
    async with http.get(f"{agent}/health") as response:
        assert response.status == 200


async def control_answer(control: str, key: ClusterKey | None) -> object:
    """What an agent's control channel answers to somebody who holds this key, None if nothing."""
    url, context = urlsplit(control), zmq.Context()
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    client = ControlClient(lambda: None, key=key)
    try:
        client.start(context, url.hostname or "", url.port or 0)
        request = messages.Drop(seq=client.next_seq(), incarnation="i", transfer_id="t")
        client.request(request, CONTROL_S if key is None else REFUSED_S, answer.set_result)
        return await answer
    finally:
        client.close()
        context.term()


async def nodes(http: aiohttp.ClientSession, proxy: str) -> dict[str, Any]:
    async with http.get(f"{proxy}/nodes") as response:
        return await response.json()

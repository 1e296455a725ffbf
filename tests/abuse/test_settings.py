# SPDX-License-Identifier: Apache-2.0
"""Attacks that need settings of their own: API keys, few descriptors, a cluster key that others can read."""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

import psutil
import pytest

from kvferry.deploy.launcher import Cluster, start_process
from tests.abuse.attacks import (
    COMPLETIONS,
    ENDLESS_HEAD,
    PAD,
    PIPELINED,
    UPGRADE,
    check_served,
    completion,
    head,
)
from tests.abuse.raw import Reply, connected, exchange, flood, post, read_reply
from tests.abuse.watch import GROWTH, MAX_BODY
from tests.helpers.commands import AGENT, PROXY

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

KEY = "a-key-of-more-than-16-characters"
FLOOD_S = 1.0


async def test_without_a_key_nothing_is_had(tmp_path: Path, log_dir: Path) -> None:
    """D1, D6, D7, D9: a key sent as a trailer opened the API; an upgrade was a 500."""
    (tmp_path / "keys").write_text(f"{KEY}\n")
    argv = (*PROXY, "--api-keys", str(tmp_path / "keys"))
    proxy = await start_process("locked", argv, log_dir / "locked")
    try:
        process = psutil.Process(proxy.pid)
        before = process.memory_info().rss
        body = completion()
        trailers = head(
            COMPLETIONS, "POST", "Transfer-Encoding: chunked"
        ) + b"%x\r\n%b\r\n0\r\nAuthorization: Bearer %b\r\n\r\n" % (len(body), body, KEY.encode())
        for sent, expected in (
            (trailers, (401, "invalid_api_key")),
            (head("/nodes", "GET", *UPGRADE), (426, "bad_request")),
            (head(COMPLETIONS, "POST", "Content-Length: 0"), (401, "invalid_api_key")),
        ):
            reply = await exchange(proxy.url, sent)
            assert reply is not None
            assert (reply.status, reply.error["code"]) == expected
        for first, more in ((PIPELINED, PIPELINED), (ENDLESS_HEAD, PAD)):
            await flood(proxy.url, first, more, FLOOD_S)
            assert process.memory_info().rss - before < GROWTH * MAX_BODY
        assert "Traceback" not in proxy.log.tail(10**6)
    finally:
        await proxy.stop()


async def test_a_proxy_without_descriptors_blames_no_agent(cluster: Cluster) -> None:
    """D13: each failed attempt counted against an agent, and all circuit breakers opened."""
    count = 40
    body = completion(max_tokens=32, ignore_eos=True)
    sent = head(COMPLETIONS, "POST", f"Content-Length: {len(body)}") + body
    process = psutil.Process(cluster.proxy.pid)
    _, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)

    async def ask(ready: asyncio.Barrier) -> Reply:
        async with connected(cluster.url) as (reader, writer):
            writer.write(head("/health"))
            assert await read_reply(reader) is not None
            await ready.wait()
            await ready.wait()
            writer.write(sent)
            reply = await read_reply(reader)
            assert reply is not None
            return reply

    ready = asyncio.Barrier(count + 1)
    try:
        async with asyncio.TaskGroup() as tasks:
            asked = [tasks.create_task(ask(ready)) for _ in range(count)]
            await ready.wait()
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (process.num_fds() + 2, hard))
            await ready.wait()
    finally:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (hard, hard))
    replies = [each.result() for each in asked]
    refused = [reply for reply in replies if reply.status != 200]
    assert refused, "descriptors were enough"
    assert {(reply.status, reply.error["code"]) for reply in refused} == {(503, "out_of_descriptors")}
    nodes = await exchange(cluster.url, head("/nodes"))
    assert nodes is not None
    assert nodes.body.count(b'"breaker":"closed"') >= len(cluster.agents)
    assert b'"breaker":"open"' not in nodes.body
    check_served(await post(cluster.url, body))


@pytest.mark.parametrize(
    "argv",
    [PROXY, (*AGENT, "--role", "both", "--model", "ferry-tiny")],
    ids=["proxy", "agent"],
)
async def test_a_cluster_key_that_others_can_read_is_refused(argv: tuple[str, ...], tmp_path: Path) -> None:
    """D14: it was taken without a word."""
    key = tmp_path / "cluster.key"
    made = await asyncio.create_subprocess_exec(sys.executable, "-m", "kvferry.deploy", "keygen", str(key))
    assert await made.wait() == 0
    key.chmod(0o644)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, "--cluster-key", str(key), stderr=asyncio.subprocess.PIPE
    )
    _, complaint = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode not in (0, None)
    assert str(key).encode() in complaint
    assert b"Traceback" not in complaint

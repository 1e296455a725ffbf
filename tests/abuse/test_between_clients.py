# SPDX-License-Identifier: Apache-2.0
"""What a client, or a web page in its browser, may not do to other clients and to the servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvferry.deploy.launcher import Cluster, start_process
from tests.abuse.attacks import CHAT, COMPLETIONS, check_refused, check_served, completion
from tests.abuse.raw import REPLY_S, Reply, exchange, post
from tests.helpers.commands import PROXY
from tests.standins.engines import SERVERS, Fabric
from tests.system.conftest import StartAgent, wait_ready

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

REBINDING = ("Host: evil.example:10001",)
CROSS_SITE = ("Host: 127.0.0.1:10001", "Origin: http://evil.example", "Content-Type: text/plain")
FETCHED = ("Host: 127.0.0.1:10001", "Sec-Fetch-Site: cross-site")


def sent(method: str, path: str, headers: tuple[str, ...]) -> bytes:
    body = completion(max_tokens=4) if method == "POST" else b""
    head = (f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "", "")
    return "\r\n".join(head).encode() + body


@pytest.mark.parametrize(
    ("headers", "code"),
    [(REBINDING, "host_not_allowed"), (CROSS_SITE, "cross_site"), (FETCHED, "cross_site")],
    ids=["rebinding", "a form", "fetch"],
)
async def test_a_web_page_operates_nothing(cluster: Cluster, headers: tuple[str, ...], code: str) -> None:
    """N4: it read `/nodes` and all else, cordoned agents and drained them."""
    agents = [agent.url for agent in cluster.agents.values()]
    ids = [agent.listening["incarnation"] for agent in cluster.agents.values()]
    tries = [(cluster.url, "POST", f"/nodes/{each}/{what}") for each in ids for what in ("cordon", "drain")]
    tries += [(cluster.url, "POST", path) for path in (COMPLETIONS, CHAT, "/v1/messages", "/tokenize")]
    tries += [(agent, "POST", path) for agent in agents for path in ("/drain", "/kv/drop", COMPLETIONS)]
    if code == "host_not_allowed":
        tries += [(cluster.url, "GET", path) for path in ("/nodes", "/ui", "/ui/events", "/v1/models")]
        tries += [(agent, "GET", "/metrics") for agent in agents]
    for url, method, path in tries:
        reply = await exchange(url, sent(method, path, headers))
        assert reply is not None, path
        if path == "/v1/messages":
            assert reply.status == 403 and json.loads(reply.body)["error"]["type"] == "permission_error"
            continue
        check_refused(reply, 403)
        assert reply.error["code"] == code, path
    check_served(await post(cluster.url, completion(max_tokens=4)))


@pytest.mark.parametrize("dialect", ["sglang", "vllm-nixl"])
async def test_an_engines_own_fields_do_not_pass(cluster: Cluster, dialect: str) -> None:
    """N6: a client chose ranks, ids and priorities at the servers, and what code they run."""
    proxies, fabric = (f"127.0.0.1:{cluster.proxy.listening['discovery_port']}",), Fabric()
    own = {
        "disagg_prefill_dp_rank": 5,
        "routed_dp_rank": 5,
        "rid": "x",
        "priority": -9,
        "session_params": {"id": "x"},
        "lora_path": "/x",
        "custom_logit_processor": "gASV",
        "input_ids": [1],
        "prompt_embeds": "AA==",
        "ec_transfer_params": {},
        "kv_transfer_params": {"do_remote_prefill": True},
        "vllm_xargs": {"kv_transfer_params": "x"},
        "bootstrap_room": 1,
    }
    model = f"other-{dialect}"
    async with (
        SERVERS[dialect](role="prefill", proxies=proxies, fabric=fabric, model=model) as prefill,
        SERVERS[dialect](role="decode", proxies=proxies, fabric=fabric, model=model) as decode,
    ):
        for server in (prefill, decode):
            await server.until(lambda server=server: server.acks)
        for name, value in own.items():
            reply = await post(cluster.url, completion(model=model, max_tokens=4, n=2, **{name: value}))
            check_refused(reply, 400, name)
        assert not (prefill.asked or decode.asked)
        check_served(await post(cluster.url, completion(model=model, max_tokens=4, n=2)))
        told = [asked.body for asked in (*prefill.asked, *decode.asked)]
        assert len(told) == 4 and not any("rid" in body or "priority" in body for body in told)


LIMITED, OTHER = "limited-key-of-16-and-more", "another-key-of-16-and-more"
LEAVE_S = 1.0


async def test_a_limited_key_does_not_make_tokens_by_leaving(
    start_agent: StartAgent, tmp_path: Path, log_dir: Path
) -> None:
    """N5: six requests, each left after 3 s, made 26,520 tokens at 300 a minute."""
    (tmp_path / "keys").write_text(f"{LIMITED} tokens=300/min\n{OTHER}\n")
    argv = (*PROXY, "--api-keys", str(tmp_path / "keys"))
    proxy = await start_process("limited", argv, log_dir / "limited")
    try:
        async with start_agent("--proxy", f"127.0.0.1:{proxy.listening['discovery_port']}"):
            await wait_ready(proxy)

            async def ask(key: str, reply_s: float, **fields: Any) -> Reply | None:
                body = completion(**fields)
                head = (
                    f"POST {COMPLETIONS} HTTP/1.1",
                    "Host: 127.0.0.1",
                    f"Authorization: Bearer {key}",
                    f"Content-Length: {len(body)}",
                )
                try:
                    return await exchange(proxy.url, "\r\n".join((*head, "", "")).encode() + body, reply_s)
                except TimeoutError:
                    return None

            large = {"n": 60, "max_tokens": 1900, "ignore_eos": True}
            served = await ask(LIMITED, REPLY_S, max_tokens=4)
            assert served is not None
            check_served(served)
            assert await ask(LIMITED, LEAVE_S, **large) is None, "served within a second"
            for stream in (False, False, False, True, True):
                refused = await ask(LIMITED, LEAVE_S, stream=stream, **large)
                assert refused is not None
                check_refused(refused, 429)
                assert (
                    refused.error["code"] == "rate_limit_exceeded"
                    and b"retry-after: " in refused.head.lower()
                )
            other = await ask(OTHER, REPLY_S, max_tokens=4)
            assert other is not None
            check_served(other)
    finally:
        await proxy.stop()

# SPDX-License-Identifier: Apache-2.0
"""ATOM's own servers behind the proxy, at its first commit with P/D code and at a later one.

Run by `make test-atom`. Answers are compared with what the model draws from the prompt's own KV (`model.py`).
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import Process, start_process
from tests.atom import recorded
from tests.atom.model import ENDS_AT_ONCE, MODEL, SLOW, answer, chat_prompt
from tests.atom.server import NUM_BLOCKS
from tests.atom.servers import HEAD, SEED, AtomServer, atom_proxy, atom_server, extract
from tests.helpers.commands import PROXY
from tests.helpers.servers import free_port
from tests.helpers.waiting import until

ATOM = os.environ.get("ATOM", "")
READY_S = 120.0
SETTLE_S = 60.0
DECODE_HANDSHAKE = 6302
PREFILL_HANDSHAKE = 6301

pytestmark = [
    pytest.mark.full,
    pytest.mark.atom,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not ATOM, reason="ATOM's repository is not given: run `make test-atom ATOM=/path/to/ATOM`"
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What is run. `pings`: the servers announce themselves; else they are named, by URL alone."""

    name: str
    commit: str
    connector: str = "moriio"
    transfer_mode: str = "read"
    prefill_ranks: int = 1
    decode_ranks: int = 1
    kv_host: str = "127.0.0.1"

    @property
    def pings(self) -> bool:
        return self.commit == SEED

    @property
    def chat_moves(self) -> bool:
        """Whether chat takes `kv_transfer_params`."""
        return self.commit == HEAD


CONFIGS = (
    Config(name="seed", commit=SEED),
    Config(name="seed-ranks", commit=SEED, prefill_ranks=3, decode_ranks=2),
    Config(name="head", commit=HEAD),
    Config(name="head-ranks", commit=HEAD, prefill_ranks=3, decode_ranks=2),
    Config(name="head-mooncake", commit=HEAD, connector="mooncake", transfer_mode="write", prefill_ranks=2),
    Config(name="head-elsewhere", commit=HEAD, kv_host="127.0.0.2"),
)


@dataclass(frozen=True, slots=True)
class Stage:
    """A pair of ATOM's servers behind the proxy."""

    config: Config
    proxy: Process
    prefill: AtomServer
    decode: AtomServer
    http: aiohttp.ClientSession

    async def ask(self, body: dict[str, Any], path: str = "completions") -> dict[str, Any]:
        """The answer to a request that is not streamed."""
        async with self.http.post(f"{self.proxy.url}/v1/{path}", json={"model": MODEL, **body}) as response:
            told = await response.json()
            assert response.status == 200, told
            return dict(told)

    async def stream(self, body: dict[str, Any], path: str = "completions") -> list[dict[str, Any]]:
        """The events of a streamed answer, which must end well."""
        asked = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **body}
        async with self.http.post(f"{self.proxy.url}/v1/{path}", json=asked) as response:
            text = await response.text()
            assert response.status == 200, text
            assert response.content_type == "text/event-stream"
        *events, done, end = text.split("\n\n")
        assert (done, end) == ("data: [DONE]", ""), text
        told = [json.loads(event.removeprefix("data: ")) for event in events]
        assert not any("error" in event or "kv_transfer_params" in event for event in told), told
        return told

    async def nodes(self) -> dict[str, Any]:
        async with self.http.get(f"{self.proxy.url}/nodes") as response:
            return dict(await response.json())

    async def metric(self, name: str) -> float:
        async with self.http.get(f"{self.proxy.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="session")
def code(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ATOM's code, by commit."""
    return {each: extract(Path(ATOM), each, tmp_path_factory.mktemp("atom")) for each in (SEED, HEAD)}


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


async def set_up(
    stack: AsyncExitStack, config: Config, code: Path, folder: Path, http: aiohttp.ClientSession
) -> Stage:
    """Start servers and proxy, and wait until a request could be served."""
    flags: list[str] = []
    proxy: Process | None = None
    options: tuple[object, ...] = ("--connector", config.connector)
    if config.pings:
        proxy = await start_proxy(stack, folder)
        options = (*options, "--ping", f"127.0.0.1:{proxy.listening['discovery_port']}")
    servers = []
    for role, ranks, port, host in (
        ("kv_producer", config.prefill_ranks, PREFILL_HANDSHAKE, config.kv_host),
        ("kv_consumer", config.decode_ranks, DECODE_HANDSHAKE, "127.0.0.1"),
    ):
        words = ("--dp-size", ranks, "--handshake-port", port, "--kv-host", host)
        servers.append(await stack.enter_async_context(atom_server(code, role, folder, *options, *words)))
    prefill, decode = servers
    if proxy is None:
        mode = f",transfer_mode={config.transfer_mode}"
        flags = ["--dialect", "atom", "--prefill", prefill.url + mode, "--decode", decode.url + mode]
        proxy = await start_proxy(stack, folder, *flags)
    stage = Stage(config, proxy, prefill, decode, http)
    await until(lambda: is_ready(stage), READY_S, 0.1)
    return stage


async def start_proxy(stack: AsyncExitStack, folder: Path, *flags: str) -> Process:
    pairs_only = ("--decode-only-fallback", "false")
    words = (*PROXY, *pairs_only, *flags)
    proxy = await start_process("proxy", words, folder)
    stack.push_async_callback(proxy.stop)
    return proxy


async def is_ready(stage: Stage) -> bool:
    async with stage.http.get(f"{stage.proxy.url}/ready") as response:
        return response.status == 200


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
async def test_a_pair_of_atoms_servers(
    config: Config, code: dict[str, Path], tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    async with AsyncExitStack() as stack:
        stage = await set_up(stack, config, code[config.commit], tmp_path, http)
        await check_nodes(stage)
        await check_completions(stage)
        await check_chat(stage)
        await check_many_at_once(stage)
        await check_nothing_is_pinned(stage)
        await check_a_client_that_leaves(stage)
        await check_what_is_recorded(stage)


async def check_nodes(stage: Stage) -> None:
    """Role, sizes and ports are learnt, by ping or from `/kv_transfer_info`; load where metrics show it."""
    config = stage.config
    nodes = {node["role"]: node for node in (await stage.nodes())["nodes"]}
    for role, server, ranks, port in (
        ("prefill", stage.prefill, config.prefill_ranks, PREFILL_HANDSHAKE),
        ("decode", stage.decode, config.decode_ranks, DECODE_HANDSHAKE),
    ):
        node = nodes[role]
        assert (node["address"], node["dialect"], node["model"]) == (server.url, "atom", MODEL)
        assert (node["tp_size"], node["dp_size"]) == (1, ranks)
        assert node["control"] == f"tcp://127.0.0.1:{port}"
        assert node["transfer_mode"] == config.transfer_mode
        assert node["load"]["kv_blocks_total"] == (0 if config.pings else NUM_BLOCKS)


async def check_completions(stage: Stage) -> None:
    """As many tokens as were asked for, each the model's, and one end; whichever way they are asked for."""
    for limit in (1, 2, 9):
        prompt = f"tell me {limit} things"
        wanted = answer(prompt, limit)
        whole = await stage.ask({"prompt": prompt, "max_tokens": limit, "stop": "no such thing"})
        check_whole(whole, wanted, "length", limit)
        events = await stage.stream({"prompt": prompt, "max_tokens": limit})
        check_events(events, wanted, "length", limit)
    whole = await stage.ask({"prompt": "as newer clients", "max_completion_tokens": 3})
    check_whole(whole, answer("as newer clients", 3), "length", 3)
    ended = {"prompt": f"this {ENDS_AT_ONCE}", "max_tokens": 5}
    check_whole(await stage.ask(ended), "", "stop", 1)
    check_events(await stage.stream(ended), "", "stop", 1)


def check_whole(whole: dict[str, Any], text: str, reason: str, tokens: int) -> None:
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == (text, reason)
    assert whole["usage"]["completion_tokens"] == tokens
    assert "kv_transfer_params" not in whole


def check_events(events: list[dict[str, Any]], text: str, reason: str, tokens: int) -> None:
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == text
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == [reason]
    assert events[-1]["usage"]["completion_tokens"] == tokens


async def check_chat(stage: Stage) -> None:
    """Where chat takes no `kv_transfer_params` the decode server computes the prompt, and that is counted."""
    messages = [{"role": "user", "content": "how are you"}]
    wanted = answer(chat_prompt(messages), 6)
    before = await stage.metric("kvferry_proxy_prompts_recomputed_total")
    whole = await stage.ask({"messages": messages, "max_tokens": 6}, "chat/completions")
    [choice] = whole["choices"]
    # At 0c982ea92 ATOM's own parser strips an answer's first blank.
    assert choice["message"]["content"].strip() == wanted.strip()
    assert choice["finish_reason"] == "length"
    events = await stage.stream({"messages": messages, "max_tokens": 6}, "chat/completions")
    choices = [choice for event in events for choice in event["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in choices).strip() == wanted.strip()
    # ATOM's streamed chat says `stop` whatever it was.
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    recomputed = await stage.metric("kvferry_proxy_prompts_recomputed_total") - before
    assert recomputed == (0 if stage.config.chat_moves else 2)


async def check_many_at_once(stage: Stage) -> None:
    """Several choices of several prompts, on whichever rank: every one from its own KV."""
    prompts = [f"prompt number {number}" for number in range(8)]
    tasks = [stage.ask({"prompt": each, "max_tokens": 4, "n": 2}) for each in prompts]
    for prompt, whole in zip(prompts, await asyncio.gather(*tasks), strict=True):
        assert [choice["text"] for choice in whole["choices"]] == [answer(prompt, 4)] * 2
    seen = (await stage.prefill.harness(stage.http))["seen"]
    ranks = {json.loads(each["answer"])["kv_transfer_params"]["dp_rank"] for each in seen}
    assert ranks == set(range(stage.config.prefill_ranks))


async def check_nothing_is_pinned(stage: Stage) -> None:
    """ATOM has no lease: what is not fetched stays pinned. And what is fetched twice kills it."""

    async def is_free() -> bool:
        return not (await stage.prefill.harness(stage.http))["pinned"]

    await until(is_free, SETTLE_S, 0.1)


async def check_a_client_that_leaves(stage: Stage) -> None:
    """HEAD ends a request whose connection is closed; 0c982ea92 computes it to the end."""
    body = {"model": MODEL, "prompt": f"a {SLOW} one", "max_tokens": 20, "stream": True}
    async with stage.http.post(f"{stage.proxy.url}/v1/completions", json=body) as response:
        await response.content.readuntil(b"\n\n")

    async def is_over() -> bool:
        return not (await stage.decode.harness(stage.http))["unfinished"]

    await until(is_over, SETTLE_S, 0.1)
    reasons = (await stage.decode.harness(stage.http))["reasons"]
    assert reasons.count("aborted") == (0 if stage.config.commit == SEED else 1)
    await check_nothing_is_pinned(stage)


async def check_what_is_recorded(stage: Stage) -> None:
    """What the unit tests and the stand-in take for ATOM's answers is what its code answers."""
    name = stage.config.name.replace("-", "_")
    for kind, path, body in recorded.REQUESTS:
        if (name, kind) not in recorded.FILES:
            continue
        before = [len((await each.harness(stage.http))["seen"]) for each in (stage.prefill, stage.decode)]
        asked = {"model": MODEL, **body}
        async with stage.http.post(f"{stage.proxy.url}/v1/{path}", json=asked) as response:
            await response.read()
        legs = [
            (await each.harness(stage.http))["seen"][count:]
            for each, count in zip((stage.prefill, stage.decode), before, strict=True)
        ]
        recorded.check(name, kind, path, asked, *legs)


async def test_a_server_that_is_not_what_it_is_named_is_down(
    code: dict[str, Path], tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """A wrong role, other ranks than named, a server that moves no KV: refused by name, not asked."""
    async with AsyncExitStack() as stack:
        options = ("--dp-size", 2, "--handshake-port", PREFILL_HANDSHAKE)
        server = await stack.enter_async_context(atom_server(code[HEAD], "kv_producer", tmp_path, *options))
        plain = await stack.enter_async_context(atom_server(code[HEAD], "none", tmp_path))
        for role, words, why in (
            ("decode", server.url, "its kv_role is kv_producer, so it cannot be a decode server"),
            ("prefill", f"{server.url},dp_size=1", "its dp_size is 2, not 1"),
            ("prefill", f"{server.url},handshake_port=6399", "its handshake_port is 6301, not 6399"),
            ("prefill", plain.url, "it has no kv_role, so it cannot be a prefill server"),
        ):
            async with AsyncExitStack() as inner:
                proxy = await start_proxy(inner, tmp_path, "--dialect", "atom", f"--{role}", words)
                await until(functools.partial(is_down, http, proxy, why), READY_S, 0.1)


async def is_down(http: aiohttp.ClientSession, proxy: Process, why: str) -> bool:
    async with http.get(f"{proxy.url}/nodes") as response:
        page = await response.json()
    assert not page["nodes"]
    return [each["reason"] for each in page["down"]] == [why]


async def test_the_legs_are_those_of_atoms_own_proxy(
    code: dict[str, Path], tmp_path: Path, http: aiohttp.ClientSession
) -> None:
    """Both proxies before the same servers: what ATOM's sends, ours sends too."""
    async with AsyncExitStack() as stack:
        theirs, discovery = free_port(), free_port()
        url = await stack.enter_async_context(atom_proxy(code[SEED], tmp_path, theirs, discovery))
        servers = []
        for role, ranks, port in (
            ("kv_producer", 2, PREFILL_HANDSHAKE),
            ("kv_consumer", 1, DECODE_HANDSHAKE),
        ):
            words = ("--dp-size", ranks, "--handshake-port", port, "--ping", f"127.0.0.1:{discovery}")
            servers.append(await stack.enter_async_context(atom_server(code[SEED], role, tmp_path, *words)))
        prefill, decode = servers
        named: tuple[str, ...] = (f"{prefill.url},handshake_port={PREFILL_HANDSHAKE},dp_size=2",)
        named = (*named, "--decode", f"{decode.url},handshake_port={DECODE_HANDSHAKE}")
        ours = await start_proxy(stack, tmp_path, "--dialect", "atom", "--prefill", *named)
        stage = Stage(CONFIGS[0], ours, prefill, decode, http)
        await until(lambda: is_ready(stage), READY_S, 0.1)
        body = {"model": MODEL, "prompt": "the same to both", "max_tokens": 5}

        async def theirs_answers() -> bool:
            async with http.post(f"{url}/v1/completions", json=body) as response:
                return response.status == 200

        await until(theirs_answers, READY_S, 0.1)
        await stage.ask(body)
        for server, varying in ((prefill, set()), (decode, {"transfer_id", "remote_dp_rank", "remote_port"})):
            legs = [json.loads(each["asked"]) for each in (await server.harness(http))["seen"]]
            one, other = legs[0]["kv_transfer_params"], legs[-1]["kv_transfer_params"]
            assert one.keys() <= other.keys()
            assert {name: other[name] for name in one if name not in varying} == {
                name: value for name, value in one.items() if name not in varying
            }

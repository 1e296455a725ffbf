# SPDX-License-Identifier: Apache-2.0
"""Unchanged SGLang servers whose KV our transfer plane moves, behind the proxy that they
announce themselves to.

They answer as one plain SGLang server does; and no answer comes from pages that were recycled under a reader
(`make test-sglang`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import aiohttp
import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import heldout, session
from tests.helpers.commands import PROXY
from tests.helpers.servers import paused
from tests.system.sglang.servers import MARKS, SglangServer, sglang_server
from tests.system.vllm.test_kvferry import Answer, answers, assert_all_equal, body

PROMPTS = 50
LEASE_S = 2
LATE = 100
BATCH = 4
LATE_READ_S = 2.0
"""So long each read waits before it begins; in that time the decode server is stopped."""
LATE_POOL = 1024
LATE_TOKENS = 200
"""Of a prompt that is read late, at most: a batch of them fits into `LATE_POOL`."""
FILLERS = [{"text": f"{number} " * 120, "sampling_params": {"max_new_tokens": 1}} for number in range(8)]
"""Prompts that together take all pages of a pool of `LATE_POOL` tokens."""
GREEDY = {"temperature": 0}
END = "<|end|>"
"""The model's token that ends a text."""
NONE_IN_USE_S = 30.0
STOPPED = 16
"""Requests during which a decode server is stopped."""
EXPIRED = "the lease expired"
"""In a prefill server's log."""

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Stack:
    """The pair, the proxy before it, and its clients' session."""

    prefill: SglangServer
    decode: SglangServer
    proxy_url: str
    http: aiohttp.ClientSession

    async def ready(self) -> None:
        """Until the proxy has a pair."""
        async with asyncio.timeout(60):
            while True:
                async with self.http.get(f"{self.proxy_url}/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.1)

    async def settled(self, *servers: SglangServer) -> None:
        """Until no server has a request, and no page in use but by its cache of prompts."""
        async with asyncio.timeout(NONE_IN_USE_S):
            for server in servers or (self.prefill, self.decode):
                while any(in_use(load := await server.load(self.http)).values()):
                    print(server.url, in_use(load))
                    await asyncio.sleep(0.2)


def in_use(load: dict[str, Any]) -> dict[str, int]:
    queues = {name: count for name, count in load["disaggregation"].items() if name.endswith("_reqs")}
    names = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
    return {name: load[name] for name in names} | queues


@asynccontextmanager
async def started(log_dir: Path, *, ranks: tuple[int, int] = (1, 1), **settings: Any) -> AsyncIterator[Stack]:
    """A proxy, and two servers of so many ranks that announce themselves to it. The proxy waits long for
    pings, for a decode server that is stopped sends none.
    """
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, {"KVFERRY_TEST_PATIENCE": "6"}))
        words = ("-m", "tests.standins.patient_proxy", *PROXY[2:])
        proxy = await start_process("proxy", words, log_dir)
        stack.push_async_callback(proxy.stop)
        discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
        starting = [
            stack.enter_async_context(sglang_server(role, role, log_dir, proxy=discovery, tp=tp, **settings))
            for role, tp in zip(("prefill", "decode"), ranks, strict=True)
        ]
        prefill, decode = await asyncio.gather(*starting)
        http = await stack.enter_async_context(session())
        pair = Stack(prefill, decode, proxy.url, http)
        await pair.ready()
        yield pair


def bodies_of(count: int, *, chat: bool, **fields: Any) -> list[dict[str, Any]]:
    return [body(prompt.prompt, chat) | GREEDY | fields for prompt in heldout(count)]


def late_bodies() -> list[dict[str, Any]]:
    short = [prompt for prompt in heldout() if prompt.prompt_tokens <= LATE_TOKENS]
    return [body(prompt.prompt, chat=False) | GREEDY for prompt in short[:LATE]]


def comparable(given: list[Answer], *, chat: bool, stream: bool) -> list[Answer]:
    """Streamed chats without the token that ends a text: SGLang only gives its log probability there if it
    comes in one event with the token before.
    """
    for answer in given if chat and stream else ():
        for index, tokens in answer.tokens.items():
            if tokens[-1:] == [END]:
                del tokens[-1], answer.logprobs[index][-1]
    return given


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Answer]]:
    """What one plain server answers."""

    async def ask() -> dict[str, list[Answer]]:
        log_dir = tmp_path_factory.mktemp("plain")
        async with sglang_server("plain", None, log_dir) as plain, session() as http:
            found = {"late": await answers(http, plain.url, late_bodies())}
            for chat, stream in product((False, True), repeat=2):
                asked = bodies_of(PROMPTS, chat=chat, stream=stream)
                found[f"{chat=} {stream=}"] = comparable(
                    await answers(http, plain.url, asked), chat=chat, stream=stream
                )
            return found

    found = asyncio.run(ask())
    assert all(len({str(answer.texts) for answer in each}) > len(each) // 2 for each in found.values())
    return found


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2), (1, 2), (2, 1)], ids="{0[0]}-{0[1]}".format)
@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_a_pair_answers_as_one_server_does(
    transfer: str, ranks: tuple[int, int], wanted: dict[str, list[Answer]], tmp_path: Path
) -> None:
    async with started(tmp_path, transfer=transfer, ranks=ranks) as stack:
        for chat in (False, True):
            for stream in (False, True):
                asked = bodies_of(PROMPTS, chat=chat, stream=stream)
                expected = wanted[f"{chat=} {stream=}"]
                found = await answers(stack.http, stack.proxy_url, asked)
                assert_all_equal(comparable(found, chat=chat, stream=stream), expected)
            several = bodies_of(PROMPTS, chat=chat, n=3)
            for three, one in zip(await answers(stack.http, stack.proxy_url, several), expected, strict=True):
                assert three.texts == dict.fromkeys(range(3), one.texts[0])
        await stack.settled()
        assert "cannot be used" not in stack.decode.log.read_text(errors="replace")


async def test_no_answer_is_drawn_from_recycled_pages(
    wanted: dict[str, list[Answer]], tmp_path: Path
) -> None:
    """The decode server is stopped between its being told what to read and its reading. The leases expire,
    other prompts overwrite the pages, and it reads them when it goes on.

    No proxy is between, which would have ended the decode server's request with the other.
    """
    settings = {"KVFERRY_LEASE_S": str(LEASE_S), "KVFERRY_TEST_LATE_READ_S": str(LATE_READ_S)}
    words = ("--max-total-tokens", str(LATE_POOL), "--disable-radix-cache")
    bodies = late_bodies()
    async with started(tmp_path, settings=settings, words=words) as stack:
        answered = 0
        for first in range(0, LATE, BATCH):
            found = await late(stack, bodies[first : first + BATCH])
            for answer, right in zip(found, wanted["late"][first : first + BATCH], strict=True):
                if answer is not None:
                    answered += 1
                    answer.assert_equal(right)
            await stack.settled()
            print(f"{first + BATCH} read late, {answered} answered", flush=True)
        text = stack.decode.log.read_text(errors="replace")
        refused = text.count("cannot be used")
        print(
            f"{LATE} late reads: {answered} answered, {refused} pulls refused, "
            f"{text.count('cannot be used: invalid')} of them had read what was no longer lent"
        )
        assert refused + answered == LATE and refused > answered


async def late(stack: Stack, asked: list[dict[str, Any]]) -> list[Answer | None]:
    """The answers to requests whose KV was gone before it was read; None for an error."""
    asking = asyncio.gather(*(to_both(stack, each) for each in asked))
    async with asyncio.timeout(60):
        while not asking.done() and await inflight(stack) < len(asked):  # its figures may come late
            await asyncio.sleep(0.02)
    with stack.decode.schedulers_stopped():
        async with asyncio.timeout(30):
            while await inflight(stack):
                await asyncio.sleep(0.1)
        await overwrite(stack)
    return await asking


async def to_both(stack: Stack, asked: dict[str, Any]) -> Answer | None:
    """Send a request to both servers, and return the decode server's answer, or None for an error."""
    room = {"bootstrap_host": "127.0.0.1", "bootstrap_room": secrets.randbits(62)}
    body = asked | room | {"bootstrap_port": stack.prefill.bootstrap_port}

    async def one(server: SglangServer) -> Answer | None:
        async with stack.http.post(f"{server.url}/v1/completions", json=body) as response:
            told: dict[str, Any] = await response.json()
            if response.status != 200:
                return None
        answer = Answer()
        answer.add(told)
        return answer

    return (await asyncio.gather(one(stack.prefill), one(stack.decode)))[1]


async def inflight(stack: Stack) -> int:
    """Prompts that the prefill server lends."""
    load = await stack.prefill.load(stack.http)
    return int(load["disaggregation"]["prefill_inflight_queue_reqs"])


async def overwrite(stack: Stack) -> None:
    """Have the prefill server compute prompts that no one fetches."""

    async def one(asked: dict[str, Any]) -> None:
        nobody = {"bootstrap_host": "127.0.0.1", "bootstrap_room": secrets.randbits(62)}
        async with stack.http.post(f"{stack.prefill.url}/generate", json=asked | nobody) as response:
            await response.read()

    await asyncio.gather(*map(one, FILLERS))


async def test_nothing_stays_in_use_when_clients_leave_or_servers_stop(
    wanted: dict[str, list[Answer]], tmp_path: Path
) -> None:
    async with started(tmp_path, settings={"KVFERRY_LEASE_S": str(LEASE_S)}) as stack:
        # Clients that leave while their prompts are queued, moved or decoded.
        for delay_s in (0.0, 0.02, 0.05, 0.1, 0.3):
            asked = bodies_of(8, chat=False, stream=True, max_tokens=200)
            asking = asyncio.create_task(answers(stack.http, stack.proxy_url, asked, concurrency=8))
            await asyncio.sleep(delay_s)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await stack.settled()

        # A decode server that stops: its prompts' leases expire, and it goes on right. For longer, and the
        # proxy would have tried each prompt as often as it may. Its rank goes on with the reads that it has
        # begun, so it is stopped again until there is a lease of which none had.
        def has_expired() -> bool:
            return EXPIRED in stack.prefill.log.read_text(errors="replace")

        for first in range(0, LATE - STOPPED, STOPPED):
            part = slice(first, first + STOPPED)
            asking = asyncio.create_task(answers(stack.http, stack.proxy_url, late_bodies()[part]))
            async with asyncio.timeout(NONE_IN_USE_S):
                while not asking.done() and not await inflight(stack):
                    await asyncio.sleep(0.02)
            with stack.decode.schedulers_stopped(), suppress(TimeoutError):
                async with asyncio.timeout(2 * LEASE_S):
                    while not has_expired():
                        await asyncio.sleep(0.2)
            assert_all_equal(await asking, wanted["late"][part])
            if has_expired():
                break
        assert has_expired()
        await stack.settled()

        # A prefill server that stops, and goes on.
        posts = sent(stack, wanted)
        await asyncio.sleep(0.2)
        with paused(stack.prefill.schedulers):
            await asyncio.sleep(2 * LEASE_S)
        print("stopped:", await ended(posts), flush=True)
        await stack.settled()
        await stack.ready()

        # A prefill server that is killed: the decode server is left without a page in use.
        posts = sent(stack, wanted)
        await asyncio.sleep(0.2)
        for pid in (*stack.prefill.schedulers, stack.prefill.pid):
            os.kill(pid, signal.SIGKILL)
        print("killed:", await ended(posts), flush=True)
        await stack.settled(stack.decode)


def sent(stack: Stack, wanted: dict[str, list[Answer]]) -> list[asyncio.Task[int]]:
    """Requests whose answers, if they are answered, are right."""

    async def status(asked: dict[str, Any], right: Answer) -> int:
        async with stack.http.post(f"{stack.proxy_url}/v1/completions", json=asked) as response:
            told = await response.json()
        if response.status != 200:
            assert told["error"]
            return response.status
        answer = Answer()
        answer.add(told)
        answer.assert_equal(right)
        return response.status

    each = zip(bodies_of(PROMPTS, chat=False), wanted["chat=False stream=False"], strict=True)
    return [asyncio.create_task(status(*one)) for one in islice(each, 8)]


async def ended(posts: list[asyncio.Task[int]]) -> Counter[int]:
    async with asyncio.timeout(120):
        statuses = Counter(await asyncio.gather(*posts))
    assert set(statuses) <= {200, 502, 503, 504}
    return statuses

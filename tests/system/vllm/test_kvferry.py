# SPDX-License-Identifier: Apache-2.0
"""Unchanged vLLM servers that move KV by our connector, behind the proxy that they announce themselves to.

They answer as one plain vLLM server does, with one transfer for each prompt however many choices are drawn;
and no answer comes from blocks that were recycled under a reader (`make test-vllm`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvferry.deploy.launcher import start_process
from tests.helpers.client import heldout, session
from tests.helpers.commands import PROXY
from tests.helpers.metrics import is_shown, scrape, total
from tests.helpers.servers import free_port
from tests.system.vllm.servers import MARKS, MODEL, VllmServer, together, vllm_server

PROMPTS = 50
CONCURRENCY = 4
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 11},
    {"temperature": 1, "seed": 11, "n": 4},
)
"""vLLM refuses several choices without sampling."""
LEASE_S = 2
STARVED_LEASE_S = 300
STARVED_PROXY = ("--queue-timeout-s", "600")
"""Ranks that spin may leave nothing else a core for a minute."""
NUM_BLOCKS = 80
LATE = 100
BATCH = 2
OPENED_S = 3.0
"""Until the decode server's plane has opened the leases; it renews them meanwhile."""
FILLERS = 6
"""Prompts of nearly 1,000 tokens, 30 blocks, that come before the late read."""
TRANSFERS = "vllm:kvferry_transfers_total"
RECOMPUTED = "vllm:kvferry_recomputed_total"
FAILED = "vllm:kvferry_failed_transfers_total"
ENDED = "vllm:kvferry_leases_ended_total"
WANTED = "kvferry_proxy_wanted_agents"
STREAMS = 16
MIGRATIONS = "kvferry_proxy_migrations_total"
GENERATED = "vllm:generation_tokens_total"
IN_USE = "vllm:kv_cache_usage_perc"

pytestmark = MARKS


@dataclass(frozen=True, slots=True)
class Stack:
    """The pair, the proxy before it, and its clients' session."""

    prefill: VllmServer
    decode: VllmServer
    proxy_url: str
    http: aiohttp.ClientSession
    spare: VllmServer | None = None
    """Another decode server."""

    async def moved(self) -> tuple[float, float]:
        """Transfers so far, and prompts that were computed again."""
        await self.settled()
        return await self.decode.sample(self.http, TRANSFERS), await self.decode.sample(self.http, RECOMPUTED)

    async def ready(self) -> None:
        """Until the proxy has a pair: an engine that was stopped has announced itself again."""
        async with asyncio.timeout(60):
            while True:
                async with self.http.get(f"{self.proxy_url}/ready") as response:
                    if response.status == 200:
                        return
                await asyncio.sleep(0.1)

    async def settled(self) -> None:
        """Until no server has a block in use: figures are reported with a step, and blocks freed with one."""
        async with asyncio.timeout(30):
            for server in (self.prefill, self.decode):
                while await server.sample(self.http, IN_USE) > 0:
                    await asyncio.sleep(0.1)

    async def ended(self) -> Counter[str]:
        """Leases that have expired, and prompts that were computed again, once all is settled."""
        await self.settled()
        expired = await self.prefill.sample(self.http, ENDED, 'reason="expired"')
        return Counter(expired=int(expired), recomputed=int(await self.decode.sample(self.http, RECOMPUTED)))


@asynccontextmanager
async def started(
    log_dir: Path,
    *,
    tp: tuple[int, int] = (1, 1),
    spare: bool = False,
    proxy_words: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Stack]:
    """A proxy, and two servers of so many ranks that announce themselves to it, or three."""
    async with AsyncExitStack() as stack:
        words = (*PROXY, "--decode-only-fallback", "false", *STARVED_PROXY, *proxy_words)
        proxy = await start_process("proxy", words, log_dir)
        stack.push_async_callback(proxy.stop)
        discovery = f"127.0.0.1:{proxy.listening['discovery_port']}"
        roles = [("prefill", "kv_producer", tp[0]), ("decode", "kv_consumer", tp[1])]
        if spare:
            roles.append(("spare", "kv_consumer", 1))
        start: dict[str, Any] = {"log_dir": log_dir, "proxy": discovery}
        servers = [vllm_server(name, role, tp=ranks, **start, **settings) for name, role, ranks in roles]
        prefill, decode, *others = await together(stack, *servers)
        http = await stack.enter_async_context(session())
        pair = Stack(prefill, decode, proxy.url, http, *others)
        await pair.ready()
        yield pair


@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_a_pair_answers_as_one_server_does_with_one_transfer_for_each_prompt(
    transfer: str, tmp_path: Path
) -> None:
    prompts = [prompt.prompt for prompt in heldout(PROMPTS)]
    async with vllm_server("plain", None, tmp_path) as plain, started(tmp_path, transfer=transfer) as stack:
        for chat in (False, True):
            for sampling in SAMPLINGS:
                bodies = [body(prompt, chat) | sampling for prompt in prompts]
                wanted = await answers(stack.http, plain.url, bodies)
                assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
                for stream in (False, True):
                    before = await stack.moved()
                    asked = [each | {"cache_salt": secrets.token_hex(8), "stream": stream} for each in bodies]
                    assert_all_equal(await answers(stack.http, stack.proxy_url, asked), wanted)
                    after = await stack.moved()
                    assert (after[0] - before[0], after[1] - before[1]) == (PROMPTS, 0), (chat, sampling)
        assert await stack.prefill.sample(stack.http, ENDED, 'reason="released"') == 12 * PROMPTS
        assert await stack.decode.sample(stack.http, FAILED) == 0


@pytest.mark.parametrize("transfer", ["tcp", "nixl"])
async def test_a_server_fetches_from_itself(transfer: str, tmp_path: Path) -> None:
    """The whole way within one server: with another salt, a prompt is not found in its prefix cache."""
    bodies = [body(prompt.prompt, chat=False) | {"temperature": 0} for prompt in heldout(PROMPTS)]
    nobody = f"127.0.0.1:{free_port()}"
    async with (
        vllm_server("both", "kv_both", tmp_path, proxy=nobody, transfer=transfer) as server,
        session() as http,
    ):
        wanted = await answers(http, server.url, [salted(each) for each in bodies])
        for asked, answer in zip(bodies, wanted, strict=True):
            lend = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": secrets.token_hex(8)}
            leg = salted(asked) | {"max_tokens": 1, "kv_transfer_params": lend}
            async with http.post(f"{server.url}/v1/completions", json=leg) as response:
                lent = (await response.json())["kv_transfer_params"]
            [found] = await answers(http, server.url, [salted(asked) | {"kv_transfer_params": lent}])
            found.assert_equal(answer)
        assert await server.sample(http, TRANSFERS) == PROMPTS
        assert await server.sample(http, RECOMPUTED) == 0


async def test_no_answer_is_drawn_from_recycled_blocks(tmp_path: Path) -> None:
    """The decode server is stopped when its ranks have been told what to read. Its leases end, other prompts
    overwrite the blocks, and it reads them when it goes on.
    """
    prompts = [prompt.prompt for prompt in heldout(LATE)]
    bodies = [body(prompt, chat=False) | {"temperature": 0} for prompt in prompts]
    async with started(tmp_path, lease_s=LEASE_S, num_blocks=NUM_BLOCKS) as stack:
        wanted = await answers(stack.http, stack.proxy_url, [salted(each) for each in bodies])
        assert len({str(answer.texts) for answer in wanted}) > LATE // 2
        counts = Counter[str]()
        for first in range(0, LATE, BATCH):
            batch = [salted(each) for each in bodies[first : first + BATCH]]
            before = await stack.ended()
            assert_all_equal(await late(stack, batch), wanted[first : first + BATCH])
            counts += await stack.ended() - before
            again = await answers(stack.http, stack.proxy_url, batch)
            assert_all_equal(again, wanted[first : first + BATCH])  # nothing that was read too late is cached
        # Not of those that were asked again: on a busy machine a lease of theirs may end too.
        assert counts == {"expired": LATE, "recomputed": LATE}
        assert await stack.decode.sample(stack.http, FAILED, 'reason="invalid"') > 0


@pytest.mark.parametrize("tp", [(1, 2), (2, 1), (2, 2)])
async def test_servers_of_several_ranks_answer_as_one_server_does(
    tp: tuple[int, int], tmp_path: Path
) -> None:
    """Each rank of the decode server reads its heads from the ranks that have them."""
    bodies = [body(prompt.prompt, chat=False) | {"temperature": 0} for prompt in heldout(PROMPTS)]
    async with started(tmp_path, tp=tp, lease_s=STARVED_LEASE_S) as stack:
        wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in bodies])
        assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
        found = await answers(stack.http, stack.proxy_url, [salted(each) for each in bodies])
        assert_all_equal(found, wanted)
        assert await stack.moved() == (PROMPTS, 0)
        assert await stack.prefill.sample(stack.http, ENDED, 'reason="released"') == PROMPTS


async def test_servers_measure_their_work_for_the_signals_to_scale_by(tmp_path: Path) -> None:
    prompts = [prompt.prompt for prompt in heldout(PROMPTS)]
    bodies = [body(prompt, chat=False) | {"temperature": 0, "ignore_eos": True} for prompt in prompts]
    async with started(tmp_path) as stack:
        before = await scrape(stack.proxy_url)
        assert not [name for name, _ in before if name == WANTED]
        await answers(stack.http, stack.proxy_url, [salted(each) for each in bodies])
        await stack.settled()
        async with asyncio.timeout(30):
            while not is_shown(page := await scrape(stack.proxy_url), WANTED) or not all(
                total(page, WANTED, role=role) for role in ("prefill", "decode")
            ):
                await asyncio.sleep(0.1)
            while total(rested := await scrape(stack.proxy_url), "kvferry_proxy_prefill_backlog_seconds"):
                await asyncio.sleep(0.1)
        # Soon none is wanted any more, so it is the page before that shows what the load asked for.
        for role in ("prefill", "decode"):
            wanted = total(page, WANTED, role=role, model_name=MODEL)
            assert 0.0 < wanted < 2.0, "four at a time, answered at once"
        assert total(rested, "kvferry_proxy_decode_pressure", model_name=MODEL) == 0.0


async def test_streams_begin_with_the_prefills_token_and_outlive_their_decode_server(tmp_path: Path) -> None:
    prompts = [prompt.prompt for prompt in heldout(STREAMS)]
    async with started(tmp_path, spare=True, max_running=STREAMS) as stack:
        assert stack.spare is not None
        for chat in (False, True):
            plain = [streamable(prompt, chat) for prompt in prompts]
            wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in plain])
            assert len({str(answer.texts) for answer in wanted}) > STREAMS // 2
            streamed = [salted(each) | {"stream": True} for each in plain]
            assert_all_equal(await answers(stack.http, stack.proxy_url, streamed), wanted)
        with stack.decode.engine_stopped(), stack.spare.engine_stopped():
            asked = salted(streamable(prompts[0], chat=True)) | {"stream": True}
            url = f"{stack.proxy_url}/v1/chat/completions"
            async with asyncio.timeout(60), stack.http.post(url, json=asked) as response:
                events = [await response.content.readuntil(b"\n\n") for _ in range(2)]
            assert json.loads(events[1].removeprefix(b"data: "))["choices"][0]["delta"]["content"]
        assert await stack.decode.sample(stack.http, RECOMPUTED) == 0

        long = [
            streamable(prompt, chat=False) | {"max_tokens": 200, "ignore_eos": True} for prompt in prompts
        ]
        wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in long])
        before = await stack.decode.sample(stack.http, GENERATED)
        asking = asyncio.create_task(
            answers(stack.http, stack.proxy_url, [salted(each) | {"stream": True} for each in long], STREAMS)
        )
        async with asyncio.timeout(120):
            while await stack.decode.sample(stack.http, GENERATED) < before + 4 * STREAMS:
                await asyncio.sleep(0.05)
        stack.decode.kill()
        assert_all_equal(await asking, wanted)
        moved = total(await scrape(stack.proxy_url), MIGRATIONS)
        print(f"{moved:g} of {STREAMS} streams went on elsewhere")
        assert moved


def streamable(prompt: str, chat: bool) -> dict[str, Any]:
    """A greedy request without logprobs."""
    plain = {name: value for name, value in body(prompt, chat).items() if "logprobs" not in name}
    return plain | {"temperature": 0}


async def late(stack: Stack, bodies: list[dict[str, Any]]) -> list[Answer]:
    """The answers to requests whose KV was gone before it was read."""
    await stack.ready()
    expired = await stack.prefill.sample(stack.http, ENDED, 'reason="expired"')
    with stack.decode.ranks_stopped():
        asking = asyncio.create_task(answers(stack.http, stack.proxy_url, bodies))
        async with asyncio.timeout(30):
            while await stack.prefill.sample(stack.http, IN_USE) == 0:
                await asyncio.sleep(0.05)
        await asyncio.sleep(OPENED_S)
        with stack.decode.engine_stopped():
            async with asyncio.timeout(60):
                while await stack.prefill.sample(stack.http, ENDED, 'reason="expired"') < expired + len(
                    bodies
                ):
                    await asyncio.sleep(0.1)
            for number in range(FILLERS):
                filler = {"model": MODEL, "prompt": f"{number} " * 480, "max_tokens": 1, "temperature": 0}
                await answers(stack.http, stack.prefill.url, [salted(filler)])
    return await asking


def body(prompt: str, chat: bool) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    logprobs = {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}
    return {"model": MODEL, **asked, "max_tokens": 16, **logprobs}


def salted(asked: dict[str, Any]) -> dict[str, Any]:
    """The same request, whose prompt is in no prefix cache."""
    return asked | {"cache_salt": secrets.token_hex(8)}


@dataclass(slots=True)
class Answer:
    """What one server's answer and another's must have in common."""

    texts: dict[int, str] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, list[str]] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    """Equal but for the order in which a batch is summed."""

    def add(self, told: dict[str, Any]) -> None:
        """Add a whole answer, or one event of a stream."""
        for choice in told["choices"]:
            index, message = choice["index"], choice.get("message") or choice.get("delta") or {}
            text = choice.get("text", message.get("content")) or ""
            self.texts[index] = self.texts.get(index, "") + text
            if choice["finish_reason"]:
                self.reasons[index] = choice["finish_reason"]
            tokens, logprobs = _logprobs(choice.get("logprobs") or {})
            self.tokens.setdefault(index, []).extend(tokens)
            self.logprobs.setdefault(index, []).extend(logprobs)
        if told.get("usage"):
            self.usage = told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]

    def assert_equal(self, other: Answer) -> None:
        assert (self.texts, self.reasons, self.tokens, self.usage) == (
            other.texts,
            other.reasons,
            other.tokens,
            other.usage,
        )
        for index, logprobs in self.logprobs.items():
            assert logprobs == pytest.approx(other.logprobs[index], abs=1e-3)


def _logprobs(told: dict[str, Any]) -> tuple[list[str], list[float]]:
    """Tokens and their logprobs, in the form of either endpoint."""
    if "content" in told:
        return [each["token"] for each in told["content"]], [each["logprob"] for each in told["content"]]
    return told.get("tokens", []), told.get("token_logprobs", [])


def assert_all_equal(found: list[Answer], wanted: list[Answer]) -> None:
    for one, other in zip(found, wanted, strict=True):
        one.assert_equal(other)


async def answers(
    http: aiohttp.ClientSession, url: str, bodies: list[dict[str, Any]], concurrency: int = CONCURRENCY
) -> list[Answer]:
    """Answers in order of the bodies; the same whether they are streamed or not."""
    gate = asyncio.Semaphore(concurrency)

    async def one(asked: dict[str, Any]) -> Answer:
        path = "chat/completions" if "messages" in asked else "completions"
        answer = Answer()
        if asked.get("stream"):
            asked = asked | {"stream_options": {"include_usage": True}}
        async with gate, http.post(f"{url}/v1/{path}", json=asked) as response:
            assert response.status == 200, await response.text()
            if not asked.get("stream"):
                answer.add(await response.json())
                return answer
            lines = [line for line in (await response.text()).splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        for line in lines[:-1]:
            answer.add(json.loads(line.removeprefix("data: ")))
        return answer

    return await asyncio.gather(*(one(asked) for asked in bodies))

# SPDX-License-Identifier: Apache-2.0
"""What becomes of KV in a pair of vLLM servers when a pull does not go through: a proof that is denied, a
client that leaves, a producer that stands still, a pool that is too small (`make test-vllm`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.helpers.client import heldout
from tests.helpers.metrics import PAGE_AGE_S
from tests.helpers.waiting import patient
from tests.system.vllm.servers import MARKS, MODEL, VllmServer
from tests.system.vllm.test_kvferry import (
    ENDED,
    FAILED,
    IN_USE,
    RECOMPUTED,
    TRANSFERS,
    Answer,
    Stack,
    answers,
    assert_all_equal,
    body,
    salted,
    started,
)

PROMPTS = 16
BLOCK = 32
CACHED = 2 * BLOCK
"""Tokens of a prompt that the decode server has in its prefix cache."""
LEASE_S = 3
PULL_TIMEOUT_S = 4.0
FREED_S = 1.0
SLOTS = 2
BYTES = "vllm:kvferry_transfer_bytes_total"
ABORTED = "vllm:kvferry_aborted_before_admission_total"
BAD_PARAMS = "vllm:kvferry_bad_params_total"
WAITING = "vllm:num_requests_waiting"
PREEMPTED = "vllm:num_preemptions_total"

pytestmark = MARKS


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_kv_that_was_not_proven_is_not_computed_on(policy: str, tmp_path: Path) -> None:
    """Every proof is denied, and what was pulled is overwritten. Half of the prompts begin with blocks that
    are in the decode server's prefix cache, which must stay as they are.
    """
    damaging = {
        "kv_connector": "DamagingConnector",
        "kv_connector_module_path": "tests.standins.damaging_connector",
        "kv_load_failure_policy": policy,
    }
    async with started(tmp_path, connector=damaging) as stack:
        bodies = [salted(greedy(ids)) for ids in await long_prompts(stack, PROMPTS)]
        wanted = await answers(stack.http, stack.prefill.url, [salted(each) for each in bodies])
        assert len({str(answer.texts) for answer in wanted}) > PROMPTS // 2
        cached = [each | {"prompt": each["prompt"][:CACHED], "max_tokens": 1} for each in bodies[::2]]
        await answers(stack.http, stack.decode.url, cached)
        if policy == "recompute":
            assert_all_equal(await answers(stack.http, stack.proxy_url, bodies), wanted)
        else:
            async with stack.http.post(f"{stack.proxy_url}/v1/completions", json=bodies[0]) as response:
                assert response.status >= 500 and (await response.json())["error"]["code"]
            for asked in bodies:  # by hand: the proxy would open a circuit breaker
                leg = asked | {"kv_transfer_params": await lend(stack, asked["prompt"])}
                async with stack.http.post(f"{stack.decode.url}/v1/completions", json=leg) as response:
                    assert response.status == 500, await response.text()
        await stack.settled()
        recomputed = await stack.decode.sample(stack.http, RECOMPUTED)
        assert recomputed == await stack.decode.sample(stack.http, FAILED, 'reason="invalid"') >= PROMPTS
        assert await stack.decode.sample(stack.http, TRANSFERS) == 0
        # What is in the prefix cache by now is right, too.
        assert_all_equal(await answers(stack.http, stack.decode.url, bodies), wanted)


async def test_what_nobody_waits_for_is_freed_and_a_producer_that_stands_still_costs_a_computation(
    tmp_path: Path,
) -> None:
    connector = {"settings": {"pull_timeout_s": PULL_TIMEOUT_S}}
    async with started(tmp_path, lease_s=LEASE_S, max_running=SLOTS, connector=connector) as stack:
        await a_cached_prefix_shortens_the_pull(stack)
        await a_lease_is_dropped(stack)
        await a_request_is_rejected_before_the_engine_has_it(stack)
        await a_client_leaves_while_its_request_waits(stack)
        await a_client_leaves_while_kv_is_pulled(stack)
        await a_client_leaves_while_its_request_decodes(stack)
        await a_producer_stands_still(stack)


async def a_cached_prefix_shortens_the_pull(stack: Stack) -> None:
    [ids] = await long_prompts(stack, 1)
    whole = greedy(ids[: 4 * BLOCK])
    pulled = []
    for cached in (0, CACHED):
        asked = salted(whole)
        if cached:
            await answers(stack.http, stack.decode.url, [asked | {"prompt": ids[:cached], "max_tokens": 1}])
        before = await stack.decode.sample(stack.http, BYTES)
        await answers(stack.http, stack.proxy_url, [asked])
        await stack.settled()
        pulled.append(await stack.decode.sample(stack.http, BYTES) - before)
    print(f"bytes pulled for 4 blocks, with none and with 2 of them cached: {pulled}")
    assert pulled[0] == 2 * pulled[1] > 0


async def a_lease_is_dropped(stack: Stack) -> None:
    lent = await lend(stack, await one_prompt(stack))
    drop = {"do_remote_prefill": True, "drop": True, "transfer_id": lent["transfer_id"]}
    before = await stack.prefill.sample(stack.http, ENDED, 'reason="dropped"')
    asked = {"model": "no such model", "prompt": "x", "kv_transfer_params": drop}
    async with stack.http.post(f"{stack.prefill.url}/v1/completions", json=asked) as response:
        assert response.status == 404
    await freed(stack, stack.prefill)
    assert await stack.prefill.sample(stack.http, ENDED, 'reason="dropped"') == before + 1


async def a_request_is_rejected_before_the_engine_has_it(stack: Stack) -> None:
    """N8: vLLM adds and aborts another in its place. The lease ends with that, and no params were bad."""
    prompt = await one_prompt(stack)
    lent = await lend(stack, prompt)
    before = [
        await stack.decode.sample(stack.http, ABORTED),
        await stack.decode.sample(stack.http, BAD_PARAMS),
        await stack.prefill.sample(stack.http, ENDED, 'reason="dropped"'),
    ]
    asked = greedy(prompt) | {"model": "no such model", "kv_transfer_params": lent}
    async with stack.http.post(f"{stack.decode.url}/v1/completions", json=asked) as response:
        assert response.status == 404
    await freed(stack, stack.prefill)
    assert await stack.decode.sample(stack.http, ABORTED) == before[0] + 1
    assert await stack.decode.sample(stack.http, BAD_PARAMS) == before[1]
    assert await stack.prefill.sample(stack.http, ENDED, 'reason="dropped"') == before[2] + 1


async def a_client_leaves_while_its_request_waits(stack: Stack) -> None:
    """It is the last that waits for a slot. The lease is renewed until it leaves, and released then."""
    long = salted(greedy(await one_prompt(stack))) | {"max_tokens": 900, "ignore_eos": True}
    before = 2 * SLOTS
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(ask(stack, salted(long))) for _ in range(SLOTS + before)]
        await until(stack, stack.decode, WAITING, before)
        prompt = await one_prompt(stack)
        lent = await lend(stack, prompt)
        async with asking(stack, greedy(prompt) | {"kv_transfer_params": lent}):
            await until(stack, stack.decode, WAITING, before + 1)
            await asyncio.sleep(LEASE_S + 1.0)
            assert await stack.decode.sample(stack.http, WAITING) >= 1
            assert await stack.prefill.sample(stack.http, IN_USE) > 0, "the lease was renewed"
        await freed(stack, stack.prefill)
        for other in others:
            other.cancel()
    await stack.settled()


async def a_client_leaves_while_kv_is_pulled(stack: Stack) -> None:
    """The blocks stay until nothing can write to them any more."""
    prompt = await one_prompt(stack)
    lent = await lend(stack, prompt)
    with stack.prefill.ranks_stopped():
        async with asking(stack, greedy(prompt) | {"kv_transfer_params": lent}):
            await until(stack, stack.decode, IN_USE, 0.0)
    await stack.settled()


async def a_client_leaves_while_its_request_decodes(stack: Stack) -> None:
    long = salted(greedy(await one_prompt(stack))) | {"max_tokens": 900, "ignore_eos": True, "stream": True}
    async with stack.http.post(f"{stack.proxy_url}/v1/completions", json=long) as response:
        for _ in range(4):
            await response.content.readuntil(b"\n\n")
    await freed(stack, stack.decode)
    await stack.settled()


async def a_producer_stands_still(stack: Stack) -> None:
    prompt = await one_prompt(stack)
    [wanted] = await answers(stack.http, stack.prefill.url, [salted(greedy(prompt))])
    lent = await lend(stack, prompt)
    _, before = await stack.moved()
    with stack.prefill.engine_stopped():
        async with asyncio.timeout(patient(LEASE_S + 2 * PULL_TIMEOUT_S)):
            [found] = await answers(
                stack.http, stack.decode.url, [salted(greedy(prompt)) | {"kv_transfer_params": lent}]
            )
    found.assert_equal(wanted)
    assert (await stack.moved())[1] == before + 1


async def test_answers_outlive_preemption(tmp_path: Path) -> None:
    """The pool holds the prompts of all requests, and not their answers."""
    running, tokens = 8, 200
    async with started(tmp_path, num_blocks=44, max_running=running) as stack:
        prompts = [ids[: BLOCK * 3] for ids in await long_prompts(stack, running)]
        bodies = [greedy(ids) | {"max_tokens": tokens, "ignore_eos": True} for ids in prompts]
        wanted: list[Answer] = await answers(
            stack.http, stack.prefill.url, [salted(each) for each in bodies], 1
        )
        asked = [salted(each) | {"stream": bool(index % 2)} for index, each in enumerate(bodies)]
        assert_all_equal(await answers(stack.http, stack.proxy_url, asked, running), wanted)
        preempted = await stack.decode.sample(stack.http, PREEMPTED)
        print(f"{preempted:g} preemptions at the decode server")
        assert preempted > 0 and await stack.moved() == (running, 0)


def greedy(prompt: list[int]) -> dict[str, Any]:
    return body("", chat=False) | {"prompt": prompt, "temperature": 0}


async def long_prompts(stack: Stack, count: int) -> list[list[int]]:
    """Return prompts of more than four blocks, as ids."""
    texts = [prompt.prompt for prompt in heldout() if 4 * BLOCK < prompt.prompt_tokens < 400][:count]
    prompts = []
    for text in texts:
        asked = {"model": MODEL, "prompt": text}
        async with stack.http.post(f"{stack.prefill.url}/tokenize", json=asked) as response:
            prompts.append((await response.json())["tokens"])
    assert len(prompts) == count
    return prompts


async def one_prompt(stack: Stack) -> list[int]:
    [prompt] = await long_prompts(stack, 1)
    return prompt


async def lend(stack: Stack, prompt: list[int]) -> dict[str, Any]:
    """Have the prefill server compute a prompt and keep it; return what it answers for the decode server."""
    params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": secrets.token_hex(16)}
    asked = salted(greedy(prompt)) | {"max_tokens": 1, "kv_transfer_params": params}
    async with stack.http.post(f"{stack.prefill.url}/v1/completions", json=asked) as response:
        lent: dict[str, Any] = (await response.json())["kv_transfer_params"]
    await until(stack, stack.prefill, IN_USE, 0.0)
    return lent


async def ask(stack: Stack, asked: dict[str, Any]) -> None:
    async with stack.http.post(f"{stack.decode.url}/v1/completions", json=asked) as response:
        await response.read()


@asynccontextmanager
async def asking(stack: Stack, asked: dict[str, Any]) -> AsyncIterator[None]:
    """Have a client wait for the decode server's answer; it leaves at the end."""
    waiting = asyncio.create_task(ask(stack, salted(asked)))
    try:
        yield
        assert not waiting.done()
    finally:
        waiting.cancel()
        with suppress(asyncio.CancelledError, aiohttp.ClientError):
            await waiting


async def until(stack: Stack, server: VllmServer, name: str, least: float) -> None:
    """Wait until a figure is `least`, or more than that if it is 0."""
    async with asyncio.timeout(patient(30.0)):
        while not (value := await server.sample(stack.http, name)) or value < least:
            await asyncio.sleep(0.05)


async def freed(stack: Stack, server: VllmServer) -> None:
    """Wait until a server has no block in use."""
    async with asyncio.timeout(patient(FREED_S + PAGE_AGE_S)):
        while await server.sample(stack.http, IN_USE) > 0:
            await asyncio.sleep(0.05)

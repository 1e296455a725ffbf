# SPDX-License-Identifier: Apache-2.0
"""Agents whose KV goes over RDMA verbs: right answers, a decode agent killed in mid-read, and late readers.

One decode agent reads from two prefill agents, of one rank and of two, each behind a proxy of its own.
Everything is started once for each backend.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import pytest_asyncio

from kvferry.agent.config import START_TIMEOUT_S
from kvferry.deploy.launcher import Process, start_process
from tests.chaos.judge import Verdict, judge
from tests.chaos.test_late_reader import prefill
from tests.helpers.client import Answer, Prompt, RequestFailed, complete_all, heldout, session
from tests.helpers.metrics import scrape, settled, total, wait_idle
from tests.helpers.waiting import patient
from tests.rdma.forked_ranks import rank_server
from tests.standins import faults
from tests.system.conftest import COMMON_ARGS, MODEL, wait_ready

SUMS, RECALLS = 60, 40
"""Held-out prompts, the shortest of their kind: the emulated processor does some thirty tokens a second."""
PROMPTS = SUMS + RECALLS
CONCURRENCY = 16
ROUNDS = 5
LATE = 20
LATE_AT_ONCE = 10
POOL_BLOCKS = 48
FILLER = [5] * (POOL_BLOCKS * 16 - 1)
"""A prompt that overwrites every block of the prefill agent's pool, which holds `LATE_AT_ONCE` prompts."""
LEASE_S = 30.0
"""Long enough for a slow machine: the decode agent never renews, for the sake of the late readers."""
LONG_PROMPTS = 4
LONG_TOKENS = 500
COUNTERS = Path("/sys/class/infiniband/rxe0/ports/1/hw_counters")
PACKET_BYTES = 4096

pytestmark = [pytest.mark.asyncio(loop_scope="module")]


@dataclass(slots=True)
class Fleet:
    """The processes of one backend. `proxies` and `prefills` by the number of the prefill agent's ranks."""

    backend: str
    log_dir: Path
    stack: AsyncExitStack
    proxies: dict[int, Process]
    prefills: dict[int, Process]
    decode: Process | None = None

    async def start_decode(self) -> Process:
        """Start the decode agent, or its successor."""
        proxies = [
            f"--proxy=127.0.0.1:{proxy.listening['discovery_port']}" for proxy in self.proxies.values()
        ]
        self.decode = await self.start_agent("decode", 1, "--control-fault", "drop=1,only=renew", *proxies)
        return self.decode

    async def start_prefill(self, tp: int) -> None:
        proxy = f"--proxy=127.0.0.1:{self.proxies[tp].listening['discovery_port']}"
        pool = ("--kv-blocks", str(POOL_BLOCKS)) if tp == 1 else ()
        self.prefills[tp] = await self.start_agent("prefill", tp, proxy, *pool)

    async def meet(self, tp: int) -> None:
        """Ask until the KV of a prompt has moved.

        Two agents greet each other within five seconds, and here it may take longer to make queue pairs. Then
        the prompt is computed again, and the queue pairs are there for the next one.
        """
        await wait_ready(self.proxies[tp], patient(20))
        body = {"model": MODEL, "prompt": [5] * 40, "temperature": 0, "max_tokens": 4, "ignore_eos": True}
        async with asyncio.timeout(patient(60)):
            while True:
                (result,) = await complete_all(self.proxies[tp].url, [body], 1)
                print(f"\n{self.backend} tp{tp}-1: {result.timing if isinstance(result, Answer) else result}")
                if (
                    isinstance(result, Answer)
                    and result.timing["pull_bytes"]
                    and not result.timing["recomputed"]
                ):
                    return

    async def start_agent(self, role: str, tp: int, *more: str) -> Process:
        """Start one agent, and wait until it is ready."""
        argv = (
            "-m", faults.AGENT, "--role", role, "--model", MODEL, "--port", "0", "--control-port", "0",
            "--tp", str(tp), "--transfer", self.backend, "--lease-s", str(LEASE_S), "--pull-timeout-s", "120",
            "--transfer-options", os.environ.get("KVFERRY_TEST_TRANSFER_OPTIONS", ""), *COMMON_ARGS, *more,
        )  # fmt: skip
        return await self.start(f"{role}-tp{tp}", argv)

    async def start(self, name: str, argv: tuple[str, ...]) -> Process:
        process = await start_process(name, argv, self.log_dir)
        self.stack.push_async_callback(process.stop)
        if "agent" in argv[1]:
            await wait_ready(process, START_TIMEOUT_S)
        return process


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["mori", "nixl"])
async def fleet(request: pytest.FixtureRequest) -> AsyncIterator[Fleet]:
    log_dir = Path(os.environ["RESULTS"]) / "logs"
    async with AsyncExitStack() as stack:
        sockets = stack.enter_context(TemporaryDirectory())
        environment = await stack.enter_async_context(rank_server(Path(sockets) / "ranks"))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in environment.items():
            patch.setenv(name, value)
        made = Fleet(request.param, log_dir, stack, {}, {})
        for tp in (1, 2):
            proxy = ("-m", "tests.standins.patient_proxy", "--port", "0", "--discovery-port", "0")
            made.proxies[tp] = await made.start(f"proxy-tp{tp}", proxy)
            await made.start_prefill(tp)
        await made.start_decode()
        for tp in (1, 2):
            await made.meet(tp)
        yield made


def shortest(task: str, count: int) -> list[Prompt]:
    return sorted(heldout(task=task), key=lambda prompt: prompt.prompt_tokens)[:count]


async def ask(proxy: Process, asked: list[dict[str, Any]]) -> list[Answer]:
    """Every answer. What found no agent is asked again: an emulated machine may stand still for long."""
    answers: dict[int, Answer] = {}
    for _ in range(ROUNDS):
        await wait_ready(proxy, patient(20))
        left = [index for index in range(len(asked)) if index not in answers]
        results = await complete_all(proxy.url, [asked[index] for index in left], CONCURRENCY)
        for index, result in zip(left, results, strict=True):
            if isinstance(result, Answer):
                answers[index] = result
            else:
                assert isinstance(result, RequestFailed) and result.error.get("code") == "no_agent", result
        if len(answers) == len(asked):
            break
        print(f"\n{len(asked) - len(answers)} found no agent and are asked again")
    assert len(answers) == len(asked), "there was no agent again and again"
    return [answers[index] for index in range(len(asked))]


def packets() -> int:
    """What the device has sent: bytes of KV alone, as everything else goes over TCP."""
    return int((COUNTERS / "sent_pkts").read_text())


@pytest.mark.parametrize("tp", [1, 2], ids=["tp1-1", "tp2-1"])
async def test_a_hundred_prompts_are_right_and_their_kv_came_over_the_device(fleet: Fleet, tp: int) -> None:
    assert fleet.decode is not None
    prompts = [*shortest("addition", SUMS), *shortest("recall", RECALLS)]
    asked = [{"model": MODEL, "prompt": each.prompt, "temperature": 0, "max_tokens": 16} for each in prompts]
    sent, before = packets(), await scrape(fleet.decode.url)
    results = await ask(fleet.proxies[tp], asked)
    wrong = [
        (prompt.prompt, prompt.answer, result.choices[0].text)
        for prompt, result in zip(prompts, results, strict=True)
        if result.choices[0].text != prompt.answer
    ]
    moved = [result for result in results if len(result.choices[0].token_ids) > 1]
    nbytes = sum(result.timing["pull_bytes"] for result in moved)
    after = await settled(
        fleet.decode.url, "kvferry_transfer_bytes_total",
        int(total(before, "kvferry_transfer_bytes_total") + nbytes), timeout_s=patient(3),
    )  # fmt: skip
    right = PROMPTS - len(wrong)
    print(f"\n{fleet.backend} tp{tp}-1: {right} right, {nbytes} bytes in {packets() - sent} packets")
    assert not wrong
    assert {result.timing["backend"] for result in moved} == {fleet.backend}
    assert all(result.timing["pull_bytes"] > 0 and not result.timing["recomputed"] for result in moved)
    assert total(after, "kvferry_agent_recomputes_total") == total(before, "kvferry_agent_recomputes_total")
    assert packets() - sent >= nbytes // PACKET_BYTES
    for agent in (fleet.prefills[tp], fleet.decode):
        left = await wait_idle(agent.url, timeout_s=patient(3))
        assert left["used"] == left["leased"] == left["quarantined"] == 0, (agent.name, left)


async def test_a_reader_that_comes_after_the_blocks_were_reused(fleet: Fleet) -> None:
    """I1, twenty times: the lease is gone, and the prompt is computed again."""
    assert fleet.decode is not None
    asked = [
        {
            "model": MODEL,
            "prompt": each.prompt,
            "temperature": 1.0,
            "seed": index,
            "max_tokens": 8,
            "ignore_eos": True,
        }
        for index, each in enumerate(shortest("recall", LATE))
    ]
    references = await complete_all(
        fleet.decode.url, [{**body, "logprobs": 0} for body in asked], CONCURRENCY
    )
    before = await expired(fleet.decode)
    verdicts: Counter[Verdict] = Counter()
    async with session() as http:
        for first in range(0, LATE, LATE_AT_ONCE):
            batch = asked[first : first + LATE_AT_ONCE]
            legs = await asyncio.gather(*(prefill(http, fleet.prefills[1], body) for body in batch))
            assert not (await wait_idle(fleet.prefills[1].url, LEASE_S + patient(5)))["leased"]
            (filled,) = await complete_all(
                fleet.prefills[1].url, [{"model": MODEL, "prompt": FILLER, "max_tokens": 1}], 1
            )
            assert isinstance(filled, Answer), filled
            results = await complete_all(fleet.decode.url, legs, CONCURRENCY)
            for result, reference in zip(results, references[first : first + LATE_AT_ONCE], strict=True):
                assert isinstance(reference, Answer), reference
                verdicts[judge(result, reference)] += 1
    print(f"\n{fleet.backend}: {dict(verdicts)}")
    assert verdicts.keys() <= {Verdict.RIGHT, Verdict.TIE}
    assert verdicts[Verdict.RIGHT] >= 0.95 * LATE
    assert await expired(fleet.decode) - before == LATE


async def expired(decode: Process) -> int:
    await asyncio.sleep(patient(1))  # counters reach the page within a second
    return int(total(await scrape(decode.url), "kvferry_transfer_failures_total", reason="lease_expired"))


async def test_a_decode_agent_killed_in_mid_read(fleet: Fleet) -> None:
    """I3, I5: nobody hangs, its prefill agent gets every block back, and its successor is served."""
    assert fleet.decode is not None
    asked = [
        {
            "model": MODEL,
            "prompt": [5 + index] * LONG_TOKENS,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
        }
        for index in range(LONG_PROMPTS)
    ]
    blocks = LONG_PROMPTS * LONG_TOKENS // 16
    await wait_ready(fleet.proxies[2], patient(20))
    sent = packets()
    running = asyncio.ensure_future(complete_all(fleet.proxies[2].url, asked, LONG_PROMPTS))
    async with asyncio.timeout(patient(60)):
        while packets() - sent < 32:
            assert not running.done(), running.result()
            await asyncio.sleep(0.005)
    os.kill(fleet.decode.pid, signal.SIGKILL)
    await fleet.decode.process.wait()
    gauges = await settled(
        fleet.prefills[2].url, "kvferry_agent_kv_blocks", 1, timeout_s=patient(1), state="leased"
    )  # a second old, and the leases last for longer
    leased = total(gauges, "kvferry_agent_kv_blocks", state="leased")
    print(
        f"\n{fleet.backend}: killed after {packets() - sent} packets, {leased:.0f} of {blocks} blocks leased"
    )
    assert leased, "it had read everything"
    results = await asyncio.wait_for(running, patient(60))
    assert all(isinstance(result, Answer | RequestFailed) for result in results), results
    left = await wait_idle(fleet.prefills[2].url, LEASE_S + patient(3))
    assert left["used"] == left["leased"] == left["quarantined"] == 0, left
    await fleet.start_decode()
    await fleet.meet(2)
    again = await ask(fleet.proxies[2], asked[:1])
    assert again[0].timing["backend"] == fleet.backend and not again[0].timing["recomputed"]

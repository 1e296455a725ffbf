# SPDX-License-Identifier: Apache-2.0
"""I4: prefill and decode apart give the answers of one agent with role `both`.

A cell is (TP of prefill and decode, backend, sampling, n, task). At equal TP everything is equal bit for bit;
elsewhere the only excuse is a tie at the first differing position. Every cell also proves that KV moved.
`make test` takes 40 prompts a cell, `make test-full` 500. Once KV is pulled, its backend matters no more, so
`make test` has all cells of each pair of TP sizes over one backend, and a few short ones over the other.
A cell's requests are sent sixteen at a time. The short form runs all cells of a task side by side, which
mixes them in the steps: fewer and larger ones cost less.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from filelock import AsyncFileLock

from kvferry.deploy.launcher import Process, start_process
from tests.helpers.client import Answer, Choice, Prompt, complete_all, heldout
from tests.helpers.commands import PROXY
from tests.helpers.metrics import STATS_S, scrape, total, wait_idle
from tests.system.conftest import COMMON_ARGS, MODEL, StartAgent, wait_ready

CONCURRENCY = 16
TIE = 1e-4
MAX_TIES = 2
REFERENCE_S = 900.0
BLOCK_TOKENS = 16
# layers × (K, V) × KV heads × head_dim × tokens × bytes of float32, of the bundled model
BLOCK_BYTES = 4 * 2 * 4 * 32 * BLOCK_TOKENS * 4
SMALL, FULL = 40, 500
SHORT_TOKENS = 80

Cell = tuple[str, int, str]
"""Sampling, n, task."""
PairKey = tuple[tuple[int, int], str]
"""TP of prefill and of decode, backend."""
AgentKey = tuple[str, int, str]
"""Role, TP, `--transfer`."""
TOPOLOGIES = [(1, 1), (2, 1), (1, 2), (2, 2)]
"""In this order no more than eight ranks live at once; see `Fleet`."""
BACKENDS = ["tcp", "nixl"]
SAMPLINGS = {"greedy": 0.0, "t1": 1.0, "t2": 2.0}
TASKS = ("answers", "ignore_eos")
CELLS: list[Cell] = list(itertools.product(SAMPLINGS, (1, 4), TASKS))
FEW_CELLS: list[Cell] = [("greedy", 1, "answers"), ("t1", 4, "answers"), ("t2", 1, "answers")]
# Room for all of them, for none to wait or to be preempted: 96 requests, of which half have four choices.
ROOM = ("--max-num-seqs", "240", "--kv-blocks", "4096")

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600), pytest.mark.long]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One prefill and one decode agent, and the proxy that knows only these two."""

    prefill_tp: int
    decode_tp: int
    backend: str
    proxy: Process
    prefill: Process
    decode: Process


def prompts(task: str, count: int) -> list[Prompt]:
    """The prompts of a cell: all 500, or a spread of them in which short ones are commoner.

    Long answers go with prompts of at most SHORT_TOKENS in the short form, because a decode step costs
    what its context costs; `make test-full` has no such limit.
    """
    every = sorted(heldout(), key=lambda prompt: prompt.prompt_tokens)
    if count == FULL:
        return every
    if task == "ignore_eos":
        every = [prompt for prompt in every if prompt.prompt_tokens <= SHORT_TOKENS]
    return [every[int(len(every) * (index / count) ** 2)] for index in range(count)]


def bodies(sampling: str, n: int, task: str, count: int, *, logprobs: bool = True) -> list[dict[str, Any]]:
    """The requests of one cell. Every third is streamed; seeds are fixed."""
    made = []
    for index, prompt in enumerate(prompts(task, count)):
        body = {
            "model": "ferry-tiny",
            "prompt": prompt.prompt,
            "temperature": SAMPLINGS[sampling],
            "seed": 1000 + index,
            "n": n,
            "logprobs": 0 if logprobs else None,
            "stream": index % 3 == 0,
            "max_tokens": 16,
        }
        if task == "ignore_eos":
            body |= {"max_tokens": 96 if count == FULL else 64, "ignore_eos": True}
        made.append(body)
    return made


class References:
    """Answers of one agent with role `both`, computed once per (TP, cell), whatever worker needs them."""

    def __init__(self, start_agent: StartAgent, folder: Path, stack: AsyncExitStack) -> None:
        self._start_agent = start_agent
        self._folder = folder
        self._stack = stack
        self._agents: dict[int, Process] = {}
        self._starting = asyncio.Lock()

    async def get(self, tp: int, cell: Cell, count: int) -> list[Answer]:
        path = self._folder / f"{tp}-{count}-{'-'.join(map(str, cell))}.json"
        async with AsyncFileLock(f"{path}.lock", timeout=REFERENCE_S):
            if not path.exists():
                answers = await complete_all((await self._agent(tp)).url, bodies(*cell, count), CONCURRENCY)
                path.write_bytes(msgspec.json.encode(expect_answers(answers)))
                if len(list(self._folder.glob(f"{tp}-{count}-*.json"))) == len(CELLS):
                    await self._agents.pop(tp).stop()  # nobody will ask it again, and memory is short
        return msgspec.json.decode(path.read_bytes(), type=list[Answer])

    async def _agent(self, tp: int) -> Process:
        async with self._starting:
            if tp not in self._agents:
                starting = self._start_agent("--tp", str(tp), *ROOM)
                self._agents[tp] = await self._stack.enter_async_context(starting)
        return self._agents[tp]


def expect_answers(results: list[Any]) -> list[Answer]:
    failed = [result for result in results if not isinstance(result, Answer)]
    assert not failed, failed[:3]
    return results


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def references(
    start_agent: StartAgent, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[References]:
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = shared / "references"
    folder.mkdir(exist_ok=True)
    async with AsyncExitStack() as stack:
        yield References(start_agent, folder, stack)


PAIRS = list(itertools.product(TOPOLOGIES, BACKENDS))


def pair_name(key: PairKey) -> str:
    return f"tp{key[0][0]}-{key[0][1]}-{key[1]}"


def agents_of(key: PairKey) -> tuple[AgentKey, AgentKey]:
    """The prefill and the decode agent of a pair."""
    (prefill_tp, decode_tp), backend = key
    return ("prefill", prefill_tp, "auto"), ("decode", decode_tp, backend)


class Fleet:
    """Every pair from six agents, each started when first needed, and stopped when no later pair needs it.

    An agent announces itself to the proxy of each pair it is in, so that one prefill agent serves four pairs:
    starting each pair by itself would import torch two to four times for every one of the eight.
    """

    def __init__(self, log_dir: Path, stack: AsyncExitStack) -> None:
        self._log_dir = log_dir
        self._stack = stack
        self._proxies: dict[PairKey, Process] = {}
        self._agents: dict[AgentKey, Process] = {}

    async def start_proxies(self) -> None:
        for key in PAIRS:
            pairs = ("--decode-only-fallback", "false")  # so that it is ready with a pair, and not before
            self._proxies[key] = await self._start(f"proxy-{pair_name(key)}", *PROXY, *pairs)

    async def pair(self, key: PairKey) -> Pair:
        (prefill_tp, decode_tp), backend = key
        still = {agent for later in PAIRS[PAIRS.index(key) :] for agent in agents_of(later)}
        for agent in self._agents.keys() - still:
            await self._agents.pop(agent).stop()
        prefill, decode = [await self._agent(agent) for agent in agents_of(key)]
        await wait_ready(self._proxies[key])
        return Pair(prefill_tp, decode_tp, backend, self._proxies[key], prefill, decode)

    async def _agent(self, key: AgentKey) -> Process:
        if key not in self._agents:
            role, tp, transfer = key
            served = [self._proxies[pair] for pair in PAIRS if key in agents_of(pair)]
            argv = (
                "-m",
                "kvferry.agent",
                "--role",
                role,
                "--model",
                MODEL,
                "--port",
                "0",
                "--control-port",
                "0",
            )
            flags = ("--tp", str(tp), "--transfer", transfer, *ROOM, *COMMON_ARGS)
            announce = (f"--proxy=127.0.0.1:{proxy.listening['discovery_port']}" for proxy in served)
            self._agents[key] = await self._start(f"{role}-{tp}-{transfer}", *argv, *flags, *announce)
        return self._agents[key]

    async def _start(self, name: str, *argv: str) -> Process:
        process = await start_process(name, argv, self._log_dir)
        self._stack.push_async_callback(process.stop)
        return process


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(log_dir: Path) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        fleet = Fleet(log_dir / "equality", stack)
        await fleet.start_proxies()
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(request: pytest.FixtureRequest, fleet: Fleet) -> Pair:
    return await fleet.pair(request.param)


def cells_at_once() -> list[object]:
    """Each pair's cells of a task side by side. The backends take turns in having all of them."""
    by_task = [[cell for cell in CELLS if cell[2] == task] for task in TASKS]
    thorough = set(zip(TOPOLOGIES, itertools.cycle(BACKENDS), strict=False))
    return [one_test(key, cells) for key in PAIRS for cells in (by_task if key in thorough else [FEW_CELLS])]


def every_cell() -> list[object]:
    """Each pair's cells. Every pair begins with another, so that workers need different references first."""
    return [
        one_test(key, [CELLS[(number + shift) % len(CELLS)]])
        for shift, key in enumerate(PAIRS)
        for number in range(len(CELLS))
    ]


def one_test(key: PairKey, cells: list[Cell]) -> object:
    name = pair_name(key)
    return pytest.param(key, cells, id=f"{name}-{cells_name(cells)}", marks=pytest.mark.xdist_group(name))


def cells_name(cells: list[Cell]) -> str:
    """For example `greedy-n1-answers`, or `greedy+t1+t2-n1+4-answers` of six."""
    samplings, counts, tasks = ("+".join(map(str, dict.fromkeys(part))) for part in zip(*cells, strict=True))
    return f"{samplings}-n{counts}-{tasks}"


def first_difference(ours: Choice, theirs: Choice) -> int | None:
    """Position of the first differing token, or None when the choices are equal."""
    for position, (left, right) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)):
        if left != right:
            return position
    if len(ours.token_ids) != len(theirs.token_ids):
        return min(len(ours.token_ids), len(theirs.token_ids))
    return None


def ties(ours: Answer, theirs: Answer) -> int:
    """Number of choices excused by a tie. Raises AssertionError on any other difference."""
    assert ours.choices.keys() == theirs.choices.keys()
    excused = 0
    for index, choice in ours.choices.items():
        other = theirs.choices[index]
        position = first_difference(choice, other)
        if position is None:
            assert (choice.text, choice.finish_reason) == (other.text, other.finish_reason)
            continue
        margin = other.margins[position]
        assert margin is not None and margin < TIE, (position, margin, choice.token_ids, other.token_ids)
        excused += 1
    return excused


async def check_moved(pair: Pair, before: dict[str, float], answers: list[Answer]) -> None:
    """Every decode leg pulled exactly its prompt's blocks over the asked backend, and none recomputed."""
    expected = 0
    for answer in answers:
        if all(len(choice.token_ids) == 1 for choice in answer.choices.values()):
            continue
        blocks = -(-answer.prompt_tokens // BLOCK_TOKENS)
        assert answer.timing["pull_bytes"] == blocks * BLOCK_BYTES
        assert answer.timing["backend"] == pair.backend
        assert not answer.timing["recomputed"]
        expected += blocks * BLOCK_BYTES
    # Counters reach /metrics with the engine's next snapshot, at most a second later.
    deadline = time.monotonic() + STATS_S
    while (after := await counters(pair))["bytes"] - before["bytes"] != expected:
        assert time.monotonic() < deadline, (after, before, expected)
        await asyncio.sleep(0.1)
    assert after["recomputes"] == before["recomputes"]
    assert after["integrity_errors"] == 0


async def counters(pair: Pair) -> dict[str, float]:
    samples = await scrape(pair.decode.url)
    prefill = await scrape(pair.prefill.url)
    return {
        "bytes": total(samples, "kvferry_transfer_bytes_total"),
        "recomputes": total(samples, "kvferry_agent_recomputes_total"),
        "integrity_errors": total(samples, "kvferry_agent_integrity_errors_total")
        + total(prefill, "kvferry_agent_integrity_errors_total"),
    }


async def check_cells(pair: Pair, references: References, cells: list[Cell], count: int) -> None:
    """Run the cells side by side, and compare each with its reference."""
    before = await counters(pair)
    async with asyncio.TaskGroup() as group:  # whose cells do not run on, into the next test, when one fails
        compared = [group.create_task(compare_cell(pair, references, cell, count)) for cell in cells]
    await check_moved(pair, before, [answer for task in compared for answer in task.result()])
    for agent in (pair.prefill, pair.decode):
        left = await wait_idle(agent.url, timeout_s=5.0)
        assert left["used"] == left["leased"] == left["quarantined"] == 0, (agent.name, left)


async def compare_cell(pair: Pair, references: References, cell: Cell, count: int) -> list[Answer]:
    """The pair's answers, which are those of one agent; at equal TP their logprobs are, too."""
    equal_tp = pair.prefill_tp == pair.decode_tp
    results, theirs = await asyncio.gather(
        complete_all(pair.proxy.url, bodies(*cell, count, logprobs=equal_tp), CONCURRENCY),
        references.get(pair.decode_tp if equal_tp else 1, cell, count),
    )
    ours = expect_answers(results)
    if equal_tp:
        different = [index for index in range(count) if ours[index].same() != theirs[index].same()]
        assert not different, (ours[different[0]], theirs[different[0]])
    else:
        excused = sum(ties(left, right) for left, right in zip(ours, theirs, strict=True))
        print(f"{cell}: {excused} choices excused by a tie")
        assert excused <= MAX_TIES
    if cell[0] == "greedy" and cell[2] == "answers":
        for answers in (ours, theirs):
            assert exact_match(answers, count) >= 0.97
    return ours


def exact_match(answers: list[Answer], count: int) -> float:
    """Share of first choices that give the task's answer."""
    wanted = [prompt.answer for prompt in prompts("answers", count)]
    return sum(answer.choices[0].text == want for answer, want in zip(answers, wanted, strict=True)) / count


@pytest.mark.parametrize(("pair", "cells"), cells_at_once(), indirect=["pair"])
async def test_apart_equals_together(pair: Pair, references: References, cells: list[Cell]) -> None:
    await check_cells(pair, references, cells, SMALL)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("pair", "cells"), every_cell(), indirect=["pair"])
async def test_apart_equals_together_on_500_prompts(
    pair: Pair, references: References, cells: list[Cell]
) -> None:
    await check_cells(pair, references, cells, FULL)

# SPDX-License-Identifier: Apache-2.0
"""One chaos run: requests go through a cluster whose agents are killed, stopped and cut off meanwhile.

Each answer is compared with that of one agent that does everything alone and undisturbed. After every round
of requests the agents must hold no block once a lease and a second are over.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from kvferry.deploy.launcher import Cluster, start_process
from tests.chaos.judge import ClientLeft, Tally
from tests.chaos.plan import ROLES, ROUND_REQUESTS, Ask, Round, Strike, make_questions, make_rounds
from tests.chaos.victims import LEASE_S, MODEL, MORI_FAULT, OutlivedItself, library, make_spec, revive, strike
from tests.helpers.client import Answer, RequestFailed, StreamCut, complete, complete_all, session
from tests.helpers.commands import AGENT
from tests.helpers.metrics import PAGE_AGE_S, scrape, total, wait_idle
from tests.system.conftest import wait_ready

CONCURRENCY = 12
DEADLINE_S = 90.0
READY_S = 120.0
_COUNTED = (
    "kvferry_agent_recomputes_total",
    "kvferry_transfer_pulls_total",
    "kvferry_transfer_failures_total",
    "kvferry_transfer_leases_ended_total",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """A run in a few figures; the same figures make the same choices."""

    seed: int
    requests: int
    questions: int
    stop_s: tuple[float, float]
    round_size: int = ROUND_REQUESTS
    decode_tp: int = 1
    """Ranks of each decode agent; a prefill agent has one."""

    def rounds(self) -> list[Round]:
        """What is asked and struck."""
        return make_rounds(self.seed, self.requests, self.questions, self.stop_s, self.round_size)

    def command(self, backend: str) -> str:
        """How to repeat the run over one backend."""
        low, high = self.stop_s
        shape = f"--requests {self.requests} --questions {self.questions} --round-size {self.round_size}"
        shape += f" --stop-s {low} {high} --decode-tp {self.decode_tp}"
        return f"python -m tests.chaos --seed {self.seed} {shape} --backend {backend}"


@dataclass(slots=True)
class _Progress:
    """How many requests of the round have begun, for the strikes that wait for it."""

    begun: int = 0
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def count(self) -> None:
        async with self.changed:
            self.begun += 1
            self.changed.notify_all()

    async def reach(self, count: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.begun >= count)


async def ask_alone(settings: Settings, log_dir: Path) -> list[Answer]:
    """The right answer to every question, from one undisturbed agent with role `both`."""
    argv = (*AGENT, "--role", "both", "--model", MODEL)
    agent = await start_process("alone", (*argv, "--prefix-cache", "false", "--threads", "1"), log_dir)
    try:
        await wait_ready(agent)
        # Only with log probabilities does an agent tell its margins.
        bodies = [{**body, "logprobs": 0} for body in make_questions(settings.seed, settings.questions)]
        answers = await complete_all(agent.url, bodies, CONCURRENCY)
    finally:
        await agent.stop()
    assert all(isinstance(answer, Answer) for answer in answers), answers
    return [answer for answer in answers if isinstance(answer, Answer)]


async def run(
    settings: Settings,
    backend: str,
    references: list[Answer],
    log_dir: Path,
    progress: Callable[[str], None] = lambda _: None,
) -> Tally:
    """All rounds of one run, over one backend. `progress` is told how far it is after each."""
    tally, started = Tally(), time.monotonic()
    questions = make_questions(settings.seed, settings.questions)
    rounds = settings.rounds()
    with library(backend, MORI_FAULT):
        async with Cluster(make_spec(settings.seed, backend, settings.decode_tp, log_dir)) as cluster:
            await cluster.wait_ready(READY_S)
            under_way = _Run(cluster, questions, references, tally)
            for number, each in enumerate(rounds, start=1):
                await under_way.round(each)
                took_s = time.monotonic() - started
                progress(f"{backend}: round {number} of {len(rounds)}, {took_s:.0f} s, {tally.summary()}")
    for counts in under_way.counts.values():
        tally.events.update(counts)
    tally.events["tracebacks in logs"] = _tracebacks(log_dir)
    return tally


def _tracebacks(log_dir: Path) -> int:
    return sum(log.read_text(errors="replace").count("Traceback (most") for log in log_dir.glob("*.log"))


@dataclass(slots=True)
class _Run:
    cluster: Cluster
    questions: list[dict[str, Any]]
    references: list[Answer]
    tally: Tally
    counts: dict[int, Counter[str]] = field(default_factory=dict)
    """What each agent has counted by now, by its process id."""

    async def round(self, round_: Round) -> None:
        """Ask and strike, wait until every agent serves again, and look for what is left over."""
        progress, queue = _Progress(), deque(round_.asks)
        async with session() as http, asyncio.TaskGroup() as tasks:
            for _ in range(CONCURRENCY):
                tasks.create_task(self._client(http, queue, progress))
            for role in ROLES:  # at most one agent of a role is down at a time
                mine = [each for each in round_.strikes if each.agent in ROLES[role]]
                tasks.create_task(self._strikes(mine, progress))
        await self._revive_the_dead()
        for agent in self.cluster.agents.values():
            await wait_ready(agent)  # the proxy may still take a killed agent's word for its successor's
        await self.cluster.wait_ready(READY_S)
        await self._check_nothing_left()

    async def _client(self, http: aiohttp.ClientSession, queue: deque[Ask], progress: _Progress) -> None:
        while queue:
            ask = queue.popleft()
            await progress.count()
            started = time.monotonic()
            result = await self._ask(http, ask)
            what = f"question {ask.question}, stream {ask.stream}, {time.monotonic() - started:.1f} s"
            self.tally.add(what, result, self.references[ask.question])

    async def _ask(self, http: aiohttp.ClientSession, ask: Ask) -> object:
        """One request's answer, or what became of it instead."""
        body = {**self.questions[ask.question], "stream": ask.stream}
        try:
            async with asyncio.timeout(DEADLINE_S if ask.leave_s is None else ask.leave_s):
                return await complete(http, self.cluster.url, body)
        except TimeoutError as error:
            return error if ask.leave_s is None else ClientLeft()
        except (RequestFailed, StreamCut, aiohttp.ClientError, AssertionError, ValueError, KeyError) as error:
            return error

    async def _strikes(self, strikes: list[Strike], progress: _Progress) -> None:
        for each in strikes:
            await progress.reach(each.after)
            if self.cluster.agents[each.agent].process.returncode is not None:
                continue  # it died by itself: a complaint at the end of the round
            self.tally.events[f"{each.blow} {each.part} of {each.agent}"] += 1
            try:
                await strike(self.cluster, each)
            except OutlivedItself as error:
                self.tally.wrongs.append(str(error))

    async def _revive_the_dead(self) -> None:
        """Those killed on purpose live again by now; any other death is a defect."""
        for name, agent in list(self.cluster.agents.items()):
            if (status := agent.process.returncode) is not None:
                self.tally.wrongs.append(f"{name} died by itself, status {status}: {agent.log_tail()}")
                await revive(self.cluster, name)

    async def _check_nothing_left(self) -> None:
        """Blocks of every agent, all at once: the lease and a second count from now."""
        agents = self.cluster.agents.values()
        held = await asyncio.gather(*(wait_idle(agent.url, LEASE_S + 1.0 + PAGE_AGE_S) for agent in agents))
        for agent, blocks in zip(agents, held, strict=True):
            if blocks["used"] or blocks["leased"] or blocks["quarantined"]:
                self.tally.wrongs.append(f"left over at {agent.name}: {blocks}")
            samples = await scrape(agent.url)
            if total(samples, "kvferry_agent_integrity_errors_total"):
                self.tally.wrongs.append(f"block accounting of {agent.name} is wrong")
            self.counts[agent.pid] = Counter(
                {
                    " ".join([agent.name.split("-")[0], name, *dict(labels).values()]): int(value)
                    for (name, labels), value in samples.items()
                    if name in _COUNTED
                }
            )

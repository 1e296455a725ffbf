# SPDX-License-Identifier: Apache-2.0
"""Ordinary load at concurrency 32 while every attack of the table goes on, over and over: `make soak`.

Each ordinary answer is compared with that of one agent that does everything alone and undisturbed. Memory and
descriptors of every process are sampled all the time: after the warm-up they must be flat.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from kvferry.deploy.launcher import Cluster
from tests.abuse.attacks import ATTACKS, Target
from tests.abuse.watch import family
from tests.chaos.judge import Verdict, judge
from tests.helpers.client import Answer, RequestFailed, StreamCut, complete, session

CONCURRENCY = 32
ATTACKERS = 2
FLOOD_S = 3.0
SAMPLE_S = 1.0
WARM_UP = 0.4
"""The share of the run after which memory and descriptors must be flat."""
MAX_GROWTH, GROWTH_ROOM = 0.05, 8 * 2**20
"""How much more memory a process may have at the end than after the warm-up: a share, and bytes."""
DESCRIPTOR_ROOM = 8


@dataclass(frozen=True, slots=True)
class Sample:
    """One process at one moment: seconds since the start, bytes, open descriptors."""

    at: float
    rss: int
    descriptors: int


@dataclass(slots=True)
class Course:
    """One process over the run."""

    samples: list[Sample] = field(default_factory=list)

    def fifths(self) -> tuple[list[Sample], list[Sample]]:
        """The fifth of the run after the warm-up, and the last one."""
        end = self.samples[-1].at
        first = [each for each in self.samples if WARM_UP <= each.at / end < WARM_UP + 0.2]
        return first, [each for each in self.samples if each.at / end >= 0.8]

    def slope(self) -> float:
        """Bytes a minute after the warm-up, as least squares have it."""
        late = [each for each in self.samples if each.at >= WARM_UP * self.samples[-1].at]
        if len(late) < 2:
            return 0.0
        return (
            60 * statistics.linear_regression([each.at for each in late], [each.rss for each in late]).slope
        )


@dataclass(slots=True)
class Figures:
    """What came of a run."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    attacks: Counter[str] = field(default_factory=Counter)
    courses: dict[str, Course] = field(default_factory=dict)

    def complaints(self, *, flat: bool) -> list[str]:
        """Why the run has failed; `flat`: it was long enough to speak of memory."""
        found = list(self.wrongs)
        for name, course in self.courses.items() if flat else ():
            early, late = course.fifths()
            was, now = (statistics.median(each.rss for each in part) for part in (early, late))
            if now > was * (1 + MAX_GROWTH) + GROWTH_ROOM:
                found.append(f"{name} grew from {was / 2**20:.1f} to {now / 2**20:.1f} MiB")
            was, now = (statistics.median(each.descriptors for each in part) for part in (early, late))
            if now > was + DESCRIPTOR_ROOM:
                found.append(f"{name} had {was} descriptors and then {now}")
        return found

    def gap(self, share: float) -> float:
        """A quantile of the streams' gaps, in seconds."""
        return sorted(self.gaps)[int(share * (len(self.gaps) - 1))] if self.gaps else 0.0

    def table(self) -> str:
        """The figures, as Markdown."""
        answers = ", ".join(f"{count} {verdict}" for verdict, count in self.verdicts.items())
        lines = [
            f"- ordinary requests: {self.verdicts.total()}: {answers}",
            f"- gaps of their streams: p50 {self.gap(0.5):.3f} s, p99 {self.gap(0.99):.3f} s, "
            f"p99.9 {self.gap(0.999):.3f} s, longest {self.gap(1.0):.2f} s",
            f"- attacks: {self.attacks.total()}, at least {min(self.attacks.values(), default=0)} of a kind",
            "",
            "| process | MiB after warm-up | at the end | KiB/min | descriptors after warm-up | at the end |",
            "|---|---|---|---|---|---|",
        ]
        for name, course in self.courses.items():
            early, late = course.fifths()
            rss = [statistics.median(each.rss for each in part) / 2**20 for part in (early, late)]
            open_files = [statistics.median(each.descriptors for each in part) for part in (early, late)]
            lines.append(
                f"| {name} | {rss[0]:.1f} | {rss[1]:.1f} | {course.slope() / 1024:+.0f} "
                f"| {open_files[0]:.0f} | {open_files[1]:.0f} |"
            )
        return "\n".join(lines)


async def soak(
    cluster: Cluster,
    seconds: float,
    questions: Sequence[dict[str, Any]],
    references: Sequence[Answer],
    seed: int,
    attacks: Sequence[int] = range(len(ATTACKS)),
) -> Figures:
    """Load and attack a cluster. `references` are the right answers to the questions."""
    figures = Figures()
    actions = {f"{ATTACKS[index].id} {ATTACKS[index].name}": ATTACKS[index].make() for index in attacks}
    agent = next(process.url for name, process in cluster.agents.items() if name.startswith("decode"))
    target = Target(
        urls={"proxy": cluster.url, "agent": agent},
        discovery=f"127.0.0.1:{cluster.proxy.listening['discovery_port']}",
        flood_s=FLOOD_S,
    )
    end = time.monotonic() + seconds
    draw = random.Random(seed)

    async def client(http: aiohttp.ClientSession) -> None:
        while time.monotonic() < end:
            index, stream = draw.randrange(len(questions)), draw.random() < 0.75
            result: object
            try:
                result = await complete(http, cluster.url, {**questions[index], "stream": stream})
            except (RequestFailed, StreamCut, aiohttp.ClientError, TimeoutError, AssertionError) as error:
                result = error
            verdict = judge(result, references[index])
            figures.verdicts[verdict] += 1
            if verdict not in (Verdict.RIGHT, Verdict.TIE):
                figures.wrongs.append(f"{verdict}: question {index}, stream {stream}: {result!r}")
            if isinstance(result, Answer):
                figures.gaps += result.gaps

    async def attacker() -> None:
        for name in itertools.chain.from_iterable(
            draw.sample(sorted(actions), len(actions)) for _ in itertools.count()
        ):
            if time.monotonic() >= end:
                return
            figures.attacks[name] += 1
            try:
                # In a thread: a stall of this loop would look like one of theirs.
                await asyncio.to_thread(asyncio.run, actions[name](target))
            except (AssertionError, OSError, TimeoutError, aiohttp.ClientError) as error:
                figures.wrongs.append(f"attack {name}: {error!r}")

    async with session() as http, asyncio.TaskGroup() as tasks:
        sampling = tasks.create_task(_sample(family(cluster.processes), figures.courses))
        clients = [tasks.create_task(client(http)) for _ in range(CONCURRENCY)]
        attackers = [tasks.create_task(attacker()) for _ in range(ATTACKERS)]
        await asyncio.wait([*clients, *attackers])
        sampling.cancel()
    return figures


async def _sample(members: dict[str, psutil.Process], courses: dict[str, Course]) -> None:
    start = time.monotonic()
    while True:
        for name, member in members.items():
            sample = Sample(time.monotonic() - start, member.memory_info().rss, member.num_fds())
            courses.setdefault(name, Course()).samples.append(sample)
        await asyncio.sleep(SAMPLE_S)

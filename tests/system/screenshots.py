# SPDX-License-Identifier: Apache-2.0
"""Pictures of the operator's page over stand-in agents: `python -m tests.system.screenshots docs/images`.

With Debian's pngquant installed they are made small.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import sys
import tempfile
from pathlib import Path

from kvferry.proxy.api.operator.commands import OperatorApi
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.server import running_proxy
from kvferry.proxy.telemetry.event_log import EventKind
from kvferry.proxy.telemetry.history import SLICE_S, History
from kvferry.proxy.telemetry.metrics import Metrics, Totals
from kvferry.proxy.wire.registration import PULL_BUCKETS
from tests.helpers.client import complete_all
from tests.standins.agents import StandInAgent
from tests.standins.pinging_fleet import PingingFleet
from tests.system.browser import Page, open_page

FLEETS = (4, 200)
SHOTS = [
    (screen, width, scheme)
    for screen, width in (("desktop", 1280), ("phone", 390))
    for scheme in ("light", "dark")
]
COLOURS = 64


def invented_history(agents: int) -> History:
    """An hour of traffic with a load that rises and falls, and an agent that is lost in it."""
    history, metrics, random_ = History(PULL_BUCKETS), Metrics(), random.Random(22)
    pulls, totals = [0] * (len(PULL_BUCKETS) + 1), Totals()
    for step in range(1800):
        load = agents * (1.5 + math.sin(step / 40) + 0.3 * random_.random())
        is_lost = 1690 < step < 1700
        for _ in range(round(load)):
            metrics.of_model("").ttft.observe(0.05 * random_.lognormvariate(0, 0.5) * (3 if is_lost else 1))
            metrics.of_model("").tpot.observe(0.012 * random_.lognormvariate(0, 0.2))
            metrics.of_model("").itl.observe(0.011 * random_.lognormvariate(0, 0.4))
            metrics.ended("completions", 502 if is_lost and random_.random() < 0.1 else 200)
        if step % 37 == 0:
            metrics.ended("completions", 400)
        if step % 53 == 0:
            metrics.ended("completions", 429)
        metrics.events += round(load * 90)
        queued = round(max(0.0, load - agents * 2.2))
        metrics.queue_length.add("", queued - metrics.queue_length.counts()[""])
        if is_lost:
            metrics.migrations.inc(2)
            metrics.retries.labels("decode").inc(1)
        for bucket, share in ((3, 0.5), (4, 0.4), (6, 0.1)):
            pulls[bucket] += round(load * share)
        totals = Totals(
            pulls=list(pulls),
            pull_bytes=totals.pull_bytes + round(load * 130e6),
            pull_failures=totals.pull_failures + is_lost,
            recomputes=totals.recomputes + is_lost,
            prompt_tokens=totals.prompt_tokens + round(load * 900),
            cached_tokens=totals.cached_tokens + round(load * (350 + 100 * math.sin(step / 90))),
        )
        history.record(metrics.totals().plus(totals), step * SLICE_S)
    return history


async def shoot(page: Page, folder: Path, agents: int) -> None:
    """Take the pictures of a fleet."""
    async with running_proxy(ProxyConfig(port=0, discovery_port=0, breaker_failures=3)) as proxy:
        views: OperatorApi = proxy.services.views
        views._history = invented_history(agents)
        discovery = f"127.0.0.1:{proxy.discovery_port}"
        fleet = PingingFleet(discovery, agents, interval_s=0.5, silent={agents - 1}, state={1: "draining"})
        async with fleet.pinging():
            fleet.silent.clear()
            await asyncio.sleep(2.5)
            fleet.silent.add(agents - 1)
            async with StandInAgent("both", (discovery,), model="other"):
                bad = {"model": "unheard-of", "prompt": "?"}
                good = {"model": "other", "prompt": "a b c", "max_tokens": 5, "stream": True}
                await asyncio.sleep(1)
                await complete_all(proxy.url, [bad, good, good], concurrency=2)
                events = proxy.fleet.registry.events
                now = asyncio.get_running_loop().time()
                events.add(EventKind.BREAKER_OPENED, now, agent="x", address=fleet.address(2), role="decode")
                events.add(EventKind.BREAKER_CLOSED, now, agent="x", address=fleet.address(2), role="decode")
            await asyncio.sleep(4)
            await page.goto(f"{proxy.url}/ui")
            for screen, width, scheme in SHOTS:
                await page.resize(width, scheme=scheme)
                await page.until("document.body.dataset.snapshot !== undefined")
                await asyncio.sleep(2)
                path = folder / f"operator-page-{screen}-{agents}-{scheme}.png"
                await page.screenshot(path)
                await make_small(path)
            await page.call("Page.navigate", url="about:blank")


async def make_small(path: Path) -> None:
    """Reduce a picture's colours, where that can be done."""
    if shutil.which("pngquant"):
        command = ("pngquant", str(COLOURS), "--nofs", "--strip", "--ext", ".png", "--force", str(path))
        done = await asyncio.create_subprocess_exec(*command)
        assert await done.wait() == 0, command


async def main(folder: Path) -> None:
    """Take all pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        async with open_page(Path(profile)) as page:
            for agents in FLEETS:
                await shoot(page, folder, agents)
            print(*page.complaints, sep="\n")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))

# SPDX-License-Identifier: Apache-2.0
"""The operator's page in a real browser, over a real cluster and over a large fleet of stand-ins."""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from kvferry.common.telemetry.version import VERSION
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.server import running_proxy
from tests.helpers.client import Answer, complete_all, heldout
from tests.standins.agents import StandInAgent
from tests.standins.pinging_fleet import PingingFleet
from tests.system.browser import Page, chromium, open_page
from tests.system.conftest import StartCluster

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(chromium() is None, reason="Chromium is not installed (see .ci/run)"),
]

ROWS = "[...document.querySelectorAll('#nodes tbody tr:has(.name)')]"
AGENTS = f"{ROWS}.map((row) => row.querySelector('.name').textContent)"
STATES = "[...document.querySelectorAll('#nodes tbody .pill')].map((state) => state.textContent)"
EVENTS = "[...document.querySelectorAll('#events tbody tr')].map((row) => row.textContent)"
CHART = "document.activeElement.getAttribute('aria-label') ?? ''"
FOCUSED = "document.activeElement"
WIDTHS = (1280, 400)
SHOWN_CHARTS = "[...document.querySelectorAll('main figure:not([hidden]) .chart')]"
FOLDED = "[...document.querySelectorAll('.folded')].map((line) => line.textContent).join(' ')"
DRAWN = (
    "Time to first token",
    "Inter-token latency",
    "Streamed tokens per second",
    "Prompt tokens per second",
    "KV pulled per second",
    "Time of a pull",
)
AXE = Path(__file__).parent / "axe" / "axe.min.js"
SHOWN = "document.body.dataset.snapshot"
ADMIN_KEY = "an-operator-of-the-tests"
MEASURED_SNAPSHOTS = 8
MOST_SCRIPT_S = 0.1
"""Of each second; it takes a quarter of that on two cores."""


@pytest.mark.timeout(180)
async def test_the_page_shows_the_cluster_live(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Agents, charts, transfers, errors; from the keyboard; in both schemes and widths; from nowhere else."""
    async with start_cluster() as cluster, open_page(tmp_path / "profile") as page:
        await page.resize(1280)
        await page.goto(f"{cluster.url}/ui")
        urls = {role: cluster.agents[f"{role}-0"].url for role in ("prefill", "decode")}
        hosts = {role: url.removeprefix("http://") for role, url in urls.items()}
        await page.until(f"{AGENTS}.length === 2")
        assert set(await page.evaluate(AGENTS)) == set(hosts.values())
        await page.until("document.getElementById('readiness').textContent === 'ready'")

        assert await page.evaluate("document.getElementById('errors').hidden"), "nothing has failed"
        answers = await complete_all(
            cluster.url,
            [
                {
                    "model": "ferry-tiny",
                    "prompt": prompt.prompt,
                    "max_tokens": 24,
                    "ignore_eos": True,
                    "stream": True,
                }
                for prompt in heldout(8)
            ]
            + [{"model": "unheard-of", "prompt": "<img src=x onerror=alert(1)>"}],
            concurrency=4,
        )
        assert sum(isinstance(answer, Answer) for answer in answers) == 8
        for title in DRAWN:
            await page.until(f"document.querySelector('.chart[aria-label^=\"{title}\"]').dataset.points > 0")
        await page.until("document.querySelector('#failures td')?.textContent === '404'")
        assert await page.evaluate("document.getElementById('num-failures').textContent") == (
            "0 of servers, 1 of clients"
        )
        await page.until("document.querySelector('#pairs tbody .number')?.textContent === '8'")
        pair = await page.evaluate("document.querySelector('#pairs tbody tr').textContent")
        assert pair.startswith(hosts["decode"] + hosts["prefill"])

        assert await page.evaluate("document.getElementById('canary').hidden"), "no pair was probed"
        async with aiohttp.ClientSession() as http, http.post(f"{cluster.url}/canary") as response:
            assert (await response.json())["verdict"] == "learning"
        # The page asks every 5 s: it may have the pair from before the probe had ended.
        row = "document.querySelector('#canary-pairs tbody tr')?.textContent"
        await page.until(f"{row}?.includes('logprobs differ by up to')")
        probed = await page.evaluate(row)
        assert "trusted" in probed and "→" in probed

        message = "no agent serves this model: 'unheard-of'; models served now: 'ferry-tiny'"
        assert message in await page.evaluate("document.querySelector('#failures tbody').textContent")
        top = "document.getElementById('errors').getBoundingClientRect().top"
        assert await page.evaluate(top) < 300, "errors are seen without scrolling"
        await page.evaluate("document.querySelector('#failures .link').click()")
        await page.until("document.querySelector('#request')?.textContent.includes('model not found')")
        assert await page.evaluate("document.querySelector('#request .problem').textContent") == message

        assert "Wait in the queue" in await page.evaluate(FOLDED), "what is empty takes no place"
        assert not await page.evaluate(f"{SHOWN_CHARTS}.some(({{dataset}}) => dataset.points === '0')")

        await walk_by_keyboard(page)
        for scheme in ("light", "dark"):
            for width in WIDTHS:
                await page.resize(width, scheme=scheme)
                await page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
            assert await page.accessibility_problems(AXE) == []
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 20, 27)"

        assert not page.complaints
        assert {url.removeprefix(cluster.url).split("/")[1] for url in page.requests} == {"ui", "canary"}

        await cordon_and_uncordon(page, hosts["decode"])

        await cluster.agents["decode-0"].stop(signum=signal.SIGKILL)
        await page.until("document.getElementById('readiness').textContent === 'not ready'")
        await page.until(f"{STATES}.includes('lost')")
        assert hosts["decode"] in await page.evaluate(AGENTS), "a killed agent stays in sight"
        assert await page.evaluate("document.getElementById('lost').textContent") == "1 lost"
        assert any("lost" in event and hosts["decode"] in event for event in await page.evaluate(EVENTS))
        await cluster.proxy.stop()
        await page.until("document.getElementById('connection').textContent.includes('does not respond')")


@pytest.mark.timeout(120)
async def test_an_empty_fleet_and_whose_page_it_is(tmp_path: Path) -> None:
    """The title and the header name the cluster, and the page says how to start an agent; on a phone too."""
    config = ProxyConfig(port=0, discovery_port=0, cluster_name="east <1>")
    async with running_proxy(config) as proxy, open_page(tmp_path / "profile") as page:
        await page.resize(390)
        await page.goto(f"{proxy.url}/ui")
        await page.until("document.title === 'east <1> not ready · kvferry'")
        assert await page.evaluate("document.getElementById('proxy-name').textContent") == "east <1>"
        discovery = f"127.0.0.1:{proxy.discovery_port}"
        command = await page.evaluate("document.getElementById('next-command').innerText")
        assert command == f"kvferry agent --proxy {discovery} --model FOLDER"
        assert await page.evaluate(f"{SHOWN_CHARTS}.length") == 0, "nothing has happened"

        async with PingingFleet(discovery, 4).pinging():
            await page.until("document.title === 'east <1> · kvferry'")
            assert await page.evaluate("document.getElementById('next-step').hidden")
            await page.until(f"{EVENTS}.some((event) => event.includes('ready'))")
            boxes = (
                "((selector) => [...document.querySelectorAll(selector)]"
                ".map((each) => each.getBoundingClientRect()))"
            )
            shown = f"{boxes}('#events .narrow').filter(({{ width }}) => width)"
            assert await page.evaluate(f"{shown}.length") >= 4, "the details of events"
            assert await page.evaluate(f"Math.max(...{shown}.map(({{ right }}) => right))") <= 390
            await complete_all(proxy.url, [{"model": "unheard-of", "prompt": "?"}], concurrency=1)
            await page.until("document.querySelector('#failures .link') !== null")
            links = f"{boxes}('#failures .link')[0].right"
            assert await page.evaluate(links) <= 390, "the request of an error is in sight"
            middles = (
                f"{boxes}('#pause, #windows').map(({{ top, bottom }}) => Math.round((top + bottom) / 2))"
            )
            assert len(set(await page.evaluate(middles))) == 1, "Pause is in one line with the window"

            await page.evaluate("document.querySelector('#nodes .name').click()")
            for chart in ("Sequences", "KV blocks in use"):
                drawn = (
                    f"document.querySelector('#agent-charts [aria-label^=\"{chart}\"]')?.dataset.points > 1"
                )
                await page.until(drawn)
            facts = await page.evaluate("document.getElementById('agent-facts').innerText")
            assert "NVIDIA H200" in facts and "4,096 of 16 tokens" in facts
            await page.evaluate("document.getElementById('agent-dialog').close()")

            assert await page.evaluate("document.getElementById('model-choice').hidden"), "there is one model"
            async with StandInAgent("both", (discovery,), model="<other>") as other:
                await page.until("!document.getElementById('model-choice').hidden")
                await page.evaluate(
                    "{ const all = document.getElementById('model'); all.value = '<other>';"
                    "all.dispatchEvent(new Event('change')) }"
                )
                await page.until(f"{AGENTS}.length === 1")
                assert await page.evaluate(AGENTS) == [other.address.removeprefix("http://")]
                assert await page.evaluate("location.search") == "?model=%3Cother%3E"
                await page.call("Page.reload")
                await page.until(f"globalThis.document?.body && {AGENTS}.length === 1")
                assert await page.evaluate("document.getElementById('model').value") == "<other>"
                assert await page.accessibility_problems(AXE) == []
        assert not page.complaints


async def cordon_and_uncordon(page: Page, host: str) -> None:
    """By the buttons of the page, which the event log then shows."""
    for word, state in (("Cordon", "cordoned"), ("Uncordon", "ready")):
        await page.evaluate(f"document.querySelector('[aria-label=\"{word} {host}\"]').click()")
        await page.until("document.getElementById('cordon-dialog').open")
        await page.evaluate("document.getElementById('cordon-go').click()")
        await page.until("!document.getElementById('cordon-dialog').open")
        row = f"{ROWS}.find((row) => row.textContent.includes({host!r}))"
        await page.until(f"{row}.querySelector('.pill').textContent === {state!r}")
        await page.until(f"{EVENTS}.some((event) => event.includes({word.lower() + 'ed'!r}))")


async def walk_by_keyboard(page: Page) -> None:
    """Tab reaches the buttons, every chart and the tables; each does its work from there."""
    await page.evaluate("document.querySelector('h1').tabIndex = -1; document.querySelector('h1').focus()")
    for _ in range(2):
        await page.press("Tab")
        assert await page.evaluate(f"{FOCUSED}.parentElement.id") == "windows"
    await page.press("Enter")
    assert await page.evaluate(f"{FOCUSED}.getAttribute('aria-pressed')") == "true"
    await page.press("Tab")
    assert await page.evaluate(f"{FOCUSED}.id") == "pause"
    await page.press("Enter")
    await page.until("document.getElementById('connection').textContent === 'paused'")
    await page.press("Enter")
    await page.until("document.getElementById('connection').textContent === 'live'")

    # The errors, their scroll area and the link of the one there is, come before the charts.
    for _ in range(2):
        await page.press("Tab")
        assert await page.evaluate(f"document.getElementById('errors').contains({FOCUSED})")
    for chart in range(await page.evaluate(f"{SHOWN_CHARTS}.length")):
        await page.press("Tab")
        assert await page.evaluate(f"{FOCUSED}.classList.contains('chart')"), chart
        await page.press("Home")
        assert "min ago" in await page.evaluate(CHART)
        await page.press("ArrowRight")
        await page.press("Escape")
        assert "ago" not in await page.evaluate(CHART)

    await page.evaluate("document.querySelector('#nodes th button').focus()")
    before = await page.evaluate(AGENTS)
    await page.press("Enter")
    await page.until("document.querySelector('#nodes th').getAttribute('aria-sort') === 'descending'")
    assert await page.evaluate(AGENTS) == before[::-1]
    await page.evaluate("document.querySelector('#nodes .name').focus()")
    await page.press("Enter")
    assert await page.evaluate("document.getElementById('agent-dialog').open")
    seen = await page.evaluate("document.body.dataset.snapshot")
    await page.until(f"document.body.dataset.snapshot !== {seen!r}")
    assert await page.evaluate("document.getElementById('agent-dialog').open"), "a new snapshot keeps it open"
    await page.until("!document.getElementById('agent-charts').hidden")
    facts = await page.evaluate("document.getElementById('agent-facts').innerText")
    for fact in ("CPU", "of 16 tokens, ", "float32", "running of at most", "Up for", VERSION):
        assert fact in facts, fact
    address = await page.evaluate("document.getElementById('agent-metrics').href")
    assert address.startswith("http://127.0.0.1:") and address.endswith("/metrics")
    await page.press("Escape")
    assert await page.evaluate(f"{FOCUSED}.classList.contains('name')"), "and takes no focus"


async def assert_agents_are_announced(page: Page, fleet: PingingFleet) -> None:
    """A screen reader finds a table of all agents, each with buttons that say what they are for."""
    told = Counter(await page.accessible())
    for number in range(fleet.size):
        for name in (fleet.name(number), f"Cordon {fleet.name(number)}"):
            assert told["button", name] == 1, name
    assert told["table", f"Agents {fleet.size}"] == 1
    assert sum(count for (role, _), count in told.items() if role == "row") > fleet.size


async def skip_the_agents(page: Page) -> None:
    """From the keyboard the 400 buttons of the agents are passed over by a link in front of them."""
    await page.evaluate("document.getElementById('filter').focus()")
    await page.press("Tab")
    assert await page.evaluate(f"{FOCUSED}.className") == "skip"
    assert await page.evaluate(f"{FOCUSED}.getBoundingClientRect().width") > 50, (
        "it is seen while it has focus"
    )
    await page.press("Enter")
    await page.press("Tab")
    assert await page.evaluate(f"{FOCUSED}.firstElementChild.id") == "events"


@pytest.mark.timeout(180)
async def test_two_hundred_agents_cost_little_and_are_accessible(tmp_path: Path) -> None:
    """Script takes under a tenth of each second, by the CPU time of the page's thread.

    With API keys, a button asks for an admin's key: the one that the browser attaches is not accepted.
    """
    keys = tmp_path / "keys"
    keys.write_text(f"{ADMIN_KEY} admin\n")
    async with (
        running_proxy(ProxyConfig(port=0, discovery_port=0, api_keys=keys)) as proxy,
        PingingFleet(f"127.0.0.1:{proxy.discovery_port}", 200).pinging() as fleet,
        open_page(tmp_path / "profile") as page,
    ):
        await page.resize(1280)
        await page.call("Performance.enable", timeDomain="threadTicks")
        url = f"{proxy.url}/ui"
        await page.call("Page.navigate", url=url.replace("://", f"://operator:{ADMIN_KEY}@"))
        await page.until(f"globalThis.document?.body && {AGENTS}.length === 200", timeout_s=30.0)
        assert await page.evaluate(f"new Set({AGENTS}).size") == 200
        await page.evaluate(
            "window.snapshots = 0; new MutationObserver(() => (window.snapshots += 1))"
            ".observe(document.body, {attributeFilter: ['data-snapshot']})"
        )
        first, before = await page.evaluate(SHOWN), await page.metric("ScriptDuration")
        await page.until(f"window.snapshots >= {MEASURED_SNAPSHOTS}", timeout_s=60.0)
        last = await page.evaluate(SHOWN)
        spent = await page.metric("ScriptDuration") - before
        assert spent / (float(last) - float(first)) < MOST_SCRIPT_S

        await page.evaluate("document.getElementById('pause').click()")
        for width, scheme in zip(WIDTHS, ("dark", "light"), strict=True):
            await page.resize(width, scheme=scheme)
            await page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
            assert await page.accessibility_problems(AXE) == []
            await assert_agents_are_announced(page, fleet)
        await skip_the_agents(page)
        await page.resize(WIDTHS[0])
        await page.evaluate("document.getElementById('pause').click()")

        name = fleet.name(3)
        await page.evaluate(f"document.querySelector('[aria-label=\"Cordon {name}\"]').click()")
        for key, error in ((None, "asks for an admin"), ("x" * 16, "not an admin"), (ADMIN_KEY, "")):
            if key is not None:
                await page.evaluate(f"document.getElementById('cordon-key').value = {key!r}")
            await page.evaluate("document.getElementById('cordon-go').click()")
            await page.until(f"document.getElementById('cordon-error').textContent.includes({error!r})")
        await page.until("!document.getElementById('cordon-dialog').open")
        await page.until(f"{STATES}.includes('cordoned')")
        assert await page.evaluate("document.getElementById('cordon-key').value") == ""

        fleet.silent.add(7)
        await page.until("document.getElementById('lost').textContent === '1 lost'", timeout_s=30.0)
        await page.evaluate("document.getElementById('lost').click()")
        assert await page.evaluate(AGENTS) == [fleet.name(7)]
        assert all("401" in complaint for complaint in page.complaints)

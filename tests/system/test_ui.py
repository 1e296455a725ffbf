# SPDX-License-Identifier: Apache-2.0
"""The operator's page in a real browser, over a real cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.browser import Page, chromium, open_page
from tests.system.client import Answer, complete_all, heldout
from tests.system.conftest import StartCluster

pytestmark = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed (see .ci/run)")

CARDS = "[...document.querySelectorAll('.role.{role} details .address')].map((e) => e.textContent)"
CHART = "document.activeElement.getAttribute('aria-label') ?? ''"
FOCUSED = "document.activeElement"
WIDTHS = (1280, 400)


@pytest.mark.timeout(180)
async def test_the_page_shows_the_cluster_live(start_cluster: StartCluster, tmp_path: Path) -> None:
    """Nodes by role, charts and errors; from the keyboard; in both schemes and widths; from nowhere else."""
    async with start_cluster() as cluster, open_page(tmp_path / "profile") as page:
        await page.resize(1280)
        await page.goto(f"{cluster.url}/ui")
        for role in ("prefill", "decode"):
            address = cluster.agents[f"{role}-0"].url.removeprefix("http://")
            assert await page.until(CARDS.format(role=role)) == [address]
        assert await page.evaluate("document.getElementById('readiness').textContent") == "ready"

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
        for chart in range(3):
            await page.until(
                f"document.querySelectorAll('svg.chart')[{chart}].querySelector('.main') !== null"
            )
        await page.until("document.querySelector('#failures td')?.textContent === '404'")

        await walk_by_keyboard(page)
        for scheme in ("light", "dark"):
            for width in WIDTHS:
                await page.resize(width, scheme=scheme)
                await page.until(f"innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
                await page.screenshot(tmp_path / f"{scheme}-{width}.png")
        assert await page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(15, 20, 27)"

        assert not page.complaints
        assert {url.removeprefix(cluster.url).split("/")[1] for url in page.requests} == {"ui"}

        await cluster.agents["decode-0"].stop()
        await page.until("document.getElementById('readiness').textContent === 'not ready'")
        await page.until("document.querySelector('.role.decode .cards').children.length === 0")
        await cluster.proxy.stop()
        await page.until("document.getElementById('connection').textContent.includes('does not respond')")


async def walk_by_keyboard(page: Page) -> None:
    """Tab reaches the button, every chart and every node; each does its work from there."""
    await page.press("Tab")
    assert await page.evaluate(f"{FOCUSED}.id") == "pause"
    await page.press("Enter")
    await page.until("document.getElementById('connection').textContent === 'paused'")
    await page.press("Enter")
    await page.until("document.getElementById('connection').textContent === 'live'")

    for _ in range(4):
        await page.press("Tab")
        assert await page.evaluate(f"{FOCUSED}.classList.contains('chart')")
        await page.press("Home")
        assert "min ago" in await page.evaluate(CHART)
        await page.press("ArrowRight")
        await page.press("Escape")
        assert "ago" not in await page.evaluate(CHART)

    await page.press("Tab")
    assert await page.evaluate(f"{FOCUSED}.tagName") == "SUMMARY"
    await page.press("Enter")
    assert await page.evaluate(f"{FOCUSED}.parentElement.open")
    seen = await page.evaluate("document.body.dataset.snapshot")
    await page.until(f"document.body.dataset.snapshot !== {seen!r}")
    assert await page.evaluate(f"{FOCUSED}.parentElement.open"), (
        "a new snapshot takes neither focus nor state"
    )

# SPDX-License-Identifier: Apache-2.0
"""The site of `docs/` in a real browser: tables fit their page, and the search finds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from aiohttp import web

from tests.system.browser import chromium, open_page

ROOT = Path(__file__).parents[2]
PAGES = ("operations", "security", "reference/cli", "reference/metrics", "deploy/sizing", "dialects")
WIDTH = 1280
CUT_OFF = (
    "[...document.querySelectorAll('.wy-table-responsive, table')]"
    ".filter((box) => box.scrollWidth > box.clientWidth).map((box) => box.textContent.slice(0, 80))"
)
pytestmark = pytest.mark.skipif(chromium() is None, reason="Chromium is not installed (see .ci/run)")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    words = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--config-file", "tools/site.yml"]
    subprocess.run([*words, "--site-dir", str(tmp_path / "site")], cwd=ROOT, check=True, timeout=120)
    return tmp_path / "site"


async def test_tables_fit_and_the_search_finds(site: Path, tmp_path: Path, unused_tcp_port: int) -> None:
    app = web.Application()
    app.router.add_static("/", site)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", unused_tcp_port).start()
    url = f"http://127.0.0.1:{unused_tcp_port}"
    try:
        async with open_page(tmp_path / "profile") as page:
            await page.resize(WIDTH)
            for name in PAGES:
                await page.goto(f"{url}/{name}/index.html")
                await page.until("document.querySelectorAll('.wy-table-responsive').length")
                assert await page.evaluate(CUT_OFF) == [], name
            await page.goto(f"{url}/search.html?q=renewal")
            await page.until("document.querySelector('#mkdocs-search-results a')?.textContent")
            assert not [each for each in page.requests if not each.startswith((url, "about:", "data:"))]
    finally:
        await runner.cleanup()

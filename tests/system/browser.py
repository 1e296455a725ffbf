# SPDX-License-Identifier: Apache-2.0
"""Headless Chromium for the tests of the operator's page, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

START_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 15.0
LONG_CALL_TIMEOUT_S = 60.0
"""What looks at all of a page with 200 agents takes some seconds of a whole core."""
POLL_S = 0.1
FLAGS = (
    "--headless",
    "--no-sandbox",  # containers run as root
    "--disable-gpu",
    "--hide-scrollbars",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)
AXE_RULES = "runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']"
FIND_VIOLATIONS = (
    f"axe.run({{{AXE_RULES}, resultTypes: ['violations']}}).then(({{violations}}) => violations)"
)
KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "Escape": 27}


def chromium() -> str | None:
    """The browser's path, or None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Page:
    """The browser's one tab. `requests` and `complaints` are what it loaded and what went wrong in it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def read(self) -> None:
        """Take what the browser says until it closes; run by `open_page`."""
        async for message in self._socket:
            said = message.json()
            if "id" in said:
                self._replies.pop(said["id"]).set_result(said)
            elif said["method"] == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(str(said["params"]["entry"]))

    async def call(self, method: str, *, timeout_s: float = CALL_TIMEOUT_S, **params: Any) -> dict[str, Any]:
        """One DevTools command."""
        number = next(self._numbers)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        said = await asyncio.wait_for(reply, timeout_s)
        assert "error" not in said, (method, said)
        result: dict[str, Any] = said["result"]
        return result

    async def resize(self, width: int, height: int = 900, *, scheme: str = "light") -> None:
        """Show the page at this size in a `light` or `dark` scheme."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        await self.call(
            "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    async def goto(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        done = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    async def until(self, expression: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Wait until a JavaScript expression is truthy, and return its value."""
        try:
            async with asyncio.timeout(timeout_s):
                while not (value := await self.evaluate(expression)):
                    await asyncio.sleep(POLL_S)
                return value
        except TimeoutError:
            text = await self.evaluate("document.body?.innerText")
            raise AssertionError(f"never true: {expression}\n{text}\n{self.complaints}") from None

    async def metric(self, name: str) -> float:
        """One of the browser's own figures of the page; `Performance.enable` must have been called."""
        figures = (await self.call("Performance.getMetrics"))["metrics"]
        return float(next(each["value"] for each in figures if each["name"] == name))

    async def accessibility_problems(self, axe: Path) -> list[str]:
        """What axe-core, in the file `axe`, finds wrong with the page as it is: WCAG 2.1 AA and more."""
        if await self.evaluate("typeof axe") == "undefined":
            await self.call("Runtime.evaluate", expression=axe.read_text())
        done = await self.call(
            "Runtime.evaluate",
            expression=FIND_VIOLATIONS,
            awaitPromise=True,
            returnByValue=True,
            timeout_s=LONG_CALL_TIMEOUT_S,
        )
        return [
            f"{found['id']}: {node['target']} {node['failureSummary']}"
            for found in done["result"]["value"]
            for node in found["nodes"]
        ]

    async def accessible(self) -> list[tuple[str, str]]:
        """Role and name of everything that a screen reader is told of, in order."""
        tree = (await self.call("Accessibility.getFullAXTree", timeout_s=LONG_CALL_TIMEOUT_S))["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in tree
            if not node["ignored"]
        ]

    async def press(self, key: str) -> None:
        """Press and release one key of the keyboard."""
        event: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        # Enter acts on a button by the character that it types.
        typed: dict[str, Any] = (
            {"type": "keyDown", "text": "\r"} if key == "Enter" else {"type": "rawKeyDown"}
        )
        await self.call("Input.dispatchKeyEvent", **event, **typed)
        await self.call("Input.dispatchKeyEvent", **event, type="keyUp")

    async def screenshot(self, path: Path) -> None:
        """Save the whole page, not only what fits the window, as PNG."""
        shot = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, timeout_s=LONG_CALL_TIMEOUT_S
        )
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def open_page(profile: Path) -> AsyncIterator[Page]:
    """Start Chromium with a fresh `profile` folder and an empty tab."""
    binary = chromium()
    assert binary is not None
    process = await asyncio.create_subprocess_exec(
        binary,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S)) as http:
            target = await _first_tab(http, profile / "DevToolsActivePort")
            async with http.ws_connect(target, max_msg_size=0) as socket:
                page = Page(socket)
                reading = asyncio.create_task(page.read())
                try:
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
                finally:
                    reading.cancel()
                    await asyncio.wait([reading])
    finally:
        process.terminate()
        await process.wait()


async def _first_tab(http: aiohttp.ClientSession, port_file: Path) -> str:
    """The tab's WebSocket URL; Chromium writes the port it chose into a file of its profile."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while not (port_file.exists() and len(port_file.read_text().splitlines()) == 2):
            await asyncio.sleep(POLL_S)
        port = port_file.read_text().splitlines()[0]
        while True:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as response:
                tabs = [tab for tab in await response.json() if tab["type"] == "page"]
            if tabs:
                return str(tabs[0]["webSocketDebuggerUrl"])
            await asyncio.sleep(POLL_S)

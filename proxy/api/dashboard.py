# SPDX-License-Identifier: Apache-2.0
"""The operator's dashboard: `/ui`, its files under `proxy/api/ui`, and its SSE feed `/ui/events`.

No build step and no external resources: the content security policy lets the page load from this proxy only.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

from quart import Quart, Response, redirect, request
from werkzeug.wrappers import Response as AnyResponse

from kvferry.proxy import sse
from kvferry.proxy.api.operator.commands import OperatorApi
from kvferry.proxy.api.operator.pages import Page
from kvferry.proxy.errors import TooManyViewers
from kvferry.proxy.http.client_connection import EXTENSION, ClientConnection
from kvferry.proxy.wire.registration import Incarnation

INTERVAL_S = 1.0
MAX_VIEWERS = 32
UNREAD_S = 10.0
"""How long what was sent to a viewer may stay unread, before it loses its place. Its page connects again."""
RECONNECT = b"retry: 2000\n\n"
FOLDER = Path(__file__).parent / "ui"
PAGE = "index.html"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".svg": "image/svg+xml",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
}
CONTENT_TYPES = {path.name: TYPES[path.suffix] for path in FOLDER.iterdir() if path.suffix in TYPES}
"""The page, and what it loads. `uPlot.*` is https://github.com/leeoniya/uPlot 1.6.32, unchanged."""
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class DashboardFeed:
    """Snapshots of the fleet, once a second, for every viewer of the dashboard.

    A snapshot is computed only while there are viewers, and once for all that look at one model. A viewer
    that reads slowly gets the newest snapshot when it reads again, never a backlog.
    """

    def __init__(self, views: OperatorApi) -> None:
        self._views = views
        self._lock = asyncio.Lock()
        self._closed = asyncio.Event()
        self._viewers = Counter[str]()
        """How many there are by the model that they look at; it is empty for all models."""
        self._latest: dict[str, tuple[float, bytes]] = {}
        """When the last event was made, and the event; by the model too."""

    @property
    def num_viewers(self) -> int:
        return self._viewers.total()

    @property
    def is_full(self) -> bool:
        """Whether the limit of viewers is reached."""
        return self.num_viewers >= MAX_VIEWERS

    def close(self) -> None:
        """End every feed, so that a stopping proxy does not wait for its viewers."""
        self._closed.set()

    async def events(self, model: str = "") -> AsyncGenerator[bytes, None]:
        """One event a second until the viewer disconnects (which closes the generator) or the proxy stops."""
        self._viewers[model] += 1
        try:
            yield RECONNECT
            while not self._closed.is_set():
                yield await self._event(model)
                try:
                    async with asyncio.timeout(INTERVAL_S):
                        await self._closed.wait()
                except TimeoutError:
                    continue
        finally:
            self._viewers[model] -= 1
            if not self._viewers[model]:
                del self._viewers[model]
                self._latest.pop(model, None)

    async def _event(self, model: str) -> bytes:
        async with self._lock:
            now = asyncio.get_running_loop().time()
            made_at, event = self._latest.get(model, (float("-inf"), b""))
            if now - made_at >= INTERVAL_S / 2:
                event = sse.event((await self._views.page("dashboard", model)).body)
                self._latest[model] = now, event
            return event


def add_dashboard(app: Quart, feed: DashboardFeed, views: OperatorApi) -> None:
    """Add the dashboard's routes. Its files are read once, here."""
    files = {name: (FOLDER / name).read_bytes() for name in CONTENT_TYPES}

    def file(name: str) -> Response:
        return Response(files[name], headers=HEADERS, content_type=CONTENT_TYPES[name])

    @app.get("/ui")
    async def page() -> Response:
        return file(PAGE)

    @app.get("/ui/")
    async def page_with_slash() -> AnyResponse:
        # The page refers to its files relative to /ui, so that it also works behind a path prefix.
        return redirect("../ui", 308)

    @app.get(f"/ui/<any({', '.join(repr(name) for name in CONTENT_TYPES if name != PAGE)}):name>")
    async def part(name: str) -> Response:
        return file(name)

    def data(made: Page) -> Response:
        return Response(made.body, made.status, HEADERS, content_type=made.content_type)

    # A path, since clients choose the ids.
    @app.get("/ui/requests/<path:request_id>")
    async def timeline(request_id: str) -> Response:
        return data(await views.timeline(request_id))

    @app.get("/ui/agents/<path:incarnation>")
    async def agent(incarnation: str) -> Response:
        return data(await views.agent(Incarnation(incarnation)))

    @app.get("/ui/events")
    async def events() -> Response:
        if feed.is_full:
            raise TooManyViewers(f"the dashboard already has {MAX_VIEWERS} viewers")
        connection: ClientConnection | None = cast(Any, request.scope).get("extensions", {}).get(EXTENSION)
        if connection is not None:
            connection.limit_unread(UNREAD_S)
        response = Response(
            feed.events(request.args.get("model", "")), headers=HEADERS, content_type=sse.CONTENT_TYPE
        )
        response.headers["X-Accel-Buffering"] = "no"  # nginx would buffer events
        return response

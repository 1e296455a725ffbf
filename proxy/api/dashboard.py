# SPDX-License-Identifier: Apache-2.0
"""The operator's page: `/ui`, its three files under `proxy/api/ui`, and its feed `/ui/events`.

No build step and nothing from elsewhere: the content security policy lets the page load from this proxy only.
"""

from __future__ import annotations

from pathlib import Path

from quart import Quart, Response, redirect
from werkzeug.wrappers import Response as AnyResponse

from kvferry.proxy import sse
from kvferry.proxy.api.dashboard_feed import DashboardFeed
from kvferry.proxy.errors import TooManyViewers

FOLDER = Path(__file__).parent / "ui"
CONTENT_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "ui.css": "text/css; charset=utf-8",
    "ui.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}
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


def add_operator_page(app: Quart, live: DashboardFeed) -> None:
    """Add the page's routes. Its files are read once, here."""
    files = {name: (FOLDER / name).read_bytes() for name in CONTENT_TYPES}

    def file(name: str) -> Response:
        return Response(files[name], headers=HEADERS, content_type=CONTENT_TYPES[name])

    @app.get("/ui")
    async def page() -> Response:
        return file("index.html")

    @app.get("/ui/")
    async def page_with_slash() -> AnyResponse:
        # The page names its files relative to /ui, so that it also works behind a path prefix.
        return redirect("../ui", 308)

    @app.get("/ui/<any('ui.css', 'ui.js', 'icon.svg'):name>")
    async def part(name: str) -> Response:
        return file(name)

    @app.get("/ui/events")
    async def events() -> Response:
        if live.full:
            error = TooManyViewers("too many operators are looking")
            return Response(error.body(), error.status, error.headers, content_type="application/json")
        feed = Response(live.feed(), headers=HEADERS, content_type=sse.CONTENT_TYPE)
        feed.headers["X-Accel-Buffering"] = "no"  # nginx would hold events back
        return feed

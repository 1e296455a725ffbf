# SPDX-License-Identifier: Apache-2.0
"""Whether a proxy and its agents can be reached from this machine, and whether clocks agree."""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import aiohttp

from kvferry.deploy.http_client import (
    CALL_TIMEOUT_S,
    StatusFailed,
    client_session,
    fetch_nodes,
    why_no_response,
)
from kvferry.proxy.api.openapi import NodeView

MAX_CALLS = 16
"""Agents that are asked at once."""
MAX_DATE_AGE_S = 5.0
"""A Date header names the second that had begun; servers look at the clock once a second, later if busy."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A line about a server; `is_well`: nothing is wrong with it."""

    is_well: bool
    line: str


async def check_fleet(url: str, key: str | None, tls: ssl.SSLContext | None) -> list[Finding]:
    """Ask a proxy, and connect to each of its agents. `key`: the operator's, if the proxy has one."""
    async with client_session(tls, None) as http, client_session(tls, key) as as_operator:
        found = [await check_server(http, f"proxy: {url}", url)]
        if not found[0].is_well:
            return found
        try:
            nodes = (await fetch_nodes(as_operator, url)).nodes
        except StatusFailed as error:
            return [*found, Finding(False, f"proxy: {error}")]
        limit = asyncio.Semaphore(MAX_CALLS)

        async def check_peer(node: NodeView) -> list[Finding]:
            what = f"peer: {node.name or node.role} at {node.address}"
            async with limit:
                over_http = await check_server(http, what, node.url)
                return [over_http, await check_control(what, node.control)] if node.control else [over_http]

        for peer in await asyncio.gather(*map(check_peer, nodes)):
            found += peer
        return found


async def check_server(http: aiohttp.ClientSession, what: str, url: str) -> Finding:
    """Whether a server responds, how soon, and whether its clock agrees with ours."""
    before, started = time.time(), time.monotonic()
    try:
        async with http.get(f"{url}/health") as response:
            took_ms = 1000 * (time.monotonic() - started)
            date = response.headers.get("Date", "")
    except (aiohttp.ClientError, TimeoutError) as error:
        return Finding(False, f"{what}: cannot be reached: {why_no_response(error)}")
    wrong = clock_error(date, before, time.time())
    return Finding(wrong is None, f"{what}: responds in {took_ms:.0f} ms, {wrong or 'clock agrees'}")


def clock_error(date: str, before: float, after: float) -> str | None:
    """Return by how much a server's clock differs from this host's at least, or None if it may agree.

    Args:
        date: The Date header of its response: the second that had begun there.
        before: When we asked, by our clock.
        after: When we had the response.
    """
    try:
        second = parsedate_to_datetime(date).timestamp()
    except ValueError:
        return None
    if second > after:
        return f"its clock is {second - after:.0f} s ahead of this host's"
    if second + MAX_DATE_AGE_S < before:
        return f"its clock is {before - second - MAX_DATE_AGE_S:.0f} s behind this host's"
    return None


async def check_control(what: str, control: str) -> Finding:
    """Whether an agent's KV control channel accepts connections from this machine."""
    try:
        address = urlsplit(control if "://" in control else f"//{control}")  # MoRIIO's pings have no scheme
        host, port = address.hostname, address.port
    except ValueError:
        host = port = None
    if host is None or port is None:
        return Finding(False, f"{what}: KV control at {control} is no address")
    try:
        async with asyncio.timeout(CALL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
        writer.close()
    except (OSError, TimeoutError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "no connection in time"
        return Finding(False, f"{what}: KV control at {control} cannot be reached: {why}")
    return Finding(True, f"{what}: KV control at {control} accepts connections")

# SPDX-License-Identifier: Apache-2.0
"""`kvferry drain`: let an agent finish its requests and stop, and wait until it has stopped.

The agent is asked itself, by its URL, or any proxy that knows it, which passes that on.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from urllib.parse import quote, urlsplit

import aiohttp

from kvferry.common.curve import BadClusterKey, ClusterKey
from kvferry.common.exceptions import message_of
from kvferry.common.http.tls import BadCertificate, client_context
from kvferry.common.options import CommandParser, number, readable_file, server_url
from kvferry.common.telemetry.prometheus_text import samples
from kvferry.deploy.http_client import (
    MAX_PAGE_BYTES,
    StatusFailed,
    client_session,
    fetch_nodes,
    read_page,
    refusal,
    why_no_response,
)
from kvferry.proxy.api.openapi import NodeView

POLL_S = 0.5
CALL_TIMEOUT_S = 10.0
REPORT_S = 5.0
"""How often is said what is left."""
REQUESTS = ("kvferry_agent_num_requests_running", "kvferry_agent_num_requests_waiting")
BLOCKS = "kvferry_agent_kv_blocks"


class DrainFailed(RuntimeError):
    """The agent cannot be asked, does not drain, or still runs; the message says which."""


@asynccontextmanager
async def client(
    url: str, bearer: str | None, tls: ssl.SSLContext | None
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open the client for an agent or a proxy. Its failures to get a response are `DrainFailed`."""
    async with client_session(tls, bearer, CALL_TIMEOUT_S) as http:
        try:
            yield http
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DrainFailed(f"{url} cannot be reached: {why_no_response(error)}") from error


async def drain_at_agent(http: aiohttp.ClientSession, url: str) -> None:
    """Ask an agent to drain, and wait until its URL refuses connections.

    Raises `DrainFailed` and `StatusFailed`.
    """
    await _request_drain(http, f"{url}/drain")
    await _wait(url, partial(_left_at_agent, http, url))


async def drain_at_proxy(http: aiohttp.ClientSession, url: str, agent: str) -> None:
    """Ask a proxy to let an agent drain, with the other ranks of its server, and wait until the proxy knows
    it no more.

    Raises `DrainFailed` and `StatusFailed`.
    """
    incarnation = _find((await fetch_nodes(http, url)).nodes, agent).incarnation
    await _request_drain(http, f"{url}/nodes/{quote(incarnation, safe='/:')}/drain")
    await _wait(agent, partial(_left_at_proxy, http, url, incarnation))


async def _wait(agent: str, left: Callable[[], Awaitable[str | None]]) -> None:
    """Poll what is left until that is None, and print it now and then."""
    clock = asyncio.get_running_loop().time
    began = said = clock()
    while (words := await left()) is not None:
        if clock() - said >= REPORT_S:
            said = clock()
            print(f"{agent} has been draining for {said - began:.0f} s{words}", file=sys.stderr, flush=True)
        await asyncio.sleep(POLL_S)


async def _request_drain(http: aiohttp.ClientSession, url: str) -> None:
    async with http.post(url) as response:
        if response.status != 202:
            page = await read_page(response, StatusFailed, MAX_PAGE_BYTES)
            # A proxy would have refused to list its agents before.
            raise DrainFailed(
                refusal(url, response.status, page, server="an agent", key_option="--cluster-key")
            )


def _find(nodes: Sequence[NodeView], agent: str) -> NodeView:
    """Return the node that a word means: by its incarnation, its URL, that URL's host and port, or its name.

    Raises `DrainFailed` if there is none, or if several have the name.
    """
    for node in nodes:
        if agent.rstrip("/") in (node.incarnation, node.address, node.url, urlsplit(node.url).netloc):
            return node
    named = [node for node in nodes if agent and node.name == agent]
    if len({node.url for node in named}) > 1:
        where = ", ".join(sorted(node.address for node in named))
        raise DrainFailed(f"several agents are called {agent}; give the address of one: {where}")
    if not named:
        known = ", ".join(" at ".join(filter(None, (node.name, node.address))) for node in nodes) or "none"
        raise DrainFailed(f"the proxy knows no agent {agent}; it knows {known}")
    return named[0]


async def _left_at_agent(http: aiohttp.ClientSession, url: str) -> str | None:
    """Return what an agent has to finish, by its metrics, or nothing where it does not respond; None once it
    refuses connections. Raises `StatusFailed`.
    """
    try:
        async with http.get(f"{url}/metrics") as response:
            page = await read_page(response, StatusFailed, MAX_PAGE_BYTES)
    except aiohttp.ClientConnectorError as error:
        # Nothing else means that it has ended: its name may not resolve, or its host not be reached.
        return None if isinstance(error.os_error, ConnectionRefusedError) else ""
    except (aiohttp.ClientError, TimeoutError):
        return ""  # it closes its connections before its socket
    found = {each.labels.get("state", each.name): each.value for each in samples(page, (*REQUESTS, BLOCKS))}
    return _left(*(found.get(name, 0.0) for name in (*REQUESTS, "leased")))


async def _left_at_proxy(http: aiohttp.ClientSession, url: str, incarnation: str) -> str | None:
    """Return what an agent has to finish, as it told a proxy; None once that knows it no more."""
    nodes = (await fetch_nodes(http, url)).nodes
    load = next((node.load for node in nodes if node.incarnation == incarnation), None)
    return None if load is None else _left(load.running, load.waiting, load.kv_blocks_leased)


def _left(running: float, waiting: float, leased: float) -> str:
    return f": {running:.0f} requests running, {waiting:.0f} waiting, {leased:.0f} KV blocks leased"


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry drain",
        "Let an agent finish its requests, hand over the KV that others still read, and stop. "
        "Its proxies send it no new requests. Returns when it has stopped.",
    )
    parser.add_argument(
        "url",
        type=server_url,
        metavar="URL",
        help="Base URL of the agent, for example http://10.0.0.1:8000; or of a proxy.",
    )
    parser.add_argument(
        "agent",
        nargs="?",
        metavar="AGENT",
        help="With the URL of a proxy: which agent, by name, address or incarnation.",
    )
    parser.add_argument(
        "--cluster-key",
        type=readable_file,
        metavar="FILE",
        help="The cluster's key file, if the agent has one.",
    )
    parser.add_credentials("the certificate of the agent or proxy")
    parser.add_argument(
        "--timeout-s",
        type=number,
        default=90.0,
        metavar="NUMBER",
        help="How long to wait until it has stopped. (default: 90.0)",
    )
    return parser


async def drain(
    url: str, agent: str | None, bearer: str | None, tls: ssl.SSLContext | None, timeout_s: float
) -> None:
    """Drain one agent. Raises `DrainFailed` and `StatusFailed`."""
    try:
        async with asyncio.timeout(timeout_s), client(url, bearer, tls) as http:
            await (drain_at_agent(http, url) if agent is None else drain_at_proxy(http, url, agent))
    except TimeoutError:
        raise DrainFailed(f"{agent or url} still runs after {timeout_s:.0f} s; it goes on draining") from None


def main(argv: Sequence[str]) -> int:
    """Drain one agent. Returns 0 when it has ended, 1 when it has not."""
    options = build_parser().read(argv)
    try:
        bearer = None
        if options.agent is not None:
            bearer = options.key
        elif options.cluster_key is not None:
            bearer = ClusterKey.read(options.cluster_key).bearer
        tls = None if options.ca is None else client_context(options.ca)
        asyncio.run(drain(options.url, options.agent, bearer, tls, options.timeout_s))
    except (DrainFailed, StatusFailed, OSError, BadClusterKey, BadCertificate) as error:
        print(f"kvferry drain: {message_of(error)}", file=sys.stderr)
        return 1
    print(f"{options.agent or options.url} has drained and ended")
    return 0

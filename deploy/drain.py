# SPDX-License-Identifier: Apache-2.0
"""`kvferry drain URL`: let an agent finish what it has and end, and wait until it has ended."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from kvferry.proxy.wire.cluster_key import BadClusterKey, ClusterKey
from kvferry.proxy.wire.flags import CommandParser
from kvferry.proxy.wire.tls import BadCertificate, client_context

POLL_S = 0.5
CALL_TIMEOUT_S = 10.0


class DrainFailed(RuntimeError):
    """The agent cannot be reached, does not drain, or still runs; the message says which."""


async def drain(url: str, key: ClusterKey | None, tls: ssl.SSLContext | None, timeout_s: float) -> None:
    """Ask an agent to drain, and wait until its URL refuses connections. Raises `DrainFailed`."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(ssl=True if tls is None else tls),
        timeout=aiohttp.ClientTimeout(total=CALL_TIMEOUT_S),
        headers={} if key is None else {"Authorization": f"Bearer {key.bearer}"},
        trust_env=False,
    ) as http:
        try:
            async with http.post(f"{url}/drain") as response:
                if response.status != 202:
                    text = (await response.text())[:200]
                    raise DrainFailed(f"{url} answered {response.status}: {text}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise DrainFailed(f"{url} cannot be asked: {error or 'no response in time'}") from error
        try:
            async with asyncio.timeout(timeout_s):
                while await _listens(http, url):  # noqa: ASYNC110 (another process ends)
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise DrainFailed(f"{url} still runs after {timeout_s:.0f} s; it goes on draining") from None


async def _listens(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(f"{url}/health"):
            return True
    except aiohttp.ClientConnectorError as error:
        # Nothing else means that it has ended: its name may not resolve, or its host not be reached.
        return not isinstance(error.os_error, ConnectionRefusedError)
    except (aiohttp.ClientError, TimeoutError):
        return True  # it closes its connections before its socket


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry drain",
        "Let an agent finish what it has, hand over the KV that others still read, and end. "
        "Its proxies send it nothing new meanwhile. Returns when it has ended.",
    )
    parser.add_argument("url", help="base URL of the agent, for example http://10.0.0.1:8000")
    parser.add_argument("--cluster-key", type=Path, help="the cluster's key file, if it has one")
    parser.add_argument("--ca", type=Path, help="PEM file of who signed the agent's certificate")
    parser.add_argument(
        "--timeout-s", type=float, default=90.0, help="how long to wait for its end (default: 90)"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Drain one agent. Returns 0 when it has ended, 1 when it has not."""
    options = build_parser().parse_args(argv)
    try:
        key = None if options.cluster_key is None else ClusterKey.read(options.cluster_key)
        tls = None if options.ca is None else client_context(options.ca)
        asyncio.run(drain(options.url.rstrip("/"), key, tls, options.timeout_s))
    except (DrainFailed, OSError, BadClusterKey, BadCertificate) as error:
        print(f"kvferry drain: {error}", file=sys.stderr)
        return 1
    print(f"{options.url} has drained and ended")
    return 0

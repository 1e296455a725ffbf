# SPDX-License-Identifier: Apache-2.0
"""`kvferry canary`: have a proxy compare the answers of its pairs with those of one server, and report."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Sequence

import aiohttp
import msgspec

from kvferry.common.exceptions import message_of
from kvferry.common.http.tls import BadCertificate, client_context
from kvferry.common.options import CommandParser, server_url
from kvferry.deploy.http_client import MAX_PAGE_BYTES, client_session, read_page, refusal, why_no_response
from kvferry.proxy.canary.pair_record import ProbeReport

CALL_TIMEOUT_S = 300.0
"""A probe is two or three requests to servers that may be busy."""


class CanaryFailed(RuntimeError):
    """The proxy did not probe; the message says why."""


def build_parser() -> CommandParser:
    parser = CommandParser(
        "kvferry canary",
        "Send prompts through pairs of prefill and decode servers and to their decode servers alone, and "
        "compare the answers. Pairs take turns. Returns 0 if all are the same, 1 if one differs or a probe "
        "failed.",
    )
    parser.add_argument(
        "url",
        type=server_url,
        nargs="?",
        default="http://127.0.0.1:10001",
        metavar="URL",
        help="Base URL of the proxy. (default: http://127.0.0.1:10001)",
    )
    parser.add_argument("--model", metavar="NAME", help="Probe pairs of this model only.")
    parser.add_argument(
        "--probes", type=int, default=20, metavar="NUMBER", help="How many probes to send. (default: 20)"
    )
    parser.add_credentials("the certificate of the proxy")
    return parser


async def probe(http: aiohttp.ClientSession, url: str, model: str | None) -> ProbeReport:
    """Have one pair probed. Raises `CanaryFailed`."""
    try:
        async with http.post(f"{url}/canary", params={} if model is None else {"model": model}) as response:
            page = await read_page(response, CanaryFailed, MAX_PAGE_BYTES)
            if response.status != 200:
                raise CanaryFailed(refusal(url, response.status, page, server="a kvferry proxy"))
        return msgspec.json.decode(page, type=ProbeReport)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise CanaryFailed(f"{url} cannot be reached: {why_no_response(error)}") from error
    except msgspec.MsgspecError as error:
        raise CanaryFailed(f"{url} is not a kvferry proxy of this version: {error}") from error


async def run(url: str, model: str | None, probes: int, key: str | None, tls: ssl.SSLContext | None) -> bool:
    """Print a line for each probe. Returns whether all answers were the same. Raises `CanaryFailed`."""
    all_same = True
    async with client_session(tls, key, CALL_TIMEOUT_S) as http:
        for number in range(1, probes + 1):
            report = await probe(http, url, model)
            print(
                f"{number}/{probes} {report.model} {report.pair}: {report.verdict} ({report.state}): ", end=""
            )
            print(report.detail, flush=True)
            all_same = all_same and report.verdict in ("same", "learning")
    return all_same


def main(argv: Sequence[str]) -> int:
    """Probe. Returns 0 if all answers were the same, else 1."""
    options = build_parser().read(argv)
    try:
        tls = None if options.ca is None else client_context(options.ca)
        return 0 if asyncio.run(run(options.url, options.model, options.probes, options.key, tls)) else 1
    except (CanaryFailed, OSError, BadCertificate) as error:
        print(f"kvferry canary: {message_of(error)}", file=sys.stderr)
        return 1

# SPDX-License-Identifier: Apache-2.0
"""`kvferry status` against pages that come in parts, are none, or are too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
import pytest

from kvferry.deploy import status
from kvferry.deploy.status import StatusFailed, fetch_nodes, node_row, other_lines, summary
from kvferry.proxy.api.openapi import DownServerView, EventView, NodeList, NodeLoadView, NodeView

LOAD = NodeLoadView(
    running=3, waiting=1, kv_blocks_free=60, kv_blocks_total=80, kv_blocks_leased=0, max_running=8
)
NODE = NodeView(
    address="http://10.0.0.1:8000",
    role="decode",
    state="ready",
    breaker="open",
    dialect="native",
    model="m",
    incarnation="i",
    load=LOAD,
    in_flight=3,
    last_ping_s=0.25,
    not_paired="other weights",
    name="decode-0",
)
LOST = EventView(
    kind="lost", agent="j", name="decode-1", address="http://10.0.0.3:8000", role="decode", model="m",
    detail="", count=1, age_s=130.4,
)  # fmt: skip
NODES = NodeList(
    nodes=[NODE] * 100,
    refused_pairings=[],
    num_refused_pairings=7,
    rejected_agents=[],
    down=[DownServerView(address="http://10.0.0.2:8000", role="prefill", reason="no answer")],
)


@asynccontextmanager
async def serving(head: bytes, *parts: bytes) -> AsyncIterator[str]:
    """A server that writes one answer in parts, each of them on its way before the next is made."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        length = sum(map(len, parts))
        writer.write(b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n" % (head, length))
        with suppress(ConnectionError, asyncio.CancelledError):
            for part in parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_page_that_comes_in_parts_is_read_whole() -> None:
    page = msgspec.json.encode(NODES)
    async with serving(b"200 OK", page[:1000], page[1000:]) as url, aiohttp.ClientSession() as http:
        assert await fetch_nodes(http, url) == NODES


@pytest.mark.parametrize(
    ("head", "page", "said"),
    [
        (b"401 Unauthorized", b'{"error": {"message": "no API key"}}', "answered 401: no API key"),
        (b"200 OK", b"<html>", "is no kvferry proxy"),
        (b"200 OK", b" " * 2000, "more than 1000 bytes"),
    ],
)
async def test_what_is_no_list_of_agents_is_said(
    head: bytes, page: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "MAX_PAGE_BYTES", 1000)
    async with serving(head, page) as url, aiohttp.ClientSession() as http:
        with pytest.raises(StatusFailed, match=said):
            await fetch_nodes(http, url)


def test_a_row_says_why_an_agent_is_not_used() -> None:
    state = "ready, breaker open, not paired: other weights"
    assert node_row(NODE) == (
        "decode-0", "http://10.0.0.1:8000", "decode", state, "native", "m", "3 of 8", "1", "25 %", "0.2 s",
    )  # fmt: skip
    nameless = node_row(msgspec.structs.replace(NODE, name=""))
    assert nameless == ("10.0.0.1:8000", *node_row(NODE)[1:]), "told apart where columns are cut"
    assert other_lines(NODES) == [
        "http://10.0.0.2:8000 (prefill) is down: no answer",
        "and 7 more pairings that cannot be",
    ]


@pytest.mark.parametrize("state", ["cordoned", "draining"])
def test_the_state_is_the_pages_word_and_said_once(state: str) -> None:
    """As the proxy tells it: `unit/proxy/fleet/test_steering.py::test_a_cordoned_agent_finishes…`."""
    node = msgspec.structs.replace(
        NODE,
        state=state,
        breaker="closed",
        not_paired=f"its state is {state}",
    )
    assert node_row(node)[3] == state


def test_what_happened_is_said_with_the_lost_first() -> None:
    refused = msgspec.structs.replace(
        LOST, kind="pairing_refused", name="", detail="other weights", count=3, age_s=9.2
    )
    ended = msgspec.structs.replace(LOST, kind="worker_ended", name="", address="", role="", age_s=9000.0)
    nodes = msgspec.structs.replace(NODES, nodes=[NODE, NODE], lost=[LOST], events=[refused, LOST, ended])
    lost, *_, first, second, third = other_lines(nodes)
    assert lost == "decode-1 (decode) is lost: its pings stopped 2 min ago"
    assert first == "9 s ago: http://10.0.0.3:8000 (decode): pairing refused, 3 times: other weights"
    assert second == "2 min ago: decode-1 at http://10.0.0.3:8000 (decode): lost"
    assert third == "2 h ago: the proxy: worker ended"
    assert summary(nodes) == "2 of 3 agents ready, 1 lost, 6 running, 2 waiting, decode KV 25 %"

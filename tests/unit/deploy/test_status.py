# SPDX-License-Identifier: Apache-2.0
"""`kvferry status` against pages that come in parts, are none, or are too long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp
import msgspec
import pytest

from kvferry.deploy import http_client
from kvferry.deploy.http_client import StatusFailed, fetch_nodes
from kvferry.deploy.status import node_row, other_lines, summary
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


HTML = b"<!DOCTYPE html>\n<html><body>\n<h1>Not here</h1></body></html>\n"


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
        (
            b"401 Unauthorized",
            b'{"error": {"message": "no API key"}}',
            "401: no API key; --key names the file",
        ),
        (b"403 Forbidden", b'{"error": {"message": "not an admin\\n"}}', "answered 403: not an admin$"),
        (b"404 Not Found", b'{"error": {"message": "no"}}', "404: no; is it a kvferry proxy\\?"),
        (b"404 Not Found", HTML, "is not a kvferry proxy: it answered 404 with an HTML page$"),
        (b"405 Not Allowed", b"go\naway", "is not a kvferry proxy: it answered 405 with 'go away'$"),
        (b"404 Not Found", b"", "is not a kvferry proxy: it answered 404 with an empty page$"),
        (b"502 Bad Gateway", HTML, "[0-9] answered 502 with an HTML page$"),
        (b"200 OK", HTML, "is not a kvferry proxy: it answered with an HTML page$"),
        (b"200 OK", b"\xff\xfe", "is not a kvferry proxy: it answered with"),
        (b"200 OK", b"[" * 900, "of this version: its list of agents must be an object, not a list$"),
        (b"200 OK", b"{}", "is not a kvferry proxy of this version: nodes is missing$"),
        (b"200 OK", b" " * 2000, "more than 1000 bytes"),
    ],
)
async def test_what_is_no_list_of_agents_is_said(
    head: bytes, page: bytes, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_client, "MAX_PAGE_BYTES", 1000)
    async with serving(head, page) as url, aiohttp.ClientSession() as http:
        with pytest.raises(StatusFailed, match=said) as raised:
            await fetch_nodes(http, url)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "sent", "said"),
    [
        ("http", b"SSH-2.0-OpenSSH_9.2\r\n", "what it sends is not HTTP"),
        ("https", b"HTTP/1.1 400 Bad Request\r\n\r\n", "it does not serve https"),
        ("http", b"", "it closed the connection; does it serve https?"),
        ("http", None, "Connection refused"),
        ("https", None, "Connection refused"),
    ],
)
async def test_why_there_is_no_response_is_said_in_plain_words(
    scheme: str, sent: bytes | None, said: str
) -> None:
    """Neither the library's names for it, nor the parts of the URL once more."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(sent or b"")
        await reader.read(65_536)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
        url = f"{scheme}://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        if sent is None:
            server.close()
            await server.wait_closed()
        with pytest.raises(StatusFailed) as raised:
            await fetch_nodes(http, url)
    assert str(raised.value) == f"{url} cannot be reached: {said}"


async def test_a_host_that_has_no_address_is_said() -> None:
    async with aiohttp.ClientSession() as http:
        with pytest.raises(StatusFailed, match=r"no\.invalid:9 cannot be reached: [A-Z][a-z ]+$"):
            await fetch_nodes(http, "http://no.invalid:9")


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


def test_an_agent_to_which_many_transfers_fail_is_named() -> None:
    """Its prompts are computed again, and nothing else shows it."""
    failing = msgspec.structs.replace(
        NODE, pulls=4, failed_pulls={"unreachable": 1, "lease_gone": 18, "invalid": 0}
    )
    nodes = msgspec.structs.replace(NODES, down=[], num_refused_pairings=0)
    told = msgspec.structs.replace(nodes, nodes=[NODE, failing])
    assert other_lines(told) == [
        "decode-0 (decode): 19 of 23 KV transfers to it failed (unreachable 1, lease_gone 18)"
    ]
    few = msgspec.structs.replace(failing, pulls=1000)
    assert other_lines(msgspec.structs.replace(nodes, nodes=[few])) == []


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

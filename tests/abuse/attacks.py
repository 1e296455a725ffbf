# SPDX-License-Identifier: Apache-2.0
"""What one client can do, as a table: each attack is refused by name or served, and nobody else notices.

An attack is made first (bodies of megabytes take a while) and carried out then. It checks what it is
answered itself; `watch` sees what others notice of it. The ids are those of README.md.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import aiohttp
import zmq
import zmq.asyncio

from kvferry.common.http.server import MAX_PARTIAL_BYTES_HELD
from kvferry.proxy.exchange.poison import MAX_CRASHED_AGENTS
from kvferry.proxy.http.pool import MAX_BODY_BYTES
from kvferry.proxy.wire import registration as wire
from tests.abuse.raw import REPLY_S, Reply, connected, exchange, flood, post, read_reply
from tests.abuse.watch import GROWTH, MAX_BODY, MODEL
from tests.standins.agents import DEADLY_TO, StandInAgent
from tests.standins.hostile import DIALECTS, model_of, registration

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LARGE = 8_000_000
"""Bytes of a large text: within the limit of a body."""
PIECE_BYTES = 8192
SIDE_BY_SIDE = 8
MAX_ERROR_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What is attacked: URLs by name (`proxy`, `agent`), where agents register, and for how long."""

    urls: Mapping[str, str]
    discovery: str
    flood_s: float
    """How long attacks last that have no end of their own."""


Action = Callable[[Target], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One row of the table. `growth`: bytes by which any process's memory may grow."""

    id: str
    name: str
    make: Callable[[], Action]
    growth: int = GROWTH * MAX_BODY
    floods: bool = False
    """Whether it lasts as long as it is told to."""
    full: bool = False
    """Whether it differs so little from another one that only `make test-full` carries it out."""


Server = Literal["proxy", "agent"]
BOTH: tuple[Server, ...] = ("proxy", "agent")


# Expectations.


def check_refused(reply: Reply, status: int, param: str | None = None) -> None:
    """A typed error that names the field, and does not repeat what it was sent."""
    assert reply.status == status, (reply.status, reply.body[:500])
    assert len(reply.body) < MAX_ERROR_BYTES
    error = reply.error
    assert param is None or error["param"] == param, error
    assert error["message"] and error["type"]


def check_served(reply: Reply) -> None:
    """A complete response."""
    assert reply.status == 200, (reply.status, reply.body[:500])
    assert all(choice["finish_reason"] for choice in json.loads(reply.body)["choices"])


def check_typed(reply: Reply) -> None:
    """Served, or refused as a client's mistake."""
    if reply.status == 200:
        check_served(reply)
    else:
        assert 400 <= reply.status < 500, (reply.status, reply.body[:500])
        check_refused(reply, reply.status)


# Ways to attack.


def posted(
    make_body: Callable[[], bytes],
    check: Callable[[Reply], None],
    path: str = COMPLETIONS,
    to: Server = "proxy",
) -> Callable[[], Action]:
    """POST one body."""

    def make() -> Action:
        raw = make_body()

        async def action(target: Target) -> None:
            check(await post(target.urls[to], raw, path))

        return action

    return make


def posted_side_by_side(make_body: Callable[[], bytes], param: str, to: Server) -> Callable[[], Action]:
    """POST one body several times at once, piece by piece in turn: so they grow beside each other."""

    def make() -> Action:
        raw = make_body()

        async def send(url: str) -> None:
            async with connected(url) as (reader, writer):
                writer.write(head(COMPLETIONS, "POST", f"Content-Length: {len(raw)}"))
                for start in range(0, len(raw), PIECE_BYTES):
                    writer.write(raw[start : start + PIECE_BYTES])
                    await writer.drain()
                    await asyncio.sleep(0)
                reply = await read_reply(reader)
                assert reply is not None, "no response"
                check_refused(reply, 400, param)

        async def action(target: Target) -> None:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(SIDE_BY_SIDE):
                    tasks.create_task(send(target.urls[to]))

        return action

    return make


def refused(param: str) -> Callable[[Reply], None]:
    return partial(check_refused, status=400, param=param)


def flooded(first: bytes, more: bytes, to: Server, *, read: bool = False) -> Callable[[], Action]:
    """Send without an end."""

    def make() -> Action:
        async def action(target: Target) -> None:
            await flood(target.urls[to], first, more, target.flood_s, read=read)

        return action

    return make


def kept_open(count: int, sent: bytes, to: Server) -> Callable[[], Action]:
    """Open connections, send the beginning of a request on each, and wait."""

    def make() -> Action:
        async def hold(url: str) -> None:
            async with connected(url) as (_, writer):
                writer.write(sent)
                await asyncio.Event().wait()

        async def action(target: Target) -> None:
            holding = [asyncio.ensure_future(hold(target.urls[to])) for _ in range(count)]
            await asyncio.sleep(target.flood_s)
            for each in holding:
                each.cancel()
            for outcome in await asyncio.gather(*holding, return_exceptions=True):
                assert isinstance(outcome, asyncio.CancelledError | ConnectionError), outcome

        return action

    return make


def sent_raw(sent: bytes, check: Callable[[Reply | None], None], to: Server) -> Callable[[], Action]:
    """Send bytes and look at the first response."""

    def make() -> Action:
        async def action(target: Target) -> None:
            check(await exchange(target.urls[to], sent))

        return action

    return make


# Bodies.


def completion(prompt: Any = "Hello", model: str = MODEL, **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": prompt, **fields}, separators=(",", ":")).encode()


def chat(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "messages": messages, **fields}, separators=(",", ":")).encode()


def with_member(name: str, value: bytes) -> bytes:
    """A small completion with one more member, whose value is JSON of any size."""
    return b'{"model":"%b","prompt":"Hello","max_tokens":8,"%b":%b}' % (MODEL.encode(), name.encode(), value)


PART = {"type": "text", "text": "a"}
TEXTS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "words": (COMPLETIONS, lambda: completion("ab cd " * (LARGE // 6))),
    "spaces": (COMPLETIONS, lambda: completion(" " * LARGE)),
    "special tokens": (COMPLETIONS, lambda: completion("<|end|>" * (LARGE // 7))),
    "ids": (COMPLETIONS, lambda: b'{"model":"%b","prompt":[%b1]}' % (MODEL.encode(), b"1," * 3_900_000)),
    "one message": (CHAT, lambda: chat([{"role": "user", "content": "ab cd " * (LARGE // 6)}])),
    "many messages": (CHAT, lambda: chat([{"role": "user", "content": "hello"}] * 190_000)),
    "many parts": (
        CHAT,
        lambda: chat([{"role": "user", "content": [PART] * 250_000}]),
    ),
    "a role": (CHAT, lambda: chat([{"role": "u" * LARGE, "content": "hello"}])),
    "tool calls": (CHAT, lambda: chat([{"role": "assistant", "tool_calls": ["a" * 100] * 75_000}])),
}
"""D2: each can only be a 400, for it cannot fit the context."""

BIASES = {str(token): -1.0 for token in range(900)}
LONG_RUN: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True}
SETTINGS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "936 biases, 64 choices": ("logit_bias", lambda: completion(n=64, logit_bias=BIASES, **LONG_RUN)),
    "550,000 biases": ("logit_bias", lambda: with_member("logit_bias", many_members(550_000))),
    "3.9 million stop ids": (
        "stop_token_ids",
        lambda: with_member("stop_token_ids", many(b"1", 3_900_000)),
    ),
    "a long stop string": ("stop", lambda: completion(stop=["a" * 1025])),
    "2 million stop strings": ("stop", lambda: with_member("stop", many(b'"a"', 1_900_000))),
    "129 prompts": ("prompt", lambda: completion(["a"] * 129)),
    "1.9 million prompts": ("prompt", lambda: completion(["a"] * 1_900_000)),
    "prompts times choices": ("n", lambda: completion(["a"] * 3, n=64)),
}
"""D3: the field that the 400 must name."""


def many(item: bytes, count: int) -> bytes:
    return b"[" + b",".join([item] * count) + b"]"


def many_members(count: int) -> bytes:
    return b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


ALLOWED: dict[str, Callable[[], bytes]] = {
    "all settings at their limits": lambda: completion(
        n=32,
        logit_bias=dict(list(BIASES.items())[:300]),
        stop_token_ids=[899] * 1024,
        stop=["~" * 64] * 16,
        presence_penalty=0.5,
        repetition_penalty=1.1,
        **LONG_RUN,
    ),
    "20 log probabilities of 32 choices": lambda: completion(n=32, logprobs=20, **LONG_RUN),
    "a prompt that fills the context": lambda: completion([7] * 2000, max_tokens=8),
    "a user of 8 MB": lambda: with_member("user", b'"' + b"u" * LARGE + b'"'),
}
ODD: dict[str, Callable[[], bytes]] = {
    "4 million brackets": lambda: with_member("x", b"[" * (LARGE // 2) + b"]" * (LARGE // 2)),
    "550,000 keys": lambda: with_member("x", many_members(550_000)),
    "550,000 keys at the top": lambda: (
        b'{"model":"%b","prompt":"a","max_tokens":4,%b'
        % (
            MODEL.encode(),
            many_members(550_000)[1:],
        )
    ),
    "a model's name of 8 MB": lambda: b'{"model":"' + b"m" * LARGE + b'","prompt":"a"}',
    "a number of 8 MB": lambda: with_member("max_tokens", b"1" * LARGE),
    "an escape of 8 MB": lambda: completion("\x01" * (LARGE // 6)),
    "no JSON": lambda: b"{" * LARGE,
    "binary": lambda: bytes(range(256)) * (LARGE // 256),
}
"""Served, or refused as the client's mistake."""


# Connections: none of these needs a key.


def head(path: str = COMPLETIONS, method: str = "GET", *fields: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *fields, "", ""]).encode()


PIPELINED = head() * 1000
ENDLESS_HEAD = head()[:-2] + b"X-Pad: "
ENDLESS_CHUNK = head(COMPLETIONS, "POST", "Transfer-Encoding: chunked") + b"1;"
BODY_IN_CHUNKS = head(COMPLETIONS, "POST", "Transfer-Encoding: chunked")
CHUNKS_OF_A_BYTE = b"1\r\n \r\n" * 50_000
COMPRESSED = head(COMPLETIONS, "POST", "Transfer-Encoding: gzip, chunked") + b"0\r\n\r\n"
HALF_A_BODY = head(COMPLETIONS, "POST", f"Content-Length: {MAX_BODY}") + b" " * (MAX_BODY // 4)
UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: YQ==",
)
PAD = b"a" * 2**18
SEGMENT_S = 0.1
"""Between two segments: the server reads the first one alone."""


def is_400(reply: Reply | None) -> None:
    assert reply is not None
    check_refused(reply, 400)


def is_no_websocket(reply: Reply | None) -> None:
    assert reply is not None
    check_refused(reply, 426)


def keeps_its_own_id(reply: Reply | None) -> None:
    assert reply is not None
    assert reply.status == 200
    assert b"smuggled" not in reply.head


H2C = ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__")


def offered(to: Server) -> Callable[[], Action]:
    """Offer h2c with each request, whose body comes in a segment of its own: it spells a request, or asks."""
    bodies = [(head("/metrics"), is_400), (completion(max_tokens=4), is_served)]

    def make() -> Action:
        async def action(target: Target) -> None:
            async with asyncio.timeout(REPLY_S), connected(target.urls[to]) as (reader, writer):
                for body, check in bodies * 2:
                    writer.write(head(COMPLETIONS, "POST", *H2C, f"Content-Length: {len(body)}"))
                    await asyncio.sleep(SEGMENT_S)
                    writer.write(body)
                    check(await read_reply(reader))

        return action

    return make


TRAILERS = head(
    COMPLETIONS, "POST", "Transfer-Encoding: chunked"
) + b"%x\r\n%b\r\n0\r\nX-Request-Id: smuggled\r\n\r\n" % (
    len(completion(max_tokens=4)),
    completion(max_tokens=4),
)


# Servers behind the proxy.


def asked_of(
    way: str, dialect: str, check: Callable[[Reply | None], None], *, stream: bool
) -> Callable[[], Action]:
    """Ask for a response of a server that misbehaves, and leave if it has no end."""

    def make() -> Action:
        body = json.dumps({"model": model_of(way, dialect), "prompt": "a", "max_tokens": 8, "stream": stream})
        sent = head(COMPLETIONS, "POST", f"Content-Length: {len(body)}", "Connection: close") + body.encode()

        async def action(target: Target) -> None:
            reply = None
            with suppress(TimeoutError):
                wait_s = target.flood_s if check is is_left else SERVER_S
                reply = await exchange(target.urls["proxy"], sent, wait_s)
            check(reply)

        return action

    return make


def is_a_bad_answer(reply: Reply | None) -> None:
    """The server's fault, and soon; later on its circuit breaker is open."""
    assert reply is not None, "no response in time"
    check_refused(reply, reply.status)
    assert reply.status == 502 or reply.error["code"] == "no_agent", reply


def is_a_bad_stream(reply: Reply | None) -> None:
    """The server's fault, be it that the stream has begun."""
    assert reply is not None, "no end in time"
    if reply.status == 200:
        assert reply.body.endswith(b"data: [DONE]\n\n"), reply.body[-100:]
        assert b'data: {"error"' in reply.body, reply.body[-500:]
    else:
        is_a_bad_answer(reply)


def is_a_short_error(reply: Reply | None) -> None:
    """An error of the server that the client may see, without its bulk."""
    assert reply is not None
    assert 400 <= reply.status < 600
    check_refused(reply, reply.status)
    check_head(reply)


def is_served(reply: Reply | None) -> None:
    assert reply is not None
    check_served(reply)
    check_head(reply)


def check_head(reply: Reply) -> None:
    """Of headers that a client library reads."""
    assert len(reply.head) < 8192, len(reply.head)
    assert reply.head.isascii(), reply.head[:500]


def unread(way: str, dialect: str, count: int) -> Callable[[], Action]:
    """Ask so many times for a stream without an end, and read nothing of it."""
    body = json.dumps({"model": model_of(way, dialect), "prompt": "a", "stream": True})
    sent = head(COMPLETIONS, "POST", f"Content-Length: {len(body)}") + body.encode()

    def make() -> Action:
        async def action(target: Target) -> None:
            async with AsyncExitStack() as stack:
                for _ in range(count):
                    _, writer = await stack.enter_async_context(connected(target.urls["proxy"]))
                    cast(asyncio.Transport, writer.transport).pause_reading()
                    writer.write(sent)
                await asyncio.sleep(target.flood_s)

        return action

    return make


def is_left(_: Reply | None) -> None:
    """An honest stream without an end: the client leaves."""


SERVER_S = 60.0
"""How long a client waits for what a misbehaving server makes of its request."""
SERVERS: dict[str, tuple[bool, Callable[[Reply | None], None]]] = {
    "a header without an end": (False, is_a_bad_answer),
    "a header of 32 MB": (False, is_a_bad_answer),
    "headers without an end": (False, is_a_bad_answer),
    "1xx without an end": (False, is_a_bad_answer),
    "status 099": (False, is_a_bad_answer),
    "an empty 200": (False, is_a_bad_answer),
    "a binary 200": (False, is_a_bad_answer),
    "a gzip 200": (False, is_a_bad_answer),
    "an answer without an end": (False, is_a_bad_answer),
    "a Retry-After of any bytes": (False, is_a_short_error),
    "an error of 1 MB": (False, is_a_short_error),
    "a Server-Timing of 60 KB": (False, is_served),
    "events without an end": (True, is_left),
    "an event without an end": (True, is_a_bad_stream),
    "token lines without an end": (True, is_a_bad_stream),
    "a token line without an end": (True, is_a_bad_stream),
    "comments without an end": (True, is_left),
    "[DONE] alone": (True, is_a_bad_stream),
    "no event at all": (True, is_a_bad_stream),
}


FOREIGN_TOO = ("an empty 200", "events without an end", "an event without an end", "[DONE] alone")
"""What dialects read in ways of their own."""


# Agents that register.


def registered(count: int) -> Callable[[], Action]:
    """Register as many agents as one peer likes, and look at the pages that show them."""

    def make() -> Action:
        frames = [
            wire.encode(registration("other", "native", 1 + number, index, f"{number:016x}"))
            for index in (1, 2)
            for number in range(count)
        ]

        async def action(target: Target) -> None:
            context = zmq.asyncio.Context()
            dealer = context.socket(zmq.DEALER)
            dealer.connect(f"tcp://{target.discovery}")
            try:
                async with aiohttp.ClientSession() as http:
                    for number, frame in enumerate(frames, 1):
                        await dealer.send(frame)
                        if number % count:
                            continue
                        for page in ("/nodes", "/ready", "/metrics", "/v1/models"):
                            async with http.get(target.urls["proxy"] + page) as response:
                                assert response.status == 200
                                await response.read()
            finally:
                context.destroy(linger=0)

        return action

    return make


def undiallable(host: str, *, registers: bool) -> Callable[[], Action]:
    """A pair of agents, and a third agent at a host that cannot be looked up: no request may notice it."""

    def make() -> Action:
        async def action(target: Target) -> None:
            proxies, model = (target.discovery,), f"undiallable-{secrets.token_hex(4)}"
            wrong = {"address": f"http://{host}:8000"}
            async with (
                StandInAgent("prefill", proxies, model=model) as prefill,
                StandInAgent("decode", proxies, model=model) as decode,
                StandInAgent("decode", proxies, model=model, overrides=wrong) as third,
            ):
                for agent in (prefill, decode, third) if registers else (prefill, decode):
                    await agent.until(lambda agent=agent: agent.acks)
                if not registers:
                    await asyncio.sleep(3 * third.ping_interval_s)  # its pings are not answered
                for _ in range(12):
                    body = json.dumps({"model": model, "prompt": "a", "max_tokens": 4}).encode()
                    check_served(await post(target.urls["proxy"], body))

        return action

    return make


DEADLY_ROLES = ("prefill", "decode", "decode", "decode")


def deadly_prompt() -> Action:
    """A request that kills the agents that decode it, real processes of a model of their own."""

    async def action(target: Target) -> None:
        model = f"deadly-{secrets.token_hex(4)}"
        async with AsyncExitStack() as stack, aiohttp.ClientSession() as http:
            agents = [
                await stack.enter_async_context(_mortal(role, model, target.discovery))
                for role in DEADLY_ROLES
            ]
            async with asyncio.timeout(SERVER_S):
                while await _num_agents(http, target.urls["proxy"], model, "ready") < len(agents):
                    await asyncio.sleep(0.05)
            deadly = completion(f"{DEADLY_TO}decode", model, max_tokens=4)
            reply = await post(target.urls["proxy"], deadly)
            check_refused(reply, 500)
            assert reply.error["code"] == "suspect_request", reply
            check_served(await post(target.urls["proxy"], completion(model=model, max_tokens=4)))
            async with asyncio.timeout(SERVER_S):
                while _num_dead(agents) < MAX_CRASHED_AGENTS:  # it is dead before this loop hears of it
                    await asyncio.sleep(0.01)
            assert _num_dead(agents) == MAX_CRASHED_AGENTS, agents

    return action


@asynccontextmanager
async def _mortal(role: str, model: str, discovery: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A stand-in agent as a process, which takes from the others no more time than they leave."""
    argv = ("-m", "tests.standins.agents", "--role", role, "--proxy", discovery, "--model", model)
    child = await asyncio.create_subprocess_exec(
        "nice", "-n", "19", sys.executable, *argv, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    try:
        json.loads(await asyncio.wait_for(child.stdout.readline(), REPLY_S))
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.communicate()


def _num_dead(agents: list[asyncio.subprocess.Process]) -> int:
    return sum(agent.returncode is not None for agent in agents)


async def _num_agents(http: aiohttp.ClientSession, url: str, model: str, state: str) -> int:
    async with http.get(f"{url}/nodes") as response:
        nodes = (await response.json())["nodes"]
    return sum((node["model"], node["state"]) == (model, state) for node in nodes)


SHORT_BODIES = ("550,000 keys at the top to the proxy", "a model's name of 8 MB to the proxy")
FULL_ONLY = frozenset(
    {
        *(f"pipelined requests to the {to}, answers read" for to in BOTH),
        *("spaces", "special tokens", "many parts", "a role"),
        *("a long stop string", "129 prompts", "prompts times choices"),
        *("a prompt that fills the context", "a user of 8 MB"),
        "300 slow heads at the proxy",
        *("an upgrade at the agent", "a request id in a trailer to the agent"),
        *("no Host at the agent", "two Hosts at the agent", "two Hosts at the proxy"),
        *(f"a compressed transfer at the {to}" for to in BOTH),
        "500 idle connections to the proxy",
        f"{SIDE_BY_SIDE} bodies of 8 MB, piece by piece, to the agent",
        *(f"{name} to the {to}" for name in ODD for to in BOTH if f"{name} to the {to}" not in SHORT_BODIES),
        *(f"{way} (vllm-nixl)" for way in SERVERS if way not in FOREIGN_TOO),
        *("a gzip 200 (native)", "status 099 (native)", "no event at all (native)"),
    }
)


def _attacks() -> list[Attack]:
    """The table, in the order of the ids."""
    table: list[Attack] = []

    def add(id: str, name: str, make: Callable[[], Action], held: int = 0, *, floods: bool = False) -> None:
        growth, full = GROWTH * MAX_BODY + held, name in FULL_ONLY
        table.append(Attack(id=id, name=name, make=make, growth=growth, floods=floods, full=full))

    for to in BOTH:
        add("D1", f"pipelined requests to the {to}", flooded(PIPELINED, PIPELINED, to), floods=True)
        add(
            "D1",
            f"pipelined requests to the {to}, answers read",
            flooded(PIPELINED, PIPELINED, to, read=True),
            floods=True,
        )
    for name, (path, body) in TEXTS.items():
        param = "prompt" if path == COMPLETIONS else "messages"
        add("D2", name, posted(body, refused(param), path))
    for name, (field, body) in SETTINGS.items():
        add("D3", name, posted(body, refused(field)))
    for name, body in ALLOWED.items():
        add("D3", name, posted(body, check_served))
    for to in BOTH:
        add("D6", f"a head without an end to the {to}", flooded(ENDLESS_HEAD, PAD, to), floods=True)
        add("D6", f"300 slow heads at the {to}", kept_open(300, ENDLESS_HEAD, to), floods=True)
        add(
            "D7",
            f"an upgrade at the {to}",
            sent_raw(head("/health", "GET", *UPGRADE), is_no_websocket, to),
        )
        add("F1", f"bodies behind an offer of h2c to the {to}", offered(to))
        add("D9", f"a request id in a trailer to the {to}", sent_raw(TRAILERS, keeps_its_own_id, to))
        add("D16", f"no Host at the {to}", sent_raw(b"GET /health HTTP/1.1\r\n\r\n", is_400, to))
        add("D16", f"two Hosts at the {to}", sent_raw(head("/health", "GET", "Host: y"), is_400, to))
        add("D16", f"a compressed transfer at the {to}", sent_raw(COMPRESSED, is_400, to))
        add(
            "connections",
            f"a chunk extension without an end to the {to}",
            flooded(ENDLESS_CHUNK, PAD, to),
            floods=True,
        )
        add(
            "connections",
            f"chunks of a byte to the {to}",
            flooded(BODY_IN_CHUNKS, CHUNKS_OF_A_BYTE, to),
            floods=True,
        )
        add("connections", f"500 idle connections to the {to}", kept_open(500, b"", to), floods=True)
        for name, body in ODD.items():
            add("bodies", f"{name} to the {to}", posted(body, check_typed, to=to))
        ids = posted_side_by_side(TEXTS["ids"][1], "prompt", to)
        held = GROWTH * MAX_BODY * (SIDE_BY_SIDE - 1)
        add("bodies", f"{SIDE_BY_SIDE} bodies of 8 MB, piece by piece, to the {to}", ids, held)
    for way, (stream, check) in SERVERS.items():
        for dialect in DIALECTS:
            id = "D10" if "200" in way or "[DONE]" in way else "D11" if "header" in way else "servers"
            held = MAX_BODY_BYTES if way == "an answer without an end" else 0
            add(id, f"{way} ({dialect})", asked_of(way, dialect, check, stream=stream), held)
    add(
        "servers",
        "100 streams that nobody reads",
        unread("events without an end", "native", 100),
        floods=True,
    )
    add("D4", "1,000 agents", registered(1000))
    for host, registers in (("gpu..7", False), ("no-such-host.invalid", True)):
        add("D5", f"an agent at {host}", undiallable(host, registers=registers))
    add("suspects", "a prompt that kills who decodes it", deadly_prompt)
    for to in BOTH:
        bodies = kept_open(100, HALF_A_BODY, to)
        held = MAX_PARTIAL_BYTES_HELD * 3 // 2  # buffers grow ahead of what they hold
        add("D12", f"100 half-sent bodies to the {to}", bodies, held, floods=True)
    return table


ATTACKS = tuple(_attacks())

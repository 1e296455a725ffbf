# SPDX-License-Identifier: Apache-2.0
"""The pool of connections to agents: its limit, when there are more requests than connections."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from typing import Any

import pytest

from kvferry.proxy.errors import AgentLost, BadResponse, OutOfDescriptors, ProxyError, TooManyResponses
from kvferry.proxy.http import pool as pool_module
from kvferry.proxy.http import upstream_connection
from kvferry.proxy.http.pool import LARGE_RESPONSE_BYTES, ConnectionLimit, PoolSettings, UpstreamPool
from kvferry.proxy.http.upstream_connection import STALE_AFTER_S, ResponseBounds
from kvferry.proxy.wire.registration import Register
from tests.standins.agents import Fault, StandInAgent
from tests.standins.raw_server import whole
from tests.unit.proxy.builders import registration

BODY = json.dumps({"model": "stand-in", "prompt": "a b c", "max_tokens": 3}).encode()
FOREVER = float("inf")
SOON_S = 20.0
"""Less than an unused connection is kept."""


async def ask(upstream: UpstreamPool, agent: StandInAgent) -> None:
    by = asyncio.get_running_loop().time() + SOON_S
    async with upstream.post(
        agent.registration(), "/v1/completions", BODY, {}, headers_deadline=by, deadline=by
    ) as response:
        await response.read()


async def test_a_waiting_request_gets_the_connection_of_one_that_ends() -> None:
    pool = UpstreamPool(PoolSettings(max_connections=2))
    async with pool as upstream, StandInAgent("both") as agent:
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for _ in range(8)))
        assert agent.peak <= 2
        assert len({asked.connection for asked in agent.asked}) == 2


async def test_a_waiting_request_takes_over_from_one_at_another_agent() -> None:
    pool = UpstreamPool(PoolSettings(max_connections=1))
    async with pool as upstream, StandInAgent("both") as one, StandInAgent("both") as other:
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for agent in (one, other, one, other)))
        assert len(one.asked) == len(other.asked) == 2


@pytest.mark.parametrize(
    ("host", "fault", "failure"),
    [
        ("gpu..7", None, AgentLost),
        ("g" * 64, None, AgentLost),
        ("127.0.0.1", errno.EMFILE, OutOfDescriptors),
        ("127.0.0.1", errno.ENFILE, OutOfDescriptors),
    ],
)
async def test_an_agent_that_cannot_be_dialled_is_lost_unless_the_fault_is_ours(
    monkeypatch: pytest.MonkeyPatch, host: str, fault: int | None, failure: type[ProxyError]
) -> None:
    """D5, D13: the one was an internal error, the other opened the circuit breakers of all agents."""

    async def fail(*_: object, **__: Any) -> None:
        assert fault is not None
        raise OSError(fault, os.strerror(fault))

    loop = asyncio.get_running_loop()
    if fault is not None:
        monkeypatch.setattr(loop, "create_connection", fail)
    by = loop.time() + SOON_S
    async with UpstreamPool(PoolSettings()) as upstream:
        with pytest.raises(failure):
            await upstream.get(registration("decode", 1), f"http://{host}:9/", deadline=by)


@pytest.mark.parametrize("within", [None, BadResponse("within"), asyncio.CancelledError()], ids=repr)
async def test_the_end_of_a_request_is_reported_once(within: BaseException | None) -> None:
    ends: list[tuple[Register, BaseException | None]] = []
    by = asyncio.get_running_loop().time() + SOON_S
    async with UpstreamPool(PoolSettings()) as upstream, StandInAgent("both") as agent:
        info = agent.registration()
        with nullcontext() if within is None else pytest.raises(type(within)):
            async with upstream.post(
                info, "/v1/completions", BODY, {}, headers_deadline=by, deadline=by,
                on_end=lambda *end: ends.append(end),
            ) as response:  # fmt: skip
                await response.read()
                if within is not None:
                    raise within
    assert ends == [(info, within)]


async def test_the_end_of_a_request_without_a_response_is_reported_once() -> None:
    ends: list[tuple[Register, BaseException | None]] = []
    by = asyncio.get_running_loop().time() + SOON_S
    async with UpstreamPool(PoolSettings()) as upstream, StandInAgent("both") as gone:
        await gone.close_http()
        info = gone.registration()
        with pytest.raises(AgentLost) as lost:
            async with upstream.post(
                info, "/v1/completions", BODY, {}, headers_deadline=by, deadline=by,
                on_end=lambda *end: ends.append(end),
            ):  # fmt: skip
                pass
    assert ends == [(info, lost.value)]


async def test_a_failed_request_releases_its_connection() -> None:
    pool = UpstreamPool(PoolSettings(max_connections=1))
    async with (
        pool as upstream,
        StandInAgent("both") as agent,
        StandInAgent("both") as gone,
    ):
        await gone.close_http()
        agent.faults += [Fault("alone", "reset"), Fault("alone", "status")]
        for failing in (gone, agent, agent):
            with pytest.raises(AgentLost):
                await ask(upstream, failing)
        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*(ask(upstream, agent) for _ in range(2)))


class OnceServer:
    """Answers one request on each connection, and closes it when the next one comes; or ends altogether then.

    An async context: entering listens, leaving closes everything.
    """

    def __init__(self, *, ends: bool) -> None:
        self.connections = 0
        self._ends = ends
        self._server: asyncio.Server
        self._served: list[asyncio.Task[None] | None] = []

    async def __aenter__(self) -> OnceServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        await asyncio.gather(*filter(None, self._served))

    def registration(self) -> Register:
        port = self._server.sockets[0].getsockname()[1]
        return registration("both", 1, address=f"http://127.0.0.1:{port}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._served.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(len(BODY))
        writer.write(whole(b"{}"))
        with suppress(asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
        if self._ends:
            self._server.close()
        writer.transport.abort()


@pytest.mark.parametrize(("idle_s", "ends"), [(STALE_AFTER_S, False), (0.0, False), (STALE_AFTER_S, True)])
async def test_a_request_that_crosses_the_close_of_an_idle_connection_is_sent_again(
    monkeypatch: pytest.MonkeyPatch, idle_s: float, ends: bool
) -> None:
    """vLLM closes what is idle for 5 s. Several requests that met that at once opened its circuit breaker.

    A server that has just answered does not do so, and one that takes no other connection has ended: those
    are lost, maybe by the request.
    """
    monkeypatch.setattr(upstream_connection, "STALE_AFTER_S", STALE_AFTER_S - idle_s)
    async with OnceServer(ends=ends) as server, UpstreamPool(PoolSettings()) as upstream:
        agent, by = server.registration(), asyncio.get_running_loop().time() + SOON_S

        async def ask_it() -> bytes:
            async with upstream.post(
                agent, "/v1/completions", BODY, {}, headers_deadline=by, deadline=by
            ) as response:
                return await response.read()

        assert await ask_it() == b"{}"
        if idle_s and not ends:
            assert await ask_it() == b"{}"
            assert server.connections == 2
        else:
            with pytest.raises(AgentLost) as lost:
                await ask_it()
            assert lost.value.may_be_caused and not lost.value.connection_refused
            assert server.connections == 1


def waiting(limit: ConnectionLimit, count: int) -> list[asyncio.Task[None]]:
    """So many tasks that acquire a connection."""
    return [asyncio.get_running_loop().create_task(limit.acquire(FOREVER)) for _ in range(count)]


async def turns() -> None:
    """Let every task run that can."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_connections_are_acquired_in_order() -> None:
    limit = ConnectionLimit(1)
    tasks = waiting(limit, 3)
    for index in range(3):
        await turns()
        assert [task.done() for task in tasks] == [True] * (index + 1) + [False] * (2 - index)
        assert not limit.free
        limit.release()
    assert limit.free == 1


async def test_acquiring_too_late_is_a_timeout() -> None:
    limit = ConnectionLimit(1)
    await limit.acquire(FOREVER)
    with pytest.raises(TimeoutError):
        await limit.acquire(asyncio.get_running_loop().time())
    limit.release()
    assert limit.free == 1


@pytest.mark.parametrize("steps", ["cancel, end, release", "cancel, release, end", "release, cancel, end"])
async def test_a_cancelled_waiter_keeps_no_connection(steps: str) -> None:
    """Whether the connection is released after it has ended, as it is cancelled, or just before."""
    limit = ConnectionLimit(1)
    holder, cancelled, last = waiting(limit, 3)
    await turns()
    for step in steps.split(", "):
        if step == "cancel":
            cancelled.cancel()
        elif step == "release":
            limit.release()
        else:
            await asyncio.wait([cancelled])
    await asyncio.wait_for(last, SOON_S)
    assert holder.done() and cancelled.cancelled() and not limit.free
    limit.release()
    assert limit.free == 1


async def test_large_responses_are_read_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Joining 64 MiB took the streams of all clients 0.2 s."""
    monkeypatch.setattr(pool_module, "MAX_READ_BYTES", 2 * LARGE_RESPONSE_BYTES)
    here, go = threading.get_ident(), threading.Event()
    async with UpstreamPool(PoolSettings()) as upstream:
        assert await upstream.read_beside(LARGE_RESPONSE_BYTES, threading.get_ident) == here
        waiting = asyncio.ensure_future(upstream.read_beside(LARGE_RESPONSE_BYTES + 1, go.wait))
        await asyncio.sleep(0)
        with pytest.raises(TooManyResponses):
            await upstream.read_beside(LARGE_RESPONSE_BYTES + 1, threading.get_ident)
        go.set()
        assert await waiting
        assert await upstream.read_beside(LARGE_RESPONSE_BYTES + 1, threading.get_ident) != here


@asynccontextmanager
async def half_an_answer(size: int, end: asyncio.Event) -> AsyncIterator[str]:
    """The address of a server that sends so many bytes of an answer, and the second half at the end."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (2 * size) + bytes(size))
        await end.wait()
        writer.write(bytes(size))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_the_answer_that_holds_most_gives_way() -> None:
    """All servers together could make the proxy hold 64 MiB for each connection."""
    end, by = asyncio.Event(), asyncio.get_running_loop().time() + SOON_S
    async with (
        UpstreamPool(PoolSettings(), ResponseBounds(2**20)) as upstream,
        half_an_answer(2**18, end) as small,
        half_an_answer(2**20, end) as large,
        asyncio.TaskGroup() as tasks,
    ):
        agent = registration("decode", 1)
        asking = [tasks.create_task(upstream.get(agent, small, deadline=by)) for _ in range(2)]
        with pytest.raises(TooManyResponses):
            await upstream.get(agent, large, deadline=by)
        end.set()
        assert [len(await each) for each in asking] == [2**19, 2**19]
        assert upstream.bounds.left == 2**20, "what has ended holds nothing"

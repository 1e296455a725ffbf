# SPDX-License-Identifier: Apache-2.0
"""HTTP towards the agents: kept connections, deadlines on every wait, failures in the proxy's own words."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from urllib.parse import urlsplit

from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.dialects import native
from kvferry.proxy.errors import AgentLost, AgentRejected, AgentTimeout, BadResponse, ProxyError, error_object
from kvferry.proxy.http.hang_detector import OpenLegs
from kvferry.proxy.http.places import ConnectionLimit
from kvferry.proxy.http.upstream_connection import (
    AgentSilent,
    ConnectionBroken,
    Sink,
    State,
    UpstreamConnection,
)
from kvferry.proxy.wire.messages import Incarnation, Register
from kvferry.proxy.wire.tls import client_context

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
FINISH_GRACE_S = 1.0


@dataclass(frozen=True, slots=True)
class Origin:
    """Where an agent listens. `host_header`: as HTTP wants it, brackets and port included."""

    host: str
    port: int
    is_tls: bool
    host_header: str


class UpstreamResponse:
    """An agent's answer with status 200. Read it once, by `body`, `pump` or `chunks`.

    All waits raise `AgentTimeout` at their deadline and `AgentLost` when the agent breaks off or is given up.
    """

    def __init__(self, connection: UpstreamConnection, agent: Register, idle_s: float, by: float) -> None:
        self._connection = connection
        self._agent = agent
        self._idle_s = idle_s
        self._by = by

    @property
    def content_type(self) -> str:
        """The media type with its parameters, as the agent sent it."""
        return self.header("content-type") or "application/octet-stream"

    def header(self, name: str) -> str | None:
        """A header of the answer; `name` in lower case."""
        value = self._connection.headers.get(name.encode())
        return None if value is None else value.decode("latin-1")

    async def body(self) -> bytes:
        """The whole body."""
        try:
            return await _read(self._connection, self._by, MAX_ANSWER_BYTES)
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self._agent) from error

    async def pump(self, sink: Sink) -> None:
        """Give the body to `sink` as it comes, until its end. What the sink raises is raised here."""
        self._connection.limit(self._by, self._idle_s)
        self._connection.feed(sink)
        try:
            await self._connection.end()
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self._agent) from error

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body's bytes as they come, until its end; for those who must wait between them."""
        self._connection.limit(self._by, self._idle_s)
        try:
            while chunk := await self._connection.take():
                yield chunk
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self._agent) from error

    async def finish(self) -> None:
        """After `chunks` was left: wait a moment for the end, so that the connection can be kept."""
        self.finish_soon()
        try:
            while await self._connection.take():
                continue
        except (ConnectionBroken, TimeoutError):
            return

    def finish_soon(self) -> None:
        """All that is wanted is here; wait a moment for the end, so that the connection can be kept."""
        self._connection.limit(asyncio.get_running_loop().time() + FINISH_GRACE_S)

    def pause(self) -> None:
        """Take nothing for a while; the agent's silence does not count meanwhile."""
        self._connection.pause()

    def resume(self) -> None:
        """Go on taking."""
        self._connection.resume()


class Leg:
    """One request to an agent, while it is open; made by `UpstreamPool.post`.

    A class, since a generator's context would cost what everything else in here costs.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        origin: Origin,
        agent: Register,
        request: bytes,
        headers_by: float,
        by: float,
        movable: Callable[[], bool],
    ) -> None:
        self.agent = agent
        self.movable = movable
        self._pool = pool
        self._origin = origin
        self._request = request
        self._headers_by = headers_by
        self._by = by
        self._connection: UpstreamConnection

    async def __aenter__(self) -> UpstreamResponse:
        self._connection = connection = await self._pool.borrow(self._origin, self.agent, self._headers_by)
        self._pool.open_legs.add(self)
        try:
            connection.send(self._request, self._headers_by)
            await connection.head()
            if connection.status != 200:
                raw = await _read(connection, self._by, MAX_ERROR_BYTES)
                raise _verdict(connection, raw, self.agent)
            connection.limit(self._by)  # for the body, whenever somebody asks for it
        except (ConnectionBroken, TimeoutError) as error:
            self._pool.open_legs.discard(self)
            self._pool.release(self._origin, connection)
            raise _failure(error, self.agent) from error
        except BaseException:
            self._pool.open_legs.discard(self)
            self._pool.release(self._origin, connection)
            raise
        return UpstreamResponse(connection, self.agent, self._pool.idle_timeout_s, self._by)

    @property
    def quiet_since(self) -> float | None:
        """Since when the agent is waited for in vain; None while nobody waits."""
        return self._connection.quiet_since

    def give_up(self) -> None:
        """The agent is lost: whoever waits for it gets an `AgentLost`."""
        self._connection.give_up()

    async def __aexit__(self, *_: object) -> None:
        self._pool.open_legs.discard(self)
        self._pool.release(self._origin, self._connection)


class UpstreamPool:
    """The proxy's one pool of connections. An async context: leaving it closes every connection.

    Raises `BadCertificate` when the file of the agents' authority is of no use.
    """

    def __init__(self, config: ProxyConfig, bearer: str | None = None) -> None:
        self._config = config
        self._bearer = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        self._agent_tls = None if config.agent_ca is None else client_context(config.agent_ca)
        self._places = ConnectionLimit(config.max_connections)
        self._idle: dict[Origin, dict[UpstreamConnection, None]] = {}
        self._kept_since: dict[UpstreamConnection, tuple[Origin, float]] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._open: set[UpstreamConnection] = set()
        self.open_legs = OpenLegs()
        """Every leg that is under way; its `run` needs an owner."""

    @property
    def idle_timeout_s(self) -> float:
        """How long an agent may be silent within a stream."""
        return self._config.idle_timeout_s

    @property
    def has_places_to_spare(self) -> bool:
        """Whether a leg that waits for another one may be sent: there must be a place left for that one."""
        return self._places.free >= 2

    async def __aenter__(self) -> UpstreamPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        for connection in tuple(self._open):
            connection.close()
        if self._sweeper is not None:
            self._sweeper.cancel()

    def post(
        self,
        agent: Register,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        headers_by: float,
        by: float,
        movable: Callable[[], bool] = lambda: False,
    ) -> Leg:
        """A context that sends one leg and hands out its answer as soon as its headers are here.

        Leaving it before the answer was read to its end closes the connection, and so tells the agent that
        nobody waits any more.

        Args:
            headers_by: Deadline for the answer's headers, on the event loop's clock; not after `by`.
            by: Deadline for its end, likewise.
            movable: Whether the leg may go elsewhere now, should its agent fall silent
            (`proxy.http.hang_detector`).

        Entering raises:
            AgentLost: connection refused or reset, an answer cut short, or a 5xx.
            AgentTimeout: a deadline passed.
            AgentRefused: a 4xx, with the agent's body.
        """
        origin = origin_of(agent.address)
        head = self._head("POST", origin, path, agent, {**headers, "Content-Length": str(len(body))})
        return Leg(self, origin, agent, head + body, headers_by, by, movable)

    async def get(self, agent: Register, url: str, *, by: float) -> bytes:
        """The body at a URL of the agent's, whichever of its ports that is.

        Raises as `post` does.
        """
        parts = urlsplit(url)
        origin = origin_of(f"{parts.scheme}://{parts.netloc}")
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        request = self._head("GET", origin, target or "/", agent, {})
        async with Leg(self, origin, agent, request, by, by, lambda: False) as answer:
            return await answer.body()

    async def borrow(self, origin: Origin, agent: Register, by: float) -> UpstreamConnection:
        """A connection that was kept, or a new one; until it is given back."""
        try:
            await self._places.take(by)
        except TimeoutError as error:
            raise _failure(error, agent) from error
        if kept := self._idle.get(origin):
            connection = next(reversed(kept))
            self._unkeep(connection)
            return connection
        if len(self._kept_since) > self._places.free:
            next(iter(self._kept_since)).close()  # the one that nobody used for longest
        try:
            return await self._connect(origin, agent, by)
        except BaseException:
            self._places.release()
            raise

    def release(self, origin: Origin, connection: UpstreamConnection) -> None:
        """Keep the connection for another request if it can serve one, else close it."""
        if connection.reusable:
            self._keep(origin, connection)
        else:
            connection.close()
        self._places.release()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """For agents by https. What the system trusts takes long to load, so only when it is needed."""
        return self._agent_tls or ssl.create_default_context()

    def _head(
        self, method: str, origin: Origin, target: str, agent: Register, headers: Mapping[str, str]
    ) -> bytes:
        """A request's head. The cluster's token is no business of other engines' servers."""
        if agent.dialect == native.NAME:
            headers = {**headers, **self._bearer}
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        assert lines.count("\n") == len(headers) == lines.count("\r"), "a header's value breaks its line"
        return f"{method} {target} HTTP/1.1\r\nHost: {origin.host_header}\r\n{lines}\r\n".encode("latin-1")

    async def _connect(self, origin: Origin, agent: Register, by: float) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(by, loop.time() + self._config.connect_timeout_s)):
                _, made = await loop.create_connection(
                    lambda: UpstreamConnection(self._forget),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.is_tls else None,
                )
        except OSError as error:  # a TimeoutError is one
            raise _cannot_connect(error, agent) from error
        self._open.add(made)
        if made.state is State.CLOSED:  # it was lost before anybody could look
            self._forget(made)
            raise _failure(ConnectionBroken("the connection ended"), agent)
        return made

    def _keep(self, origin: Origin, connection: UpstreamConnection) -> None:
        connection.rest()
        self._kept_since[connection] = (origin, asyncio.get_running_loop().time())
        self._idle.setdefault(origin, {})[connection] = None
        if self._sweeper is None:
            self._sweep()

    def _unkeep(self, connection: UpstreamConnection) -> None:
        origin, _ = self._kept_since.pop(connection)
        kept = self._idle[origin]
        del kept[connection]
        if not kept:
            del self._idle[origin]

    def _sweep(self) -> None:
        """Close what was kept for too long, and come again when the next one is due."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        for connection, (_, since) in tuple(self._kept_since.items()):
            due = since + self._config.keepalive_s
            if due > loop.time():
                self._sweeper = loop.call_at(due, self._sweep)
                return
            connection.close()

    def _forget(self, connection: UpstreamConnection) -> None:
        """The connection was closed, by either side."""
        if connection in self._kept_since:
            self._unkeep(connection)
        self._open.discard(connection)


@lru_cache(maxsize=4096)
def origin_of(address: str) -> Origin:
    """What to dial for `http://host:port`, as agents advertise it (checked when they register)."""
    url = urlsplit(address)
    is_tls = url.scheme == "https"
    return Origin(url.hostname or "", url.port or (443 if is_tls else 80), is_tls, url.netloc)


async def _read(connection: UpstreamConnection, by: float, limit: int) -> bytes:
    """The whole body. Raises as `UpstreamConnection.end` does, and `BadResponse` past `limit` bytes."""
    parts: list[bytes] = []
    size = 0

    def take(part: bytes) -> None:
        nonlocal size
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BadResponse(f"an agent's answer exceeds {limit} bytes")

    connection.limit(by)
    connection.feed(take)
    await connection.end()
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _failure(error: ConnectionBroken | TimeoutError, agent: Register) -> ProxyError:
    if isinstance(error, TimeoutError):
        return AgentTimeout(f"{agent.address} did not answer in time")
    lost = Incarnation(agent.incarnation)
    if isinstance(error, AgentSilent):
        return AgentLost(f"{agent.address} fell silent", lost, silent=True, status=504)
    return AgentLost(f"{agent.address} broke off: {error}", lost)


def _cannot_connect(error: OSError, agent: Register) -> AgentLost:
    lost = Incarnation(agent.incarnation)
    if isinstance(error, TimeoutError):
        return AgentLost(f"connecting to {agent.address} took too long", lost, status=504)
    refused = error.errno == errno.ECONNREFUSED
    return AgentLost(f"cannot connect to {agent.address}: {error}", lost, refused=refused)


def _verdict(
    connection: UpstreamConnection, raw: bytes, agent: Register
) -> AgentRejected | AgentLost | BadResponse:
    """What an agent's status other than 200 means for the request."""
    status, headers = connection.status, connection.headers
    if 400 <= status < 500:
        content_type = headers.get(b"content-type", b"application/json").decode("latin-1")
        retry_after = headers.get(b"retry-after")
        told = None if retry_after is None else retry_after.decode("latin-1")
        return AgentRejected(status, content_type, raw, told)
    if status >= 500:
        said = (error_object(raw) or {}).get("message", "no reason given")
        return AgentLost(
            f"{agent.address} answered HTTP {status}: {said}", Incarnation(agent.incarnation), status=status
        )
    return BadResponse(f"{agent.address} answered HTTP {status}")

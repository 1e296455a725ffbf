# SPDX-License-Identifier: Apache-2.0
"""HTTP towards the agents: a connection pool, a deadline on every wait, failures as our own errors."""

from __future__ import annotations

import asyncio
import errno
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, TypeVar
from urllib.parse import urlsplit

from kvferry.common.exceptions import system_reason
from kvferry.common.http.tls import client_context
from kvferry.common.work_pool import WorkPool
from kvferry.proxy.errors import (
    AGENT_BUSY,
    AgentBusy,
    AgentLost,
    AgentRejected,
    AgentTimeout,
    BadResponse,
    OutOfDescriptors,
    ProxyError,
    TooManyResponses,
    agent_error,
    shorten,
)
from kvferry.proxy.http.hang_detector import HangDetector
from kvferry.proxy.http.upstream_connection import (
    AgentUnresponsive,
    ConnectionBroken,
    ConnectionState,
    ResponseBounds,
    Sink,
    StaleConnection,
    UpstreamConnection,
)
from kvferry.proxy.wire.dialects import NATIVE_DIALECT
from kvferry.proxy.wire.registration import Register

T = TypeVar("T")
OnEnd = Callable[[Register, BaseException | None], None]

MAX_BODY_BYTES = 64 * 1024 * 1024
"""Largest response that is not streamed, in bytes."""
LARGE_BODY_BYTES = 64 * 1024
"""A request's body of this many bytes or more is not copied to put a head in front of it."""
MAX_ERROR_BYTES = 1024 * 1024
"""Largest body of a response with another status than 200, in bytes; far less of it is passed on."""
MAX_PAGE_BYTES = 4 * 1024 * 1024
"""Largest page that is fetched by GET, in bytes: metrics, lists of ranks."""
MAX_RETRY_AFTER_S = 3600
LARGE_RESPONSE_BYTES = 64 * 1024
"""More is read (parsed, joined) beside the event loop."""
SHORT_RESPONSE_BYTES = 1024 * 1024
"""These do not wait for larger ones."""
MAX_READ_BYTES = 256 * 1024 * 1024
"""Most bytes of large responses that wait to be read, or are being read."""
READ_TIMEOUT_S = 30.0
FINISH_GRACE_S = 1.0


def now() -> float:
    """Return the running event loop's time, in seconds: the clock of deadlines and ages."""
    return asyncio.get_running_loop().time()


class Origin(NamedTuple):
    """Where an agent listens. `host_header`: host and port as HTTP spells them."""

    host: str
    port: int
    is_tls: bool
    host_header: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """What an `UpstreamPool` needs to know; `ProxyConfig` describes the fields of the same names.

    `bearer`: the token for agents of the native dialect; none is sent to other engines' servers.
    """

    max_connections: int = 4096
    connect_timeout_s: float = 5.0
    idle_timeout_s: float = 120.0
    keepalive_s: float = 30.0
    agent_ca: Path | None = None
    bearer: str | None = field(default=None, repr=False)


class ConnectionLimit:
    """A semaphore of `count` connections, first in, first out."""

    def __init__(self, count: int) -> None:
        self.free = count
        """How many may still be acquired at once; 0 while any task waits."""
        self._waiters: dict[asyncio.Future[None], None] = {}

    async def acquire(self, deadline: float) -> None:
        """Acquire one, to be released. Raises `TimeoutError` at `deadline`, on the event loop's clock."""
        if self.free:
            self.free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            async with asyncio.timeout_at(deadline):
                await waiter
        except BaseException:
            self._waiters.pop(waiter, None)
            if waiter.done() and not waiter.cancelled():
                self.release()
            raise

    def release(self) -> None:
        """Release one: the task that has waited longest acquires it."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]
            if not waiter.done():  # else it was cancelled and has not run yet
                waiter.set_result(None)
                return
        self.free += 1


class UpstreamRequest:
    """One request to an agent and its response; made by `UpstreamPool.post`. An async context: entering sends
    it and waits for the response's head, leaving ends it. Read the response once, by `read` or `stream_to`.

    All waits raise `AgentTimeout` at their deadline and `AgentLost` when the agent breaks off or is aborted.
    A class, since a generator's context would cost as much as all the rest here.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        origin: Origin,
        agent: Register,
        request: bytes,
        headers_deadline: float,
        deadline: float,
        can_retry: Callable[[], bool],
        body: bytes = b"",
        on_end: OnEnd | None = None,
    ) -> None:
        self.agent = agent
        self.can_retry = can_retry
        self._pool = pool
        self._origin = origin
        self._request = request
        self._body = body
        self._headers_deadline = headers_deadline
        self._deadline = deadline
        self._on_end = on_end
        self._connection: UpstreamConnection

    async def __aenter__(self) -> UpstreamRequest:
        pool = self._pool
        try:
            connection = pool.acquire_idle(self._origin)
            if connection is None:
                connection = await pool.acquire(self._origin, self.agent, self._headers_deadline)
            try:
                await self._send(connection)
                return self
            except StaleConnection as error:
                lost = _failure(error, self.agent)
            # Most likely the agent never saw the request (RFC 9112, 9.3.1). Otherwise it has ended, and takes
            # no connection either: then the loss may be the request's doing.
            try:
                connection = await pool.acquire(self._origin, self.agent, self._headers_deadline, is_new=True)
            except AgentLost:
                raise lost from None
            await self._send(connection)
            return self
        except BaseException as error:
            if self._on_end is not None:
                self._on_end(self.agent, error)
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release()
        if self._on_end is not None:
            self._on_end(self.agent, error)

    @property
    def content_type(self) -> str:
        """The media type with its parameters, as the agent sent it."""
        return self.header(b"content-type") or "application/octet-stream"

    def header(self, name: bytes) -> str | None:
        """A header of the response; `name` in lower case."""
        value = self._connection.headers.get(name)
        return None if value is None else value.decode("latin-1")

    async def read(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """The whole body. Raises `BadResponse` past `limit` bytes."""
        if (whole := self._connection.take_body()) is not None:  # no more than a connection buffers
            return whole
        try:
            return await _read_body(self._connection, limit)
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self.agent) from error

    async def stream_to(self, sink: Sink, held: Callable[[], int] | None = None) -> None:
        """Pass the body to `sink` as it arrives, until its end. Also raises what `sink` raises.

        `held` says how many bytes the sink keeps of it; beyond `ResponseBounds`, raises `TooManyResponses`.
        """
        self._connection.set_deadline(self._deadline, self._pool.settings.idle_timeout_s)
        self._connection.stream_to(sink, held)
        try:
            await self._connection.wait_complete()
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self.agent) from error

    async def read_some(self) -> bytes:
        """The next bytes of the body to arrive; empty at its end. `stream_to` may follow."""
        self._connection.set_deadline(self._deadline, self._pool.settings.idle_timeout_s)
        try:
            return await self._connection.read_some()
        except (ConnectionBroken, TimeoutError) as error:
            raise _failure(error, self.agent) from error

    def finish_soon(self) -> None:
        """All that is needed has arrived: give the body's end `FINISH_GRACE_S` more."""
        self._deadline = now() + FINISH_GRACE_S
        self._connection.set_deadline(self._deadline)

    def pause(self) -> None:
        """Stop reading for a while. The idle timeout stops meanwhile."""
        self._connection.pause()

    def resume(self) -> None:
        """Undo `pause`."""
        self._connection.resume()

    @property
    def waiting_since(self) -> float | None:
        """See `PendingRequest`."""
        return self._connection.waiting_since

    def abort(self) -> None:
        """Fail the pending wait with `AgentLost`: the agent is unresponsive."""
        self._connection.abort()

    async def _send(self, connection: UpstreamConnection) -> None:
        """Send the request and wait for its response's head. Raises `StaleConnection`."""
        self._connection = connection
        self._pool.hang_detector.pending.add(self)
        try:
            connection.send(self._request, self._headers_deadline, self._body)
            await connection.read_headers()
            if self._deadline != self._headers_deadline:
                connection.set_deadline(self._deadline)  # for the body, whenever it is read
            if connection.status != 200:
                raw = await _read_body(connection, MAX_ERROR_BYTES)
                raise _status_error(connection, raw, self.agent)
            coding = connection.headers.get(b"content-encoding")
            if coding is not None and coding.lower() not in (b"identity", b""):  # the request asks for none
                shown = shorten(coding.decode("latin-1"))
                raise BadResponse(f"{self.agent.address} answered with Content-Encoding {shown}")
        except (ConnectionBroken, TimeoutError) as error:
            self._release()
            if isinstance(error, StaleConnection):
                raise
            raise _failure(error, self.agent) from error
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        self._pool.hang_detector.pending.discard(self)
        self._pool.release(self._origin, self._connection)


class UpstreamPool:
    """The proxy's connections to agents. An async context: leaving it closes every connection.

    Raises `BadCertificate` when `settings.agent_ca` cannot be used.
    """

    def __init__(self, settings: PoolSettings, bounds: ResponseBounds | None = None) -> None:
        self.settings = settings
        self.hang_detector = HangDetector()
        """Watches every request in flight; its `run` needs an owner."""
        self._bearer = "" if settings.bearer is None else f"Authorization: Bearer {settings.bearer}\r\n"
        self._agent_tls = None if settings.agent_ca is None else client_context(settings.agent_ca)
        self._limit = ConnectionLimit(settings.max_connections)
        self.bounds = bounds or ResponseBounds()
        """What all responses may hold, and what is kept of one after its end."""
        self._readers = WorkPool(
            "responses",
            short_bytes=SHORT_RESPONSE_BYTES,
            max_bytes=MAX_READ_BYTES,
            timeout_s=READ_TIMEOUT_S,
            busy=lambda why: TooManyResponses(f"large responses wait to be read: {why}"),
        )
        self._open: set[UpstreamConnection] = set()
        self._idle: dict[Origin, dict[UpstreamConnection, None]] = {}
        self._idle_origin: dict[UpstreamConnection, Origin] = {}
        """Idle connections of all origins, the one that is idle longest first."""
        self._sweeper: asyncio.TimerHandle | None = None

    @property
    def has_spare_connections(self) -> bool:
        """Whether a request that depends on another one may be sent: that one must find a connection too."""
        return self._limit.free >= 2

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
        headers_deadline: float,
        deadline: float,
        can_retry: Callable[[], bool] = lambda: False,
        on_end: OnEnd | None = None,
    ) -> UpstreamRequest:
        """A context that sends one request and yields its response as soon as its headers have arrived.

        Leaving it before the response was read to its end closes the connection, which cancels the request at
        the agent.

        Args:
            headers_deadline: For the response's headers, on the event loop's clock; not after `deadline`.
            deadline: For its end, likewise.
            can_retry: Whether the request could be retried elsewhere now, should the agent become
                unresponsive (`proxy.http.hang_detector`).
            on_end: Called once, at the end, with the agent and with what was raised in the context.

        Entering raises:
            AgentLost: connection refused or reset, a truncated response, or a 5xx; `AgentBusy` for a 503 with
                a reason or a `Retry-After`.
            AgentTimeout: a deadline passed.
            AgentRejected: a 4xx, with the agent's error.
            BadResponse: any other status but 200, or a body that is compressed.
            OutOfDescriptors: this process may open no more connections.
        """
        origin = origin_of(agent.address)
        head = self._head("POST", origin, path, agent, {**headers, "Content-Length": str(len(body))})
        if len(body) < LARGE_BODY_BYTES:
            head, body = head + body, b""
        return UpstreamRequest(self, origin, agent, head, headers_deadline, deadline, can_retry, body, on_end)

    async def get(self, agent: Register, url: str, *, deadline: float) -> bytes:
        """The body at a URL of the agent, which may be on another port than its address.

        Raises as `post` does.
        """
        parts = urlsplit(url)
        origin = origin_of(f"{parts.scheme}://{parts.netloc}")
        target = parts.path + (f"?{parts.query}" if parts.query else "")
        request = self._head("GET", origin, target or "/", agent, {})
        async with UpstreamRequest(
            self, origin, agent, request, deadline, deadline, lambda: False
        ) as response:
            return await response.read(MAX_PAGE_BYTES)

    async def read_beside(self, size: int, read: Callable[[], T]) -> T:
        """Return what `read` makes of `size` bytes of responses; of many, in a thread beside the event loop.

        Raises what `read` raises, and `TooManyResponses`.
        """
        return read() if size <= LARGE_RESPONSE_BYTES else await self._readers.run(size, read)

    def acquire_idle(self, origin: Origin) -> UpstreamConnection | None:
        """An idle connection, to be released; None if there is none, or others wait for one."""
        connection = self._take_idle(origin) if self._limit.free else None
        if connection is not None:
            self._limit.free -= 1
        return connection

    async def acquire(
        self, origin: Origin, agent: Register, deadline: float, *, is_new: bool = False
    ) -> UpstreamConnection:
        """An idle connection unless `is_new`, or a new one; to be released."""
        try:
            await self._limit.acquire(deadline)
        except TimeoutError as error:
            raise _failure(error, agent) from error
        connection = None if is_new else self._take_idle(origin)
        if connection is not None:
            return connection
        if len(self._idle_origin) > self._limit.free:
            next(iter(self._idle_origin)).close()  # the one that has been idle longest
        try:
            return await self._connect(origin, agent, deadline)
        except BaseException:
            self._limit.release()
            raise

    def release(self, origin: Origin, connection: UpstreamConnection) -> None:
        """Return a connection to the idle pool if it can be reused, else close it."""
        if connection in self.bounds.held:
            self.bounds.release(connection)
        if connection.reusable:
            connection.reset()
            self._idle_origin[connection] = origin
            self._idle.setdefault(origin, {})[connection] = None
            if self._sweeper is None:
                self._sweep()
        else:
            connection.close()
        self._limit.release()

    @cached_property
    def _tls(self) -> ssl.SSLContext:
        """For agents by https. Loaded lazily, since the system's authorities take long to load."""
        return self._agent_tls or ssl.create_default_context()

    def _head(
        self, method: str, origin: Origin, target: str, agent: Register, headers: Mapping[str, str]
    ) -> bytes:
        """A request's head. The cluster's token is not for other engines' servers."""
        bearer = self._bearer if agent.dialect == NATIVE_DIALECT else ""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
        if not lines.count("\n") == len(headers) == lines.count("\r"):
            raise ProxyError("internal error: a line break in a header")
        start = f"{method} {target} HTTP/1.1\r\nHost: {origin.host_header}\r\n"
        return f"{start}{bearer}{lines}\r\n".encode("latin-1")

    async def _connect(self, origin: Origin, agent: Register, by: float) -> UpstreamConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(min(by, loop.time() + self.settings.connect_timeout_s)):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(self._discard, self.bounds),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.is_tls else None,
                )
        except (
            OSError,
            UnicodeError,
        ) as error:  # UnicodeError: IDNA rejects the name
            raise _cannot_connect(error, agent) from error
        self._open.add(connection)
        if connection.state is ConnectionState.CLOSED:  # it was lost before this task could run
            self._discard(connection)
            raise _failure(ConnectionBroken("the connection was lost"), agent)
        return connection

    def _take_idle(self, origin: Origin) -> UpstreamConnection | None:
        idle = self._idle.get(origin)
        if idle is None:
            return None
        connection = next(reversed(idle))
        self._remove_idle(connection)
        return connection

    def _remove_idle(self, connection: UpstreamConnection) -> None:
        origin = self._idle_origin.pop(connection)
        idle = self._idle[origin]
        del idle[connection]
        if not idle:
            del self._idle[origin]

    def _sweep(self) -> None:
        """Close connections that have been idle for too long, and schedule the next sweep."""
        loop = asyncio.get_running_loop()
        self._sweeper = None
        for connection in tuple(self._idle_origin):
            due = connection.idle_since + self.settings.keepalive_s
            if due > loop.time():
                self._sweeper = loop.call_at(due, self._sweep)
                return
            connection.close()

    def _discard(self, connection: UpstreamConnection) -> None:
        """Called when a connection was closed, by either side."""
        if connection in self._idle_origin:
            self._remove_idle(connection)
        self._open.discard(connection)


@lru_cache(maxsize=4096)
def origin_of(address: str) -> Origin:
    """The origin of `http://host:port`, as agents advertise it (validated when they register)."""
    url = urlsplit(address)
    is_tls = url.scheme == "https"
    return Origin(url.hostname or "", url.port or (443 if is_tls else 80), is_tls, url.netloc)


async def _read_body(connection: UpstreamConnection, limit: int) -> bytes:
    """The whole body. Raises as `UpstreamConnection.wait_complete`, and `BadResponse` past `limit` bytes."""
    body = bytearray()  # one buffer: freed pieces would leave gaps in the heap

    def collect(part: bytes) -> None:
        body.extend(part)
        if len(body) > limit:
            raise BadResponse(f"an agent's response exceeds {limit} bytes")

    connection.stream_to(collect, body.__len__)
    try:
        await connection.wait_complete()
    except BaseException:
        body.clear()  # what is raised refers to it, and may wait for the garbage collector
        raise
    return bytes(body)


def _failure(error: ConnectionBroken | TimeoutError, agent: Register) -> ProxyError:
    if isinstance(error, TimeoutError):
        return AgentTimeout(f"{agent.address} did not respond in time")
    lost = agent.incarnation
    if isinstance(error, AgentUnresponsive):
        return AgentLost(f"{agent.address} is unresponsive", lost, unresponsive=True, status=504)
    return AgentLost(f"connection to {agent.address} broken: {error}", lost)


def _cannot_connect(error: OSError | UnicodeError, agent: Register) -> ProxyError:
    lost = agent.incarnation
    if isinstance(error, TimeoutError):
        return AgentLost(f"connecting to {agent.address} timed out", lost, not_connected=True, status=504)
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.EMFILE, errno.ENFILE):
        return OutOfDescriptors("the proxy has no file descriptor left to connect to an agent")
    refused = number == errno.ECONNREFUSED
    reason = system_reason(error) if isinstance(error, OSError) else str(error)
    return AgentLost(
        f"cannot connect to {agent.address}: {reason}", lost, not_connected=True, connection_refused=refused
    )


def _status_error(
    connection: UpstreamConnection, raw: bytes, agent: Register
) -> AgentRejected | AgentLost | BadResponse:
    """The error for an agent's status other than 200."""
    status, error = connection.status, agent_error(raw)
    retry_after = connection.headers.get(b"retry-after")
    if 400 <= status < 500:
        return AgentRejected(status, error, _retry_after_s(retry_after or b""))
    if status < 500:
        return BadResponse(f"{agent.address} returned HTTP {status}")
    reason = "no reason given" if error is None else error.message
    message = f"{agent.address} returned HTTP {status}: {reason}"
    # Without either it may come from what is before the server, which has failed.
    if status == AGENT_BUSY and not (error is None and retry_after is None):
        return AgentBusy(message, agent.incarnation, _retry_after_s(retry_after or b""))
    return AgentLost(message, agent.incarnation, status=status)


def _retry_after_s(value: bytes) -> int | None:
    """An agent's `Retry-After`, if it is a number of seconds; at most an hour."""
    digits = value.strip()
    return min(int(digits), MAX_RETRY_AFTER_S) if digits.isdigit() and len(digits) <= 9 else None

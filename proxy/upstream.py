# SPDX-License-Identifier: Apache-2.0
"""HTTP towards the agents: pooled connections, deadlines on every wait, failures in the proxy's own words."""

from __future__ import annotations

import asyncio
import errno
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType

import aiohttp

from proxy.config import ProxyConfig
from proxy.dialects import native
from proxy.errors import AgentLost, AgentRefused, AgentTimeout, BadAnswer, error_object
from proxy.silence import OpenLeg, OpenLegs
from proxy.tls import client_context
from proxy.wire import Incarnation, Register

MAX_ANSWER_BYTES = 64 * 1024 * 1024
MAX_ERROR_BYTES = 1024 * 1024
FINISH_GRACE_S = 1.0
READ_BUFFER_BYTES = 64 * 1024
# aiohttp warns about bytes of more than 1 MiB; a stream over the same bytes goes out in pieces.
MAX_BODY_IN_ONE_PIECE = 512 * 1024


class AgentAnswer:
    """An agent's answer whose status is below 400. Read it once, by `body` or by `chunks`.

    All waits raise `AgentTimeout` at their deadline and `AgentLost` when the agent breaks off or is given up.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, agent: Register, leg: OpenLeg, idle_s: float, deadline: float
    ) -> None:
        self._response = response
        self._agent = agent
        self._leg = leg
        self._idle_s = idle_s
        self._deadline = deadline

    @property
    def status(self) -> int:
        return self._response.status

    @property
    def content_type(self) -> str:
        """The media type with its parameters, as the agent sent it."""
        return self._response.headers.get("Content-Type", "application/octet-stream")

    @property
    def headers(self) -> Mapping[str, str]:
        return self._response.headers

    async def body(self) -> bytes:
        """The whole body."""
        with _translated(self._agent, self._leg):
            async with self._leg.waiting(self._deadline):
                return await _read(self._response, MAX_ANSWER_BYTES)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body's bytes as they come, until its end."""
        content = self._response.content
        with (
            _translated(self._agent, self._leg),
            _Watch(content, self._idle_s, self._deadline) as watch,
            self._leg.watched(watch),
        ):
            while True:
                watch.reading()
                chunk = await content.readany()
                watch.read()
                if not chunk:
                    return
                yield chunk

    async def finish(self) -> None:
        """Let an answer whose last event was read come to its end, so that its connection can be used again.

        Waits `FINISH_GRACE_S` at most; the connection of an answer that goes on is closed with its context.
        """
        try:
            async with asyncio.timeout(FINISH_GRACE_S):
                while await self._response.content.readany():
                    pass
        except (TimeoutError, aiohttp.ClientError, OSError):
            return


class Upstream:
    """The proxy's one pool of connections. An async context: leaving it closes every connection.

    Raises `BadCertificate` when the file of the agents' authority is of no use.
    """

    def __init__(self, config: ProxyConfig, bearer: str | None = None) -> None:
        self._config = config
        self.open_legs = OpenLegs()
        """Every leg that is under way; its `run` needs an owner."""
        self._tls = True if config.agent_ca is None else client_context(config.agent_ca)
        self._bearer = {} if bearer is None else {"Authorization": f"Bearer {bearer}"}
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Upstream:
        connector = aiohttp.TCPConnector(
            limit=self._config.max_connections,
            limit_per_host=0,  # the sum is bounded; one busy agent may use all of it
            keepalive_timeout=self._config.keepalive_s,
            ssl=self._tls,
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            # Everything but connecting has a deadline of ours; aiohttp's own 300 s would cut long streams.
            timeout=aiohttp.ClientTimeout(
                total=None, connect=None, sock_connect=self._config.connect_timeout_s, sock_read=None
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BUFFER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    @asynccontextmanager
    async def post(
        self,
        agent: Register,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        *,
        headers_by: float,
        by: float,
        movable: Callable[[], bool] = lambda: False,
    ) -> AsyncIterator[AgentAnswer]:
        """Send one leg and hand out its answer as soon as its headers are here.

        Leaving the context before the answer was read to its end closes the connection, and so tells the
        agent that nobody waits any more.

        Args:
            headers_by: Deadline for the answer's headers, on the event loop's clock; not after `by`.
            by: Deadline for its end, likewise.
            movable: Whether the leg may go elsewhere now, should its agent fall silent (`proxy.silence`).

        Raises:
            AgentLost: connection refused or reset, an answer cut short, a 5xx, or one given up (`OpenLegs`).
            AgentTimeout: a deadline passed.
            AgentRefused: a 4xx, with the agent's body.
        """
        with self.open_legs.open(agent, movable) as leg:
            response = await self._send(agent, path, body, headers, leg, headers_by)
            try:
                if response.status != 200:
                    with _translated(agent, leg):
                        async with leg.waiting(by):
                            raw = await _read(response, MAX_ERROR_BYTES)
                    raise _verdict(response, raw, agent)
                yield AgentAnswer(response, agent, leg, self._config.idle_timeout_s, by)
            finally:
                # A body read to its end has given its connection back already; any other must not be reused.
                response.close()

    async def _send(
        self, agent: Register, path: str, body: bytes, headers: Mapping[str, str], leg: OpenLeg, by: float
    ) -> aiohttp.ClientResponse:
        """Send one request and wait for its answer's headers."""
        with _translated(agent, leg):
            async with leg.waiting(by):
                return await self._session.post(
                    agent.address.rstrip("/") + path,
                    data=body if len(body) <= MAX_BODY_IN_ONE_PIECE else io.BytesIO(body),
                    headers=self._authorized(agent, headers),
                    allow_redirects=False,
                )

    async def get(self, agent: Register, url: str, *, by: float) -> bytes:
        """The body at a URL of the agent's, whichever of its ports that is.

        Raises as `post` does.
        """
        with _translated(agent):
            async with (
                asyncio.timeout_at(by),
                self._session.get(url, headers=self._authorized(agent, {}), allow_redirects=False) as answer,
            ):
                raw = await _read(answer, MAX_ANSWER_BYTES)
                if answer.status != 200:
                    raise _verdict(answer, raw, agent)
                return raw

    def _authorized(self, agent: Register, headers: Mapping[str, str]) -> Mapping[str, str]:
        """With the cluster's token, which is no business of other engines' servers."""
        return {**headers, **self._bearer} if agent.dialect == native.NAME else headers


class _Watch:
    """Fails the pending read of a stream whose agent has fallen silent.

    One timer per stream that looks at the clock now and then; `asyncio.timeout` around every read would cost
    a tenth of what relaying an event costs. Time that passes while the client is slow does not count.
    """

    def __init__(self, content: aiohttp.StreamReader, idle_s: float, deadline: float) -> None:
        self._content = content
        self._idle_s = idle_s
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self.since: float | None = None
        """When the pending read began; None while there is none."""
        self._timer: asyncio.TimerHandle

    def __enter__(self) -> _Watch:
        self._arm(self._loop.time())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def reading(self) -> None:
        """A read begins."""
        self.since = self._loop.time()

    def read(self) -> None:
        """The read has ended."""
        self.since = None

    def _arm(self, since: float) -> None:
        self._timer = self._loop.call_at(min(since + self._idle_s, self._deadline), self._look)

    def _look(self) -> None:
        now = self._loop.time()
        since = now if self.since is None else self.since
        if now >= min(since + self._idle_s, self._deadline):
            self.end()
        else:
            self._arm(since)

    def end(self) -> None:
        """Fail the pending read."""
        self._content.set_exception(TimeoutError())


@contextmanager
def _translated(agent: Register, leg: OpenLeg | None = None) -> Iterator[None]:
    """The only place that knows what aiohttp raises."""
    lost = Incarnation(agent.incarnation)
    try:
        yield
    except aiohttp.ConnectionTimeoutError as error:
        raise AgentLost(f"connecting to {agent.address} took too long", lost, status=504) from error
    except TimeoutError as error:
        if leg is not None and leg.given_up:
            raise AgentLost(f"{agent.address} fell silent", lost, silent=True, status=504) from error
        raise AgentTimeout(f"{agent.address} did not answer in time") from error
    except aiohttp.ClientConnectorError as error:
        refused = error.os_error.errno == errno.ECONNREFUSED
        raise AgentLost(f"cannot connect to {agent.address}: {error}", lost, refused=refused) from error
    except (aiohttp.ClientError, OSError) as error:
        raise AgentLost(f"{agent.address} broke off: {type(error).__name__}", lost) from error


async def _read(response: aiohttp.ClientResponse, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while part := await response.content.readany():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise BadAnswer(f"an agent's answer exceeds {limit} bytes")
    return b"".join(parts)


def _verdict(
    response: aiohttp.ClientResponse, raw: bytes, agent: Register
) -> AgentRefused | AgentLost | BadAnswer:
    """What an agent's status other than 200 means for the request."""
    if 400 <= response.status < 500:
        content_type = response.headers.get("Content-Type", "application/json")
        return AgentRefused(response.status, content_type, raw, response.headers.get("Retry-After"))
    if response.status >= 500:
        said = (error_object(raw) or {}).get("message", "no reason given")
        return AgentLost(
            f"{agent.address} answered HTTP {response.status}: {said}",
            Incarnation(agent.incarnation),
            status=response.status,
        )
    return BadAnswer(f"{agent.address} answered HTTP {response.status}")

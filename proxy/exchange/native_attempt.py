# SPDX-License-Identifier: Apache-2.0
"""One attempt with a pair of native agents: prefill leg, first token, decode leg.

With a long prompt the decode leg is sent together with the prefill leg (`EarlyLeg`), so that KV moves while
the rest is computed. Only its begin is early (docs/architecture.md#one-request): the client still gets token
1 from the prefill leg, and the decode leg's response is read after that.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any

from kvferry.proxy import sse
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.dialects.native import NativePrefill
from kvferry.proxy.errors import AgentLost, AgentRejected, error_object
from kvferry.proxy.exchange.kv_drops import KvDrops
from kvferry.proxy.exchange.legs import (
    Attempt,
    Legs,
    ResponseSink,
    lost,
    read_events,
    require_json,
    require_stream,
)
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.resume import MARK, Progress
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.http.pool import UpstreamResponse
from kvferry.proxy.ids import Identity, TransferId
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation, Register

CAUSE_TIMEOUT_S = 1.0
"""How long the failure of one leg waits for the other's end, which may be its cause."""
DROPPED = "transfer_dropped"
"""The code with which an agent rejects a prefill leg whose transfer was dropped."""


class NativeAttempt(Attempt):
    """See `Attempt`.

    Args:
        progress: What the client has of a streamed response: the attempt goes on from there and adds to it.
        is_retry: Whether another attempt came before.
    """

    def __init__(
        self,
        reservation: Reservation,
        request: ClientRequest,
        ids: Identity,
        transfer_id: TransferId,
        *,
        legs: Legs,
        log: RequestLog,
        progress: Progress,
        drops: KvDrops,
        metrics: Metrics,
        is_retry: bool,
    ) -> None:
        super().__init__(reservation)
        self._request = request
        self._ids = ids
        self._transfer_id = transfer_id
        self._legs = legs
        self._log = log
        self._progress = progress
        self._drops = drops
        self._metrics = metrics
        self._is_retry = is_retry
        self._pinned = False
        """Whether the prefill agent may hold KV that has not been read yet."""

    async def run(self, sink: ResponseSink) -> None:
        """Steps 2 to 4 of a request (`proxy.exchange.exchange`)."""
        if self.pair.alone:
            await self._receive(self._open_last(native.alone_body(self._request, self._ids)), sink)
            return
        async with self._early_leg() as early:
            # 2. Prefill leg.
            prefill = await (self._prefill() if early is None else early.run_beside(self._prefill()))
            # 3. First token.
            if self._request.stream and (news := self._progress.begin(prefill)):
                sink.write(native.first_events(self._request, self._ids, prefill, news))
            # 4. Decode leg, unless every choice has ended with token 1.
            if prefill.params is None:
                self._complete(prefill, sink)
            elif early is None:
                resume = self._progress.resume()
                body = native.decode_body(self._request, self._ids, prefill.params, resume)
                await self._receive(self._open_last(body), sink)
            else:
                decode = self.pair.decode.incarnation
                opening = OpeningEvent(native.first_tokens_event(prefill), decode)
                await self._receive(early.opened(), sink, opening)
            self._pinned = False

    def end(self) -> None:
        """Also drop KV that is still pinned."""
        super().end()
        if self._pinned:
            self._drops.drop(self.pair.prefill.info, self._transfer_id)

    def _early_leg(self) -> AbstractAsyncContextManager[EarlyLeg | None]:
        """The decode leg, to be sent together with the prefill leg; None where it comes after it.

        A retry takes the plain way: the decode agent must get what the client has, and nothing that made the
        early leg fail can make it fail again. So does a request that finds the connections used up:
        connections are acquired in the order of asking, the prefill leg asks right after its early leg, and
        so, of all early legs that have a connection, at most one waits for its prefill leg to get the next.
        """
        prefill, decode = (node.info for node in (self.pair.prefill, self.pair.decode))
        early = self.pair.streamed and not self._is_retry and self._legs.upstream.has_spare_connections
        control = early and native.control_address(prefill)
        if not control:
            return nullcontext()
        body = native.streamed_body(self._request, self._ids, prefill, control, self._transfer_id)
        self._metrics.streamed_pulls.inc()
        # Its first byte can come only after the prefill's last.
        return EarlyLeg(self._open_last(body, patience=2), Incarnation(decode.incarnation))

    async def _prefill(self) -> NativePrefill:
        """The prefill leg. From sending it until its KV is known to be read or absent, KV is pinned."""
        self._log.enter(Phase.PREFILL)
        leg = self._leg(native.prefill_body(self._request, self._ids, self._transfer_id))
        self._pinned = True
        try:
            async with self._legs.open_prefill(self.pair.prefill.info, leg) as response:
                raw = await response.read()
                self._log.add_agent_timing("prefill", response.header("server-timing"))
                prefill = native.read_prefill(raw, self._request, self._transfer_id)
        except AgentRejected:
            self._pinned = False
            raise
        except AgentLost as error:
            self._pinned = not error.connection_refused
            raise
        self._pinned = prefill.params is not None
        self._reservation.prefill_over()
        return prefill

    def _complete(self, prefill: NativePrefill, sink: ResponseSink) -> None:
        """End the response with that of the prefill leg."""
        if self._request.stream:
            sink.write(native.closing_events(self._request, self._ids, prefill))
        else:
            sink.set_whole("application/json", prefill.raw)

    async def _receive(
        self,
        leg: AbstractAsyncContextManager[UpstreamResponse],
        sink: ResponseSink,
        opening: OpeningEvent | None = None,
    ) -> None:
        """Pass the last leg's response on; of a stream, `opening` is stripped."""
        agent = self.pair.decode.info
        self._log.enter(Phase.DECODE_WAIT)
        async with leg as response:
            if self._request.stream:
                require_stream(response, agent)
                relay = Relay(agent, self._progress, opening, sink, on_done=response.finish_soon)
                await read_events(response, agent, relay, sink)
            else:
                require_json(response, agent)
                body = await response.read()
                self._log.add_agent_timing("decode", response.header("server-timing"))
                sink.set_whole(response.content_type, body)

    def _open_last(self, body: bytes, patience: int = 1) -> AbstractAsyncContextManager[UpstreamResponse]:
        return self._legs.open_last(
            self.pair.decode.info, self._leg(body), stream=self._request.stream, patience=patience
        )

    def _leg(self, body: bytes) -> LegRequest:
        return LegRequest(path=native.path(self._request), headers=native.headers(self._ids), body=body)


class Relay:
    """Passes whole events of one stream to the client, up to `[DONE]`, and notes the tokens in `progress`.

    What a token costs the proxy is spent in `feed`, which the connection calls as bytes arrive. So the usual
    piece, one event behind its token line, has a short way of its own; everything else takes the long one.

    Args:
        opening: Strips what the stream begins with, if that is not the client's.
        on_done: Called once, when `[DONE]` has been passed on.
    """

    def __init__(
        self,
        agent: Register,
        progress: Progress,
        opening: OpeningEvent | None,
        sink: ResponseSink,
        on_done: Callable[[], None],
    ) -> None:
        self._agent = agent
        self._progress = progress
        self._opening = opening
        self._sink = sink
        self._on_done = on_done
        self._scanner = sse.Scanner()
        self.done = False
        """See `EventReader`."""

    def feed(self, piece: bytes) -> None:
        """See `EventReader`. Raises `AgentLost` when the agent reports a failure of its own or begins with
        other tokens than it should, and `BadResponse` for an event without end.
        """
        if self._opening is not None:
            piece = self._opening.strip(piece)
            if self._opening.is_over:
                self._opening = None
        if (
            piece.startswith(MARK)
            and piece.endswith(sse.END_OF_EVENT)
            and piece.count(b"\n") == 3
            and self._scanner.between_events
        ):
            # One event behind its line. It is neither `[DONE]` nor an error: those come without a line.
            self._sink.write_event(self._progress.strip_one(piece))
        elif not self._scanner.done:
            self._pass_on(self._scanner.feed(piece))

    def _pass_on(self, events: bytes) -> None:
        events = self._progress.strip(events)
        failure = native.agent_failure(events)
        if failure is not None:
            events, message = failure
        if events:
            self._sink.write(events)
        if failure is not None:
            raise lost(self._agent, f"failed: {message}")
        if self._scanner.done:
            self.done = True
            self._on_done()


class EarlyLeg:
    """A decode leg that is sent together with its prefill leg.

    An async context: entering sends the leg, leaving ends it whatever became of it. Until the prefill leg has
    ended, only the failure of this one is looked at, and either leg's failure ends both:

    - The prefill leg fails: the attempt ends, this leg is cancelled with it, and its agent stops.
    - This leg fails: the prefill leg is cancelled, unless it ends by itself within `CAUSE_TIMEOUT_S`. One
      agent may make the other fail (a prefill that ends the response leaves nothing to pull; a pull that
      breaks off drops the prompt), and of two such failures the first cause is the one to act on.
    """

    def __init__(self, leg: AbstractAsyncContextManager[UpstreamResponse], agent: Incarnation) -> None:
        self._leg = leg
        self._agent = agent
        self._entered = AsyncExitStack()
        self._opening: asyncio.Future[UpstreamResponse]

    async def __aenter__(self) -> EarlyLeg:
        self._opening = asyncio.ensure_future(self._entered.enter_async_context(self._leg))
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(self._opening)
        # A response that was not read is cancelled; that must not look like a failure of its agent.
        cancelled = asyncio.CancelledError()
        await self._entered.__aexit__(type(cancelled), cancelled, None)

    async def run_beside(self, prefill: Coroutine[Any, Any, NativePrefill]) -> NativePrefill:
        """Run the prefill leg beside this one, and return its result. Raises what either leg failed with."""
        running = asyncio.ensure_future(prefill)
        legs: set[asyncio.Future[Any]] = {running, self._opening}
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and self._opening.exception() is not None:
                await asyncio.wait({running}, timeout=CAUSE_TIMEOUT_S)
                if not running.done():
                    self._opening.result()
            return await running
        except AgentRejected as rejected:
            if (error_object(rejected.raw) or {}).get("code") == DROPPED:
                await self._raise_cause()
            raise
        finally:
            await _cancel(running)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[UpstreamResponse]:
        """The leg's response, once its headers have arrived. What is raised within is the leg's failure."""
        response = await self._opening
        async with self._entered.pop_all():
            yield response

    async def _raise_cause(self) -> None:
        """The prefill was dropped, which only this leg's agent does: raise why that failed."""
        await asyncio.wait({self._opening}, timeout=CAUSE_TIMEOUT_S)
        if self._opening.done():
            self._opening.result()
        raise AgentLost("the decode agent dropped a prompt that was still being computed", self._agent)


class OpeningEvent:
    """Strips the event with which an early leg's stream says which first tokens it goes on from.

    The client has those of the prefill leg. A decode agent that could not pull has sampled its own, and two
    machines may disagree where two tokens are as good as equal.

    Args:
        event: What the stream must begin with.
        agent: Whose stream it is.
    """

    def __init__(self, event: bytes, agent: Incarnation) -> None:
        self._event = event
        self._agent = agent
        self._head: bytes | None = b""

    @property
    def is_over(self) -> bool:
        """Whether the event has been stripped, and what comes now is the client's."""
        return self._head is None

    def strip(self, chunk: bytes) -> bytes:
        """The chunk without the event. Raises `AgentLost` when the stream begins otherwise."""
        if self._head is None:
            return chunk
        self._head += chunk
        if len(self._head) < len(self._event) and self._event.startswith(self._head):
            return b""
        if not self._head.startswith(self._event):
            raise AgentLost("the decode agent goes on from other first tokens", self._agent)
        rest, self._head = self._head[len(self._event) :], None
        return rest


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end. Its failure, if any, was raised elsewhere."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()

# SPDX-License-Identifier: Apache-2.0
"""One attempt with a pair of native agents: for each prompt a prefill leg, first tokens, a decode leg.

With a long prompt the decode leg is sent together with the prefill leg (`EarlyLeg`), so that KV moves while
the rest is computed. Only its begin is early (docs/architecture.md#one-request): the client still gets token
1 from the prefill leg, and the decode leg's response is read after that.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec

from kvferry.proxy import sse
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import LegRequest
from kvferry.proxy.dialects.native import NativePrefill
from kvferry.proxy.errors import AgentLost, AgentRejected, agent_error
from kvferry.proxy.exchange.kv_lifetime import KvDrops
from kvferry.proxy.exchange.legs import (
    Attempt,
    KeptResponses,
    Legs,
    ResponseSink,
    lost,
    raise_one,
    read_events,
    require_json,
    require_stream,
)
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.resume import MARK, Progress
from kvferry.proxy.exchange.sub_requests import PromptShare, add_counts
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.router import Pair
from kvferry.proxy.http.pool import UpstreamResponse
from kvferry.proxy.ids import TransferId, new_transfer_id
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Incarnation, Register

MAX_PROMPTS_AT_ONCE = 16
"""Of one request; each takes a connection or two."""
CAUSE_TIMEOUT_S = 1.0
"""How long the failure of one leg waits for the other's end, which may be its cause."""
_NO_CHOICES = re.compile(rb'"choices": ?\[\]')
"""No text can look like this: its quotes have backslashes."""
DROPPED = "transfer_dropped"
"""The code with which an agent rejects a prefill leg whose transfer was dropped."""


class PromptPart:
    """One prompt of a client's request, and what there is of its response; it outlives attempts."""

    def __init__(self, share: PromptShare) -> None:
        self.share = share
        self.progress = Progress(share.request.n)
        """What the client has of a streamed response: another attempt goes on from there and adds to it."""
        self.whole: bytes | None = None
        """The response, if it is not streamed."""
        self.usage: dict[str, Any] | None = None
        """That of a stream, if it has come."""
        self.timing = native.NULL
        """How long its parts took, as JSON, if it is streamed and that has come."""

    def forget(self) -> None:
        """See `RequestPart`."""
        self.whole = None

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to ask an agent for."""
        return self.whole is not None or self.progress.complete


class NativeAttempt(Attempt):
    """See `Attempt`. The failure of one prompt ends them all; another attempt goes on where this one ended.

    Args:
        parts: The request's prompts. Each is a transfer of its own.
        kept: Counts the responses to several prompts.
        transfer_id: That of the first one.
        is_retry: Whether another attempt came before.
    """

    def __init__(
        self,
        reservation: Reservation,
        parts: Sequence[PromptPart],
        kept: KeptResponses,
        transfer_id: TransferId,
        *,
        legs: Legs,
        log: RequestLog,
        drops: KvDrops,
        metrics: Metrics,
        is_retry: bool,
    ) -> None:
        super().__init__(reservation)
        self._log = log
        self._legs = legs
        self._parts = parts
        self._kept = kept
        left = [part for part in parts if not part.is_complete]
        self._num_in_prefill = len(left)
        pair, ids = self.pair, [transfer_id]
        if len(left) > 1:
            ids += [new_transfer_id() for _ in left[1:]]
            if not pair.alone:
                log.add_transfers(ids[1:])
        tools = _Tools(legs=legs, log=log, drops=drops, metrics=metrics, is_retry=is_retry)
        self._exchanges = [
            _PromptExchange(tools, pair, part, each, self._on_prefilled)
            for part, each in zip(left, ids, strict=True)
        ]

    async def run(self, sink: ResponseSink) -> None:
        """Steps 2 to 4 of a request (`proxy.exchange.exchange`)."""
        if len(self._parts) == 1:  # a task of its own would cost more than all else here
            await self._exchanges[0].run(sink)
            return
        room = asyncio.Semaphore(self._most_at_once)

        async def run(exchange: _PromptExchange) -> None:
            async with room:
                await exchange.run(_PartSink(sink, exchange.part, self._kept))

        try:
            await self._kept.join([asyncio.ensure_future(run(exchange)) for exchange in self._exchanges])
        except BaseExceptionGroup as failures:
            raise_one(failures)
        await self._close(sink)

    def end(self) -> None:
        """Also drop KV that is still pinned."""
        super().end()
        for exchange in self._exchanges:
            exchange.end()
        self._exchanges.clear()  # they refer to this attempt

    @property
    def _most_at_once(self) -> int:
        """How many prompts are served at once: as many as the agents run, so that few wait there."""
        n, runs = self._parts[0].share.request.n, [node.info.load.max_running for node in self.pair.nodes]
        return max(1, min([MAX_PROMPTS_AT_ONCE, *(most // n for most in runs if most)]))

    def _on_prefilled(self) -> None:
        self._num_in_prefill -= 1
        if not self._num_in_prefill:
            self._reservation.prefill_over()

    async def _close(self, sink: ResponseSink) -> None:
        """End the response of several prompts."""
        share = self._parts[0].share
        if share.request.stream:
            usage = _sum([part.usage for part in self._parts])
            sink.write(native.joined_closing_events(share.request, share.ids, usage, self._parts[0].timing))
            return
        wholes = [part.whole for part in self._parts if part.whole is not None]
        size = sum(map(len, wholes))
        joined = await self._legs.upstream.read_beside(size, partial(_joined, wholes, share.request.n))
        sink.set_whole("application/json", joined)


def _joined(wholes: Sequence[bytes], n: int) -> bytes:
    """The whole response of several prompts, from that of each with `n` choices. Raises `BadResponse`."""
    parts = [native.part_of_whole(whole, index * n) for index, whole in enumerate(wholes)]
    return native.joined(parts, _sum([part.usage for part in parts]))


def _sum(usages: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The usage of several prompts; None if no agent reported any."""
    reported = [usage for usage in usages if usage is not None]
    return add_counts(reported) if reported else None


class _Tools(msgspec.Struct, frozen=True, kw_only=True):
    """What the legs of one attempt work with."""

    legs: Legs
    log: RequestLog
    drops: KvDrops
    metrics: Metrics
    is_retry: bool


class _PromptExchange:
    """The legs of one prompt. Call `run` once, then `end` once.

    Args:
        on_prefilled: Called when the prefill leg has ended well.
    """

    def __init__(
        self,
        tools: _Tools,
        pair: Pair,
        part: PromptPart,
        transfer_id: TransferId,
        on_prefilled: Callable[[], None],
    ) -> None:
        self.part = part
        self._pair = pair
        self._request = part.share.request
        self._ids = part.share.ids
        self._first_choice = part.share.first_choice
        self._progress = part.progress
        self._transfer_id = transfer_id
        self._tools = tools
        self._legs = tools.legs
        self._log = tools.log
        self._on_prefilled = on_prefilled
        self._pinned = False
        """Whether the prefill agent may hold KV that has not been read yet."""

    async def run(self, sink: ResponseSink) -> None:
        """See `Attempt.run`. An agent that is lost when the client has everything is not missed."""
        try:
            await self._run(sink)
        except AgentLost:
            if not self._progress.complete:
                raise
            sink.write(sse.DONE)

    def end(self) -> None:
        """Drop KV that is still pinned."""
        if self._pinned:
            self._tools.drops.drop(self._pair.prefill.info, self._transfer_id)

    async def _run(self, sink: ResponseSink) -> None:
        if self._pair.alone:
            body = native.alone_body(self._request, self._ids, self._first_choice)
            await self._receive(self._open_last(body), sink)
            return
        async with self._early_leg() as early:
            # 2. Prefill leg.
            prefill = await (self._prefill() if early is None else early.run_beside(self._prefill()))
            # 3. First token.
            if self._request.stream and (news := self._progress.begin(prefill)):
                sink.write(native.first_events(self._request, self._ids, prefill, news, self._first_choice))
            # 4. Decode leg, unless every choice has ended with token 1.
            if prefill.params is None:
                self._complete(prefill, sink)
            elif early is None:
                resume = self._progress.resume()
                body = native.decode_body(
                    self._request, self._ids, prefill.params, resume, self._first_choice
                )
                await self._receive(self._open_last(body), sink)
            else:
                decode = self._pair.decode.incarnation
                opening = OpeningEvent(native.first_tokens_event(prefill), decode)
                await self._receive(early.opened(), sink, opening)
            self._pinned = False

    def _early_leg(self) -> AbstractAsyncContextManager[EarlyLeg | None]:
        """The decode leg, to be sent together with the prefill leg; None where it comes after it.

        A retry takes the plain way: the decode agent must get what the client has, and nothing that made the
        early leg fail can make it fail again. So does a request that finds the connections used up:
        connections are acquired in the order of asking, the prefill leg asks right after its early leg, and
        so, of all early legs that have a connection, at most one waits for its prefill leg to get the next.
        """
        prefill, decode = (node.info for node in (self._pair.prefill, self._pair.decode))
        may_be_early = self._pair.streamed and not self._tools.is_retry
        early = may_be_early and self._legs.upstream.has_spare_connections
        control = early and native.control_address(prefill)
        if not control:
            return nullcontext()
        body = native.streamed_body(
            self._request, self._ids, prefill, control, self._transfer_id, self._first_choice
        )
        self._tools.metrics.streamed_pulls.inc()
        # Its first byte can come only after the prefill's last.
        return EarlyLeg(self._open_last(body, patience=2), decode.incarnation)

    async def _prefill(self) -> NativePrefill:
        """The prefill leg. From sending it until its KV is known to be read or absent, KV is pinned."""
        if self._log.phase is Phase.ROUTE:
            self._log.enter(Phase.PREFILL)
        source = self._prefix_source()
        leg = self._leg(native.prefill_body(self._request, self._ids, self._transfer_id, source))
        self._pinned = True
        try:
            async with self._legs.open_prefill(self._pair.prefill.info, leg) as response:
                raw = await response.read()
                self._note_timing("prefill", response)
                read = partial(native.read_prefill, raw, self._request, self._transfer_id)
                prefill = await self._legs.upstream.read_beside(len(raw), read)
        except AgentRejected:
            self._pinned = False
            raise
        except AgentLost as error:
            self._pinned = not error.connection_refused
            raise
        self._pinned = prefill.params is not None
        self._on_prefilled()
        return prefill

    def _prefix_source(self) -> dict[str, Any] | None:
        """From whom the prefill agent may pull. A retry takes the plain way."""
        lender = self._pair.prefix_lender
        if lender is None or self._tools.is_retry:
            return None
        params = native.prefix_source_params(lender.agent, lender.min_tokens)
        if params is not None:
            self._tools.metrics.prefix_sources.inc()
        return params

    def _complete(self, prefill: NativePrefill, sink: ResponseSink) -> None:
        """End the response with that of the prefill leg."""
        if self._request.stream:
            sink.write(native.closing_events(self._request, self._ids, prefill))
            self._progress.end()
        else:
            sink.set_whole("application/json", prefill.raw)

    async def _receive(
        self,
        leg: AbstractAsyncContextManager[UpstreamResponse],
        sink: ResponseSink,
        opening: OpeningEvent | None = None,
    ) -> None:
        """Pass the last leg's response on; of a stream, `opening` is stripped."""
        agent = self._pair.decode.info
        if self._log.phase in (Phase.ROUTE, Phase.PREFILL):  # another prompt may be further
            self._log.enter(Phase.DECODE_WAIT)
        async with leg as response:
            if self._request.stream:
                require_stream(response, agent)
                relay = Relay(agent, self._progress, opening, sink, on_done=response.finish_soon)
                await read_events(response, agent, relay, sink)
            else:
                require_json(response, agent)
                body = await response.read()
                check = partial(native.require_whole, body, self._request)
                await self._legs.upstream.read_beside(len(body), check)
                self._note_timing("decode", response)
                sink.set_whole("application/json", body)

    def _note_timing(self, leg: str, response: UpstreamResponse) -> None:
        """Note an agent's own timing; of several prompts the first one's."""
        if not self._first_choice:
            self._log.add_agent_timing(leg, response.header(b"server-timing"))

    def _open_last(self, body: bytes, patience: int = 1) -> AbstractAsyncContextManager[UpstreamResponse]:
        return self._legs.open_last(
            self._pair.decode.info, self._leg(body), stream=self._request.stream, patience=patience
        )

    def _leg(self, body: bytes) -> LegRequest:
        return LegRequest(path=native.path(self._request), headers=native.headers(self._ids), body=body)


class _PartSink:
    """The client's sink for one of several prompts (`ResponseSink`): what ends its response is kept back."""

    def __init__(self, sink: ResponseSink, part: PromptPart, kept: KeptResponses) -> None:
        self._sink = sink
        self._part = part
        self._kept = kept
        self.throttling = sink.throttling

    def set_whole(self, content_type: str, body: bytes) -> None:
        """See `ResponseSink`. Raises `TooManyResponses`."""
        self._part.whole = body
        self._kept.add(len(body))

    def write_event(self, event: bytes) -> None:
        """See `ResponseSink`. Raises `BadResponse`."""
        if _NO_CHOICES.search(event):
            self.write(event)
        else:
            self._sink.write_event(event)

    def write(self, events: bytes) -> None:
        """See `ResponseSink`. Raises `BadResponse`, and an agent's error, which ends all prompts."""
        shown = []
        for event in sse.split(events):
            if event.startswith(sse.ERROR_EVENT):
                raise AgentRejected(400, agent_error(sse.data(event) or b""))
            last = None if event == sse.DONE else native.last_event(event)
            if last is not None:
                self._part.usage, self._part.timing = last.usage, last.kvferry_timing
            elif event != sse.DONE:
                shown.append(event)
        if shown:
            self._sink.write(b"".join(shown))


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
        self._has_error = False
        """Whether the client was sent an error event of the agent's."""
        self.done = False
        """See `EventReader`."""

    def feed(self, piece: bytes) -> None:
        """See `EventReader`. Raises `AgentLost` when the agent reports a failure of its own, begins with
        other tokens than it should, or sends `[DONE]` before every choice has ended, and `BadResponse` for an
        event without end.
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

    def num_held(self) -> int:
        """See `EventReader`."""
        return self._scanner.num_held + self._progress.num_held

    def _pass_on(self, events: bytes) -> None:
        events = self._progress.strip(events)
        failure = native.agent_failure(events)
        self._has_error |= sse.has_error(events)
        if failure is None and self._scanner.done and not (self._progress.complete or self._has_error):
            failure = events.removesuffix(sse.DONE), "[DONE] came before the end of every choice"
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
            if rejected.error is not None and rejected.error.code == DROPPED:
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

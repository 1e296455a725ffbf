# SPDX-License-Identifier: Apache-2.0
"""One attempt with another engine's servers: the request's sub-requests side by side, each in two legs.

A sub-request's legs run in the order that its dialect says:

- **Serial**: the prefill leg, then the decode leg with the params of the prefill response. They are
  used once, here; whatever goes wrong, the next attempt begins with a fresh prefill and a fresh transfer id.
- **Concurrent**: both legs at once. The prefill's response is read to its end and checked; until then nothing
  of the decode's goes to the client. Either leg's failure cancels the other (sglang #9726, smg #831).

Where the dialect `may_continue` a stream, the serial order begins with the prefill's token, and the decode
leg goes on after it. So does another attempt, after all tokens that the client has (`SentTokens`).

Nothing here knows a field or a header of any engine: that is its `Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from msgspec import structs

from kvferry.proxy import sse
from kvferry.proxy.clock import now
from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Opening,
    Prefilled,
    SubRequest,
    pick_rank,
)
from kvferry.proxy.errors import (
    AgentLost,
    AgentRejected,
    AgentTimeout,
    BadResponse,
    KvUnproven,
    LeaseUnknown,
    StreamBroken,
)
from kvferry.proxy.exchange.foreign_events import SubResponse, as_events, closing_events, merge
from kvferry.proxy.exchange.kv_lifetime import ExpiryCounts, KvDrops, KvEndpointCache, LeaseCheck, Verdict
from kvferry.proxy.exchange.legs import (
    AGENT_FAILURES,
    Attempt,
    KeptResponses,
    Legs,
    ResponseSink,
    join,
    lost,
    raise_one,
    read_events,
    require_stream,
)
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.resume import SentTokens
from kvferry.proxy.exchange.sub_requests import split, split_into_prompts, whole_request
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.router import Pair
from kvferry.proxy.http.pool import UpstreamResponse
from kvferry.proxy.ids import Identity, TransferId, new_transfer_id
from kvferry.proxy.request import ClientRequest
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Register

LOOKUP_MAX_AGE_S = 10.0
"""How long an engine id that was looked up is believed: its server may have restarted at the same address."""
LOOKUP_TIMEOUT_S = 5.0
ACCEPT_S = 0.5
"""A decode server that had less than this to accept a leg may not have seen it when the leg is cancelled."""

Check = Callable[[], Awaitable[None]]


class ForeignTools(msgspec.Struct, frozen=True, kw_only=True):
    """What the legs of one attempt work with."""

    dialect: Dialect
    legs: Legs
    kept: KeptResponses
    kv_endpoints: KvEndpointCache
    drops: KvDrops
    expiry_counts: ExpiryCounts
    metrics: Metrics


class _Continued(msgspec.Struct, frozen=True, kw_only=True):
    """The decode leg of a stream of which the client has some.

    `is_pinned`: whether the prefill server holds KV for it. `usage` is the prefill's.
    """

    leg: LegRequest
    is_pinned: bool
    usage: dict[str, Any]


class ForeignAttempt(Attempt):
    """See `Attempt`. The failure of one sub-request ends them all: a response is complete or it is none.

    Until the client has anything a lost server is an `AgentLost`. Later it is `StreamBroken`, unless it is
    known what the client has, so that another server can go on.

    Args:
        sent: What the client has of a stream that may be continued. It outlives attempts.
    """

    def __init__(
        self,
        reservation: Reservation,
        request: ClientRequest,
        ids: Identity,
        transfer_id: TransferId,
        *,
        sent: SentTokens,
        tools: ForeignTools,
        log: RequestLog,
    ) -> None:
        super().__init__(reservation)
        self._sent = sent
        self._request = request
        self._tools = tools
        self._log = log
        if self.pair.alone:
            self._subs: tuple[SubRequest, ...] = (whole_request(request, ids, transfer_id),)
        else:
            forks = tools.dialect.forks
            others = [new_transfer_id() for _ in range(1, request.prompts if forks else request.sequences)]
            log.add_transfers(others)
            self._subs = (split_into_prompts if forks else split)(request, ids, [transfer_id, *others])
        self._num_in_prefill = len(self._subs)
        self._has_begun = False
        """Whether the client has anything."""

    async def run(self, sink: ResponseSink) -> None:
        self._log.enter(Phase.DECODE_WAIT if self.pair.alone else Phase.PREFILL)
        try:
            responses = await self._run_all(sink)
        except AgentLost as error:
            if self._has_begun and not self._sent.begun:
                raise StreamBroken(error.message) from error
            raise
        if self._request.stream:
            sink.write(closing_events(responses))
        else:
            size = sum(response.size for response in responses)
            merged = await self._tools.legs.upstream.read_beside(size, partial(merge, responses))
            sink.set_whole("application/json", merged)

    def end(self) -> None:
        """Also count the responses as gone."""
        super().end()
        self._tools.kept.release()

    async def _run_all(self, sink: ResponseSink) -> list[SubResponse]:
        """The response of every sub-request, in order. Raises the `ProxyError` that says most."""

        def write(events: bytes) -> None:
            if not self._has_begun:
                self._has_begun = True
                self._note_prefill_over()
            sink.write(events)

        exchanges = [
            _SubExchange(self._tools, sub, self._sent, sink, write, self._on_prefilled) for sub in self._subs
        ]
        try:
            if len(exchanges) == 1:  # a task of its own would cost more than all else here
                return [await exchanges[0].run(self.pair)]
            return await self._tools.kept.join(
                [asyncio.ensure_future(self._run_counted(each)) for each in exchanges]
            )
        except AGENT_FAILURES:
            self._tools.kv_endpoints.forget(self.pair.prefill.incarnation)
            raise
        except BaseExceptionGroup as failures:
            if failures.subgroup(AGENT_FAILURES):
                self._tools.kv_endpoints.forget(self.pair.prefill.incarnation)
            raise_one(failures)

    async def _run_counted(self, exchange: _SubExchange) -> SubResponse:
        """Raises `TooManyResponses`, and as `_SubExchange.run` does."""
        sub_response = await exchange.run(self.pair)
        self._tools.kept.add(sub_response.size)
        return sub_response

    def _on_prefilled(self) -> None:
        """One more prefill leg has ended well."""
        self._num_in_prefill -= 1
        if not self._num_in_prefill:
            self._note_prefill_over()
            self._reservation.prefill_over()

    def _note_prefill_over(self) -> None:
        """The client waits for prefill no more: all prefill legs have ended, or it has an event already."""
        if self._log.phase is Phase.PREFILL:
            self._log.enter(Phase.DECODE_WAIT)


class _SubExchange:
    """The legs of one sub-request. Call `run` once.

    Args:
        sent: See `ForeignAttempt`.
        write: Sends whole events to the client; not called for a response that is not streamed.
        on_prefilled: Called when the prefill leg has ended well.
    """

    def __init__(
        self,
        tools: ForeignTools,
        sub: SubRequest,
        sent: SentTokens,
        sink: ResponseSink,
        write: Callable[[bytes], None],
        on_prefilled: Callable[[], None],
    ) -> None:
        self._dialect = tools.dialect
        self._legs = tools.legs
        self._tools = tools
        self._sub = sub
        self._sent = sent
        self._sink = sink
        self._write = write
        self._on_prefilled = on_prefilled

    async def run(self, pair: Pair) -> SubResponse:
        """Raises `ProxyError`, or an exception group of such."""
        if pair.alone and not self._sent.begun:
            server = pair.prefill.info
            leg = self._dialect.alone_leg(self._sub, pick_rank(self._sub.room, server))
            return await self._receive(server, leg, SubResponse(self._sub, server, self._dialect))
        endpoints = self._sub.endpoints(pair.prefill.info, pair.decode.info)
        kv_endpoint = await self._find_kv_endpoint(endpoints)
        if self._dialect.leg_order(endpoints, kv_endpoint) is LegOrder.SERIAL:
            return await self._run_serial(endpoints, kv_endpoint)
        return await self._run_concurrent(endpoints, kv_endpoint)

    async def _run_serial(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> SubResponse:
        dialect, counts = self._dialect, self._tools.expiry_counts
        if dialect.has_leases and dialect.expiry_counter is None and dialect.lease_s is None:
            raise LeaseUnknown(
                f"servers of {dialect.name} say neither how long they keep KV nor that they gave it up, so "
                f"no response could be trusted: the proxy must be started with {dialect.lease_flag}"
            )
        async with LeaseCheck(counts, endpoints.prefill, dialect.expiry_counter, dialect.lease_s) as lease:
            prefilled = await self._prefill(endpoints)
            lease.answered()
            if prefilled.whole is not None:
                self._free_kv(endpoints, prefilled)
                return await self._complete(endpoints, prefilled.whole)
            begun = self._begin_continued(endpoints, prefilled)
            if isinstance(begun, SubResponse):
                return begun
            if begun is None:
                return await self._decode(endpoints, kv_endpoint, prefilled, lease)
            del prefilled  # with the prompt's ids, which may be megabytes
            return await self._decode_continued(endpoints, begun)

    def _begin_continued(self, endpoints: Endpoints, prefilled: Prefilled) -> _Continued | SubResponse | None:
        """Show the prefill's token, unless the client has one, and make the leg that goes on after it.

        Returns the response if it ends with that token, and None where the decode server has to begin the
        response. Raises `StreamBroken` where it would have to, and the client has some of it.
        """
        opening, sent = prefilled.opening, self._sent
        if sent.begun:
            leg = None
            if opening is not None:
                leg = self._dialect.continued_leg(self._sub, endpoints, prefilled, sent.ids)
            if opening is None or leg is None:
                self._drop_prefilled(endpoints, prefilled)
                raise _cannot_go_on(endpoints)
            sent.go_on_elsewhere()
        elif opening is None or not opening.events:
            return None
        elif opening.has_ended:
            self._drop_prefilled(endpoints, prefilled)
            return self._show(endpoints, opening)
        else:
            leg = self._dialect.continued_leg(self._sub, endpoints, prefilled, opening.first_id)
            if leg is None:
                return None
            self._show(endpoints, opening)
        if prefilled.params is None:
            self._tools.metrics.prompts_recomputed.labels(self._dialect.name).inc()
        return _Continued(leg=leg, is_pinned=prefilled.params is not None, usage=opening.usage)

    def _show(self, endpoints: Endpoints, opening: Opening) -> SubResponse:
        """Send the client the prefill's token."""
        first = SubResponse(self._sub, endpoints.prefill, self._dialect, self._sent)
        self._write(first.rewrite(opening.events))
        return first

    async def _decode_continued(self, endpoints: Endpoints, begun: _Continued) -> SubResponse:
        """The decode leg of a stream of which the client has some. Of one whose end the client has, nothing
        is missed when the server is lost.
        """
        sub_response = SubResponse(self._sub, endpoints.decode, self._dialect, self._sent)
        try:
            if begun.is_pinned:
                return await self._decode_or_drop(endpoints, begun.leg, sub_response)
            return await self._receive(endpoints.decode, begun.leg, sub_response)
        except AgentLost:
            if not sub_response.complete:
                raise
            if self._sub.request.include_usage:
                sampled = self._sent.count_sampled
                total = begun.usage["prompt_tokens"] + sampled
                sub_response.assume_usage(begun.usage | {"completion_tokens": sampled, "total_tokens": total})
            return sub_response

    async def _decode(
        self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None, prefilled: Prefilled, lease: LeaseCheck
    ) -> SubResponse:
        """The decode leg of a serial order."""
        dialect = self._dialect
        sub_response = SubResponse(self._sub, endpoints.decode, dialect)
        sub_response.prompt_tokens_details = prefilled.prompt_tokens_details
        leg = dialect.decode_leg(self._sub, endpoints, prefilled, kv_endpoint)
        if prefilled.params is None:
            # The prompt is computed again, which an operator should know.
            self._tools.metrics.prompts_recomputed.labels(dialect.name).inc()
            return await self._receive(endpoints.decode, leg, sub_response)
        if not dialect.has_leases:
            return await self._decode_or_drop(endpoints, leg, sub_response)
        return await self._decode_under_lease(endpoints, prefilled, leg, sub_response, lease)

    async def _decode_or_drop(
        self, endpoints: Endpoints, leg: LegRequest, sub_response: SubResponse
    ) -> SubResponse:
        """A decode leg whose KV is dropped if it ends before the decode server has answered anything."""
        try:
            return await self._receive(endpoints.decode, leg, sub_response)
        finally:
            if not sub_response.has_begun:
                self._drop(endpoints)

    def _drop_prefilled(self, endpoints: Endpoints, prefilled: Prefilled) -> None:
        if prefilled.params is not None:
            self._drop(endpoints)

    def _drop(self, endpoints: Endpoints) -> None:
        """Have the prefill server free KV that no decode server will read, where it offers a way."""
        drop = self._dialect.drop_leg(self._sub, endpoints)
        if drop is not None:
            self._tools.drops.send(endpoints.prefill, drop, delivered_by=404)

    async def _decode_under_lease(
        self,
        endpoints: Endpoints,
        prefilled: Prefilled,
        leg: LegRequest,
        sub_response: SubResponse,
        lease: LeaseCheck,
    ) -> SubResponse:
        """A decode leg whose KV may be gone after a while. Raises `KvUnproven` if it may have been."""
        if lease.is_over:
            raise _too_late(endpoints)
        accepted_by = now() + ACCEPT_S

        async def check() -> None:
            verdict = await lease.judge()
            self._tools.metrics.leases.add(verdict.name.lower(), 1)
            if not verdict.is_accepted:
                server = endpoints.prefill if verdict is Verdict.UNPROVEN else endpoints.decode
                raise KvUnproven(f"{endpoints.prefill.address}: {verdict.value}", server.incarnation)

        try:
            return await self._receive(endpoints.decode, leg, sub_response, check, lease.deadline)
        except AgentTimeout:
            if not lease.is_over:
                raise
            raise _too_late(endpoints) from None
        except asyncio.CancelledError:
            if now() < accepted_by:
                self._free_kv(endpoints, prefilled)
            raise

    async def _run_concurrent(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> SubResponse:
        sub_response = SubResponse(self._sub, endpoints.decode, self._dialect)
        leg = self._dialect.decode_leg(self._sub, endpoints, Prefilled(), kv_endpoint)

        async def check() -> None:
            sub_response.prompt_tokens_details = (await prefill).prompt_tokens_details

        # Two tasks made in one go ask for their connections one right after the other, and connections
        # are acquired in that order. So, of all legs with one, at most one waits for its other leg's.
        prefill = asyncio.ensure_future(self._prefill(endpoints))
        decode = asyncio.ensure_future(self._receive(endpoints.decode, leg, sub_response, check))
        legs: tuple[asyncio.Future[Any], ...] = (prefill, decode)
        await join(legs)
        return sub_response

    async def _prefill(self, endpoints: Endpoints) -> Prefilled:
        """The prefill leg, up to the end of its response; nothing, where the dialect sends none."""
        server, leg = endpoints.prefill, self._dialect.prefill_leg(self._sub, endpoints)
        prefilled = Prefilled()
        if leg is not None:
            try:
                async with self._legs.open_prefill(server, leg) as response:
                    raw = await response.read()
                    read = partial(self._dialect.read_prefill, self._sub, raw)
                    prefilled = await self._legs.upstream.read_beside(len(raw), read)
            except BadResponse as error:  # another server may do better
                raise AgentLost(f"{server.address}: {error.message}", server.incarnation) from error
        if prefilled.kv_endpoint is not None:
            self._tools.kv_endpoints.learn(endpoints, prefilled.kv_endpoint, now())
        self._on_prefilled()
        return prefilled

    async def _receive(
        self,
        server: Register,
        leg: LegRequest,
        sub_response: SubResponse,
        check: Check | None = None,
        accept_deadline: float = float("inf"),
    ) -> SubResponse:
        """Send the last leg and read its response into `sub_response`.

        `check` runs once, when there is something that it must vouch for, before the client gets that.
        """
        stream = self._sub.request.stream
        opening = self._legs.open_last(server, leg, stream=stream, accept_deadline=accept_deadline)
        async with opening as response:
            if stream:
                await self._receive_events(response, server, sub_response, check)
            else:
                raw = await response.read()
                if check is not None:
                    await check()
                await self._legs.upstream.read_beside(len(raw), partial(sub_response.read_whole, raw))
        return sub_response

    async def _receive_events(
        self, response: UpstreamResponse, server: Register, sub_response: SubResponse, check: Check | None
    ) -> None:
        require_stream(response, server)
        reader = _SubReader(sub_response, self._write, self._sink.write_event, response.finish_soon)
        if check is not None:
            if await reader.read_first(response):
                await check()
            reader.release()
        await read_events(response, server, reader, self._sink)
        if not sub_response.complete:
            raise lost(server, "ended its stream without ending every choice")

    async def _complete(self, endpoints: Endpoints, whole: bytes) -> SubResponse:
        """The response ended with its first token, at the prefill server."""
        sub_response = SubResponse(self._sub, endpoints.prefill, self._dialect)
        if not self._sub.request.stream:
            await self._legs.upstream.read_beside(len(whole), partial(sub_response.read_whole, whole))
            return sub_response
        events = await self._legs.upstream.read_beside(
            len(whole), lambda: sub_response.rewrite(as_events(whole, self._sub))
        )
        if events:
            self._write(events)
        return sub_response

    def _free_kv(self, endpoints: Endpoints, prefilled: Prefilled) -> None:
        """Have the decode server fetch the KV for one token, unread, so that the prefill server can free it.

        No engine offers a shorter way (`docs/sources.md#vllm`); otherwise its blocks wait for their lease to
        end.
        """
        if prefilled.params is not None:
            once = {"max_tokens": 1, "stream": False}
            kept = ("model", "prompt", "messages", "cache_salt")
            body = {name: value for name, value in self._sub.body.items() if name in kept} | once
            leg = self._dialect.decode_leg(structs.replace(self._sub, body=body), endpoints, prefilled, None)
            self._tools.drops.send(endpoints.decode, leg)

    async def _find_kv_endpoint(self, endpoints: Endpoints) -> KvEndpoint | None:
        """What must be, or happens to be, known of the prefill server beforehand."""
        dialect, known = self._dialect, self._tools.kv_endpoints
        url = dialect.lookup(endpoints)
        if url is None:
            return known.find(endpoints)
        found = known.find(endpoints, since=now() - LOOKUP_MAX_AGE_S)
        if found is None:
            deadline = min(now() + LOOKUP_TIMEOUT_S, self._legs.deadline)
            try:
                raw = await self._legs.upstream.get(endpoints.prefill, url, deadline=deadline)
                found = dialect.read_lookup(endpoints, raw)
            except (AgentRejected, AgentTimeout, BadResponse) as error:
                raise AgentLost(f"{url}: {error.message}", endpoints.prefill.incarnation) from error
            known.learn(endpoints, found, now())
        return found


class _SubReader:
    """Rewrites the events of one sub-request's stream for the client (`EventReader`).

    What a token costs the proxy is spent in `feed`, which the connection calls as bytes arrive. So the usual
    piece, one event with nothing but text, has a short way of its own; everything else takes the long one.
    """

    __slots__ = (
        "_held", "_is_quick", "_on_done", "_rewrite_one", "_scanner",
        "_sub_response", "_write", "_write_event", "done",
    )  # fmt: skip

    def __init__(
        self,
        sub_response: SubResponse,
        write: Callable[[bytes], None],
        write_event: Callable[[bytes], None],
        on_done: Callable[[], None],
    ) -> None:
        self._sub_response = sub_response
        self._rewrite_one = sub_response.rewrite_one
        self._write = write
        self._write_event = write_event
        self._on_done = on_done
        self._scanner = sse.Scanner()
        self._held: bytes | None = None
        """What is held back from the client; None when nothing is."""
        self._is_quick = True
        """Whether a piece may take the short way: nothing is held back, nor was the last event cut off."""
        self.done = False

    async def read_first(self, response: UpstreamResponse) -> bool:
        """Read until there is anything for the client, and hold it back. Returns False if nothing comes."""
        self._held = b""
        self._is_quick = False
        while not self._held and not self.done:
            piece = await response.read_some()
            if not piece:
                return False
            self.feed(piece)
        return True

    def release(self) -> None:
        """Hold nothing back any more."""
        held, self._held = self._held, None
        self._is_quick = self._scanner.between_events
        if held:
            self._write(held)

    def feed(self, piece: bytes) -> None:
        """See `EventReader`. Raises as `SubResponse.rewrite` does."""
        if self._is_quick:
            event = self._rewrite_one(piece)
            if event is not None:
                self._write_event(event)
                return
        if not self.done:
            self._rewrite(self._scanner.feed(piece))
            self._is_quick = self._held is None and self._scanner.between_events

    def num_held(self) -> int:
        """See `EventReader`."""
        return self._scanner.num_held + self._sub_response.num_held

    def _rewrite(self, whole: bytes) -> None:
        shown: list[bytes] = []
        try:
            for event in sse.split(whole):
                shown.append(self._sub_response.rewrite_event(event))
        finally:  # those before one that failed are the client's
            events = b"".join(shown)
            if self._held is not None:
                self._held += events
            elif events:
                self._write(events)
        if self._scanner.done:
            self.done = True
            self._on_done()


def _cannot_go_on(endpoints: Endpoints) -> StreamBroken:
    return StreamBroken(f"{endpoints.decode.address} could not go on where another server was lost")


def _too_late(endpoints: Endpoints) -> KvUnproven:
    return KvUnproven(
        f"{endpoints.decode.address} was too late for the KV at {endpoints.prefill.address}",
        endpoints.decode.incarnation,
    )

# SPDX-License-Identifier: Apache-2.0
"""One attempt with one pair of servers: the request's sub-requests side by side, each in two legs.

A sub-request's legs run in the order that its dialect says:

- **Serial**: the prefill leg, then the decode leg with the params of the prefill response. They are used
  once, here; whatever goes wrong, the next attempt begins with a fresh prefill and a fresh transfer id.
- **Early**: the decode leg is sent together with the prefill leg (`EarlyLeg`), so that KV moves while the
  rest of a long prompt is computed. Only its begin is early: its response is read after the prefill's.
- **Concurrent**: both legs at once. The prefill's response is read to its end and checked; until then nothing
  of the decode's goes to the client. Either leg's failure cancels the other (sglang #9726, smg #831).

Where the prefill's first tokens are the client's (`Dialect.opening_events`), it gets them before the decode
leg's, which goes on after them. So does another attempt, after all that the client has (`SentTokens`).

Nothing here knows a field or a header of any engine: that is its `Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from msgspec import structs

from kvferry.proxy.dialects.base import (
    Dialect,
    Endpoints,
    KvEndpoint,
    LegOrder,
    LegRequest,
    Prefilled,
    SubRequest,
    pick_rank,
)
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import (
    AgentBusy,
    AgentLost,
    AgentRejected,
    AgentTimeout,
    BadResponse,
    BusyResponse,
    KvUnproven,
    LeaseUnknown,
    StreamBroken,
)
from kvferry.proxy.exchange.kv_lifetime import ExpiryCounts, KvDrops, KvEndpointCache, LeaseCheck, Verdict
from kvferry.proxy.exchange.legs import (
    AGENT_FAILURES,
    Legs,
    ResponseSink,
    lost,
    read_events,
    require_json,
    require_stream,
)
from kvferry.proxy.exchange.relay import OpeningEvent, RelayedResponse
from kvferry.proxy.exchange.rewrite import EventRewriter, RewrittenResponse
from kvferry.proxy.exchange.sub_requests import (
    KeptResponses,
    SubResponse,
    closing_events,
    join,
    merge,
    raise_one,
    split,
)
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.routing.routing_request import PrefixLender
from kvferry.proxy.http.pool import UpstreamPool, UpstreamRequest, now
from kvferry.proxy.ids import Identity
from kvferry.proxy.request import ClientRequest, reported_usage
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Phase, RequestLog
from kvferry.proxy.wire.registration import Incarnation, Register

MAX_PROMPTS_AT_ONCE = 16
"""Most prompts of one request that a pair of our agents serves at once; each takes a connection or two."""
CAUSE_TIMEOUT_S = 1.0
"""How long the failure of one leg waits for the other's end, which may be its cause."""
DROPPED = "transfer_dropped"
"""The code with which an agent rejects a prefill leg whose transfer was dropped."""
WITHDRAWN = "transfer_withdrawn"
"""The code with which an agent rejects a decode leg whose prefill has ended the whole response."""
LOOKUP_MAX_AGE_S = 10.0
"""How long an engine id that was looked up is believed: its server may have restarted at the same address."""
LOOKUP_TIMEOUT_S = 5.0
ACCEPT_S = 0.5
"""A decode server that had less than this to accept a leg may not have seen it when the leg is cancelled."""

Check = Callable[[], Awaitable[None]]
OpenLeg = AbstractAsyncContextManager[UpstreamRequest]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptContext:
    """What all attempts of one proxy share."""

    upstream: UpstreamPool
    drops: KvDrops
    dialects: Mapping[str, Dialect]
    kv_endpoints: KvEndpointCache
    expiry_counts: ExpiryCounts
    metrics: Metrics


@dataclass(slots=True, kw_only=True)
class RequestState:
    """What all attempts of one request share. `sent`: what the client of a stream has, by prompt."""

    request: ClientRequest
    ids: Identity
    log: RequestLog
    legs: Legs
    sent: Sequence[SentTokens]
    kept: KeptResponses | None = None
    """Of a request with several parts."""
    prompt_tokens: dict[int, int] = field(default_factory=dict)
    """By prompt, as its first prefill has reported."""

    @property
    def begun(self) -> bool:
        """Whether the client has tokens that another attempt can go on after."""
        return any(sent.begun for sent in self.sent)


class Attempt:
    """One try of a request with one pair of agents. Call `run` once, then `end` once.

    The failure of one sub-request ends them all. Those that are complete are not asked for again.

    Args:
        is_retry: Whether another attempt came before. Then the plain way is taken, so that nothing that made
            that one fail can make this one fail.
    """

    def __init__(
        self, context: AttemptContext, state: RequestState, reservation: Reservation, *, is_retry: bool
    ) -> None:
        pair = reservation.pair
        self.context = context
        self.state = state
        self.pair = pair
        self.is_alone = pair.alone
        self.dialect = dialect = context.dialects[pair.prefill.info.dialect]
        self.is_retry = is_retry
        self.sink: ResponseSink
        self.write_event: Callable[[bytes], None]
        """The sink's (`EventWriter`): the first event of a rewritten stream does not come by it."""
        self.prefilled_at: float | None = None
        """When the last prefill leg had ended, on the event loop's clock."""
        self._reservation = reservation
        self._has_begun = False
        """Whether the client has anything that was rewritten for it."""
        self._subs = split(dialect, state.request, state.ids, alone=self.is_alone)
        self.is_divided = len(self._subs) > 1
        left = self._subs
        if self.is_divided:
            state.kept = kept = state.kept or KeptResponses(context.upstream.bounds)
            left = tuple(sub for sub in left if kept.find(sub) is None)
        self._num_in_prefill = len(left)
        self._exchanges = [SubExchange(self, sub) for sub in left]
        first, *others = [sub.transfer_id for sub in left or self._subs]
        state.log.add_attempt(pair, first)
        if others and not self.is_alone:
            state.log.add_transfers(others)

    async def run(self, sink: ResponseSink) -> None:
        """Give `sink` the response, `[DONE]` included. Raises `ProxyError`; on `AgentLost` another attempt
        may follow.
        """
        self.sink, self.write_event = sink, sink.write_event
        self.state.log.enter(Phase.DECODE_WAIT if self.is_alone else Phase.PREFILL)
        try:
            responses = await (self._run_all() if self.is_divided else self._run_one())
        except AgentLost as error:
            if self._has_begun and not self.state.begun:
                raise StreamBroken(error.message) from error
            raise
        if self.state.request.stream:
            if events := closing_events(responses):
                sink.write(events)
            return
        whole = responses[0].whole
        if whole is None:
            size = sum(response.size for response in responses)
            whole = await self.context.upstream.read_beside(size, partial(merge, responses))
        sink.set_whole("application/json", whole)

    def end(self) -> None:
        """Release what the attempt holds. Does not await, so that a cancelled task completes it too."""
        self._reservation.release()
        for exchange in self._exchanges:
            exchange.end()
        self._exchanges.clear()  # they refer to this attempt

    def write(self, events: bytes) -> None:
        """Write rewritten events (`EventWriter`)."""
        if not self._has_begun:
            self._has_begun = True
            self.note_prefill_over()
        self.sink.write(events)

    def prefilled(self) -> None:
        """One more prefill leg has ended well."""
        self._num_in_prefill -= 1
        if not self._num_in_prefill:
            self.prefilled_at = now()
            self._reservation.prefill_over()
            if not self.dialect.is_native:  # else the first token is still the prefill's
                self.note_prefill_over()

    def note_prefill_over(self) -> None:
        """The client waits for prefill no more: it has an event already, or will get the decode server's."""
        if self.state.log.phase is Phase.PREFILL:
            self.state.log.enter(Phase.DECODE_WAIT)

    async def _run_one(self) -> list[SubResponse]:
        """The only response, without a task of its own, which would cost more than all else here."""
        try:
            return [await self._exchanges[0].run()]
        except AGENT_FAILURES:
            self._forget_kv_endpoints()
            raise
        except BaseExceptionGroup as failures:
            self._raise_one(failures)

    async def _run_all(self) -> list[SubResponse]:
        """The response of every sub-request, in order. Raises the `ProxyError` that says most."""
        kept = self.state.kept
        assert kept is not None
        room = asyncio.Semaphore(self._most_at_once)

        async def run(exchange: SubExchange) -> None:
            async with room:
                kept.add(await exchange.run())

        try:
            await kept.join([asyncio.ensure_future(run(exchange)) for exchange in self._exchanges])
        except BaseExceptionGroup as failures:
            self._raise_one(failures)
        return [response for sub in self._subs if (response := kept.find(sub)) is not None]

    @property
    def _most_at_once(self) -> int:
        """How many parts are served at once: of our agents as many as they run, so that few wait there."""
        if not self.dialect.is_native:
            return len(self._subs)
        n, runs = self.state.request.n, [node.info.load.max_running for node in self.pair.nodes]
        return max(1, min([MAX_PROMPTS_AT_ONCE, *(most // n for most in runs if most)]))

    def _raise_one(self, failures: BaseExceptionGroup[BaseException]) -> NoReturn:
        if failures.subgroup(AGENT_FAILURES):
            self._forget_kv_endpoints()
        raise_one(failures)

    def _forget_kv_endpoints(self) -> None:
        """The prefill server may have restarted."""
        self.context.kv_endpoints.forget(self.pair.prefill.incarnation)


class SubExchange:
    """The legs of one sub-request. Call `run` once, then `end` once."""

    def __init__(self, attempt: Attempt, sub: SubRequest) -> None:
        self._attempt = attempt
        self._context = attempt.context
        self._dialect = attempt.dialect
        self._legs = attempt.state.legs
        self._sub = sub
        self._sent = attempt.state.sent[sub.prompt]
        self._endpoints: Endpoints
        self._response: SubResponse | None = None
        self._is_pinned = False
        """Whether the prefill server may hold KV that has not been read yet."""

    async def run(self) -> SubResponse:
        """Raises `ProxyError`, or an exception group of such."""
        attempt, dialect = self._attempt, self._dialect
        pair = attempt.pair
        prefill, decode = pair.prefill.info, pair.decode.info
        if attempt.is_alone and not self._sent.begun:
            leg = dialect.alone_leg(self._sub, pick_rank(self._sub.room, prefill))
            return await self._receive(self._open_decode(leg), self._respond())
        lender = pair.prefix_lender if not attempt.is_retry else None
        self._endpoints = self._sub.endpoints(
            prefill,
            decode,
            early=pair.streamed and self._may_be_early(),
            prefix_source=None if lender is None else self._prefix_source(lender),
        )
        kv_endpoint = await self._find_kv_endpoint() if dialect.uses_kv_endpoints else None
        match dialect.leg_order(self._endpoints, kv_endpoint):
            case LegOrder.SERIAL if dialect.has_leases:
                return await self._run_under_lease(kv_endpoint)
            case LegOrder.SERIAL:
                return await self._decode(await self._prefill(), kv_endpoint)
            case LegOrder.EARLY:
                return await self._run_early()
            case LegOrder.CONCURRENT:
                return await self._run_concurrent(kv_endpoint)

    def end(self) -> None:
        """Drop KV that no decode server will read, where the prefill server offers a way."""
        if self._is_pinned and not (self._response is not None and self._response.has_answered):
            drop = self._dialect.drop_leg(self._sub, self._endpoints)
            if drop is not None:
                drops, status = self._context.drops, self._dialect.drop_status
                drops.send(self._endpoints.prefill, drop, delivered_by=status)

    def _may_be_early(self) -> bool:
        """Whether an early leg finds a connection.

        Connections are acquired in the order of asking, the prefill leg asks right after its early leg, and
        so, of all early legs that have a connection, at most one waits for its prefill leg to get the next.
        """
        return not self._attempt.is_retry and self._context.upstream.has_spare_connections

    def _prefix_source(self, lender: PrefixLender) -> dict[str, Any] | None:
        source = self._dialect.prefix_source(lender.agent, lender.min_tokens)
        if source is not None:
            self._context.metrics.prefix_sources.inc()
        return source

    # The three orders.

    async def _run_under_lease(self, kv_endpoint: KvEndpoint | None) -> SubResponse:
        dialect, counts = self._dialect, self._context.expiry_counts
        if dialect.expiry_counter is None and dialect.lease_s is None:
            raise LeaseUnknown(
                f"servers of {dialect.name} say neither how long they keep KV nor that they gave it up, so "
                f"no response could be trusted: the proxy must be started with {dialect.lease_flag}"
            )
        prefill = self._endpoints.prefill
        async with LeaseCheck(counts, prefill, dialect.expiry_counter, dialect.lease_s) as lease:
            prefilled = await self._prefill()
            lease.answered()
            return await self._decode(prefilled, kv_endpoint, lease)

    async def _run_early(self) -> SubResponse:
        dialect, decode = self._dialect, self._endpoints.decode.incarnation
        self._context.metrics.streamed_pulls.inc()
        # Its first byte can come only after the prefill's last.
        leg = self._open_decode(dialect.early_leg(self._sub, self._endpoints), patience=2)
        async with EarlyLeg(leg, decode) as early:
            prefilled = await early.run_beside(self._prefill())
            if prefilled.whole is not None:
                return await self._complete(prefilled, prefilled.whole)
            response = self._respond()
            assert isinstance(response, RelayedResponse), "other servers' legs are not early"
            response.opening = OpeningEvent(dialect.early_event(prefilled), decode)
            if events := dialect.opening_events(self._sub, prefilled, self._sent):
                response.show_opening(events)
            return await self._receive(early.opened(), response, prefilled)

    async def _run_concurrent(self, kv_endpoint: KvEndpoint | None) -> SubResponse:
        response = self._respond()
        assert isinstance(response, RewrittenResponse), "our agents' legs are not concurrent"
        leg = self._dialect.decode_leg(self._sub, self._endpoints, Prefilled(), kv_endpoint)

        async def check() -> None:
            response.prompt_tokens_details = (await prefill).prompt_tokens_details

        # Two tasks made in one go ask for their connections one right after the other, and connections
        # are acquired in that order. So, of all legs with one, at most one waits for its other leg's.
        prefill = asyncio.ensure_future(self._prefill_for_reader())
        decode = asyncio.ensure_future(self._receive(self._open_decode(leg), response, check=check))
        legs: tuple[asyncio.Future[Any], ...] = (prefill, decode)
        await join(legs)
        return response

    # The two legs.

    async def _prefill(self) -> Prefilled:
        """The prefill leg, up to the end of its response; nothing, where the dialect sends none.

        Of our agents, KV is pinned from sending it until it is known to be read or absent.
        """
        server, dialect = self._endpoints.prefill, self._dialect
        leg = dialect.prefill_leg(self._sub, self._endpoints)
        prefilled = Prefilled()
        if leg is not None:
            self._is_pinned = dialect.is_native
            try:
                async with self._legs.open_prefill(server, leg) as response:
                    raw = await response.read()
                    self._note_timing("prefill", response)
                    read = partial(self._read_prefill, raw)
                    prefilled = await self._context.upstream.read_beside(len(raw), read)
                    self._check_lender(prefilled)
            except AgentRejected:
                self._is_pinned = False
                raise
            except AgentLost as error:
                self._is_pinned &= not error.connection_refused
                raise
            except BadResponse as error:
                if dialect.is_native:
                    raise
                kind = AgentBusy if isinstance(error, BusyResponse) else AgentLost
                raise kind(f"{server.address}: {error.message}", server.incarnation) from error
        self._is_pinned = prefilled.params is not None
        if prefilled.kv_endpoint is not None:
            self._context.kv_endpoints.learn(self._endpoints, prefilled.kv_endpoint, now())
        self._attempt.prefilled()
        return prefilled

    async def _prefill_for_reader(self) -> Prefilled:
        """The prefill leg. If it fails because nothing read its KV, a retry is to avoid the decode server."""
        try:
            return await self._prefill()
        except AgentBusy as error:
            if not self._dialect.is_unread(error.message):
                raise
            raise AgentBusy(error.message, self._endpoints.decode.incarnation) from error

    def _check_lender(self, prefilled: Prefilled) -> None:
        """Raise `AgentLost` if another data-parallel rank than the leg was for has served it."""
        server = self._endpoints.prefill
        if server.dp_rank is not None and prefilled.lender not in ("", server.incarnation):
            self._is_pinned = True
            message = f"{server.location}: the prefill leg was served by another rank, or after a restart"
            raise AgentLost(message, server.incarnation)

    def _read_prefill(self, raw: bytes) -> Prefilled:
        prefilled = self._dialect.read_prefill(self._sub, raw)
        tokens = prefilled.prompt_tokens
        if not tokens and (usage := reported_usage(raw)) is not None:
            tokens = usage.prompt_tokens
        if tokens:
            self._attempt.state.prompt_tokens.setdefault(self._sub.prompt, tokens)
        return prefilled

    async def _decode(
        self, prefilled: Prefilled, kv_endpoint: KvEndpoint | None, lease: LeaseCheck | None = None
    ) -> SubResponse:
        """What follows the prefill leg in the serial order: first tokens, and the decode leg after them."""
        dialect, sub, endpoints, sent = self._dialect, self._sub, self._endpoints, self._sent
        if prefilled.whole is not None:
            self._free_kv(prefilled)
            return await self._complete(prefilled, prefilled.whole)
        begun, leg = sent.begun, None
        events = dialect.opening_events(sub, prefilled, sent)
        if events is not None:
            opening = prefilled.opening
            if opening is not None and opening.has_ended and not begun:
                response = self._respond(sent)
                response.show_opening(events)
                return response
            leg = dialect.continued_leg(sub, endpoints, prefilled, sent)
        if leg is not None:
            if begun:
                sent.go_on_elsewhere()
            response = self._respond(sent)
            if events:
                response.show_opening(events)
        elif begun:
            raise StreamBroken(f"{endpoints.decode.address} could not go on where another server was lost")
        else:
            leg = dialect.decode_leg(sub, endpoints, prefilled, kv_endpoint)
            response = self._respond(details=prefilled.prompt_tokens_details)
        if prefilled.params is None:  # the prompt is computed again, which an operator should know
            self._context.metrics.prompts_recomputed.labels(dialect.name).inc()
        elif lease is not None:
            return await self._decode_under_lease(prefilled, leg, response, lease)
        return await self._receive(self._open_decode(leg), response, prefilled)

    async def _decode_under_lease(
        self, prefilled: Prefilled, leg: LegRequest, response: SubResponse, lease: LeaseCheck
    ) -> SubResponse:
        """A decode leg whose KV may be gone after a while. Raises `KvUnproven` if it may have been."""
        prefill, decode = self._endpoints.prefill, self._endpoints.decode
        too_late = KvUnproven(
            f"{decode.address} was too late for the KV at {prefill.address}", decode.incarnation
        )
        if lease.is_over:
            raise too_late
        accepted_by = now() + ACCEPT_S

        async def check() -> None:
            verdict = await lease.judge()
            self._context.metrics.leases.add(verdict.name.lower(), 1)
            if not verdict.is_accepted:
                server = prefill if verdict is Verdict.UNPROVEN else decode
                raise KvUnproven(f"{prefill.address}: {verdict.value}", server.incarnation)

        try:
            opened = self._open_decode(leg, accept_deadline=lease.deadline)
            return await self._receive(opened, response, check=check)
        except AgentTimeout:
            if not lease.is_over:
                raise
            raise too_late from None
        except asyncio.CancelledError:
            if now() < accepted_by:
                self._free_kv(prefilled)
            raise

    def _open_decode(
        self, leg: LegRequest, *, patience: int = 1, accept_deadline: float = float("inf")
    ) -> OpenLeg:
        server, stream = self._attempt.pair.decode.info, self._sub.request.stream
        return self._legs.open_decode(
            server, leg, stream=stream, patience=patience, accept_deadline=accept_deadline
        )

    def _respond(self, sent: SentTokens | None = None, details: bytes | None = None) -> SubResponse:
        """What the decode server's response is to become. `sent`: of a stream that it goes on with."""
        attempt, sub, server = self._attempt, self._sub, self._attempt.pair.decode.info
        if self._dialect.is_native:
            response: SubResponse = RelayedResponse(
                sub, server, self._sent, attempt.sink, is_part=attempt.is_divided
            )
        else:
            response = RewrittenResponse(sub, server, self._dialect, sent, attempt)
            response.prompt_tokens_details = details
        self._response = response
        return response

    async def _receive(
        self,
        leg: OpenLeg,
        response: SubResponse,
        prefilled: Prefilled | None = None,
        check: Check | None = None,
    ) -> SubResponse:
        """Send the decode leg and read its response.

        `check` runs once, when there is something that it must vouch for, before the client gets that. A
        server that is lost when the client has the end of every choice is not missed.
        """
        server = self._attempt.pair.decode.info
        if self._dialect.is_native:
            self._attempt.note_prefill_over()
        try:
            async with leg as upstream:
                if self._sub.request.stream:
                    await self._receive_events(upstream, server, response, check)
                else:
                    if self._dialect.is_native:
                        require_json(upstream, server)
                    raw = await upstream.read()
                    if check is not None:
                        await check()
                    await self._context.upstream.read_beside(len(raw), partial(response.read_whole, raw))
                    self._note_timing("decode", upstream)
        except AgentLost:
            if not (self._sent.complete and response.complete):
                raise
            response.end_without_server(prefilled)
        else:
            self._is_pinned = False
        return response

    async def _receive_events(
        self, upstream: UpstreamRequest, server: Register, response: SubResponse, check: Check | None
    ) -> None:
        require_stream(upstream, server)
        reader = response.reader(upstream.finish_soon)
        if check is not None:
            assert isinstance(reader, EventRewriter), "our agents prove what they read themselves"
            if await reader.read_first(upstream.read_some):
                await check()
            reader.release()
        await read_events(upstream, server, reader, self._attempt.sink)
        if not response.complete and not self._dialect.is_native:
            raise lost(server, "ended its stream without ending every choice")

    async def _complete(self, prefilled: Prefilled, whole: bytes) -> SubResponse:
        """The response ended with its first token, at the prefill server."""
        response = self._respond()
        read = partial(response.read_prefilled, prefilled)
        if events := await self._context.upstream.read_beside(len(whole), read):
            response.show(events)
        return response

    def _note_timing(self, leg: str, response: UpstreamRequest) -> None:
        """Note an agent's own timing; of several prompts the first one's."""
        if self._dialect.is_native and not self._sub.prompt:
            self._attempt.state.log.add_agent_timing(leg, response.header(b"server-timing"))

    def _free_kv(self, prefilled: Prefilled) -> None:
        """Have the decode server fetch the KV for one token, unread, so that the prefill server can free it.

        No engine offers a shorter way (`docs/sources.md#vllm`); otherwise its blocks wait for their lease to
        end.
        """
        if prefilled.params is not None:
            once = {"max_tokens": 1, "stream": False}
            kept = ("model", "prompt", "messages", "cache_salt")
            body = {name: value for name, value in self._sub.body.items() if name in kept} | once
            sub = structs.replace(self._sub, body=body)
            leg = self._dialect.decode_leg(sub, self._endpoints, prefilled, None)
            self._context.drops.send(self._endpoints.decode, leg)

    async def _find_kv_endpoint(self) -> KvEndpoint | None:
        """What must be, or happens to be, known of the prefill server beforehand."""
        dialect, known, endpoints = self._dialect, self._context.kv_endpoints, self._endpoints
        url = dialect.lookup(endpoints)
        if url is None:
            return known.find(endpoints)
        found = known.find(endpoints, since=now() - LOOKUP_MAX_AGE_S)
        if found is None:
            deadline = min(now() + LOOKUP_TIMEOUT_S, self._legs.deadline)
            try:
                raw = await self._context.upstream.get(endpoints.prefill, url, deadline=deadline)
                found = dialect.read_lookup(endpoints, raw)
            except (AgentRejected, AgentTimeout, BadResponse) as error:
                raise AgentLost(f"{url}: {error.message}", endpoints.prefill.incarnation) from error
            known.learn(endpoints, found, now())
        return found


class EarlyLeg:
    """A decode leg that is sent together with its prefill leg.

    An async context: entering sends the leg, leaving ends it whatever became of it. Until the prefill leg has
    ended, only the failure of this one is looked at, and either leg's failure ends both:

    - The prefill leg fails: the attempt ends, this leg is cancelled with it, and its agent stops.
    - This leg fails: the prefill leg is cancelled, unless it ends by itself within `CAUSE_TIMEOUT_S`. One
      agent may make the other fail (a pull that breaks off drops the prompt), and of two such failures the
      first cause is the one to act on. Where the prefill has left nothing to pull, its end is waited for.
    """

    def __init__(self, leg: AbstractAsyncContextManager[UpstreamRequest], agent: Incarnation) -> None:
        self._leg = leg
        self._agent = agent
        self._entered = AsyncExitStack()
        self._opening: asyncio.Future[UpstreamRequest]

    async def __aenter__(self) -> EarlyLeg:
        self._opening = asyncio.ensure_future(self._entered.enter_async_context(self._leg))
        return self

    async def __aexit__(self, *_: object) -> None:
        await _cancel(self._opening)
        # A response that was not read is cancelled; that must not look like a failure of its agent.
        cancelled = asyncio.CancelledError()
        await self._entered.__aexit__(type(cancelled), cancelled, None)

    async def run_beside(self, prefill: Coroutine[Any, Any, Prefilled]) -> Prefilled:
        """Run the prefill leg beside this one, and return its result. Raises what either leg failed with."""
        running = asyncio.ensure_future(prefill)
        legs: set[asyncio.Future[Any]] = {running, self._opening}
        try:
            await asyncio.wait(legs, return_when=asyncio.FIRST_COMPLETED)
            failure = None if running.done() else self._opening.exception()
            if failure is not None and not _is_rejection(failure, WITHDRAWN):
                await asyncio.wait({running}, timeout=CAUSE_TIMEOUT_S)
                if not running.done():
                    self._opening.result()
            return await running
        except AgentRejected as rejected:
            if _is_rejection(rejected, DROPPED):
                await self._raise_cause()
            raise
        finally:
            await _cancel(running)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[UpstreamRequest]:
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


def _is_rejection(error: BaseException, code: str) -> bool:
    return isinstance(error, AgentRejected) and error.error is not None and error.error.code == code


async def _cancel(task: asyncio.Future[Any]) -> None:
    """Cancel a task and wait for its end. Its failure, if any, was raised elsewhere."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()

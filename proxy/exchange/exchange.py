# SPDX-License-Identifier: Apache-2.0
"""One request through a pair of agents: route, prefill, first token, decode; deadlines, drop and retry.

The life of a streamed request, as `Exchange.stream` tells it:

1. **Route.** The router picks a pair with room, if need be after a wait (`admission`); the attempt holds
   slots at both agents and has a fresh transfer id.
2. **Prefill leg.** The prefill agent answers with the first token of every choice and, if any choice must
   go on, with where it keeps the prompt's KV. From here on that KV is *pinned* for this attempt.
   With a long prompt the decode leg is sent at the same time (`streamed`), to pull what is computed.
3. **First token.** The client gets it now: it need not wait for the KV to move.
4. **Decode leg.** The decode agent pulls the KV, and its events are relayed from token 2 to `[DONE]`. The ids
   of the tokens that pass are noted (`Progress`).

However an attempt ends, `_end` runs exactly once: its hold goes back, and KV that is still pinned is dropped.
A client that leaves cancels the task that runs this code. The connections of the legs that are open close
with it, and their agents stop; there is nothing else to cancel.

An agent may be lost at any point of this (`AgentLost` → `_plan_retry`); then the same four steps are taken
again with another pair. The seed stays the same, so the same tokens are drawn, and what the client already
has is neither repeated nor lost: a first token that it knows is checked, not shown, and the decode leg is
told the ids of all tokens that were passed on (`resume`) and goes on after them. When a stream breaks in
mid-answer this is a *migration*. Every other failure is final.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, nullcontext
from dataclasses import dataclass

from kvferry.proxy import sse
from kvferry.proxy.api.client_stream import ClientStream
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import Dialect, LegRequest, SubRequest
from kvferry.proxy.dialects.kv_endpoint_cache import KvEndpointCache
from kvferry.proxy.errors import (
    AgentLost,
    AgentRejected,
    AgentTimeout,
    BadResponse,
    InvalidRequest,
    ModelNotFound,
    NoAgent,
    StreamBroken,
)
from kvferry.proxy.exchange.fan_out import Spread
from kvferry.proxy.exchange.kv_drops import KvDrops
from kvferry.proxy.exchange.legs import Tools
from kvferry.proxy.exchange.relay import Relay
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.resume import Progress
from kvferry.proxy.exchange.retry_budget import RetryBudget
from kvferry.proxy.exchange.streamed import EarlyLeg, FirstTokens
from kvferry.proxy.exchange.sub_requests import split, whole_request
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.interface import AcquireRequest, Fleet
from kvferry.proxy.fleet.router import NOBODY, NoPair, Pair
from kvferry.proxy.fleet.routing_request import routing_request
from kvferry.proxy.http.pool import UpstreamPool, UpstreamResponse
from kvferry.proxy.ids import Identity, TransferId, new_transfer_id
from kvferry.proxy.request import ClientRequest, check_context
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation, Register


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeSettings:
    """Deadlines and tries of one request; `ProxyConfig` describes the fields of the same names."""

    queue_timeout_s: float
    first_byte_timeout_s: float
    total_timeout_s: float
    retries: int
    migrations: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """What all exchanges of one proxy share."""

    settings: ExchangeSettings
    fleet: Fleet
    retry_budget: RetryBudget
    upstream: UpstreamPool
    drops: KvDrops
    dialects: Mapping[str, Dialect]
    kv_endpoints: KvEndpointCache
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer that is not streamed, as the agent gave it."""

    content_type: str
    body: bytes


@dataclass(slots=True)
class Attempt:
    """One try with one pair. `pinned`: the prefill agent may hold KV that nobody has read yet."""

    hold: Reservation
    transfer_id: TransferId
    pinned: bool = False

    @property
    def pair(self) -> Pair:
        return self.hold.pair


class Exchange:
    """Serves one client request. Call either `answer` or `stream`, once."""

    def __init__(
        self, context: ExchangeContext, request: ClientRequest, ids: Identity, record: RequestLog
    ) -> None:
        self._context = context
        self._request = request
        self._ids = ids
        self._ask = routing_request(request, ids.session)
        self._record = record
        self._retries_left = context.settings.retries
        self._migrations_left = context.settings.migrations
        self._avoid = NOBODY
        self._deadline = _now() + context.settings.total_timeout_s

    async def answer(self) -> Answer:
        """The answer of a request that does not stream. Raises `ProxyError`."""
        while True:
            attempt = await self._begin()
            try:
                return await self._answer_from(attempt)
            except AgentLost as lost:
                self._plan_retry(attempt, lost)
            finally:
                self._end(attempt)

    async def stream(self, out: ClientStream) -> None:
        """Give `out` the events of a streamed answer, `[DONE]` included.

        Raises `ProxyError`: while `out` has not begun it can become an HTTP status, later an error event.
        """
        request, ids = self._request, self._ids
        progress = Progress(request.n)
        must_match: Register | None = None
        while True:
            attempt = await self._begin(must_match)
            try:
                if (spread := self._spread(attempt)) is not None:
                    async with aclosing(spread.events()) as told:
                        async for events in told:
                            await out.send(events)
                    return
                async with self._early_leg(attempt) as early:
                    agent, first_tokens = attempt.pair.decode.info, None
                    if attempt.pair.alone:
                        leg = self._last_leg(agent, native.alone_body(request, ids))
                    else:
                        prefill = await self._prefilled(attempt, early)
                        if news := progress.open(prefill):
                            out.write(native.first_events(request, ids, prefill, news))
                        if prefill.params is None:
                            out.write(native.closing_events(request, ids, prefill))
                            return
                        if early is None:
                            body = native.decode_body(request, ids, prefill.params, progress.resume())
                            leg = self._last_leg(agent, body)
                        else:
                            leg, event = early.answered(), native.first_tokens_event(prefill)
                            first_tokens = FirstTokens(event, Incarnation(agent.incarnation))
                    await self._relay(leg, agent, progress, first_tokens, out)
                    attempt.pinned = False
                    return
            except AgentLost as lost:
                if progress.complete:
                    out.write(sse.DONE)
                    return
                self._plan_retry(attempt, lost)
                must_match = attempt.pair.prefill.info if progress.begun else None
            finally:
                self._end(attempt)

    async def _begin(self, must_match: Register | None = None) -> Attempt:
        """Route: wait for a pair with room and hold its slots.

        `must_match` is an agent from which the client has tokens: others must go on with that very answer.
        Raises `NoAgent`, `ModelNotFound`, `InvalidRequest` or `Overloaded`.
        """
        context, model = self._context, self._request.model
        if not self._avoid:
            context.retry_budget.request()
        by = min(_now() + context.settings.queue_timeout_s, self._deadline)
        hold = await context.fleet.enter(
            AcquireRequest(ask=self._ask, by=by, exclude=self._avoid, must_match=must_match)
        )
        if hold is NoPair.UNKNOWN_MODEL:
            raise ModelNotFound(f"{hold.value}: {model!r}", param="model")
        if isinstance(hold, NoPair):
            raise NoAgent(f"{hold.value}: {model!r}")
        try:
            check_context(self._request, _context_of(hold.pair))
            (self._dialect(hold.pair) or native).check(self._request)
        except InvalidRequest:
            hold.release()
            raise
        attempt = Attempt(hold, new_transfer_id())
        self._record.add_attempt(attempt.pair, attempt.transfer_id)
        return attempt

    def _end(self, attempt: Attempt) -> None:
        """Give back what the attempt holds. Never waits, so that it also runs to its end when cancelled."""
        attempt.hold.release()
        if attempt.pinned:
            self._context.drops.drop(attempt.pair.prefill.info, attempt.transfer_id)

    def _plan_retry(self, attempt: Attempt, lost: AgentLost) -> None:
        """Prepare for another attempt; raises `AgentLost` or `StreamBroken` if there were enough."""
        context = self._context
        if lost.connection_refused:
            context.fleet.connection_refused(lost.agent)
        if self._record.phase is Phase.DECODE:
            if not self._may_repeat(lost):
                raise StreamBroken(lost.message) from lost
            self._migrations_left -= 1
            context.metrics.migrations.inc()
        else:
            if not self._may_repeat(lost):
                raise lost
            self._retries_left -= 1
            leg = "prefill" if lost.agent == attempt.pair.prefill.incarnation else "decode"
            context.metrics.retries.labels(leg).inc()
        self._avoid |= {lost.agent}
        self._record.enter(Phase.ROUTE)

    def _has_tries_left(self) -> bool:
        """Whether this request's own allowance has room for one more try, as things stand."""
        streaming = self._record.phase is Phase.DECODE
        return (self._migrations_left if streaming else self._retries_left) > 0

    def _may_repeat(self, lost: AgentLost) -> bool:
        """Whether one more try is allowed, by this request's own allowance and by the proxy's budget."""
        if not self._has_tries_left():
            return False
        if lost.is_down:
            return True
        if not self._context.retry_budget.take():
            self._context.metrics.retries_denied.inc()
            return False
        return True

    def _spread(self, attempt: Attempt) -> Spread | None:
        """What takes the attempt through another engine's servers; None for our own agents."""
        context = self._context
        dialect = self._dialect(attempt.pair)
        if dialect is None:
            return None
        tools = Tools(
            dialect=dialect,
            post=self._post,
            upstream=context.upstream,
            kv_endpoints=context.kv_endpoints,
            drops=context.drops,
            metrics=context.metrics,
            first_byte_s=context.settings.first_byte_timeout_s,
            by=self._deadline,
        )
        return Spread(tools, attempt.hold, self._record, self._subs(attempt))

    def _subs(self, attempt: Attempt) -> tuple[SubRequest, ...]:
        if attempt.pair.alone:
            return (whole_request(self._request, self._ids, attempt.transfer_id),)
        others = [new_transfer_id() for _ in range(1, self._request.sequences)]
        self._record.add_transfers(others)
        return split(self._request, self._ids, [attempt.transfer_id, *others])

    def _dialect(self, pair: Pair) -> Dialect | None:
        return self._context.dialects.get(pair.prefill.info.dialect)

    async def _answer_from(self, attempt: Attempt) -> Answer:
        """One attempt at an answer that is not streamed."""
        request, ids, agent = self._request, self._ids, attempt.pair.decode.info
        if (spread := self._spread(attempt)) is not None:
            return Answer(content_type="application/json", body=await spread.answer())
        if attempt.pair.alone:
            return await self._fetch(self._last_leg(agent, native.alone_body(request, ids)), agent)
        async with self._early_leg(attempt) as early:
            prefill = await self._prefilled(attempt, early)
            if prefill.params is None:
                return Answer(content_type="application/json", body=prefill.raw)
            if early is None:
                leg = self._last_leg(agent, native.decode_body(request, ids, prefill.params))
            else:
                leg = early.answered()
            answer = await self._fetch(leg, agent)
            attempt.pinned = False
            return answer

    def _early_leg(self, attempt: Attempt) -> AbstractAsyncContextManager[EarlyLeg | None]:
        """The decode leg, to be sent together with the prefill leg; None where it comes after it.

        A retry takes the plain way: what the client has must be told to the decode agent, and nothing that
        made the early leg fail can make it fail again. So does a request that finds the connections used up:
        places go in the order in which they are asked for, the prefill leg asks right after its early leg,
        and so, of all early legs that have a place, at most one waits for its prefill leg to get the next.
        """
        pair = attempt.pair
        may_be_early = pair.streamed and not self._avoid and self._context.upstream.has_spare_connections
        where = may_be_early and native.control_address(pair.prefill.info)
        if not where:
            return nullcontext()
        agent = pair.decode.info
        body = native.streamed_body(self._request, self._ids, pair.prefill.info, where, attempt.transfer_id)
        self._context.metrics.streamed_pulls.inc()
        # Its first byte can come only after the prefill's last.
        return EarlyLeg(self._last_leg(agent, body, patience=2), Incarnation(agent.incarnation))

    async def _prefilled(self, attempt: Attempt, early: EarlyLeg | None) -> native.NativePrefill:
        """The prefill leg's answer; a failure of the leg beside it ends it too."""
        leg = self._prefill(attempt)
        return await (leg if early is None else early.beside(leg))

    async def _prefill(self, attempt: Attempt) -> native.NativePrefill:
        """The prefill leg. From sending it until its KV is known to be read or absent, KV is pinned."""
        self._record.enter(Phase.PREFILL)
        agent = attempt.pair.prefill.info
        leg = self._leg(native.prefill_body(self._request, self._ids, attempt.transfer_id))
        attempt.pinned = True
        try:
            # Its answer is short and comes at once, so the deadline for its first byte is that for its last.
            soon = self._first_byte_deadline()
            async with self._post(agent, leg, headers_by=soon, by=soon) as answer:
                raw = await answer.read()
                self._record.add_agent_timing("prefill", answer.header("server-timing"))
                prefill = native.read_prefill(raw, self._request, attempt.transfer_id)
        except AgentRejected:
            attempt.pinned = False
            raise
        except AgentLost as lost:
            attempt.pinned = not lost.connection_refused
            raise
        attempt.pinned = prefill.params is not None
        attempt.hold.prefill_over()
        return prefill

    def _last_leg(
        self, agent: Register, body: bytes, patience: int = 1
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """The leg whose answer is the client's: a stream, or all at once and at the very end.

        `patience`: how many times the usual wait a stream may take to begin.
        """
        soon = self._first_byte_deadline(patience) if self._request.stream else self._deadline
        return self._post(agent, self._leg(body), headers_by=soon, by=self._deadline)

    def _leg(self, body: bytes) -> LegRequest:
        """A leg of the native dialect."""
        return LegRequest(path=native.path(self._request), headers=native.headers(self._ids), body=body)

    async def _fetch(self, leg: AbstractAsyncContextManager[UpstreamResponse], agent: Register) -> Answer:
        """All of a last leg's answer."""
        self._record.enter(Phase.DECODE_WAIT)
        async with leg as answer:
            if not answer.content_type.startswith("application/json"):
                # Nothing that a browser would run may be served from where the operator's page is.
                raise BadResponse(f"{agent.address} answered {answer.content_type} where JSON was asked for")
            whole = await answer.read()
            self._record.add_agent_timing("decode", answer.header("server-timing"))
            return Answer(content_type=answer.content_type, body=whole)

    async def _relay(
        self,
        leg: AbstractAsyncContextManager[UpstreamResponse],
        agent: Register,
        progress: Progress,
        first_tokens: FirstTokens | None,
        out: ClientStream,
    ) -> None:
        """A last leg's events as they come, whole, up to `[DONE]`; `first_tokens` takes one off before."""
        self._record.enter(Phase.DECODE_WAIT)
        async with leg as answer:
            if not answer.content_type.startswith(sse.CONTENT_TYPE):
                raise BadResponse(
                    f"{agent.address} answered {answer.content_type} where a stream was asked for"
                )
            relay = Relay(agent, progress, first_tokens, out, done=answer.finish_soon)
            try:
                with out.throttling(answer):
                    await answer.stream_to(relay.feed)
            except (AgentLost, AgentTimeout):
                if not relay.done:
                    raise
            if not relay.done:
                raise AgentLost(
                    f"{agent.address} ended its stream without [DONE]", Incarnation(agent.incarnation)
                )

    @asynccontextmanager
    async def _post(
        self, server: Register, leg: LegRequest, *, headers_by: float, by: float
    ) -> AsyncIterator[UpstreamResponse]:
        """One leg. How it ends is what the agent's breaker goes by; a leg that is given up says nothing."""
        context, incarnation = self._context, Incarnation(server.incarnation)
        try:
            async with context.upstream.post(
                server,
                leg.path,
                leg.body,
                leg.headers,
                headers_by=headers_by,
                by=by,
                can_retry=self._has_tries_left,
            ) as answer:
                yield answer
        except (AgentLost, AgentTimeout, BadResponse):
            context.fleet.leg_failed(incarnation)
            raise
        context.fleet.leg_succeeded(incarnation)

    def _first_byte_deadline(self, patience: int = 1) -> float:
        return min(_now() + patience * self._context.settings.first_byte_timeout_s, self._deadline)


def _context_of(pair: Pair) -> int | None:
    """The longest prompt and answer that both agents have room for; None when neither tells."""
    return min((node.info.max_model_len for node in pair.nodes if node.info.max_model_len), default=None)


def _now() -> float:
    return asyncio.get_running_loop().time()

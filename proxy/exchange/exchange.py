# SPDX-License-Identifier: Apache-2.0
"""One request through a pair of agents: route, attempt, retry.

The life of a request, as `Exchange.run` and the attempts conduct it:

1. **Route** (`Exchange._begin`). The router picks a pair with room, if need be after a wait (`Admission`).
   The attempt reserves slots at both agents and has a fresh transfer id.
2. **Prefill leg** (`NativeAttempt.run`). The prefill agent answers with the first token of every choice and,
   if any choice must go on, with where it keeps the prompt's KV. From here on that KV is *pinned* for this
   attempt. With a long prompt the decode leg is sent at the same time (`EarlyLeg`), to pull what is computed.
3. **First token.** A streaming client gets it now: it need not wait for the KV to move.
4. **Decode leg.** The decode agent pulls the KV, and its events are relayed from token 2 to `[DONE]`. The ids
   of the tokens that pass are noted (`Progress`). A response that is not streamed comes whole, at the end.
5. **End** (`Attempt.end`), exactly once for every attempt: its reservation is released, and KV that is still
   pinned is dropped. A client that leaves cancels the task that runs this code. The connections of the legs
   that are open close with it, and their agents stop; there is nothing else to cancel.
6. **Retry** (`Exchange._plan_retry`, `Retries.use_one`). An agent may be lost at any point (`AgentLost`);
   then the same steps are taken with another pair. The seed stays the same, so the same tokens are sampled,
   and what the client already has is neither repeated nor lost: a first token that it has is compared, not
   shown, and the decode agent is sent the ids of all tokens that were passed on (`resume`) and goes on after
   them. When a stream breaks in mid-response this is a *migration*. Every other failure is final, and so is a
   second agent that died or fell silent with the request (`Suspicion`).

Other engines' servers (`ForeignAttempt`) take each choice through two legs of its own. Step 6 ends with the
first event, but for streams that their dialect `may_continue`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvferry.common.exceptions import release_locals
from kvferry.proxy.clock import now
from kvferry.proxy.dialects import native
from kvferry.proxy.dialects.base import Dialect
from kvferry.proxy.errors import AgentLost, ModelNotFound, NoAgent, StreamBroken
from kvferry.proxy.exchange.foreign_attempt import ForeignAttempt, ForeignTools
from kvferry.proxy.exchange.kv_lifetime import ExpiryCounts, KvDrops, KvEndpointCache
from kvferry.proxy.exchange.legs import Attempt, KeptResponses, Legs, ResponseSink
from kvferry.proxy.exchange.native_attempt import NativeAttempt, PromptPart
from kvferry.proxy.exchange.poison import Suspicion
from kvferry.proxy.exchange.request_log import Phase, RequestLog
from kvferry.proxy.exchange.resume import SentTokens
from kvferry.proxy.exchange.retry import Retries, RetryBudget
from kvferry.proxy.exchange.sub_requests import split_by_prompt
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet
from kvferry.proxy.fleet.router import NO_AGENTS, NoPair, Pair
from kvferry.proxy.fleet.routing_request import routing_request
from kvferry.proxy.http.pool import UpstreamPool
from kvferry.proxy.ids import Identity, RandomBytes, new_transfer_id
from kvferry.proxy.request import ClientRequest, check_context
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.registration import Register


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
    expiry_counts: ExpiryCounts
    metrics: Metrics
    random: RandomBytes = field(default_factory=RandomBytes)
    """For transfer ids."""


class Exchange:
    """Serves one client request. Call `run` once."""

    def __init__(
        self, context: ExchangeContext, request: ClientRequest, ids: Identity, log: RequestLog
    ) -> None:
        settings = context.settings
        self._context = context
        self._request = request
        self._ids = ids
        self._log = log
        self._routing_request = routing_request(request, ids.session)
        self._retries = Retries(
            log, context.retry_budget, context.metrics, settings.retries, settings.migrations
        )
        self._deadline = now() + settings.total_timeout_s
        self._suspicion = Suspicion(context.fleet, log, context.metrics)
        self._legs = Legs(
            context.upstream,
            self._suspicion,
            first_byte_timeout_s=settings.first_byte_timeout_s,
            deadline=self._deadline,
            can_retry=self._retries.has_more,
            trace=log.trace,
        )
        self._parts = [PromptPart(share) for share in split_by_prompt(request, ids)]
        self._kept = KeptResponses(context.upstream.bounds, self._parts)
        self._sent = SentTokens()
        self._exclude = NO_AGENTS
        self._must_match: Register | None = None
        """An agent from which the client has tokens: others must go on with that very response."""

    async def run(self, sink: ResponseSink) -> None:
        """Give `sink` the whole response. Raises `ProxyError`, maybe when `sink` has events already."""
        try:
            while True:
                attempt = await self._begin()
                try:
                    await attempt.run(sink)
                    return
                except AgentLost as error:
                    lost = error
                    if lost.connection_refused:
                        self._context.fleet.connection_refused(lost.agent)
                finally:
                    attempt.end()
                await self._plan_retry(attempt.pair, lost)
        finally:
            self._kept.release()

    async def _begin(self) -> Attempt:
        """Reserve a pair for another attempt."""
        reservation = await self._reserve()
        try:
            return self._new_attempt(reservation)
        except BaseException:
            reservation.release()
            raise

    def _new_attempt(self, reservation: Reservation) -> Attempt:
        """Raises `InvalidRequest` for what the agents of the pair cannot serve."""
        context, pair = self._context, reservation.pair
        dialect = context.dialects.get(pair.prefill.info.dialect)
        check_context(self._request, _max_model_len(pair))
        (dialect or native).check(self._request)
        transfer_id = new_transfer_id(context.random)
        self._log.add_attempt(pair, transfer_id)
        if dialect is None:
            return NativeAttempt(
                reservation,
                self._parts,
                self._kept,
                transfer_id,
                legs=self._legs,
                log=self._log,
                drops=context.drops,
                metrics=context.metrics,
                is_retry=bool(self._exclude),
            )
        tools = ForeignTools(
            dialect=dialect,
            legs=self._legs,
            kept=self._kept,
            kv_endpoints=context.kv_endpoints,
            expiry_counts=context.expiry_counts,
            drops=context.drops,
            metrics=context.metrics,
        )
        return ForeignAttempt(
            reservation,
            self._request,
            self._ids,
            transfer_id,
            sent=self._sent,
            tools=tools,
            log=self._log,
        )

    async def _reserve(self) -> Reservation:
        """Wait for a pair with room. Raises `NoAgent`, `ModelNotFound` or `Overloaded`."""
        context, model = self._context, self._request.model
        if not self._exclude:
            context.retry_budget.deposit()
        by = min(now() + context.settings.queue_timeout_s, self._deadline)
        asked_at = time.monotonic()
        try:
            reservation = await context.fleet.acquire(
                AcquireRequest(
                    routing_request=self._routing_request,
                    by=by,
                    exclude=self._exclude,
                    must_match=self._must_match,
                )
            )
        finally:
            if self._log.trace is not None:
                self._log.trace.queued(asked_at)
        if reservation is NoPair.UNKNOWN_MODEL:
            raise ModelNotFound(f"{reservation.value}: {model!r}", param="model")
        if isinstance(reservation, NoPair):
            raise NoAgent(f"{reservation.value}: {model!r}")
        return reservation

    async def _plan_retry(self, pair: Pair, lost: AgentLost) -> None:
        """Prepare for another attempt. Raises `AgentLost`, `StreamBroken` or `SuspectRequest` if there may be
        none.
        """
        release_locals(lost)
        self._log.add_loss(lost.message)
        self._suspicion.attempt_ended()
        begun = self._sent.begun or any(part.progress.begun for part in self._parts)
        if begun and self._request.undivided:
            # A pair, which could go on after what the client has, cannot serve such a request.
            raise StreamBroken(lost.message) from lost
        if self._retries.has_more():
            await self._suspicion.judge(self._deadline)
        self._retries.use_one(lost, "prefill" if lost.agent == pair.prefill.incarnation else "decode")
        self._exclude |= {lost.agent}
        self._must_match = pair.prefill.info if begun else None
        self._log.enter(Phase.ROUTE)


def _max_model_len(pair: Pair) -> int | None:
    """The longest prompt and response that both agents have room for; None when neither says."""
    prefill, decode = pair.prefill.info.max_model_len, pair.decode.info.max_model_len
    return min(prefill, decode) or max(prefill, decode) or None

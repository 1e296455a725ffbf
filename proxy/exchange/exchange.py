# SPDX-License-Identifier: Apache-2.0
"""One request through a pair of agents: route, attempt, retry.

The life of a request, as `Exchange.run` and its attempts conduct it:

1. **Route** (`Exchange._begin`). The router picks a pair with room, if need be after a wait (`Admission`).
   The attempt reserves slots at both agents and has a fresh transfer id for each sub-request: one, unless the
   request has several prompts, or several choices that its engine samples one by one.
2. **Prefill leg** (`SubExchange._prefill`). The prefill agent answers with the first token of every choice
   and, if any choice must go on, with where it keeps the prompt's KV. From here on that KV is *pinned* for
   this attempt. With a long prompt the decode leg is sent at the same time (`EarlyLeg`), to pull what is
   computed.
3. **First token.** A streaming client gets it now: it need not wait for the KV to move.
4. **Decode leg.** The decode agent pulls the KV, and its events are relayed from token 2 to `[DONE]`. The ids
   of the tokens that pass are noted (`SentTokens`). A response that is not streamed comes whole, at the end.
5. **End** (`Attempt.end`), exactly once for every attempt: its reservation is released, and KV that is still
   pinned is dropped. A client that leaves cancels the task that runs this code. The connections of the legs
   that are open close with it, and their agents stop; there is nothing else to cancel.
6. **Retry** (`Exchange._plan_retry`, `Retries.use_one`). An agent may be lost at any point (`AgentLost`);
   then the same steps are taken with another pair. The seed stays the same, so the same tokens are sampled,
   and what the client already has is neither repeated nor lost: a first token that it has is compared, not
   shown, and the decode agent is sent the ids of all tokens that were passed on (`resume`) and goes on after
   them. When a stream breaks in mid-response this is a *migration*. Every other failure is final, and so is a
   second agent that crashed or fell silent with the request (`PoisonCheck`).

Servers of other engines take the same steps, in the order that their dialect says. Most of them sample their
first token themselves; then step 6 ends with the first event.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Literal

from kvferry.common.exceptions import release_locals
from kvferry.proxy.dialects.sent_tokens import SentTokens
from kvferry.proxy.errors import AgentLost, ModelNotFound, StreamBroken
from kvferry.proxy.exchange.attempt import Attempt, AttemptContext, RequestState
from kvferry.proxy.exchange.legs import Legs, ResponseSink
from kvferry.proxy.exchange.poison import PoisonCheck
from kvferry.proxy.fleet.admission import Reservation
from kvferry.proxy.fleet.fleet import AcquireRequest, Fleet
from kvferry.proxy.fleet.routing.routing_request import NO_AGENTS, Pair, PinnedPair, routing_request
from kvferry.proxy.fleet.snapshot import NoPair
from kvferry.proxy.http.pool import now
from kvferry.proxy.ids import Identity
from kvferry.proxy.request import ClientRequest, check_context
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.telemetry.request_log import Phase, RequestLog
from kvferry.proxy.wire.registration import Register

RATIO = 0.1
RESERVE = 64.0
MAX_SAVED = 1024.0


class RetryBudget:
    """A token bucket that requests fill and retries empty.

    In the long run retries are at most a tenth of the requests. `RESERVE` lets a small fleet, or one that has
    just started, survive the death of an agent under load; `MAX_SAVED` bounds what is saved up. Retries of
    what an agent that is down would have done (`AgentLost.is_down`) add no load, and are not counted.
    """

    def __init__(self, reserve: float = RESERVE) -> None:
        self._tokens = reserve

    def deposit(self) -> None:
        """Count a client's request."""
        self._tokens = min(self._tokens + RATIO, MAX_SAVED)

    def try_withdraw(self) -> bool:
        """Return whether a retry may be made, and count it as made."""
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


@dataclass(slots=True)
class Retries:
    """How many more attempts one request may make: to *migrate* a stream that has begun, else to *retry*."""

    log: RequestLog
    budget: RetryBudget
    metrics: Metrics
    retries: int
    migrations: int

    def has_more(self) -> bool:
        """Whether the request's own limits allow another attempt, as things stand."""
        return (self.migrations if self._migrates else self.retries) > 0

    def use_one(self, lost: AgentLost, leg: Literal["prefill", "decode"]) -> None:
        """Count another attempt, after `leg` has lost its agent.

        Raises `lost`, or `StreamBroken` where the client has events already, if there may be no other.
        """
        if not self._is_allowed(lost):
            if self._migrates:
                raise StreamBroken(lost.message) from lost
            raise lost
        if self._migrates:
            self.migrations -= 1
            self.metrics.migrations.inc()
        else:
            self.retries -= 1
            self.metrics.retries.labels(leg).inc()

    @property
    def _migrates(self) -> bool:
        return self.log.phase is Phase.DECODE

    def _is_allowed(self, lost: AgentLost) -> bool:
        if not self.has_more():
            return False
        if lost.is_down or self.budget.try_withdraw():
            return True
        self.metrics.retries_denied.inc()
        return False


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
    attempts: AttemptContext


class Exchange:
    """Serves one client request. Call `run` once.

    Args:
        pinned: The pair that is to serve it; None lets the router choose.
    """

    def __init__(
        self,
        context: ExchangeContext,
        request: ClientRequest,
        ids: Identity,
        log: RequestLog,
        pinned: PinnedPair | None = None,
    ) -> None:
        settings, attempts = context.settings, context.attempts
        self._context = context
        self._request = request
        self._log = log
        self._routing_request = routing_request(request, ids.session)
        self._retries = Retries(
            log, context.retry_budget, attempts.metrics, settings.retries, settings.migrations
        )
        self._deadline = now() + settings.total_timeout_s
        self._reject_at = math.inf
        """From when on the client does not want the first token."""
        if request.rejects_late:
            objective = context.fleet.settings.objectives.of(request.model)
            self._reject_at = now() + (request.ttft_s or objective.ttft_s)
        self._poison = PoisonCheck(context.fleet.registry, log, attempts.metrics)
        legs = Legs(
            attempts.upstream,
            context.fleet.registry.leg_succeeded,
            self._poison,
            first_byte_timeout_s=settings.first_byte_timeout_s,
            deadline=self._deadline,
            can_retry=self._retries.has_more,
            trace=log.trace,
        )
        sent = [SentTokens(request.n) for _ in range(request.prompts)]
        self._state = RequestState(request=request, ids=ids, log=log, legs=legs, sent=sent)
        self._exclude = NO_AGENTS
        self._pinned = pinned
        self._must_match: Register | None = None
        """An agent from which the client has tokens: others must go on with that very response."""

    @property
    def num_tokens(self) -> int:
        """How many tokens of a stream the client has, as far as agents have said."""
        return sum(sent.num_tokens for sent in self._state.sent)

    @property
    def prompt_tokens(self) -> int:
        """The tokens of the prompts whose prefill legs have ended."""
        return sum(self._state.prompt_tokens.values())

    async def run(self, sink: ResponseSink) -> None:
        """Give `sink` the whole response. Raises `ProxyError`, maybe when `sink` has events already."""
        try:
            while True:
                attempt = await self._begin()
                try:
                    await attempt.run(sink)
                    self._record_outcome(attempt)
                    return
                except AgentLost as error:
                    lost = error
                    if lost.connection_refused:
                        self._context.fleet.registry.connection_refused(lost.agent)
                finally:
                    attempt.end()
                await self._plan_retry(attempt.pair, lost)
        finally:
            if self._state.kept is not None:
                self._state.kept.release()

    async def _begin(self) -> Attempt:
        """Reserve a pair for another attempt. Raises `InvalidRequest` for what its agents cannot serve."""
        reservation = await self._reserve()
        try:
            pair = reservation.pair
            check_context(self._request, _max_model_len(pair))
            context = self._context.attempts
            context.dialects[pair.prefill.info.dialect].check(self._request)
            return Attempt(context, self._state, reservation, is_retry=bool(self._exclude))
        except BaseException:
            reservation.release()
            raise

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
                    pinned=self._pinned,
                    reject_at=math.inf if self._exclude else self._reject_at,
                )
            )
        finally:
            if self._log.trace is not None:
                self._log.trace.queued(asked_at)
        if reservation is NoPair.UNKNOWN_MODEL:
            raise ModelNotFound(model, context.fleet.registry.snapshot().served())
        if isinstance(reservation, NoPair):
            raise context.fleet.no_agent(reservation, model)
        return reservation

    def _record_outcome(self, attempt: Attempt) -> None:
        """Compare the prediction with what came, unless other attempts went before.

        Of several prompts one is first, while the prediction is for all.
        """
        if attempt.pair.prediction is not None and not self._exclude and self._request.prompts == 1:
            log = self._log
            first_token_at = log.first_text_at if attempt.is_alone else attempt.prefilled_at
            self._context.fleet.record_outcome(
                self._routing_request, attempt.pair, first_token_at, log.decode_time_per_token()
            )

    async def _plan_retry(self, pair: Pair, lost: AgentLost) -> None:
        """Prepare for another attempt. Raises `AgentLost`, `StreamBroken` or `SuspectRequest` if there may be
        none.
        """
        release_locals(lost)
        self._log.add_loss(lost.message)
        self._poison.attempt_ended()
        begun = self._state.begun
        if begun and self._request.undivided:
            # A pair, which could go on after what the client has, cannot serve such a request.
            raise StreamBroken(lost.message) from lost
        if self._retries.has_more():
            await self._poison.judge(self._deadline)
        self._retries.use_one(lost, "prefill" if lost.agent == pair.prefill.incarnation else "decode")
        self._exclude |= {lost.agent}
        self._must_match = pair.prefill.info if begun else None
        self._log.enter(Phase.ROUTE)


def _max_model_len(pair: Pair) -> int | None:
    """The longest prompt and response that both agents have room for; None when neither says."""
    prefill, decode = pair.prefill.info.max_model_len, pair.decode.info.max_model_len
    return min(prefill, decode) or max(prefill, decode) or None

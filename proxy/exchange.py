# SPDX-License-Identifier: Apache-2.0
"""One request through a pair of agents: route, prefill, first token, decode; deadlines, drop and retry.

The life of a streamed request, as `Exchange.events` tells it:

1. **Route.** The router picks a pair with room, if need be after a wait (`admission`); the attempt holds
   slots at both agents and has a fresh transfer id.
2. **Prefill leg.** The prefill agent answers with the first token of every choice and, if any choice must
   go on, with where it keeps the prompt's KV. From here on that KV is *pinned* for this attempt.
3. **First token.** The client gets it now: it need not wait for the KV to move.
4. **Decode leg.** The decode agent pulls the KV, and its events are relayed from token 2 to `[DONE]`. The ids
   of the tokens that pass are noted (`Progress`).

However an attempt ends, `_end` runs exactly once: its hold goes back, and KV that is still pinned is dropped.
A client that leaves cancels the task that runs this code. Only one leg is open at a time, so the connection
of that leg closes and its agent stops; there is nothing else to cancel.

An agent may be lost at any point of this (`AgentLost` → `_plan_retry`); then the same four steps are taken
again with another pair. The seed stays the same, so the same tokens are drawn, and what the client already
has is neither repeated nor lost: a first token that it knows is checked, not shown, and the decode leg is
told the ids of all tokens that were passed on (`resume`) and goes on after them. When a stream breaks in
mid-answer this is a *migration*. Every other failure is final.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from proxy import sse
from proxy.admission import Admission, Hold
from proxy.api_keys import ApiKeys
from proxy.ask import ask_about
from proxy.config import ProxyConfig
from proxy.dialects import native
from proxy.drops import Drops
from proxy.errors import (
    AgentLost,
    AgentRefused,
    AgentTimeout,
    BadAnswer,
    InvalidRequest,
    ModelNotFound,
    NoAgent,
    StreamBroken,
)
from proxy.history import History
from proxy.ids import Identity, TransferId, new_transfer_id
from proxy.live import Live
from proxy.metrics import Metrics
from proxy.open_requests import OpenRequests
from proxy.openai_api import ClientRequest, check_context
from proxy.pairing import alike
from proxy.progress import Progress
from proxy.record import Phase, Record
from proxy.registry import Registry
from proxy.retry_budget import RetryBudget
from proxy.router import NOBODY, NoPair, Pair, Router
from proxy.slots import Slots
from proxy.upstream import AgentAnswer, Upstream
from proxy.wire import Incarnation, Register


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every exchange of one proxy works with."""

    config: ProxyConfig
    registry: Registry
    router: Router
    slots: Slots
    admission: Admission
    retry_budget: RetryBudget
    upstream: Upstream
    drops: Drops
    open_requests: OpenRequests
    metrics: Metrics
    history: History
    live: Live
    api_keys: ApiKeys | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer that is not streamed, as the agent gave it."""

    content_type: str
    body: bytes
    server_timing: str | None


@dataclass(slots=True)
class Attempt:
    """One try with one pair. `pinned`: the prefill agent may hold KV that nobody has read yet."""

    hold: Hold
    transfer_id: TransferId
    pinned: bool = False

    @property
    def pair(self) -> Pair:
        return self.hold.pair


class Exchange:
    """Serves one client request. Call either `answer` or `events`, once."""

    def __init__(self, services: Services, request: ClientRequest, ids: Identity, record: Record) -> None:
        self._services = services
        self._request = request
        self._ids = ids
        self._ask = ask_about(request, ids.session)
        self._record = record
        self._retries_left = services.config.retries
        self._migrations_left = services.config.migrations
        self._avoid = NOBODY
        self._deadline = _now() + services.config.total_timeout_s

    @property
    def deadline(self) -> float:
        """When the whole exchange must be over, on the event loop's clock."""
        return self._deadline

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

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The events of a streamed answer, `[DONE]` included; each item is one or more whole events.

        Raises `ProxyError`: before the first item it can still become an HTTP status, later an error event.
        """
        request, ids = self._request, self._ids
        progress = Progress(request.n)
        begun_by: Register | None = None
        while True:
            attempt = await self._begin(begun_by)
            try:
                if attempt.pair.alone:
                    agent, body = attempt.pair.prefill.info, native.alone_body(request, ids)
                else:
                    prefill = await self._prefill(attempt)
                    if news := progress.open(prefill):
                        yield native.first_events(request, ids, prefill, news)
                    if prefill.params is None:
                        yield native.closing_events(request, ids, prefill)
                        return
                    agent = attempt.pair.decode.info
                    body = native.decode_body(request, ids, prefill.params, progress.resume())
                async with aclosing(self._relay(agent, body, progress)) as relayed:
                    async for events in relayed:
                        yield events
                attempt.pinned = False
                return
            except AgentLost as lost:
                if progress.complete:
                    yield sse.DONE
                    return
                self._plan_retry(attempt, lost)
                begun_by = attempt.pair.prefill.info if progress.begun else None
            finally:
                self._end(attempt)

    async def _begin(self, begun_by: Register | None = None) -> Attempt:
        """Route: wait for a pair with room and hold its slots.

        `begun_by` is an agent from which the client has tokens: others must go on with that very answer.
        Raises `NoAgent`, `ModelNotFound`, `InvalidRequest` or `Overloaded`.
        """
        services, model = self._services, self._request.model
        retrying = bool(self._avoid)
        if not retrying:
            services.retry_budget.request()
        by = min(_now() + services.config.queue_timeout_s, self._deadline)
        hold = await services.admission.enter(self._ask, lambda: self._route(begun_by), by=by, first=retrying)
        if hold is NoPair.UNKNOWN_MODEL:
            raise ModelNotFound(f"{hold.value}: {model!r}", param="model")
        if isinstance(hold, NoPair):
            raise NoAgent(f"{hold.value}: {model!r}")
        try:
            check_context(self._request, min(node.info.max_model_len for node in hold.pair.nodes))
        except InvalidRequest:
            hold.give_back()
            raise
        attempt = Attempt(hold, new_transfer_id())
        self._record.tell_attempt(attempt.pair, attempt.transfer_id)
        return attempt

    def _route(self, begun_by: Register | None) -> Pair | NoPair:
        """Which pair may have the request now."""
        services, now = self._services, _now()
        snapshot = services.registry.snapshot(now)
        if begun_by is not None:
            snapshot = alike(snapshot, begun_by)
        # An agent alone would begin again with token 1, which the client may have by now.
        apart = begun_by is not None
        pair = services.router.choose(snapshot, self._ask, self._avoid, apart=apart)
        if isinstance(pair, Pair):
            services.registry.sent((node.incarnation for node in pair.nodes), now)
        return pair

    def _end(self, attempt: Attempt) -> None:
        """Give back what the attempt holds. Never waits, so that it also runs to its end when cancelled."""
        attempt.hold.give_back()
        if attempt.pinned:
            self._services.drops.drop(attempt.pair.prefill.info, attempt.transfer_id)

    def _plan_retry(self, attempt: Attempt, lost: AgentLost) -> None:
        """Prepare for another attempt; raises `AgentLost` or `StreamBroken` if there were enough."""
        services = self._services
        if lost.refused:
            services.registry.connection_refused(lost.agent, _now())
        if self._record.phase is Phase.DECODE:
            if not self._may_repeat(lost):
                raise StreamBroken(lost.message) from lost
            self._migrations_left -= 1
            services.metrics.migrations.inc()
        else:
            if not self._may_repeat(lost):
                raise lost
            self._retries_left -= 1
            leg = "prefill" if lost.agent == attempt.pair.prefill.incarnation else "decode"
            services.metrics.retries.labels(leg).inc()
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
        if lost.idle:
            return True
        if not self._services.retry_budget.take():
            self._services.metrics.retries_denied.inc()
            return False
        return True

    async def _answer_from(self, attempt: Attempt) -> Answer:
        """One attempt at an answer that is not streamed."""
        request, ids = self._request, self._ids
        if attempt.pair.alone:
            return await self._fetch(attempt.pair.prefill.info, native.alone_body(request, ids))
        prefill = await self._prefill(attempt)
        if prefill.params is None:
            return Answer(content_type="application/json", body=prefill.raw, server_timing=None)
        body = native.decode_body(request, ids, prefill.params)
        answer = await self._fetch(attempt.pair.decode.info, body)
        attempt.pinned = False
        return answer

    async def _prefill(self, attempt: Attempt) -> native.PrefillAnswer:
        """The prefill leg. From sending it until its KV is known to be read or absent, KV is pinned."""
        self._record.enter(Phase.PREFILL)
        agent = attempt.pair.prefill.info
        body = native.prefill_body(self._request, self._ids, attempt.transfer_id)
        attempt.pinned = True
        try:
            # Its answer is short and comes at once, so the deadline for its first byte is that for its last.
            soon = self._first_byte_deadline()
            async with self._post(agent, body, headers_by=soon, by=soon) as answer:
                raw = await answer.body()
                prefill = native.read_prefill_answer(raw, self._request, attempt.transfer_id)
        except AgentRefused:
            attempt.pinned = False
            raise
        except AgentLost as lost:
            attempt.pinned = not lost.refused
            raise
        attempt.pinned = prefill.params is not None
        attempt.hold.prefill_over()
        return prefill

    async def _fetch(self, agent: Register, body: bytes) -> Answer:
        """The last leg of a request that is not streamed: its answer comes all at once, at the very end."""
        self._record.enter(Phase.DECODE_WAIT)
        async with self._post(agent, body, headers_by=self._deadline, by=self._deadline) as answer:
            if not answer.content_type.startswith("application/json"):
                # Nothing that a browser would run may be served from where the operator's page is.
                raise BadAnswer(f"{agent.address} answered {answer.content_type} where JSON was asked for")
            return Answer(
                content_type=answer.content_type,
                body=await answer.body(),
                server_timing=answer.headers.get("Server-Timing"),
            )

    async def _relay(self, agent: Register, body: bytes, progress: Progress) -> AsyncGenerator[bytes, None]:
        """The last leg of a streamed request: whole events as they come, up to `[DONE]`."""
        self._record.enter(Phase.DECODE_WAIT)
        scanner, lost = sse.Scanner(), Incarnation(agent.incarnation)
        soon = self._first_byte_deadline()
        async with self._post(agent, body, headers_by=soon, by=self._deadline) as answer:
            if not answer.content_type.startswith(sse.CONTENT_TYPE):
                raise BadAnswer(
                    f"{agent.address} answered {answer.content_type} where a stream was asked for"
                )
            async with aclosing(answer.chunks()) as chunks:
                async for chunk in chunks:
                    events = progress.take(scanner.feed(chunk))
                    failure = native.agent_failure(events)
                    if failure is not None:
                        events, said = failure
                    if events:
                        if self._record.phase is not Phase.DECODE:
                            self._record.enter(Phase.DECODE)
                        yield events
                    if failure is not None:
                        raise AgentLost(f"{agent.address} failed: {said}", lost)
                    if scanner.done:
                        break
            if not scanner.done:
                raise AgentLost(f"{agent.address} ended its stream without [DONE]", lost)
            await answer.finish()

    @asynccontextmanager
    async def _post(
        self, agent: Register, body: bytes, *, headers_by: float, by: float
    ) -> AsyncIterator[AgentAnswer]:
        """One leg. How it ends is what the agent's breaker goes by; a leg that is given up says nothing."""
        services, incarnation = self._services, Incarnation(agent.incarnation)
        path, headers = native.path(self._request), native.headers(self._ids)
        try:
            async with services.upstream.post(
                agent, path, body, headers, headers_by=headers_by, by=by, movable=self._has_tries_left
            ) as answer:
                yield answer
        except (AgentLost, AgentTimeout, BadAnswer):
            services.registry.leg_failed(incarnation, _now())
            raise
        services.registry.leg_succeeded(incarnation)

    def _first_byte_deadline(self) -> float:
        return min(_now() + self._services.config.first_byte_timeout_s, self._deadline)


def _now() -> float:
    return asyncio.get_running_loop().time()

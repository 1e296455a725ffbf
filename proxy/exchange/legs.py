# SPDX-License-Identifier: Apache-2.0
"""One part of a request through a pair of another engine's servers: two legs, in the order its dialect says.

- **Serial**: the prefill leg, then the decode leg with the params that the prefill answered. They are used
  once, here; whatever goes wrong, the next attempt begins with a fresh prefill and a fresh transfer id.
- **Concurrent**: both legs at once. The prefill's answer is read to its end and checked; until then nothing
  of the decode's goes to the client. Either leg's failure cancels the other (sglang #9726, smg #831).

Nothing here knows a field or a header of any engine: that is its `Dialect`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from kvferry.proxy import sse
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
from kvferry.proxy.dialects.kv_endpoint_cache import KvEndpointCache
from kvferry.proxy.errors import AgentLost, AgentRejected, AgentTimeout, BadResponse
from kvferry.proxy.exchange.kv_drops import KvDrops
from kvferry.proxy.exchange.lease_check import LeaseCheck, Verdict
from kvferry.proxy.exchange.sub_requests import SubResponse, as_events
from kvferry.proxy.http.pool import UpstreamPool, UpstreamResponse
from kvferry.proxy.telemetry.metrics import Metrics
from kvferry.proxy.wire.messages import Incarnation, Register

LOOKED_UP_FOR_S = 10.0
"""How long an engine id that was looked up is believed: its server may have restarted at the same address."""
LOOKUP_TIMEOUT_S = 5.0
ACCEPT_S = 0.5
"""A decode server that had less than this to take a leg may not have seen it when the leg is given up."""

Put = Callable[[bytes], Awaitable[None]]


class Post(Protocol):
    """Sends a leg, and tells the server's breaker how it ended."""

    def __call__(
        self, server: Register, leg: LegRequest, *, headers_by: float, by: float
    ) -> AbstractAsyncContextManager[UpstreamResponse]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the legs of one attempt work with. `by` is the request's deadline, on the event loop's clock.

    `first_byte_s`: how long a prefill's answer or a stream's first event may take, in seconds.
    """

    dialect: Dialect
    post: Post
    upstream: UpstreamPool
    kv_endpoints: KvEndpointCache
    drops: KvDrops
    metrics: Metrics
    first_byte_s: float
    by: float


class SubRequestLegs:
    """The legs of one part. Call `run` or `run_alone`, once.

    Args:
        put: Takes whole events for the client; not called for an answer that is not streamed.
        prefilled: Called when the prefill leg has ended well.
    """

    def __init__(self, tools: Tools, sub: SubRequest, put: Put, prefilled: Callable[[], None]) -> None:
        self._tools = tools
        self._sub = sub
        self._put = put
        self._prefilled = prefilled

    async def run_alone(self, server: Register) -> SubResponse:
        """Have one server serve it all. Raises `ProxyError`."""
        leg = self._tools.dialect.alone_leg(self._sub, pick_rank(self._sub.room, server))
        answer = SubResponse(self._sub, server)
        async with self._send(server, leg) as told:
            await self._receive(told, answer, server)
        return answer

    async def run(self, prefill: Register, decode: Register) -> SubResponse:
        """Take it through a pair. Raises `ProxyError`, or an exception group of such."""
        endpoints = self._sub.endpoints(prefill, decode)
        kv_endpoint = await self._kv_endpoint(endpoints)
        if self._tools.dialect.leg_order(endpoints, kv_endpoint) is LegOrder.SERIAL:
            return await self._serial(endpoints, kv_endpoint)
        return await self._concurrent(endpoints, kv_endpoint)

    async def _serial(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> SubResponse:
        dialect, sent_at = self._tools.dialect, _now()
        prefilled = await self._prefill(endpoints)
        if prefilled.whole is not None:
            self._release(endpoints, prefilled)
            return await self._finished(endpoints, prefilled.whole)
        answer = SubResponse(self._sub, endpoints.decode)
        answer.prompt_tokens_details = prefilled.prompt_tokens_details
        leg = dialect.decode_leg(self._sub, endpoints, prefilled, kv_endpoint)
        if prefilled.params is None:
            # The prompt is computed again. Whoever runs the fleet should know.
            self._tools.metrics.prompts_recomputed.labels(dialect.name).inc()
        if prefilled.params is None or dialect.lease_s is None:
            async with self._send(endpoints.decode, leg) as told:
                await self._receive(told, answer, endpoints.decode)
            return answer
        watch = LeaseCheck(
            self._tools.upstream,
            endpoints.prefill,
            dialect.expiry_counter,
            sent_at=sent_at,
            answered_at=_now(),
            lease_s=dialect.lease_s,
        )
        async with watch:
            await self._decode_under_lease(endpoints, prefilled, leg, answer, watch)
        return answer

    async def _decode_under_lease(
        self,
        endpoints: Endpoints,
        prefilled: Prefilled,
        leg: LegRequest,
        answer: SubResponse,
        watch: LeaseCheck,
    ) -> None:
        """The decode leg of a serial shape, whose KV may be gone after a while. Raises `AgentLost` then."""
        late = AgentLost(
            f"{endpoints.decode.address} was too late for the KV at {endpoints.prefill.address}",
            _lost(endpoints.decode),
        )
        if not watch.is_sure:
            raise late
        accepted_by = _now() + ACCEPT_S

        async def check() -> None:
            verdict = await watch.judge()
            self._tools.metrics.leases.labels(verdict.name.lower()).inc()
            if verdict is Verdict.SUSPECT:
                raise late

        try:
            async with self._send(endpoints.decode, leg, headers_by=watch.sure_until) as told:
                await self._receive(told, answer, endpoints.decode, check)
        except AgentTimeout:
            if watch.is_sure:
                raise
            raise late from None
        except asyncio.CancelledError:
            if _now() < accepted_by:
                self._release(endpoints, prefilled)
            raise

    async def _concurrent(self, endpoints: Endpoints, kv_endpoint: KvEndpoint | None) -> SubResponse:
        answer = SubResponse(self._sub, endpoints.decode)
        leg = self._tools.dialect.decode_leg(self._sub, endpoints, Prefilled(), kv_endpoint)

        async def check() -> None:
            answer.prompt_tokens_details = (await prefill).prompt_tokens_details

        async def receive() -> None:
            async with self._send(endpoints.decode, leg) as told:
                await self._receive(told, answer, endpoints.decode, check)

        async with asyncio.TaskGroup() as legs:
            # Two tasks made in one go ask for their connections one right after the other, and places go in
            # that order. So, of all legs with a place, at most one waits for its other to get the next.
            prefill = legs.create_task(self._prefill(endpoints))
            legs.create_task(receive())
        return answer

    async def _prefill(self, endpoints: Endpoints) -> Prefilled:
        """The prefill leg, up to the end of its answer, which is short."""
        leg = self._tools.dialect.prefill_leg(self._sub, endpoints)
        soon = self._soon()
        try:
            async with self._tools.post(endpoints.prefill, leg, headers_by=soon, by=soon) as told:
                prefilled = self._tools.dialect.read_prefill(self._sub, await told.read())
        except BadResponse as error:  # another server may do better
            raise AgentLost(
                f"{endpoints.prefill.address}: {error.message}", _lost(endpoints.prefill)
            ) from error
        if prefilled.kv_endpoint is not None:
            self._tools.kv_endpoints.learn(endpoints, prefilled.kv_endpoint, _now())
        self._prefilled()
        return prefilled

    def _send(
        self, server: Register, leg: LegRequest, headers_by: float | None = None
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """The last leg. An answer that is not streamed may take all the time that there is."""
        by = self._tools.by
        if not self._sub.request.stream:
            return self._tools.post(server, leg, headers_by=by, by=by)
        soon = self._soon() if headers_by is None else min(headers_by, self._soon())
        return self._tools.post(server, leg, headers_by=soon, by=by)

    async def _receive(
        self,
        told: UpstreamResponse,
        answer: SubResponse,
        server: Register,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Read the last leg's answer. `check` runs once, when there is something that it must vouch for."""
        if not self._sub.request.stream:
            raw = await told.read()
            if check is not None:
                await check()
            answer.read_whole(raw)
            return
        if not told.content_type.startswith(sse.CONTENT_TYPE):
            raise BadResponse(f"{server.address} answered {told.content_type} where a stream was asked for")
        scanner = sse.Scanner()
        async with aclosing(told.chunks()) as chunks:
            async for chunk in chunks:
                events = answer.take(scanner.feed(chunk))
                if (events or scanner.done) and check is not None:
                    await check()
                    check = None
                if events:
                    await self._put(events)
                if scanner.done:
                    break
        if not scanner.done:
            raise AgentLost(f"{server.address} ended its stream without [DONE]", _lost(server))
        if not answer.complete:
            raise AgentLost(f"{server.address} ended its stream without ending every choice", _lost(server))
        await told.finish()

    async def _finished(self, endpoints: Endpoints, whole: bytes) -> SubResponse:
        """The answer ended at its first token, at the prefill server."""
        answer = SubResponse(self._sub, endpoints.prefill)
        if not self._sub.request.stream:
            answer.read_whole(whole)
        elif events := answer.take(as_events(whole, self._sub)):
            await self._put(events)
        return answer

    def _release(self, endpoints: Endpoints, prefilled: Prefilled) -> None:
        """Let the decode server fetch the KV for one token, unread, so that the prefill server can free it.

        No engine offers a shorter way (docs/sources.md#vllm); otherwise its blocks wait for their lease to
        end.
        """
        if prefilled.params is not None:
            once = {"max_tokens": 1, "stream": False}
            body = {k: v for k, v in self._sub.body.items() if k in ("model", "prompt", "messages")} | once
            sub = replace(self._sub, body=body)
            leg = self._tools.dialect.decode_leg(sub, endpoints, prefilled, None)
            self._tools.drops.send(endpoints.decode, leg)

    async def _kv_endpoint(self, endpoints: Endpoints) -> KvEndpoint | None:
        """What must be, or happens to be, known of the prefill server beforehand."""
        dialect, kv_endpoints = self._tools.dialect, self._tools.kv_endpoints
        url = dialect.lookup(endpoints)
        if url is None:
            return kv_endpoints.find(endpoints)
        kv_endpoint = kv_endpoints.find(endpoints, since=_now() - LOOKED_UP_FOR_S)
        if kv_endpoint is None:
            by = min(_now() + LOOKUP_TIMEOUT_S, self._tools.by)
            try:
                kv_endpoint = dialect.read_lookup(
                    endpoints, await self._tools.upstream.get(endpoints.prefill, url, by=by)
                )
            except (AgentRejected, AgentTimeout, BadResponse) as error:
                raise AgentLost(f"{url}: {error.message}", _lost(endpoints.prefill)) from error
            kv_endpoints.learn(endpoints, kv_endpoint, _now())
        return kv_endpoint

    def _soon(self) -> float:
        return min(_now() + self._tools.first_byte_s, self._tools.by)


def _lost(server: Register) -> Incarnation:
    return Incarnation(server.incarnation)


def _now() -> float:
    return asyncio.get_running_loop().time()

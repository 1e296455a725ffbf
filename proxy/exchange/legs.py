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
from kvferry.proxy.dialects.base import Dialect, Endpoints, Leg, Peer, Prefilled, Shape, SubRequest, draw_rank
from kvferry.proxy.dialects.peer_cache import PeerCache
from kvferry.proxy.errors import AgentLost, AgentRejected, AgentTimeout, BadResponse
from kvferry.proxy.exchange.kv_drops import KvDrops
from kvferry.proxy.exchange.lease_check import LeaseCheck, Verdict
from kvferry.proxy.exchange.sub_requests import SubAnswer, as_events
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
        self, server: Register, leg: Leg, *, headers_by: float, by: float
    ) -> AbstractAsyncContextManager[UpstreamResponse]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What the legs of one attempt work with. `by` is the request's deadline, on the event loop's clock.

    `first_byte_s`: how long a prefill's answer or a stream's first event may take, in seconds.
    """

    dialect: Dialect
    post: Post
    upstream: UpstreamPool
    peers: PeerCache
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

    def __init__(self, tools: Tools, part: SubRequest, put: Put, prefilled: Callable[[], None]) -> None:
        self._tools = tools
        self._part = part
        self._put = put
        self._prefilled = prefilled

    async def run_alone(self, server: Register) -> SubAnswer:
        """Have one server serve it all. Raises `ProxyError`."""
        leg = self._tools.dialect.alone_leg(self._part, draw_rank(self._part.room, server))
        answer = SubAnswer(self._part, server)
        async with self._send(server, leg) as told:
            await self._receive(told, answer, server)
        return answer

    async def run(self, prefill: Register, decode: Register) -> SubAnswer:
        """Take it through a pair. Raises `ProxyError`, or an exception group of such."""
        ends = self._part.ends(prefill, decode)
        peer = await self._peer(ends)
        if self._tools.dialect.shape(ends, peer) is Shape.SERIAL:
            return await self._serial(ends, peer)
        return await self._concurrent(ends, peer)

    async def _serial(self, ends: Endpoints, peer: Peer | None) -> SubAnswer:
        dialect, sent_at = self._tools.dialect, _now()
        prefilled = await self._prefill(ends)
        if prefilled.whole is not None:
            self._release(ends, prefilled)
            return await self._finished(ends, prefilled.whole)
        answer = SubAnswer(self._part, ends.decode)
        answer.prompt_tokens_details = prefilled.prompt_tokens_details
        leg = dialect.decode_leg(self._part, ends, prefilled, peer)
        if prefilled.params is None:
            # The prompt is computed again. Whoever runs the fleet should know.
            self._tools.metrics.prompts_recomputed.labels(dialect.name).inc()
        if prefilled.params is None or dialect.lease_s is None:
            async with self._send(ends.decode, leg) as told:
                await self._receive(told, answer, ends.decode)
            return answer
        watch = LeaseCheck(
            self._tools.upstream,
            ends.prefill,
            dialect.expiry_counter,
            sent_at=sent_at,
            answered_at=_now(),
            lease_s=dialect.lease_s,
        )
        async with watch:
            await self._decode_under_lease(ends, prefilled, leg, answer, watch)
        return answer

    async def _decode_under_lease(
        self, ends: Endpoints, prefilled: Prefilled, leg: Leg, answer: SubAnswer, watch: LeaseCheck
    ) -> None:
        """The decode leg of a serial shape, whose KV may be gone after a while. Raises `AgentLost` then."""
        late = AgentLost(
            f"{ends.decode.address} was too late for the KV at {ends.prefill.address}", _lost(ends.decode)
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
            async with self._send(ends.decode, leg, headers_by=watch.sure_until) as told:
                await self._receive(told, answer, ends.decode, check)
        except AgentTimeout:
            if watch.is_sure:
                raise
            raise late from None
        except asyncio.CancelledError:
            if _now() < accepted_by:
                self._release(ends, prefilled)
            raise

    async def _concurrent(self, ends: Endpoints, peer: Peer | None) -> SubAnswer:
        answer = SubAnswer(self._part, ends.decode)
        leg = self._tools.dialect.decode_leg(self._part, ends, Prefilled(), peer)

        async def check() -> None:
            answer.prompt_tokens_details = (await prefill).prompt_tokens_details

        async def receive() -> None:
            async with self._send(ends.decode, leg) as told:
                await self._receive(told, answer, ends.decode, check)

        async with asyncio.TaskGroup() as legs:
            # Two tasks made in one go ask for their connections one right after the other, and places go in
            # that order. So, of all legs with a place, at most one waits for its other to get the next.
            prefill = legs.create_task(self._prefill(ends))
            legs.create_task(receive())
        return answer

    async def _prefill(self, ends: Endpoints) -> Prefilled:
        """The prefill leg, up to the end of its answer, which is short."""
        leg = self._tools.dialect.prefill_leg(self._part, ends)
        soon = self._soon()
        try:
            async with self._tools.post(ends.prefill, leg, headers_by=soon, by=soon) as told:
                prefilled = self._tools.dialect.read_prefill(self._part, await told.read())
        except BadResponse as error:  # another server may do better
            raise AgentLost(f"{ends.prefill.address}: {error.message}", _lost(ends.prefill)) from error
        if prefilled.peer is not None:
            self._tools.peers.learn(ends, prefilled.peer, _now())
        self._prefilled()
        return prefilled

    def _send(
        self, server: Register, leg: Leg, headers_by: float | None = None
    ) -> AbstractAsyncContextManager[UpstreamResponse]:
        """The last leg. An answer that is not streamed may take all the time that there is."""
        by = self._tools.by
        if not self._part.request.stream:
            return self._tools.post(server, leg, headers_by=by, by=by)
        soon = self._soon() if headers_by is None else min(headers_by, self._soon())
        return self._tools.post(server, leg, headers_by=soon, by=by)

    async def _receive(
        self,
        told: UpstreamResponse,
        answer: SubAnswer,
        server: Register,
        check: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Read the last leg's answer. `check` runs once, when there is something that it must vouch for."""
        if not self._part.request.stream:
            raw = await told.read()
            if check is not None:
                await check()
            answer.take_whole(raw)
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

    async def _finished(self, ends: Endpoints, whole: bytes) -> SubAnswer:
        """The answer ended at its first token, at the prefill server."""
        answer = SubAnswer(self._part, ends.prefill)
        if not self._part.request.stream:
            answer.take_whole(whole)
        elif events := answer.take(as_events(whole, self._part)):
            await self._put(events)
        return answer

    def _release(self, ends: Endpoints, prefilled: Prefilled) -> None:
        """Let the decode server fetch the KV for one token, unread, so that the prefill server can free it.

        No engine offers a shorter way (`vllm-sglang.md` §7.7); otherwise its blocks wait for their lease to
        end.
        """
        if prefilled.params is not None:
            once = {"max_tokens": 1, "stream": False}
            body = {k: v for k, v in self._part.body.items() if k in ("model", "prompt", "messages")} | once
            part = replace(self._part, body=body)
            leg = self._tools.dialect.decode_leg(part, ends, prefilled, None)
            self._tools.drops.send(ends.decode, leg)

    async def _peer(self, ends: Endpoints) -> Peer | None:
        """What must be, or happens to be, known of the prefill server beforehand."""
        dialect, peers = self._tools.dialect, self._tools.peers
        url = dialect.lookup(ends)
        if url is None:
            return peers.find(ends)
        peer = peers.find(ends, since=_now() - LOOKED_UP_FOR_S)
        if peer is None:
            by = min(_now() + LOOKUP_TIMEOUT_S, self._tools.by)
            try:
                peer = dialect.read_lookup(ends, await self._tools.upstream.get(ends.prefill, url, by=by))
            except (AgentRejected, AgentTimeout, BadResponse) as error:
                raise AgentLost(f"{url}: {error.message}", _lost(ends.prefill)) from error
            peers.learn(ends, peer, _now())
        return peer

    def _soon(self) -> float:
        return min(_now() + self._tools.first_byte_s, self._tools.by)


def _lost(server: Register) -> Incarnation:
    return Incarnation(server.incarnation)


def _now() -> float:
    return asyncio.get_running_loop().time()

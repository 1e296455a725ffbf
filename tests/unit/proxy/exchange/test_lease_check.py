# SPDX-License-Identifier: Apache-2.0
"""What can be said of KV that a lease kept, by times and by the prefill server's count of expired leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvferry.proxy.exchange.lease_check import LeaseCheck, Verdict
from kvferry.proxy.http.pool import PoolSettings, UpstreamPool
from tests.standins.engines import Fabric, VllmNixlServer

COUNTER = "vllm:nixl_num_kv_expired_reqs_total"
LEASE_S = 30.0


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.fixture
async def server() -> AsyncIterator[VllmNixlServer]:
    async with VllmNixlServer(role="prefill", fabric=Fabric()) as server:
        yield server


@pytest.fixture
async def upstream() -> AsyncIterator[UpstreamPool]:
    async with UpstreamPool(PoolSettings()) as upstream:
        yield upstream


def watch(upstream: UpstreamPool, server: VllmNixlServer, sure_for_s: float, **fields: Any) -> LeaseCheck:
    """A watch over a lease that is sure for so many seconds more, after an answer that came at once."""
    sent_at = now() + sure_for_s - LEASE_S * 5 / 6
    settings = {"sent_at": sent_at, "answered_at": sent_at, "lease_s": LEASE_S, **fields}
    return LeaseCheck(upstream, server.registration(), COUNTER, **settings)


async def test_tokens_that_come_in_time_are_proven_without_asking(
    upstream: UpstreamPool, server: VllmNixlServer
) -> None:
    server.fabric.expired = 5
    async with watch(upstream, server, 10.0) as watched:
        assert watched.is_sure
        assert await watched.judge() is Verdict.PROVEN


@pytest.mark.parametrize(
    ("expire", "verdict"), [(0, Verdict.PROVEN), (1, Verdict.SUSPECT)], ids=["none expired", "one expired"]
)
async def test_late_tokens_are_judged_by_the_counter(
    upstream: UpstreamPool, server: VllmNixlServer, expire: int, verdict: Verdict
) -> None:
    """Row 3 (vllm #52234). A decode server renews its lease while it waits, so late is not always wrong."""
    async with watch(upstream, server, 1.0) as watched:
        await asyncio.sleep(watched.sure_until - now())
        server.fabric.expired += expire
        assert not watched.is_sure
        assert await watched.judge() is verdict


@pytest.mark.parametrize("counted_in_time", [True, False])
async def test_late_tokens_without_a_count_are_unproven(
    upstream: UpstreamPool, server: VllmNixlServer, counted_in_time: bool
) -> None:
    """No such metric, or read when the lease could have ended already."""
    server.counts = not counted_in_time
    async with watch(upstream, server, 0.3 if counted_in_time else -1.0) as watched:
        await asyncio.sleep(watched.sure_until - now())
        assert await watched.judge() is Verdict.UNPROVEN


async def test_a_lease_began_no_later_than_a_sixth_before_the_answer_and_not_before_the_question(
    upstream: UpstreamPool, server: VllmNixlServer
) -> None:
    at = now()
    slow = watch(upstream, server, 0.0, sent_at=at - 100, answered_at=at)
    quick = watch(upstream, server, 0.0, sent_at=at - 1, answered_at=at)
    assert slow.sure_until - at == pytest.approx(LEASE_S * 4 / 6)
    assert quick.sure_until - at == pytest.approx(LEASE_S * 5 / 6 - 1)

# SPDX-License-Identifier: Apache-2.0
"""What can be said of KV that a lease kept, by times and by the prefill server's count of expired leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import product

import pytest

from kvferry.proxy.exchange import kv_lifetime
from kvferry.proxy.exchange.kv_lifetime import SURE_S, ExpiryCounts, LeaseCheck, Verdict
from kvferry.proxy.http.pool import PoolSettings, UpstreamPool
from tests.standins.engines import Fabric, VllmNixlServer
from tests.unit.proxy.conftest import side_by_side

COUNTER = "vllm:nixl_num_kv_expired_reqs_total"
LATE_S = SURE_S + 0.1


@pytest.fixture
async def server() -> AsyncIterator[VllmNixlServer]:
    async with VllmNixlServer(role="prefill", fabric=Fabric()) as server:
        yield server


@pytest.fixture
async def counts() -> AsyncIterator[ExpiryCounts]:
    async with UpstreamPool(PoolSettings()) as upstream:
        yield ExpiryCounts(upstream)


def watch(counts: ExpiryCounts, server: VllmNixlServer, lease_s: float | None = None) -> LeaseCheck:
    return LeaseCheck(counts, server.registration(), COUNTER, lease_s)


async def read_once(server: VllmNixlServer) -> None:
    """Wait until the count was read, and the page has arrived."""
    while not server.counts_asked:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)


async def test_tokens_that_come_in_time_are_proven_without_waiting(
    counts: ExpiryCounts, server: VllmNixlServer
) -> None:
    server.counts = False
    async with watch(counts, server) as check:
        assert await check.judge() is Verdict.PROVEN


async def test_late_tokens_are_judged_by_the_counter_whatever_the_operator_said(counts: ExpiryCounts) -> None:
    """Row 3 (vllm #52234). A decode server renews its lease while it waits, so late is not always wrong."""

    async def check(case: tuple[float | None, int]) -> None:
        lease_s, expire = case
        async with (
            VllmNixlServer(role="prefill", fabric=Fabric()) as server,
            watch(counts, server, lease_s) as check,
        ):
            check.answered()
            await read_once(server)
            await asyncio.sleep(LATE_S)
            server.fabric.expired_elsewhere += expire
            wrong = Verdict.CONTRADICTED if lease_s == 60.0 else Verdict.SUSPECT
            assert await check.judge() is (wrong if expire else Verdict.PROVEN)

    await side_by_side(check, product([None, 60.0, 0.5], [0, 1]))


async def test_late_tokens_without_a_count_are_unproven(counts: ExpiryCounts) -> None:
    """No such metric now, or none before."""

    async def check(counted_before: bool) -> None:
        async with VllmNixlServer(role="prefill", fabric=Fabric()) as server:
            server.counts = counted_before
            async with watch(counts, server) as check:
                await asyncio.sleep(LATE_S)
                server.counts = not counted_before
                assert await check.judge() is Verdict.UNPROVEN

    await side_by_side(check, [True, False])


async def test_a_count_that_was_read_when_the_lease_could_be_over_is_no_count_before(
    counts: ExpiryCounts,
) -> None:
    """The page is so slow that the lease may have expired meanwhile; only an earlier one would do."""

    async def check(is_slow: bool) -> None:
        async with VllmNixlServer(role="prefill", fabric=Fabric()) as server:
            server.count_delay_s = LATE_S * is_slow
            async with watch(counts, server) as first, watch(counts, server) as second:
                await asyncio.sleep(LATE_S + 0.1)
                server.count_delay_s = 0.0
                assert await first.judge() is (Verdict.UNPROVEN if is_slow else Verdict.PROVEN)
                server.fabric.expired_elsewhere += 1
                assert await second.judge() is (Verdict.UNPROVEN if is_slow else Verdict.SUSPECT)
            async with watch(counts, server) as later:
                await asyncio.sleep(LATE_S)
                assert await later.judge() is Verdict.PROVEN

    await side_by_side(check, [True, False])


async def test_a_lease_is_taken_to_have_begun_a_sixth_before_the_response_and_not_before_the_leg(
    counts: ExpiryCounts, server: VllmNixlServer
) -> None:
    async with watch(counts, server, 0.6) as slow, watch(counts, server, 60.0) as quick:
        await asyncio.sleep(0.3)
        at = asyncio.get_running_loop().time()
        slow.answered()
        quick.answered()
    assert slow.deadline - at == pytest.approx(0.6 * 4 / 6, abs=0.02)
    assert quick.deadline - at == pytest.approx(60.0 * 5 / 6 - 0.3, abs=0.05)


async def test_readings_are_shared_and_outlive_the_one_who_asked(
    counts: ExpiryCounts, server: VllmNixlServer
) -> None:
    server.count_delay_s = 0.2
    info = server.registration()
    async with asyncio.TaskGroup() as group:
        first = group.create_task(counts.read(info, COUNTER))
        await asyncio.sleep(0.05)
        later = [group.create_task(counts.read(info, COUNTER)) for _ in range(9)]
        first.cancel()
    assert {task.result() for task in later} != {None}
    assert server.counts_asked == 2


async def test_a_server_without_the_counter_is_asked_again_after_a_while(
    counts: ExpiryCounts, server: VllmNixlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was asked for all its metrics with every request."""
    monkeypatch.setattr(kv_lifetime, "ABSENT_S", 0.3)
    info = server.registration()
    server.counts = False
    for _ in range(5):
        assert await counts.read(info, COUNTER) is None
        async with watch(counts, server):
            assert counts.is_absent(info)
    assert server.counts_asked == 1
    server.counts = True
    await asyncio.sleep(0.35)
    assert await counts.read(info, COUNTER) is not None and not counts.is_absent(info)


async def test_a_server_that_hangs_is_not_waited_for(
    counts: ExpiryCounts, server: VllmNixlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_lifetime, "READ_TIMEOUT_S", 0.2)
    server.count_delay_s = 30.0
    began_at = asyncio.get_running_loop().time()
    async with asyncio.TaskGroup() as group:
        asked = group.create_task(counts.read(server.registration(), COUNTER))
        await asyncio.sleep(0.01)
        asked_meanwhile = group.create_task(counts.read(server.registration(), COUNTER))
    assert asked.result() is asked_meanwhile.result() is None
    assert asyncio.get_running_loop().time() - began_at < 2 * kv_lifetime.READ_TIMEOUT_S + 1.0

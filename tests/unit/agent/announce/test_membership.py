# SPDX-License-Identifier: Apache-2.0
"""What a server announces of itself, from its first ping to its bye."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvferry.agent.announce.membership import Describe, Membership, MembershipState
from kvferry.proxy.config import ProxyConfig
from kvferry.proxy.fleet.address_rules import RejectReason
from kvferry.proxy.fleet.snapshot import Node
from kvferry.proxy.server import RunningProxy, running_proxy
from kvferry.proxy.wire.registration import Incarnation, Load, NodeState, Register
from tests.helpers.waiting import until

DEADLINE_S = 20.0


def registration(index: int, state: NodeState, incarnation: str = "abc") -> Register:
    load = Load(running=0, waiting=0, kv_blocks_free=1, kv_blocks_total=1, kv_blocks_leased=0)
    return Register(
        role="prefill", incarnation=Incarnation(incarnation), index=index, address="http://127.0.0.1:9",
        control="tcp://127.0.0.1:10", dialect="native", model="m", max_model_len=10, tp_size=1, dp_size=1,
        transfers=("tcp",), host_id="h", layout="l", weights="w", tokenizer="t", transfer_mode="read",
        version="0", state=state, steps=0, load=load,
    )  # fmt: skip


@asynccontextmanager
async def announced(describe: Describe, **options: Any) -> AsyncIterator[tuple[Membership, RunningProxy]]:
    async with running_proxy(ProxyConfig(port=0, discovery_port=0)) as proxy:
        where = (f"127.0.0.1:{proxy.discovery_port}",)
        membership = Membership(where, describe, interval_s=0.05, **options)
        running = asyncio.ensure_future(membership.run())
        try:
            yield membership, proxy
        finally:
            running.cancel()
            await asyncio.wait([running])


def nodes(proxy: RunningProxy) -> list[Node]:
    return list(proxy.fleet.registry.snapshot().nodes)


def states(proxy: RunningProxy) -> list[NodeState]:
    return [node.info.state for node in nodes(proxy)]


def said_bye(proxy: RunningProxy, incarnation: str) -> bool:
    """Whether its pings are not believed any more."""
    info = registration(99, "ready", incarnation)
    return proxy.fleet.registry.register(info, proxy.fleet.clock()) is RejectReason.RETIRED


async def test_it_starts_serves_drains_is_released_and_leaves_with_a_bye() -> None:
    async with announced(registration) as (membership, proxy):
        await until(lambda: states(proxy) == ["starting"])
        membership.become_ready()
        await until(lambda: states(proxy) == ["ready"])
        membership.start_draining()
        await asyncio.wait_for(membership.wait_released(), DEADLINE_S)
        assert states(proxy) == ["draining"]
        assert membership._state is MembershipState.RELEASED
    assert membership._state is MembershipState.LEFT
    await until(lambda: said_bye(proxy, "abc"))


async def test_one_that_is_found_ready_while_it_drains_goes_on_draining() -> None:
    """The look takes its time; the drain is asked for meanwhile."""
    looking, look_over = threading.Event(), threading.Event()

    def is_ready() -> bool:
        looking.set()
        look_over.wait(DEADLINE_S)
        return True

    async with announced(registration, is_ready=is_ready) as (membership, proxy):
        await asyncio.to_thread(looking.wait, DEADLINE_S)
        membership.start_draining()
        look_over.set()
        await until(lambda: nodes(proxy))
        assert states(proxy) == ["draining"]
        membership.become_ready()
        assert membership.state == "draining"


async def test_one_that_looks_ready_is_announced_so() -> None:
    ready = threading.Event()
    async with announced(registration, is_ready=ready.is_set) as (_, proxy):
        await until(lambda: states(proxy) == ["starting"])
        ready.set()
        await until(lambda: states(proxy) == ["ready"])


async def test_an_incarnation_that_has_gone_is_said_bye_to_once_and_another_may_come() -> None:
    current: list[str] = ["one"]

    def describe(index: int, state: NodeState) -> Register | None:
        return registration(index, state, current[0]) if current else None

    async with announced(describe) as (membership, proxy):
        await until(lambda: [node.incarnation for node in nodes(proxy)] == ["one"])
        current.clear()
        membership.withdraw()
        await until(lambda: said_bye(proxy, "one"))
        assert not nodes(proxy)
        current.append("two")
        await until(lambda: [node.incarnation for node in nodes(proxy)] == ["two"])
    await until(lambda: said_bye(proxy, "two"))


@pytest.mark.parametrize("asked", ["never", "twice"])
async def test_a_drain_may_be_asked_for_before_it_is_ready_and_again(asked: str) -> None:
    async with announced(registration) as (membership, proxy):
        for _ in range(2 if asked == "twice" else 0):
            membership.start_draining()
        await until(lambda: states(proxy) == (["draining"] if asked == "twice" else ["starting"]))

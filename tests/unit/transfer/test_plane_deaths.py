# SPDX-License-Identifier: Apache-2.0
"""Agents that are killed and stopped, as processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import one_group
from tests.helpers.forked import Forked
from tests.unit.transfer.agent_process import OURS, THEIRS, TOKENS, consume, produce
from tests.unit.transfer.rig import Agent, assert_same_kv
from tests.unit.transfer.test_plane import BACKENDS

# Long enough that no renewal comes too late on a busy machine.
LEASE_S = 2.0


StartAgent = Callable[..., Forked]


@pytest.fixture
def start_agent() -> Iterator[StartAgent]:
    started: list[Forked] = []

    def start(main: Callable[..., None], *arguments: object) -> Forked:
        started.append(Forked(main, *arguments))
        return started[-1]

    yield start
    for agent in started:
        agent.close()


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_producer_that_was_killed_fails_its_readers_at_once(
    start_agent: StartAgent, backend: str
) -> None:
    """I5: from the broken connection, not from a timeout."""
    other = start_agent(produce, backend)
    remote, ids = other.said
    async with Agent(transfer=backend, seed=2) as decode:
        decode.plane.pull(ids[0], remote, one_group(OURS), 20.0)
        await decode.event(PullDone)
        other.kill_now()
        begun = time.monotonic()
        decode.plane.pull(ids[1], remote, one_group(OURS), 20.0)
        failed = await decode.event(PullFailed)
        assert failed.reason in ("unreachable", "read_failed")
        assert time.monotonic() - begun < 10.0
        if not failed.quiescent:
            await decode.event(PullQuiescent)


@pytest.mark.parametrize("backend", BACKENDS)
async def test_a_stopped_producer_costs_the_deadline_and_serves_again_when_it_goes_on(
    start_agent: StartAgent, backend: str
) -> None:
    other = start_agent(produce, backend)
    remote, ids = other.said
    async with Agent(transfer=backend, seed=2) as decode:
        decode.plane.pull(ids[0], remote, one_group(OURS), 20.0)
        await decode.event(PullDone)
        other.stop()
        begun = time.monotonic()
        decode.plane.pull(ids[1], remote, one_group(OURS), 0.7)
        failed = await decode.event(PullFailed)
        assert failed.reason == "deadline"
        assert time.monotonic() - begun < 10.0
        other.resume()
        if not failed.quiescent:
            await decode.event(PullQuiescent)
        decode.plane.pull(ids[2], remote, one_group(OURS), 20.0)
        await decode.event(PullDone)
        async with Agent(seed=1) as same:
            assert_same_kv(same, THEIRS, decode, OURS)


async def test_a_consumer_that_was_killed_costs_one_lease_period(
    start_agent: StartAgent,
) -> None:
    """I2. The stream is stalled, so that the reader is surely in the middle of it."""
    other = start_agent(consume, LEASE_S)
    async with Agent(seed=1, lease_s=LEASE_S, tcp_fault="stall:after=64") as prefill:
        renewed, unread = prefill.lend(THEIRS, TOKENS), prefill.lend([11], 4)
        other.tell((prefill.remote(TOKENS), renewed))
        assert (await prefill.event(LeaseEnded)).transfer_id == unread
        with pytest.raises(TimeoutError):
            await prefill.event(LeaseEnded, timeout_s=1.5 * LEASE_S)
        other.kill_now()
        ended = await prefill.event(LeaseEnded, timeout_s=LEASE_S + 1)
        assert (ended.transfer_id, ended.cause) == (renewed, "expired")
        assert prefill.plane.stats().leased == 0

# SPDX-License-Identifier: Apache-2.0
"""I3: blocks of a failed read come back when nothing can write to them any more, by force if need be."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch

from kvferry.transfer.backends.nixl.engine import NixlEngine, NixlTransfer
from kvferry.transfer.consumer.quarantine import GRACE_S, Quarantine, RebuildScheduler
from kvferry.transfer.events import PullDone, PullFailed, PullQuiescent
from kvferry.transfer.ids import TransferId
from kvferry.transfer.plane import one_group
from kvferry.transfer.ranks.messages import CancelRead, Command, Read
from kvferry.transfer.ranks.reads import RankReader
from tests.helpers.deaths import assert_within
from tests.helpers.forked import Forked
from tests.unit.transfer.agent_process import OURS, THEIRS, TOKENS, produce
from tests.unit.transfer.rig import Agent, assert_same_kv
from tests.unit.transfer.test_plane import needs_nixl

ELSEWHERE = [10, 11, 12, 13, 14]
A, B, C = (TransferId(name) for name in "abc")


def test_a_stay_that_lasts_too_long_asks_for_a_rebuild_once() -> None:
    quarantine = Quarantine(30.0, 100)
    quarantine.add(0.0, A, "nixl", 5)
    quarantine.add(10.0, B, "mori", 5)
    assert quarantine.delay(5.0) == 25.0
    assert quarantine.pop_due(29.9) == []
    assert quarantine.pop_due(30.0) == ["nixl"]
    assert quarantine.pop_due(31.0) == []
    assert quarantine.delay(31.0) == 9.0


def test_a_quarter_of_the_pool_is_the_most_that_may_stay() -> None:
    quarantine = Quarantine(30.0, 100)
    quarantine.add(0.0, A, "nixl", 20)
    quarantine.add(0.0, B, "nixl", 5)
    assert quarantine.pop_due(1.0) == []
    quarantine.add(1.0, C, "nixl", 1)
    assert quarantine.delay(1.0) == GRACE_S
    assert quarantine.pop_due(10.0 + GRACE_S) == ["nixl"]
    assert quarantine.delay(10.0 + GRACE_S) is None


def test_what_is_quiescent_within_the_grace_costs_no_engine() -> None:
    quarantine = Quarantine(30.0, 100)
    quarantine.add(0.0, A, "tcp", 50)
    quarantine.add(0.1, B, "nixl", 50)
    assert quarantine.pop_due(GRACE_S - 0.1) == []
    assert quarantine.pop_due(GRACE_S) == ["tcp"]  # the other has not stayed for so long
    quarantine.remove(B)
    assert quarantine.delay(GRACE_S) is None


def test_an_idle_backend_is_rebuilt_at_once_and_once() -> None:
    rebuilds = RebuildScheduler(30.0)
    rebuilds.request(1.0, "mori")
    rebuilds.request(1.5, "mori")
    assert rebuilds.pop_due(2.0, ()) == ["mori"]
    assert not rebuilds
    assert rebuilds.pop_due(99.0, ()) == []


def test_reads_under_way_may_end_first_within_a_limit() -> None:
    rebuilds = RebuildScheduler(30.0)
    rebuilds.request(1.0, "mori")
    assert rebuilds.pop_due(30.9, {"mori", "tcp"}) == []
    assert rebuilds.pop_due(31.0, {"mori"}) == ["mori"]


def test_what_breaks_again_at_once_does_not_end_everybody_elses_reads_each_time() -> None:
    rebuilds = RebuildScheduler(30.0)
    rebuilds.request(1.0, "mori")
    rebuilds.pop_due(1.0, ())
    rebuilds.request(2.0, "mori")
    assert rebuilds.pop_due(30.9, ()) == []
    assert rebuilds.pop_due(31.0, ()) == ["mori"]


def test_what_became_quiescent_asks_for_nothing() -> None:
    quarantine = Quarantine(30.0, 100)
    quarantine.add(0.0, A, "nixl", 50)
    quarantine.remove(A)
    quarantine.remove(A)
    assert len(quarantine) == 0
    assert quarantine.pop_due(99.0) == []


async def test_a_large_pull_that_was_cancelled_leaves_the_others_their_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ranks give it up at once, but they say so only after we have."""
    handle, loop = RankReader.handle, asyncio.get_running_loop()
    reads: asyncio.Queue[str] = asyncio.Queue()

    def handle_late(links: RankReader, command: Command) -> None:
        if isinstance(command, CancelRead):
            time.sleep(0.05)
        handle(links, command)
        if isinstance(command, Read):
            loop.call_soon_threadsafe(reads.put_nowait, command.transfer_id)

    monkeypatch.setattr(RankReader, "handle", handle_late)
    stalls, slow = Agent(seed=1, tcp_fault="stall:after=64"), Agent(seed=3, tcp_fault="delay:seconds=1")
    async with stalls, slow, Agent(seed=2, num_blocks=16) as decode:
        cancelled, other = stalls.lend(THEIRS, TOKENS), slow.lend([9], 4)
        decode.plane.pull(cancelled, stalls.remote(TOKENS), one_group(OURS), 20.0)
        decode.plane.pull(other, slow.remote(4), one_group([10]), 20.0)
        async with asyncio.timeout(10.0):
            assert {await reads.get(), await reads.get()} == {cancelled, other}
        decode.plane.cancel(cancelled)
        assert not (await decode.event(PullFailed)).quiescent
        assert (await decode.event(PullDone)).transfer_id == other
        await decode.event(PullQuiescent)
        assert decode.plane.stats().rebuilds == 0


class Stopped:
    """A decode agent whose producer was stopped as it began to read into `OURS`, and that cancelled."""

    def __init__(self, decode: Agent, producer: Forked, failed: PullFailed) -> None:
        self.decode = decode
        self.producer = producer
        self.failed = failed


@asynccontextmanager
async def stopped(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> AsyncIterator[Stopped]:
    # Over shared memory UCX reads the stopped process all the same; over sockets that process takes part.
    monkeypatch.setenv("UCX_TLS", "tcp")
    producer = Forked(produce, "nixl")
    try:
        async with Agent(transfer="nixl", seed=2, **settings) as decode:
            remote, ids = producer.said
            decode.plane.pull(ids[0], remote, one_group(ELSEWHERE), 20.0)
            await decode.event(PullDone)
            read, reading, loop = NixlEngine.read, asyncio.Event(), asyncio.get_running_loop()

            def stop_and_read(*arguments: Any) -> NixlTransfer:
                producer.stop()
                posted = read(*arguments)
                loop.call_soon_threadsafe(reading.set)
                return posted

            monkeypatch.setattr(NixlEngine, "read", stop_and_read)
            decode.plane.pull(ids[1], remote, one_group(OURS), 20.0)
            async with asyncio.timeout(20.0):
                await reading.wait()
            # Not a deadline: on a busy machine it could come before the read.
            decode.plane.cancel(ids[1])
            failed = await decode.event(PullFailed)
            monkeypatch.setattr(NixlEngine, "read", read)
            yield Stopped(decode, producer, failed)
    finally:
        producer.close()


@needs_nixl
@pytest.mark.parametrize("how", [signal.SIGCONT, signal.SIGKILL])
async def test_a_quarantine_ends_within_a_second_of_the_peers_resuming_or_dying(
    monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    async def end_s() -> float:
        async with stopped(monkeypatch) as case:
            assert not case.failed.quiescent
            assert case.decode.plane.stats().quarantined == 1
            with pytest.raises(TimeoutError):
                await case.decode.event(PullQuiescent, timeout_s=0.5)
            begun = time.monotonic()
            case.producer.signal(how)
            quiescent = await case.decode.event(PullQuiescent)
            took = time.monotonic() - begun
            assert quiescent.transfer_id == case.failed.transfer_id
            assert case.decode.plane.stats().quarantined == case.decode.plane.stats().rebuilds == 0
            return took

    await assert_within(end_s, 1.0)


@needs_nixl
@pytest.mark.parametrize(
    ("settings", "within_s"),
    [({"quarantine_s": 0.5}, 10.0), ({"quarantine_s": 30.0, "num_blocks": 16}, 10.0 + GRACE_S)],
    ids=["too old", "too large"],
)
async def test_a_rebuilt_engine_writes_nothing_into_blocks_that_are_used_again(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], within_s: float
) -> None:
    """The writer is stopped, its destination is wanted again, and then the writer goes on."""
    async with stopped(monkeypatch, **settings) as case:
        decode, producer = case.decode, case.producer
        begun = time.monotonic()
        assert not case.failed.quiescent
        await decode.event(PullQuiescent, timeout_s=within_s)
        assert time.monotonic() - begun < within_s
        assert decode.plane.stats().rebuilds == 1
        pattern = torch.full_like(decode.pools[0][OURS], 7.0)
        decode.pools[0][OURS] = pattern
        producer.resume()
        await asyncio.sleep(0.5)
        async with Agent(seed=3, transfer="nixl") as other:  # the stopped one's UCX may not survive our end
            transfer_id = other.lend(THEIRS, TOKENS)
            decode.plane.pull(transfer_id, other.remote(TOKENS), one_group(ELSEWHERE), 10.0)
            assert (await decode.event(PullDone)).backend == "nixl"
            assert_same_kv(other, THEIRS, decode, ELSEWHERE)
        assert torch.equal(decode.pools[0][OURS], pattern)

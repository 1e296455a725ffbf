# SPDX-License-Identifier: Apache-2.0
"""Whole transfer planes over mori, on the stand-in."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack

import pytest

from kvferry.transfer.events import PullDone, PullFailed, PullQuiescent
from kvferry.transfer.plane import one_group
from tests.standins import mori_io
from tests.unit.transfer.backends.mori.rig import FIRST, fault
from tests.unit.transfer.rig import Agent, assert_same_kv, idle_cost, thread_seconds
from tests.unit.transfer.test_plane import OURS, THEIRS, TOKENS


@pytest.fixture(autouse=True)
def standin() -> Iterator[None]:
    with mori_io.on_path():
        yield


@pytest.mark.parametrize(("producer_tp", "consumer_tp"), [(1, 1), (2, 2), (1, 2), (2, 1)])
async def test_a_pull_moves_exactly_the_prompts_kv(producer_tp: int, consumer_tp: int) -> None:
    async with (
        Agent(seed=1, transfer="mori", tp_size=producer_tp) as prefill,
        Agent(seed=2, transfer="mori", tp_size=consumer_tp) as decode,
    ):
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "mori"
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_auto_takes_mori_where_it_works_and_does_without_where_it_does_not() -> None:
    async with Agent(seed=1, transfer="auto") as prefill, Agent(seed=2, transfer="auto") as decode:
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "mori"
    with fault("topology"):
        async with Agent(seed=1, transfer="auto") as prefill:
            assert "mori" not in prefill.plane.transfers
            assert "tcp" in prefill.plane.transfers


async def test_a_broken_queue_pair_fails_one_pull_and_the_next_takes_another_backend() -> None:
    """I5: MORI cannot repair it, so a reader that insisted on it would never get anything again."""
    with fault(f"fail:after={FIRST}"):  # which the child that tries first does not come to
        decode = Agent(seed=2, transfer="auto")
        async with Agent(seed=1, transfer="auto") as prefill, decode:
            for _ in range(3):
                decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
                ended = await decode.event((PullDone, PullFailed))
                if isinstance(ended, PullFailed):
                    break
            assert (ended.reason, ended.detail) == ("read_failed", "peer_lost")
            if not ended.quiescent:
                await decode.event(PullQuiescent)
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            assert (await decode.event(PullDone)).backend != "mori"
            assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_refused_queue_pair_has_the_engine_opened_anew_and_the_peer_is_read_again() -> None:
    """Nothing but mori is allowed here, so without a new engine every pull would fail from then on."""
    options = {"transfer": "mori", "transfer_options": "mori.qp_per_transfer=1"}
    async with Agent(seed=1, **options) as prefill, AsyncExitStack() as stack:
        decode = Agent(seed=2, **options)
        with fault(f"fail:after={FIRST}"):  # which the child that tries first does not come to
            await stack.enter_async_context(decode)
        reasons = []
        while not decode.plane.stats().rebuilds:
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            ended = await decode.event((PullDone, PullFailed))
            if isinstance(ended, PullFailed):
                reasons.append(ended.reason)
                if not ended.quiescent:
                    await decode.event(PullQuiescent)
        assert reasons[:2] == ["read_failed", "unreachable"]
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "mori"
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_read_past_its_deadline_keeps_its_blocks_in_quarantine_until_it_ends() -> None:
    """I3."""
    options = {"transfer": "mori", "transfer_options": "mori.qp_per_transfer=1"}
    async with Agent(seed=1, **options) as prefill:
        with fault(f"stall:seconds=3,after={FIRST}"):
            decode = Agent(seed=2, **options)
            async with decode:
                # Its deadline has to come after the read has begun, on a busy machine too.
                decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 2.0)
                failed = await decode.event(PullFailed)
                assert "deadline" in (failed.reason, failed.detail)  # the pull's, or its read's
                assert not failed.quiescent
                assert decode.plane.stats().quarantined == 1
                await decode.event(PullQuiescent)
                assert decode.plane.stats().quarantined == 0


async def test_a_rebuilt_engine_ends_what_would_not_end_and_reads_again() -> None:
    """I3: MORI cannot cancel, so only the end of its engine ends a read that hangs."""
    options = {"transfer": "mori", "transfer_options": "mori.qp_per_transfer=1"}
    async with Agent(seed=1, **options) as prefill, AsyncExitStack() as stack:
        decode = Agent(seed=2, quarantine_s=0.3, **options)
        with fault(f"stall:seconds=60,after={FIRST + 1}"):  # the second pull
            await stack.enter_async_context(decode)
        for _ in range(2):
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 2.0)
            ended = await decode.event((PullDone, PullFailed))
        assert isinstance(ended, PullFailed)
        assert not ended.quiescent
        await decode.event(PullQuiescent, timeout_s=15.0)
        assert decode.plane.stats().rebuilds == 1
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "mori"
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_an_idle_plane_costs_next_to_nothing() -> None:
    """R24, but for the thread that the real library itself keeps spinning. Two of them are here."""
    others = thread_seconds().keys() - {threading.get_native_id()}
    async with Agent(seed=1, transfer="mori") as prefill, Agent(seed=2, transfer="mori") as decode:
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        await asyncio.sleep(0.3)
        assert await idle_cost(others) / 2 < 0.05

# SPDX-License-Identifier: Apache-2.0
"""Two transfer planes that move real blocks, and every way in which that can end."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from itertools import pairwise
from typing import Any

import msgspec
import pytest
import torch

from kvferry.transfer.backends.tcp.peer import TcpPeer
from kvferry.transfer.connector import SchedulerConnector
from kvferry.transfer.control import messages as wire
from kvferry.transfer.engine import PeerUnreachable, usable
from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed, PullQuiescent
from kvferry.transfer.ids import DuplicateTransfer, new_transfer_id
from kvferry.transfer.layout import KVGeometry, Layers
from kvferry.transfer.plane import one_group
from kvferry.transfer.producer.lease import LeaseTable
from kvferry.transfer.ranks.channel import RankSocket
from kvferry.transfer.sampled_tokens import SampledToken, SampledTokens
from tests.helpers.deaths import assert_within
from tests.helpers.waiting import until
from tests.unit.transfer.rig import GEOMETRY, NUM_BLOCKS, Agent, assert_same_kv

THEIRS = [3, 4, 5, 9, 1]
OURS = [20, 21, 22, 7, 30]
TOKENS = 18


def needs(backend: str) -> pytest.MarkDecorator:
    """Skips where the backend does not work."""
    verdict = usable(backend)
    return pytest.mark.skipif(not verdict.ok, reason=verdict.reason)


needs_nixl = needs("nixl")
BACKENDS = [
    "tcp",
    pytest.param("nixl", marks=needs_nixl),
    pytest.param("mooncake", marks=needs("mooncake")),
    pytest.param("nccl", marks=needs("nccl")),
]


async def arrived(producer: Agent, theirs: int, consumer: Agent, ours: int) -> None:
    """Wait until a block is there."""
    await until(lambda: producer.heads(theirs).equal(consumer.heads(ours)), 10.0)


@pytest.mark.parametrize("transfer", BACKENDS)
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (2, 2), (1, 2), (2, 1), (4, 1), (1, 4)])
async def test_blocks_arrive_byte_for_byte_at_every_tp_ratio(
    transfer: str, prefill_tp: int, decode_tp: int
) -> None:
    async with (
        Agent(tp_size=prefill_tp, transfer=transfer, seed=1) as prefill,
        Agent(tp_size=decode_tp, transfer=transfer, seed=2) as decode,
    ):
        before = decode.heads(0).clone()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        done = await decode.event(PullDone)
        ended = await prefill.event(LeaseEnded)
        assert (done.transfer_id, done.backend) == (transfer_id, transfer)
        assert done.nbytes == len(OURS) * 4 * GEOMETRY.head_block_bytes
        assert (ended.transfer_id, ended.cause) == (transfer_id, "released")
        assert_same_kv(prefill, THEIRS, decode, OURS)
        assert decode.heads(0).equal(before)
        assert prefill.plane.stats().leased == 0


async def test_a_pull_that_ends_well_leaves_no_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """L19: what is worth a line is the request's, and its agent writes it."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        decode.plane.pull(prefill.lend([9], 4), prefill.remote(4), one_group([30]), 10.0)
        await decode.event(PullDone)
        caplog.clear()
        with caplog.at_level("INFO"):
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            await decode.event(PullDone)
    assert [record for record in caplog.records if record.name.startswith("kvferry.transfer")] == []


async def test_blocks_that_are_cached_are_not_pulled() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        before = decode.heads(OURS[1]).clone()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS, 2), 10.0)
        done = await decode.event(PullDone)
        assert done.nbytes == 3 * 4 * GEOMETRY.head_block_bytes
        assert_same_kv(prefill, THEIRS[2:], decode, OURS[2:])
        assert decode.heads(OURS[1]).equal(before)


async def test_a_full_prefix_hit_pulls_nothing_and_releases() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS, len(OURS)), 10.0)
        assert (await decode.event(PullDone)).nbytes == 0
        assert (await prefill.event(LeaseEnded)).cause == "released"


async def test_a_pull_that_comes_before_the_prefill_reads_each_chunk_as_it_is_computed() -> None:
    """A3: an early open is staged, and settled when the prefill registers."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = new_transfer_id()
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await asyncio.sleep(0.1)
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.advance(transfer_id, 2)
        await arrived(prefill, THEIRS[1], decode, OURS[1])
        assert_same_kv(prefill, THEIRS[:2], decode, OURS[:2])
        assert not decode.plane.take_events()
        prefill.plane.ready(transfer_id)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


@pytest.mark.parametrize("verify", [False, True])
async def test_a_pull_that_has_every_block_waits_for_the_word_that_the_prompt_is_ready(verify: bool) -> None:
    async with Agent(seed=1, verify_kv=verify) as prefill, Agent(seed=2, verify_kv=verify) as decode:
        transfer_id = new_transfer_id()
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        prefill.plane.advance(transfer_id, len(THEIRS))
        await arrived(prefill, THEIRS[-1], decode, OURS[-1])
        assert not decode.plane.take_events()
        prefill.plane.ready(transfer_id)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


@pytest.mark.parametrize("verify", [False, True])
async def test_a_reader_that_came_first_gets_the_first_tokens_with_the_last_blocks(verify: bool) -> None:
    """Also where blocks become readable only once they are summed."""
    first = SampledTokens(choices=(SampledToken(id=7, logprob=-0.5), SampledToken(id=8, finish="stop")))
    async with Agent(seed=1, verify_kv=verify) as prefill, Agent(seed=2, verify_kv=verify) as decode:
        transfer_id = new_transfer_id()
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0, "hash")
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.advance(transfer_id, 2)
        prefill.plane.ready(transfer_id, first)
        assert (await decode.event(PullDone)).first_tokens == first
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_an_id_that_another_producer_uses_again_is_a_transfer_of_its_own() -> None:
    """I2: what was said of the first one's reads is not about the second's."""
    async with Agent(seed=1) as one, Agent(seed=3) as other, Agent(seed=2) as decode:
        transfer_id = one.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, one.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        other.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        other.plane.ready(transfer_id)
        decode.plane.pull(transfer_id, other.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert_same_kv(other, THEIRS, decode, OURS)


async def test_a_producer_lost_while_our_ranks_connect_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connecting = threading.Event()

    def poll(peer: TcpPeer) -> bool:
        connecting.set()
        return False

    monkeypatch.setattr(TcpPeer, "poll", poll)
    async with Agent(seed=2) as decode:
        async with Agent(seed=1) as prefill:
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            assert await asyncio.to_thread(connecting.wait, 5.0)
        assert (await decode.event(PullFailed)).reason == "unreachable"
        decode.plane.check_integrity()


async def test_another_prompt_under_the_same_id_is_noticed_before_anything_is_read() -> None:
    """A reader that encoded the prompt itself compares its hash with the producer's."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        before = decode.heads(OURS[0]).clone()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0, "another")
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("mismatch", True)
        assert decode.heads(OURS[0]).equal(before)
        assert (await prefill.event(LeaseEnded)).cause == "released"


async def test_a_prefill_may_outlast_the_time_that_moving_may_take() -> None:
    """I5: both have their deadlines, one after the other."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        slow, dead = new_transfer_id(), new_transfer_id()
        decode.plane.pull(slow, prefill.remote(TOKENS), one_group(OURS), 1.0, fill_s=30.0)
        decode.plane.pull(dead, prefill.remote(4), one_group([15]), 1.0, fill_s=0.3)
        prefill.plane.register(slow, one_group(THEIRS), TOKENS, "hash", 30.0)
        failed = await decode.event(PullFailed)
        assert (failed.transfer_id, failed.reason) == (dead, "deadline")
        prefill.plane.ready(slow)
        assert (await decode.event(PullDone)).transfer_id == slow


async def test_once_the_prefill_has_ended_moving_may_take_no_longer_than_it_may() -> None:
    """Even if the rank that reads has stopped to say anything."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        known = prefill.lend([11], 4)
        decode.plane.pull(known, prefill.remote(4), one_group([12]), 10.0)
        await decode.event(PullDone)
        decode.workers[0].close()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 0.3, fill_s=600.0)
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("deadline", False)


async def test_a_producer_without_room_for_early_readers_is_not_asked_without_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """R24: its answer is `pending` at once, so the reader paces itself, and still gets its blocks."""
    asked: list[float] = []
    take = LeaseTable.open

    def counted(table: LeaseTable, now: float, *rest: Any) -> Any:
        asked.append(now)
        return take(table, now, *rest)

    monkeypatch.setattr(LeaseTable, "open", counted)
    async with Agent(seed=1, max_staged=0) as prefill, Agent(seed=2) as decode:
        transfer_id = new_transfer_id()
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await until(lambda: len(asked) >= 4, 10.0)
        pauses = [later - earlier for earlier, later in pairwise(asked)]
        assert all(pause > 0.9 * least for pause, least in zip(pauses, (0.02, 0.04, 0.08), strict=False))
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.ready(transfer_id)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_concurrent_first_contacts_make_exactly_one_handshake() -> None:
    """R30, X15: the first transfer makes the link; the others share its handshake."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        ids = [prefill.lend([block], 4) for block in range(12)]
        for place, transfer_id in enumerate(ids):
            decode.plane.pull(transfer_id, prefill.remote(4), one_group([place + 15]), 10.0)
        done = {(await decode.event(PullDone)).transfer_id for _ in ids}
        assert done == set(ids)
        assert_same_kv(prefill, list(range(12)), decode, list(range(15, 27)))
        assert (prefill.plane.stats().handshakes, decode.plane.stats().handshakes) == (1, 1)


async def test_a_held_transfer_does_not_inherit_the_connection_that_another_broke() -> None:
    async with Agent(seed=1, tcp_fault="drop:count=1") as prefill, Agent(seed=2) as decode:
        held, unlucky = prefill.lend(THEIRS, TOKENS), prefill.lend([11], 4)
        decode.plane.hold(held, prefill.remote(TOKENS), 10.0)
        decode.plane.pull(unlucky, prefill.remote(4), one_group([12]), 10.0)
        assert (await decode.event(PullFailed)).reason == "read_failed"
        decode.plane.pull(held, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).transfer_id == held
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_lease_that_is_not_renewed_expires_by_itself() -> None:
    """X7: no reader, no request, and the blocks come back all the same."""

    async def end_s() -> float:
        async with Agent(lease_s=0.3) as prefill:
            begun = time.monotonic()
            transfer_id = prefill.lend(THEIRS, TOKENS)
            assert prefill.plane.stats().leased == 1
            ended = await prefill.event(LeaseEnded)
            assert (ended.transfer_id, ended.cause) == (transfer_id, "expired")
            return time.monotonic() - begun

    await assert_within(end_s, 1.3)


async def test_a_held_lease_outlives_its_period_and_ends_when_the_hold_does() -> None:
    async with Agent(lease_s=2.0, seed=1) as prefill, Agent(lease_s=2.0, seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.hold(transfer_id, prefill.remote(TOKENS), 10.0)
        with pytest.raises(TimeoutError):
            await prefill.event(LeaseEnded, timeout_s=3.0)
        decode.plane.cancel(transfer_id)
        assert (await prefill.event(LeaseEnded)).cause == "dropped"
        assert not decode.plane.take_events()


async def test_a_hold_becomes_a_pull() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.hold(transfer_id, prefill.remote(TOKENS), 10.0)
        with pytest.raises(DuplicateTransfer):
            decode.plane.hold(transfer_id, prefill.remote(TOKENS), 10.0)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        with pytest.raises(DuplicateTransfer):
            decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)


async def test_a_lease_never_outlives_its_request() -> None:
    async with Agent(lease_s=5.0, seed=1) as prefill, Agent(lease_s=5.0, renew_s=0.1, seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS, timeout_s=0.5)
        decode.plane.hold(transfer_id, prefill.remote(TOKENS), 10.0)
        assert (await prefill.event(LeaseEnded, timeout_s=4.0)).cause == "expired"


async def test_a_long_read_of_a_producer_whose_leases_are_shorter_than_ours() -> None:
    """What it grants says how often to renew it, not the reader's own setting."""
    async with (
        Agent(lease_s=1.5, seed=1, tcp_fault="delay:seconds=3") as prefill,
        Agent(lease_s=10.0, seed=2) as decode,
    ):
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert isinstance(await decode.event(PullDone), PullDone)
        assert (await prefill.event(LeaseEnded)).cause == "released"


async def test_an_early_lease_end_reaches_the_reader_as_the_reason() -> None:
    async with Agent(lease_s=0.2, seed=1) as prefill, Agent(seed=2) as decode:
        expired = prefill.lend(THEIRS, TOKENS)
        await prefill.event(LeaseEnded)
        decode.plane.pull(expired, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("lease_expired", True)


async def test_a_dropped_lease_is_gone_and_dropping_again_changes_nothing() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        assert prefill.plane.drop(transfer_id)
        assert not prefill.plane.drop(transfer_id)
        assert [event.cause for event in prefill.plane.take_events()] == ["dropped"]
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullFailed)).reason == "lease_dropped"


async def test_a_drop_that_overtakes_its_prefill_ends_the_lease_at_registration() -> None:
    async with Agent() as prefill:
        transfer_id = new_transfer_id()
        assert not prefill.plane.drop(transfer_id)
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        assert (await prefill.event(LeaseEnded)).cause == "dropped"
        assert prefill.plane.stats().leased == 0


async def test_a_failed_prefill_fails_the_waiting_reader_and_says_nothing_to_its_own_scheduler() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = new_transfer_id()
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.advance(transfer_id, 1)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await arrived(prefill, THEIRS[0], decode, OURS[0])
        prefill.plane.withdraw(transfer_id)
        assert (await decode.event(PullFailed)).reason == "lease_withdrawn"
        assert not prefill.plane.take_events()


async def test_no_end_of_a_lease_is_reported_after_the_scheduler_withdrew_it() -> None:
    """I2: an event that was already queued would free the blocks a second time."""
    async with Agent() as prefill:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        prefill.plane.drop(transfer_id)
        prefill.plane.withdraw(transfer_id)
        assert not prefill.plane.take_events()


async def test_a_transfer_id_is_never_registered_twice() -> None:
    async with Agent() as prefill:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        with pytest.raises(DuplicateTransfer):
            prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.drop(transfer_id)
        with pytest.raises(DuplicateTransfer):
            prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)


async def test_the_second_reader_of_a_lease_is_turned_away() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as first, Agent(seed=3) as second:
        transfer_id = new_transfer_id()
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.advance(transfer_id, 1)
        first.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await arrived(prefill, THEIRS[0], first, OURS[0])
        second.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await second.event(PullFailed)).reason == "lease_finished"
        prefill.plane.ready(transfer_id)
        await first.event(PullDone)


async def test_a_reader_that_dies_costs_one_lease_period() -> None:
    """I2. The reader's plane is torn down with its pull half way."""
    async with Agent(lease_s=2.0, seed=1, tcp_fault="stall:after=64") as prefill:
        async with Agent(lease_s=2.0, seed=2) as decode:
            transfer_id = prefill.lend(THEIRS, TOKENS)
            decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
            with pytest.raises(TimeoutError):
                await prefill.event(LeaseEnded, timeout_s=3.0)
        assert (await prefill.event(LeaseEnded, timeout_s=3.0)).cause == "expired"


async def test_another_incarnation_at_the_same_address_is_not_taken_for_the_old_one() -> None:
    """X23: nothing known about the dead agent is used for the one in its place."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        old = prefill.remote(TOKENS, engine_id="0123456789abcdef")
        decode.plane.pull(transfer_id, old, one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert failed.reason == "incarnation"
        assert prefill.config.incarnation in failed.detail


async def test_a_restarted_producer_is_met_anew() -> None:
    """X23, R30: its old link is dropped, and a pull from the new life works at once."""
    async with Agent(seed=2) as decode:
        async with Agent(seed=1) as prefill:
            port = prefill.plane.control_port
            transfer_id = prefill.lend(THEIRS, TOKENS)
            decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
            await decode.event(PullDone)
            stale = prefill.lend(THEIRS, TOKENS)
            remembered = prefill.remote(TOKENS)
        async with Agent(seed=3, control_port=port) as reborn:
            decode.plane.pull(stale, remembered, one_group(OURS), 10.0)
            fresh = reborn.lend(THEIRS, TOKENS)
            decode.plane.pull(fresh, reborn.remote(TOKENS), one_group(OURS), 10.0)
            assert (await decode.event(PullFailed)).reason in ("incarnation", "unreachable")
            assert (await decode.event(PullDone)).transfer_id == fresh
            assert_same_kv(reborn, THEIRS, decode, OURS)


async def test_an_address_without_a_listener_fails_at_once() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            remote = prefill.remote(TOKENS, port=unused.getsockname()[1])
        decode.plane.pull(new_transfer_id(), remote, one_group(OURS), 10.0)
        failed = await decode.event(PullFailed, timeout_s=5.0)
        assert (failed.reason, failed.quiescent) == ("unreachable", True)


async def test_an_address_that_makes_no_sense_fails_the_pull_and_nothing_else() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        decode.plane.pull(
            new_transfer_id(), prefill.remote(TOKENS, host="no such host"), one_group(OURS), 2.0
        )
        assert (await decode.event(PullFailed)).reason in ("unreachable", "deadline")


async def test_a_name_that_is_not_resolved_delays_no_other_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZMQ would resolve it on the I/O thread that renewals and releases of every other pull go through."""
    answered, getaddrinfo = threading.Event(), socket.getaddrinfo
    names: list[object] = []

    def look_up(host: object, *arguments: Any, **options: Any) -> Any:
        if host == "slow.invalid":
            names.append(host)
            answered.wait(30.0)
        return getaddrinfo(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        slow = new_transfer_id()
        decode.plane.pull(slow, prefill.remote(TOKENS, host="slow.invalid"), one_group(OURS), 10.0)
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert names == ["slow.invalid"]
        answered.set()
        failed = await decode.event(PullFailed)
        assert (failed.transfer_id, failed.reason) == (slow, "unreachable")


async def test_a_producer_may_be_addressed_by_name() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        remote = prefill.remote(TOKENS, host="localhost")
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), remote, one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_listener_that_never_answers_runs_into_the_deadline() -> None:
    """X13: a handshake has a deadline."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
            remote = prefill.remote(TOKENS, port=silent.getsockname()[1])
            decode.plane.pull(new_transfer_id(), remote, one_group(OURS), 0.5)
            assert (await decode.event(PullFailed, timeout_s=4.0)).reason == "deadline"


def other_geometry(**changes: Any) -> KVGeometry:
    values = {name: getattr(GEOMETRY, name) for name in KVGeometry.__struct_fields__}
    return KVGeometry(**{**values, **changes})


@pytest.mark.parametrize(
    ("field", "ours", "theirs"),
    [
        ("block_size", 4, 8),
        ("num_layers", 3, 2),
        ("rope", "default:10000", "default:500000"),
        ("head_dim", 8, 16),
    ],
)
async def test_another_layout_is_refused_with_both_values(field: str, ours: object, theirs: object) -> None:
    """L21: nothing is written before both sides know that they mean the same bytes."""
    async with (
        Agent(seed=1, geometry=other_geometry(**{field: theirs})) as prefill,
        Agent(seed=2) as decode,
    ):
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert failed.reason == "refused"
        assert field in failed.detail
        assert str(ours) in failed.detail
        assert str(theirs) in failed.detail


@pytest.mark.parametrize("theirs", [(4, 5), (9, 9)])
async def test_a_consumer_without_a_version_in_common_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, theirs: tuple[int, int]
) -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        monkeypatch.setattr("kvferry.transfer.consumer.link.VERSIONS", theirs)
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert failed.reason == "refused"
        assert failed.detail == f"version: theirs {wire.VERSIONS}, ours {theirs}"


@pytest.mark.parametrize(
    ("changes", "detail"),
    [
        ({"heads_start": 2}, "no rank of theirs has head 0"),
        ({"num_blocks": NUM_BLOCKS - 1}, f"not every rank has {NUM_BLOCKS} blocks"),
        ({"planes": 1}, "planes: theirs 1, ours 2"),
        ({"unit_bytes": 4}, "unit_bytes: theirs 4"),
        ({"names": (b"a", b"b", b"c")}, "no rank of theirs has the layer 0000"),
        ({"groups": ((), ())}, "KV-cache groups: theirs 2, ours 1"),
    ],
)
async def test_a_placement_that_makes_no_sense_is_refused(changes: dict[str, Any], detail: str) -> None:
    """What a producer says of its memory is checked before anything is read from there."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        hellos = prefill.plane._ranks._hellos
        placement = hellos[0].placement
        if changes.keys() <= set(Layers.__struct_fields__):
            changes = {"groups": ((msgspec.structs.replace(placement.only_layers, **changes),),)}
        placement = msgspec.structs.replace(placement, **changes)
        hellos[0] = msgspec.structs.replace(hellos[0], placement=placement)
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert failed.reason == "refused" and detail in failed.detail


async def test_other_weights_are_refused() -> None:
    async with Agent(seed=1, weights="other") as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.detail) == ("refused", "weights: theirs other, ours w")


async def test_a_producer_that_refused_us_is_not_asked_again() -> None:
    async with Agent(seed=1, weights="other") as prefill, Agent(seed=2) as decode:
        held = prefill.lend([9], 4)
        decode.plane.hold(held, prefill.remote(4), 10.0)
        for _ in range(2):
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
            assert (await decode.event(PullFailed)).reason == "refused"
        assert decode.plane.stats().refusals == {prefill.config.incarnation: "weights: theirs other, ours w"}
        decode.plane.cancel(held)


async def test_another_incarnation_at_the_address_is_remembered_as_a_refusal() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        remote = prefill.remote(TOKENS, engine_id="of-an-earlier-life")
        decode.plane.pull(new_transfer_id(), remote, one_group(OURS), 10.0)
        assert (await decode.event(PullFailed)).reason == "incarnation"
        (why,) = decode.plane.stats().refusals.values()
        assert prefill.config.incarnation in why and "of-an-earlier-life" in why


class Forwarder:
    """Stands between a reader and a producer's control channel. Connections it has may be forgotten."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._server: asyncio.Server | None = None
        self._pumps: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> int:
        """The port to dial."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def __aexit__(self, *error: object) -> None:
        assert self._server is not None
        self._server.close()
        self.forget()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)

    def forget(self) -> None:
        """Like a firewall: nothing passes any more, and no error is reported."""
        for pump in self._pumps:
            pump.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, there_writer]
        for pair in ((reader, there_writer), (there_reader, writer)):
            self._pumps.append(asyncio.create_task(self._pump(*pair)))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(4096):
            writer.write(data)
            await writer.drain()


async def test_a_connection_that_only_fell_silent_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.transfer.consumer.link.RESPONSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvferry.transfer.consumer.consumer._OPEN_WAIT_S", 0.1)
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        forwarder = Forwarder(prefill.plane.control_port)
        async with forwarder as port:
            ends: list[type[object]] = []
            for _ in range(3):
                remote = prefill.remote(TOKENS, port=port)
                decode.plane.pull(prefill.lend(THEIRS, TOKENS), remote, one_group(OURS), 10.0)
                ended = await decode.event((PullDone, PullFailed))
                ends.append(type(ended))
                if len(ends) == 1:
                    forwarder.forget()
            assert ends == [PullDone, PullFailed, PullDone]
            assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_read_from_a_host_that_is_down_ends_long_before_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """W1: no connection breaks, but leases are not renewed. Its blocks may still be written to."""
    monkeypatch.setattr("kvferry.transfer.consumer.link.RESPONSE_TIMEOUT_S", 0.3)
    monkeypatch.setattr("kvferry.transfer.consumer.link.MAX_SILENCE_S", 0.5)
    async with (
        Agent(seed=1, lease_s=0.6, tcp_fault="delay:seconds=20") as prefill,
        Agent(seed=2, lease_s=0.6) as decode,
    ):
        forwarder = Forwarder(prefill.plane.control_port)
        async with forwarder as port:
            remote = prefill.remote(TOKENS, port=port)
            decode.plane.pull(prefill.lend(THEIRS, TOKENS), remote, one_group(OURS), 60.0)
            await asyncio.sleep(2.0)
            assert not decode.events, "it is renewed, and goes on"
            forwarder.forget()
            failed = await decode.event(PullFailed, timeout_s=4.0)
            assert failed.reason == "unreachable" and "no response" in failed.detail
            if not failed.quiescent:
                await decode.event(PullQuiescent, timeout_s=10.0)


async def test_a_held_transfer_moves_to_the_connection_that_replaces_a_silent_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Or else its renewals would go nowhere, and its lease would end."""
    monkeypatch.setattr("kvferry.transfer.consumer.link.RESPONSE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("kvferry.transfer.consumer.consumer._OPEN_WAIT_S", 0.05)
    async with Agent(seed=1, lease_s=4.0) as prefill, Agent(seed=2, lease_s=4.0) as decode:
        forwarder = Forwarder(prefill.plane.control_port)
        async with forwarder as port:
            held, remote = prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS, port=port)
            decode.plane.hold(held, remote, 30.0)
            decode.plane.pull(prefill.lend([9], 4), prefill.remote(4, port=port), one_group([10]), 10.0)
            await decode.event(PullDone)
            forwarder.forget()
            decode.plane.pull(prefill.lend([11], 4), prefill.remote(4, port=port), one_group([12]), 10.0)
            await decode.event(PullFailed)
            with pytest.raises(TimeoutError):  # but a lease that is not renewed ends
                while (await prefill.event(LeaseEnded, timeout_s=5.0)).transfer_id != held:
                    pass
            decode.plane.pull(held, remote, one_group(OURS), 10.0)
            await decode.event(PullDone)
            assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_wrong_address_for_an_incarnation_costs_only_those_who_give_it() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=3) as other, Agent(seed=2) as decode:
        wrong = prefill.remote(TOKENS, port=other.plane.control_port)
        decode.plane.pull(new_transfer_id(), wrong, one_group(OURS), 10.0)
        assert (await decode.event(PullFailed)).reason == "incarnation"
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


@needs_nixl
async def test_agents_without_a_backend_in_common_refuse_each_other() -> None:
    async with Agent(seed=1, transfer="nixl") as prefill, Agent(seed=2, transfer="tcp") as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullFailed)).detail == "transfers: theirs nixl, ours tcp"


@needs_nixl
async def test_auto_takes_the_best_backend_that_both_have() -> None:
    async with Agent(seed=1, transfer="auto") as prefill, Agent(seed=2, transfer="auto") as decode:
        assert decode.plane.transfers == ("nixl", "tcp")
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "nixl"
    async with Agent(seed=1, transfer="auto") as prefill, Agent(seed=2, transfer="tcp") as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "tcp"


@pytest.mark.parametrize("fault", ["drop:after=100", "truncate:after=100", "stall:after=100"])
@pytest.mark.parametrize("decode_tp", [1, 2])
async def test_a_broken_stream_fails_the_pull_frees_the_lease_and_the_next_pull_works(
    fault: str, decode_tp: int
) -> None:
    """X11, X12: a transfer is done only if all of it arrived, and a broken one never parks its request."""
    async with (
        Agent(seed=1, tcp_fault=f"{fault},count=1") as prefill,
        Agent(seed=2, tp_size=decode_tp) as decode,
    ):
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 1.0)
        failed = await decode.event(PullFailed)
        assert failed.reason in ("read_failed", "deadline")
        if not failed.quiescent:
            await decode.event(PullQuiescent)
        assert decode.plane.stats().quarantined == 0
        ended = await prefill.event(LeaseEnded)
        assert ended.cause in ("released", "dropped")
        again = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(again, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_flipped_bits_arrive_flipped_so_that_a_comparison_can_fail() -> None:
    """The control test's tool: damage in flight goes through, and the producer's pool stays whole."""
    block = 4 * GEOMETRY.head_block_bytes
    async with Agent(seed=1, tcp_fault=f"flip:start=0,end={block}") as prefill, Agent(seed=2) as decode:
        whole = prefill.heads(THEIRS[0]).clone()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert prefill.heads(THEIRS[0]).equal(whole)
        assert (decode.heads(OURS[0]) != whole).all()
        assert_same_kv(prefill, THEIRS[1:], decode, OURS[1:])


async def test_a_cancelled_pull_ends_in_one_failure_and_gives_the_producer_its_blocks_back() -> None:
    async with Agent(seed=1, tcp_fault="stall:after=64") as prefill, Agent(seed=2) as decode:
        transfer_id, before = prefill.lend(THEIRS, TOKENS), decode.pools[0].clone()
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        async with asyncio.timeout(10.0):
            while decode.pools[0].equal(before):  # the read has not begun
                await asyncio.sleep(0.01)
        decode.plane.cancel(transfer_id)
        decode.plane.cancel(transfer_id)
        failed = await decode.event(PullFailed)
        assert failed.reason == "cancelled"
        if not failed.quiescent:
            await decode.event(PullQuiescent)
        assert (await prefill.event(LeaseEnded)).cause == "released"
        assert not decode.plane.take_events()
        assert not decode.plane.stats().pull_failures, "it has not failed"


async def test_a_mismatch_of_lengths_is_an_error_not_a_shorter_copy() -> None:
    """X24: the lists of blocks are compared, never zipped to the shorter."""
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS[:3]), 10.0)
        assert (await decode.event(PullFailed)).reason == "mismatch"


async def test_other_token_ids_fail_the_pull() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0, "another hash")
        assert (await decode.event(PullFailed)).reason == "mismatch"


async def test_a_rank_that_never_reports_is_named() -> None:
    agent = Agent(tp_size=2)
    agent.workers[0].start()
    silent = RankSocket(agent.config.rank_addresses[1])
    plane = SchedulerConnector(agent.config, agent.woken.set)
    with pytest.raises(TimeoutError, match=r"ranks \[1\]"):
        await plane.start(0.5)
    await plane.close()
    silent.close()
    plane = SchedulerConnector(agent.config, agent.woken.set)
    with pytest.raises(OSError, match="rank 0 does not listen"):
        await plane.start(0.5)
    await plane.close()
    for worker in agent.workers:
        worker.close()
    agent.directory.cleanup()


@needs_nixl
async def test_a_backend_that_does_not_work_between_two_agents_gives_way_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(peer: object) -> bool:
        raise PeerUnreachable("no path")

    monkeypatch.setattr("kvferry.transfer.backends.nixl.engine.NixlPeer.poll", unreachable)
    async with Agent(seed=1, transfer="auto") as prefill, Agent(seed=2, transfer="auto") as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).backend == "tcp"
        assert_same_kv(prefill, THEIRS, decode, OURS)


@needs_nixl
async def test_a_backend_that_failed_once_is_no_refusal_of_the_producer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """nixl does not connect, and the others are not theirs: another time nixl may."""

    def unreachable(peer: object) -> bool:
        raise PeerUnreachable("no path")

    monkeypatch.setattr("kvferry.transfer.backends.nixl.engine.NixlPeer.poll", unreachable)
    async with Agent(seed=1, transfer="nixl") as prefill, Agent(seed=2, transfer="auto") as decode:
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.detail) == ("refused", "transfers: theirs nixl, ours tcp")
        assert decode.plane.stats().refusals == {}


async def test_a_plane_can_be_closed_after_its_ranks() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        for worker in decode.workers:
            worker.close()


@pytest.mark.gpu
@pytest.mark.parametrize("transfer", ["tcp", pytest.param("nixl", marks=needs_nixl)])
async def test_blocks_move_between_pools_on_a_gpu(transfer: str) -> None:
    """The tcp backend stages through pinned host memory; NIXL registers VRAM."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    async with (
        Agent(seed=1, transfer=transfer, device="cuda") as prefill,
        Agent(seed=2, transfer=transfer, device="cuda", tp_size=2) as decode,
    ):
        before = decode.heads(0).clone()
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        assert (await decode.event(PullDone)).nbytes == len(OURS) * 4 * GEOMETRY.head_block_bytes
        assert_same_kv(prefill, THEIRS, decode, OURS)
        assert decode.heads(0).equal(before)


@pytest.mark.parametrize(
    ("transfer", "hosts", "warned"),
    [("auto", ("h", "i"), True), ("auto", ("h", "h"), False), ("tcp", ("h", "i"), False)],
)
async def test_tcp_between_two_hosts_is_no_silent_choice(
    transfer: str, hosts: tuple[str, str], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "kvferry.transfer")
    ours, theirs = ({"transfer": transfer, "auto": ("tcp",), "host_id": host} for host in hosts)
    async with Agent(seed=1, **theirs) as prefill, Agent(seed=2, **ours) as decode:
        decode.plane.pull(prefill.lend(THEIRS, TOKENS), prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
    warnings = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == int(warned)
    assert all("over tcp, the slowest transfer" in line for line in warnings)
    assert caplog.text.count(": KV comes over tcp") == 1


async def test_auto_says_what_it_opened_and_why_not_more(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "kvferry.transfer")
    async with Agent(transfer="auto", auto=("cuda_ipc", "tcp")) as agent:
        assert agent.plane.transfers == (("tcp",) if "left out" in caplog.text else ("cuda_ipc", "tcp"))
    (line,) = [each.message for each in caplog.records if "transfer backends, best first: " in each.message]
    if not torch.cuda.is_available():
        assert line.startswith("transfer backends, best first: tcp; left out: cuda_ipc: ")

# SPDX-License-Identifier: Apache-2.0
"""Planes that verify what they pull (`--verify-kv`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from kvferry.transfer.checksum import SUM_BYTES, SumTable
from kvferry.transfer.control.messages import MAX_FRAME_BYTES, Opened, decode_response, encode, max_blocks
from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed
from kvferry.transfer.ids import TransferId, new_transfer_id
from kvferry.transfer.layout import KVGeometry
from kvferry.transfer.plane import one_group
from kvferry.transfer.producer.checksum_publisher import ChecksumPublisher
from kvferry.transfer.ranks.group import RankGroup
from tests.unit.transfer.rig import GEOMETRY, Agent, assert_same_kv

THEIRS = [3, 4, 5, 9, 1]
OURS = [20, 21, 22, 7, 30]
TOKENS = 18
MLA = KVGeometry(num_layers=2, num_kv_heads=1, head_dim=24, dtype="float32", block_size=4, rope="r", mla=True)
FLIPPED_BLOCK = f"flip:start={GEOMETRY.head_block_bytes},end={2 * GEOMETRY.head_block_bytes}"


@pytest.mark.parametrize("geometry", [GEOMETRY, MLA], ids=["heads", "mla"])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (1, 2), (4, 1)])
async def test_what_arrives_whole_is_taken_at_every_tp_ratio(
    prefill_tp: int, decode_tp: int, geometry: KVGeometry
) -> None:
    async with (
        Agent(tp_size=prefill_tp, geometry=geometry, seed=1, verify_kv=True) as prefill,
        Agent(tp_size=decode_tp, geometry=geometry, seed=2, verify_kv=True) as decode,
    ):
        if geometry.mla:
            for pool in prefill.pools:
                pool.copy_(prefill.pools[0])
        transfer_id = new_transfer_id()
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS, 1), 10.0)
        prefill.plane.register(transfer_id, one_group(THEIRS), TOKENS, "hash", 30.0)
        prefill.plane.advance(transfer_id, 2)
        prefill.plane.ready(transfer_id)
        await decode.event(PullDone)
        assert (await prefill.event(LeaseEnded)).cause == "released"
        if geometry.mla:
            assert all(pool[OURS[1:]].equal(prefill.pools[0][THEIRS[1:]]) for pool in decode.pools)
        else:
            assert_same_kv(prefill, THEIRS[1:], decode, OURS[1:])
        assert decode.plane.stats().verify_seconds > 0


async def test_what_was_damaged_on_its_way_is_thrown_away_and_the_next_is_not() -> None:
    """The bytes all arrived and the lease held: only the checksums tell."""
    async with (
        Agent(tcp_fault=f"{FLIPPED_BLOCK},count=1", seed=1, verify_kv=True) as prefill,
        Agent(seed=2, verify_kv=True) as decode,
    ):
        damaged, sound = prefill.lend(THEIRS, TOKENS), prefill.lend([11], 4)
        decode.plane.pull(damaged, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("checksum", True)
        assert "1 of 20 slices differ, first block 20, head 1" in failed.detail
        assert not any(decode.heads(block).any() for block in OURS), "nothing of it is left"
        assert (await prefill.event(LeaseEnded)).transfer_id == damaged
        decode.plane.pull(sound, prefill.remote(4), one_group([12]), 10.0)
        await decode.event(PullDone)
        assert decode.plane.stats().pull_failures == {"checksum": 1}


async def test_a_producer_without_checksums_is_refused_with_both_values() -> None:
    async with Agent(seed=1) as prefill, Agent(seed=2, verify_kv=True) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        failed = await decode.event(PullFailed)
        assert failed.reason == "refused"
        assert failed.detail == "verify_kv: theirs off, ours on"


async def test_a_consumer_that_does_not_verify_may_read_from_a_producer_that_does() -> None:
    async with Agent(seed=1, verify_kv=True) as prefill, Agent(seed=2) as decode:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        decode.plane.pull(transfer_id, prefill.remote(TOKENS), one_group(OURS), 10.0)
        await decode.event(PullDone)
        assert_same_kv(prefill, THEIRS, decode, OURS)


async def test_a_lease_that_ends_while_it_is_summed_is_over() -> None:
    """The sums come late, to a transfer whose blocks are someone else's by now."""
    async with Agent(seed=1, verify_kv=True) as prefill:
        transfer_id = prefill.lend(THEIRS, TOKENS)
        prefill.plane.withdraw(transfer_id)
        other = prefill.lend(THEIRS, TOKENS)
        assert prefill.plane.drop(other)
        assert (await prefill.event(LeaseEnded)).transfer_id == other
        assert prefill.plane.stats().leased == 0


@dataclass
class StandInRanks:
    """Sums when the test says so."""

    asked: list[tuple[tuple[int, ...], Callable[[list[SumTable]], None]]] = field(default_factory=list)

    def sum_blocks(self, blocks: Sequence[Sequence[int]], on_sums: Callable[[list[SumTable]], None]) -> None:
        (group,) = blocks
        self.asked.append((tuple(group), on_sums))

    def sum_next(self) -> None:
        blocks, on_sums = self.asked.pop(0)
        on_sums([np.array([[block] for block in blocks], dtype=np.uint32)])


def test_a_reader_hears_of_blocks_only_after_every_rank_has_summed_them() -> None:
    """And in the order of the scheduler's calls, also of those that came meanwhile."""
    said: list[tuple[object, ...]] = []
    ranks = StandInRanks()
    sealer = ChecksumPublisher(
        cast(RankGroup, ranks),
        1.0,
        advance=lambda _, readable, sums: said.append((readable, *sums)),
        ready=lambda _, sums: said.append(("ready", *sums)),
    )
    transfer_id = TransferId("t")
    sealer.register(transfer_id, one_group([7, 8, 9]))
    sealer.advance(transfer_id, 1)
    sealer.advance(transfer_id, 2)
    sealer.ready(transfer_id)
    assert (said, [blocks for blocks, _ in ranks.asked]) == ([], [(7,)])
    ranks.sum_next()
    assert (said, [blocks for blocks, _ in ranks.asked]) == ([(1, b"\7\0\0\0")], [(8, 9)])
    ranks.sum_next()
    assert said[1:] == [("ready", b"\x08\0\0\0", b"\x09\0\0\0")]
    sealer.register(TransferId("forgotten"), one_group([1]))
    sealer.ready(TransferId("forgotten"))
    sealer.forget(TransferId("forgotten"))
    ranks.sum_next()
    assert len(said) == 2


@pytest.mark.parametrize("columns", [0, 1, 8, 128])
def test_as_many_blocks_as_an_answer_may_name_fit_its_frame(columns: int) -> None:
    count = max_blocks(columns * SUM_BYTES)
    opened = Opened(
        seq=1 << 40,
        incarnation="i" * 128,
        transfer_id="t" * 128,
        state="ready",
        first_block=1 << 40,
        block_ids=(1 << 40,) * count,
        num_tokens=1 << 40,
        lease_s=10.0,
        ids_hash="h" * 256,
        checksums=b"\xff" * (columns * SUM_BYTES * count),
    )
    frame = encode(opened)
    assert len(frame) < MAX_FRAME_BYTES
    assert decode_response(frame) == opened

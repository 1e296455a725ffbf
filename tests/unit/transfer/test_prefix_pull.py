# SPDX-License-Identifier: Apache-2.0
"""Blocks of a prefix cache that one transfer plane lends and another borrows, and how that can end."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvferry.agent.plugin.kept_prompts import KeptPrompts
from kvferry.transfer.events import LeaseEnded, LoanRequested, PrefixLent, PullDone, PullFailed
from kvferry.transfer.ids import new_transfer_id
from kvferry.transfer.plane import one_group
from tests.unit.transfer.rig import GEOMETRY, Agent, assert_same_kv
from tests.unit.transfer.test_plane import BACKENDS

HASHES = [b"first", b"second", b"third", b"fourth"]
OURS = [20, 21, 22, 7]
CACHED = [3, 9, 4]
"""What the lender has of them."""


async def answer(lender: Agent, blocks: list[int]) -> LoanRequested:
    """Lend these blocks to whoever asks next, as a scheduler does."""
    asked: LoanRequested = await lender.event(LoanRequested)
    ids_hash = asked.hashes[len(blocks) - 1].hex() if blocks else ""
    tokens = len(blocks) * GEOMETRY.block_size
    assert lender.plane.grant_prefix(asked.transfer_id, blocks, tokens, ids_hash) == bool(blocks)
    return asked


@pytest.mark.parametrize("transfer", BACKENDS)
@pytest.mark.parametrize(("lender_tp", "borrower_tp"), [(1, 1), (2, 1), (1, 2)])
async def test_what_the_cache_has_is_borrowed_with_proof(
    transfer: str, lender_tp: int, borrower_tp: int
) -> None:
    async with (
        Agent(tp_size=lender_tp, transfer=transfer, seed=1, lends_prefixes=True) as decode,
        Agent(tp_size=borrower_tp, transfer=transfer, seed=2) as prefill,
    ):
        before = prefill.heads(OURS[3]).clone()
        transfer_id = new_transfer_id()
        prefill.plane.pull_prefix(transfer_id, decode.remote(16), OURS, HASHES, 10.0)
        asked = await answer(decode, CACHED)
        assert (asked.transfer_id, list(asked.hashes)) == (transfer_id, HASHES)
        done = await prefill.event(PullDone)
        assert (done.transfer_id, done.num_blocks) == (transfer_id, 3)
        assert (await decode.event(LeaseEnded)).cause == "released"
        assert_same_kv(decode, CACHED, prefill, OURS[:3])
        assert prefill.heads(OURS[3]).equal(before)
        lender, borrower = decode.plane.stats(), prefill.plane.stats()
        assert (lender.prefix_loans, lender.leased) == (1, 0)
        assert (borrower.prefix_pulls, borrower.prefix_pull_bytes) == (1, done.nbytes)
        assert (borrower.pulls, borrower.pull_bytes) == (0, 0), "counted apart"


@pytest.mark.parametrize("transfer", BACKENDS)
async def test_two_agents_borrow_from_each_other_and_pull_at_once(transfer: str) -> None:
    """A pair in two roles: the loan goes the other way than its prompt's KV."""
    async with (
        Agent(seed=1, lends_prefixes=True, transfer=transfer) as decode,
        Agent(seed=2, lends_prefixes=True, transfer=transfer) as prefill,
    ):
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        decode.plane.pull(prefill.lend([1, 2], 8), prefill.remote(8), one_group([30, 31]), 10.0)
        await answer(decode, CACHED)
        await prefill.event(PullDone)
        await decode.event(PullDone)
        assert_same_kv(decode, CACHED, prefill, OURS[:3])
        assert_same_kv(prefill, [1, 2], decode, [30, 31])


async def test_a_lender_that_verifies_sends_checksums_first() -> None:
    async with (
        Agent(seed=1, lends_prefixes=True, verify_kv=True) as decode,
        Agent(seed=2, verify_kv=True) as prefill,
    ):
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        await answer(decode, CACHED)
        await prefill.event(PullDone)
        assert_same_kv(decode, CACHED, prefill, OURS[:3])
        assert prefill.plane.stats().verify_seconds > 0


@pytest.mark.parametrize("lends", [True, False])
async def test_nothing_to_lend_is_said_and_is_no_failure(lends: bool) -> None:
    """Also by an engine whose prefix cache is off, or is not ours."""
    async with Agent(seed=1, lends_prefixes=lends) as decode, Agent(seed=2) as prefill:
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        if lends:
            await answer(decode, [])
        done = await prefill.event(PullDone)
        assert (done.num_blocks, done.nbytes) == (0, 0)
        assert (decode.plane.stats().prefix_loans, prefill.plane.stats().prefix_pull_failures) == (0, {})


@pytest.mark.parametrize(
    ("theirs", "field"),
    [
        ({"weights": "other"}, "weights"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, rope="other")}, "rope"),
    ],
)
async def test_agents_of_other_weights_or_another_layout_never_lend(
    theirs: dict[str, object], field: str
) -> None:
    async with Agent(seed=1, lends_prefixes=True, **theirs) as decode, Agent(seed=2) as prefill:
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        failed = await prefill.event(PullFailed)
        assert failed.reason == "refused" and field in failed.detail
        assert not [each for each in decode.plane.take_events() if isinstance(each, LoanRequested)]
        assert prefill.plane.stats().prefix_pull_failures == {"refused": 1}
        assert prefill.plane.stats().pull_failures == {}


async def test_a_loan_that_runs_out_while_it_is_read_is_thrown_away() -> None:
    """I1, I2: the blocks are the lender's again in time; what was read meanwhile is worth nothing."""
    async with (
        Agent(seed=1, lease_s=0.3, lends_prefixes=True, tcp_fault="delay:seconds=1") as decode,
        Agent(seed=2, control_fault="drop=1,only=renew") as prefill,
    ):
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        await answer(decode, CACHED)
        assert (await decode.event(LeaseEnded, timeout_s=8.0)).cause == "expired"
        for block in CACHED:
            for pool in decode.pools:
                pool[block].zero_()
        failed = await prefill.event(PullFailed)
        assert failed.reason in ("invalid", "lease_gone")


async def test_no_loan_lasts_longer_than_the_lender_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    """I2: whatever limit the borrower names, and however often it renews."""
    monkeypatch.setattr("kvferry.transfer.producer.producer.MAX_LOAN_S", 0.3)
    async with (
        Agent(seed=1, lends_prefixes=True, tcp_fault="delay:seconds=2") as decode,
        Agent(seed=2) as prefill,
    ):
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 3600.0)
        await answer(decode, CACHED)
        assert (await decode.event(LeaseEnded, timeout_s=8.0)).cause == "expired"
        await prefill.event(PullFailed)


async def test_a_lender_that_does_not_answer_costs_the_deadline_and_no_lease() -> None:
    async with Agent(seed=1, lends_prefixes=True) as decode, Agent(seed=2) as prefill:
        transfer_id = new_transfer_id()
        prefill.plane.pull_prefix(transfer_id, decode.remote(16), OURS, HASHES, 0.3)
        failed = await prefill.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("deadline", True)
        asked = await decode.event(LoanRequested)
        await asyncio.sleep(0.1)  # the drop is on its way
        decode.plane.grant_prefix(asked.transfer_id, CACHED, 12, HASHES[2].hex())
        assert (await decode.event(LeaseEnded, timeout_s=8.0)).cause == "dropped"


async def test_a_request_for_a_loan_that_comes_twice_gets_one_loan() -> None:
    async with (
        Agent(seed=1, lends_prefixes=True) as decode,
        Agent(seed=2, control_fault="dup=1,only=lend") as prefill,
    ):
        prefill.plane.pull_prefix(new_transfer_id(), decode.remote(16), OURS, HASHES, 10.0)
        await answer(decode, CACHED)
        assert (await prefill.event(PullDone)).num_blocks == 3
        assert (await decode.event(LeaseEnded)).cause == "released"
        assert (decode.plane.stats().prefix_loans, decode.plane.stats().leased) == (1, 0)


async def test_what_was_not_asked_for_is_not_lent() -> None:
    async with Agent(seed=1, lends_prefixes=True) as decode:
        assert not decode.plane.grant_prefix(new_transfer_id(), CACHED, 12, "hash")
        assert decode.plane.stats().leased == 0


@pytest.mark.parametrize("transfer", BACKENDS)
async def test_what_was_asked_for_is_held_until_there_is_room_and_then_pulled(transfer: str) -> None:
    async with (
        Agent(seed=1, lease_s=0.5, lends_prefixes=True, transfer=transfer) as decode,
        Agent(seed=2, lease_s=0.5, transfer=transfer) as prefill,
    ):
        transfer_id = new_transfer_id()
        prefill.plane.ask_prefix(transfer_id, decode.remote(16), HASHES, 10.0)
        await answer(decode, CACHED)
        assert (await prefill.event(PrefixLent)).num_blocks == 3
        await asyncio.sleep(1.0)  # twice its lease: it is renewed
        prefill.plane.pull(transfer_id, decode.remote(12), one_group(OURS[:3]), 10.0, HASHES[2].hex())
        assert (await prefill.event(PullDone)).num_blocks == 3
        assert (await decode.event(LeaseEnded)).cause == "released"
        assert_same_kv(decode, CACHED, prefill, OURS[:3])
        borrower = prefill.plane.stats()
        assert (borrower.prefix_pulls, borrower.pulls, borrower.prefix_pull_failures) == (1, 0, {})


async def test_what_is_lent_and_not_pulled_is_given_back() -> None:
    """Given up by name, or by the limit of the question."""
    async with Agent(seed=1, lends_prefixes=True) as decode, Agent(seed=2) as prefill:
        for limit_s in (10.0, 0.5):
            transfer_id = new_transfer_id()
            prefill.plane.ask_prefix(transfer_id, decode.remote(16), HASHES, limit_s)
            await answer(decode, CACHED)
            await prefill.event(PrefixLent)
            if limit_s == 10.0:
                prefill.plane.cancel(transfer_id)
            assert (await decode.event(LeaseEnded)).cause in ("dropped", "expired")
        prefill.plane.pull(transfer_id, decode.remote(12), one_group(OURS[:3]), 10.0, HASHES[2].hex())
        assert (await prefill.event(PullFailed)).reason.startswith("lease_"), "it came too late"
        assert prefill.plane.stats().quarantined == 0


async def test_who_asks_a_peer_that_has_nothing_or_does_not_answer_learns_it() -> None:
    async with Agent(seed=1, lends_prefixes=True) as decode, Agent(seed=2) as prefill:
        prefill.plane.ask_prefix(new_transfer_id(), decode.remote(16), HASHES, 10.0)
        await answer(decode, [])
        assert (await prefill.event(PrefixLent)).num_blocks == 0
        prefill.plane.ask_prefix(new_transfer_id(), decode.remote(16), HASHES, 0.3)
        failed = await prefill.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("deadline", True)


async def test_kept_prompts_lend_the_longest_beginning_and_end_when_nobody_reads() -> None:
    ended: list[str] = []
    async with Agent(seed=1, lends_prefixes=True) as decode, Agent(seed=2) as prefill:
        kept = KeptPrompts(decode.plane, GEOMETRY.block_size, ended.append)
        kept.keep("short", [1], HASHES[:1], 3600.0)
        kept.keep("lone", [8], [b"lone"], 3600.0)
        kept.keep("long", CACHED, HASHES[:3], 3600.0)
        kept.keep("other", [5, 6], [HASHES[0], b"another"], 3600.0)
        transfer_id = new_transfer_id()
        # Its first block is there already.
        prefill.plane.ask_prefix(transfer_id, decode.remote(12), HASHES[1:], 10.0)
        kept.requested(await decode.event(LoanRequested))
        assert (await prefill.event(PrefixLent)).num_blocks == 2
        prefill.plane.ask_prefix(new_transfer_id(), decode.remote(12), [b"no such", b"lone"], 10.0)
        kept.requested(await decode.event(LoanRequested))
        assert (await prefill.event(PrefixLent)).num_blocks == 0, "not in the order of a prompt"
        for key in ("long", "short", "short"):
            kept.end(key)
        assert ended == ["short"], "one is being read"
        late = new_transfer_id()
        prefill.plane.ask_prefix(late, decode.remote(12), HASHES[1:], 10.0)
        kept.requested(await decode.event(LoanRequested))
        assert (await prefill.event(PrefixLent)).num_blocks == 0, "it is lent to nobody else"
        prefill.plane.pull(transfer_id, decode.remote(8), one_group(OURS[:2]), 10.0, HASHES[2].hex())
        await prefill.event(PullDone)
        assert_same_kv(decode, CACHED[1:], prefill, OURS[:2])
        assert kept.lease_ended(await decode.event(LeaseEnded)) and ended == ["short", "long"]
        assert not kept.lease_ended(LeaseEnded(transfer_id="not a loan", cause="released"))


async def test_kept_prompts_that_are_dropped_are_not_proven_right() -> None:
    ended: list[str] = []
    async with (
        Agent(seed=1, lends_prefixes=True, tcp_fault="delay:seconds=1") as decode,
        Agent(seed=2) as prefill,
    ):
        kept = KeptPrompts(decode.plane, GEOMETRY.block_size, ended.append)
        kept.keep("a", CACHED, HASHES[:3], 3600.0)
        kept.keep("b", [1], [b"another"], 0.2)
        transfer_id = new_transfer_id()
        prefill.plane.ask_prefix(transfer_id, decode.remote(16), HASHES, 10.0)
        kept.requested(await decode.event(LoanRequested))
        await prefill.event(PrefixLent)
        prefill.plane.pull(transfer_id, decode.remote(12), one_group(OURS[:3]), 10.0, HASHES[2].hex())
        await asyncio.sleep(0.3)
        kept.drop(["a"])
        kept.lease_ended(await decode.event(LeaseEnded))
        assert ended == ["b", "a"], "b by its time"
        assert (await prefill.event(PullFailed)).reason in ("invalid", "lease_dropped", "lease_gone")

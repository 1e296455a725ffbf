# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kvferry.transfer.control import messages as wire
from kvferry.transfer.events import LeaseEnded, PullDone, PullFailed
from kvferry.transfer.plane import one_group
from tests.standins.faults.control import ControlFault, ControlFaults, parse_control_fault
from tests.unit.transfer.rig import Agent

DROP = wire.encode(wire.Drop(seq=1, incarnation="i", transfer_id="t"))
RENEW = wire.encode(wire.Renew(seq=1, incarnation="i", consumer="c", transfer_ids=("t",)))


def test_a_fault_is_read() -> None:
    assert parse_control_fault("drop=0.05,dup=0.1,seed=3") == ControlFault(drop=0.05, dup=0.1, seed=3)
    assert parse_control_fault("drop=1,only=renew") == ControlFault(drop=1.0, only="renew")


@pytest.mark.parametrize(
    "spec", ["", "melt=1", "drop=x", "drop=0.6,dup=0.6", "drop=-1", "drop=1,only=nothing", "seed=0.5"]
)
def test_a_fault_that_makes_no_sense_is_named(spec: str) -> None:
    with pytest.raises(ValueError, match="control fault"):
        parse_control_fault(spec)


def test_the_same_seed_loses_and_repeats_the_same_messages() -> None:
    fault = parse_control_fault("drop=0.3,dup=0.3,seed=5")
    first, second = ControlFaults(fault), ControlFaults(fault)
    copies = [first.copies(DROP) for _ in range(300)]
    assert copies == [second.copies(DROP) for _ in range(300)]
    assert all(60 < copies.count(each) < 150 for each in (0, 1, 2))


def test_only_the_named_message_is_touched() -> None:
    faults = ControlFaults(parse_control_fault("drop=1,only=renew"))
    assert (faults.copies(RENEW), faults.copies(DROP)) == (0, 1)
    assert faults.copies(b"no control message") == 1


@pytest.mark.parametrize("message", ["open", "opened", "release", "released", "hello", "hello_ok"])
async def test_a_pull_stands_every_message_twice(message: str) -> None:
    """X20: a repeated message gets a second response, which is ignored."""
    fault = f"dup=1,only={message}"
    async with (
        Agent(seed=1, control_fault=fault) as prefill,
        Agent(seed=2, control_fault=fault) as decode,
    ):
        for blocks in ([3, 4, 5], [6]):
            transfer_id = prefill.lend(blocks, num_tokens=4 * len(blocks))
            decode.plane.pull(transfer_id, prefill.remote(4 * len(blocks)), one_group(blocks), 10.0)
            assert (await decode.event(PullDone)).transfer_id == transfer_id
            assert (await prefill.event(LeaseEnded)).cause == "released"
        assert prefill.plane.stats().bad_frames == decode.plane.stats().bad_frames == 0


async def test_a_lease_that_cannot_be_renewed_ends_under_the_reader() -> None:
    """I1: the read itself succeeds, and what it brought is thrown away all the same."""
    async with (
        Agent(seed=1, lease_s=0.3, tcp_fault="delay:seconds=0.8") as prefill,
        Agent(seed=2, lease_s=0.3, control_fault="drop=1,only=renew") as decode,
    ):
        transfer_id = prefill.lend([3, 4], num_tokens=8)
        decode.plane.pull(transfer_id, prefill.remote(8), one_group([7, 8]), 10.0)
        assert (await prefill.event(LeaseEnded)).cause == "expired"
        failed = await decode.event(PullFailed)
        assert (failed.reason, failed.quiescent) == ("invalid", True)

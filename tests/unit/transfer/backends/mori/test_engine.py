# SPDX-License-Identifier: Apache-2.0
"""The mori backend against a library that fails in the ways in which the real one does."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.engine import PeerBroken, PeerUnreachable, Status
from tests.standins import mori_io
from tests.unit.transfer.backends.mori.rig import BLOCK, BLOCKS, FIRST, Pair, fault, scattered

MakePair = Callable[..., Pair]


@pytest.fixture
def pair() -> Iterator[MakePair]:
    """`pair("stall:…", qp_per_transfer="2")`: a reader that suffers this, and the owner."""
    made: list[Pair] = []

    def make(spec: str = "", **options: str) -> Pair:
        with fault(spec):
            made.append(Pair(**options))
        return made[-1]

    with mori_io.on_path():
        yield make
        for each in made:
            each.close(*each.engines)


def expect(pair: Pair, blocks: list[tuple[int, int]]) -> None:
    """Exactly these blocks have arrived."""
    wanted = np.zeros_like(pair.ours)
    for local, remote in blocks:
        wanted[local] = pair.theirs[remote]
    assert np.array_equal(pair.ours, wanted)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_queue_pair_is_no_proof_that_the_others_have_stopped(
    pair: MakePair, broken: int
) -> None:
    """I3: MORI's status turns to an error at the first failure, while another queue pair still writes."""
    spec = f"unheard;fail:after={FIRST},lane={broken};stall:seconds=0.5,after={FIRST},lane={1 - broken}"
    two = pair(spec, qp_per_transfer="2")
    transfer = two.read(two.meet(), scattered(64))
    assert two.finish(transfer) is Status.FAILED
    assert transfer.reason == "peer_lost"
    assert not transfer.quiescent
    assert not two.ours.any(), "nothing has landed yet"
    two.settle(transfer)
    assert two.ours.any(), "the other half has landed since"
    two.ours[:] = 0
    time.sleep(0.1)
    assert not two.ours.any()


def test_a_batch_of_which_only_a_part_could_be_posted_is_waited_for(pair: MakePair) -> None:
    """The send queue was full at the second part; the first is under way and has no status of its own."""
    two = pair("full:after=0;delay:seconds=0.2", qp_per_transfer="2")
    transfer = two.read(two.meet(), scattered(64))
    assert two.finish(transfer) is Status.FAILED
    assert not transfer.quiescent
    assert not two.ours.any()
    two.settle(transfer)
    assert two.ours.any()
    peer = two.meet()
    assert two.finish(two.read(peer, [(0, 1)])) is Status.DONE, "no queue pair was broken by it"


def test_every_status_counts_and_not_the_last_one(pair: MakePair) -> None:
    """X11: several batches, of which only the first fails."""
    two = pair("full:after=0", region_bytes=str(16 * BLOCK))
    blocks = [(block, block) for block in range(0, BLOCKS, 2)]
    transfer = two.read(two.meet(), blocks)
    assert len(transfer.batches) == 16
    two.settle(transfer)
    assert (transfer.poll(), transfer.reason) == (Status.FAILED, "peer_lost")
    assert np.array_equal(two.ours[16::2], two.theirs[16::2]), "the others did their work"


def test_batches_that_end_out_of_order_all_arrive(pair: MakePair) -> None:
    """L10: every transfer has statuses of its own."""
    two = pair("jitter:seconds=0.02")
    peer = two.meet()
    blocks = scattered(BLOCKS // 2)
    transfers = [two.read(peer, blocks[first : first + 8]) for first in range(0, len(blocks), 8)]
    assert {two.finish(each) for each in transfers} == {Status.DONE}
    expect(two, blocks)


def test_a_status_that_has_not_even_begun_is_not_done(pair: MakePair) -> None:
    """`Wait` of a status in INIT returns at once, which is not the end of the read."""
    two = pair("init:seconds=0.2")
    transfer = two.read(two.meet(), scattered(8))
    for _ in range(20):
        two.reader.progress()
        assert transfer.poll() is Status.PENDING
    assert two.finish(transfer) is Status.DONE
    expect(two, scattered(8))


def test_the_deadline_is_ours_and_the_destination_is_held_until_the_read_ends(pair: MakePair) -> None:
    """MORI has neither a deadline nor a cancel."""
    two = pair(f"stall:seconds=6,after={FIRST},lane=0", qp_per_transfer="1")
    begun = time.monotonic()
    transfer = two.read(two.meet(), scattered(8), timeout_s=0.1)
    assert two.finish(transfer) is Status.FAILED
    assert time.monotonic() - begun < 5.5
    assert transfer.reason == "deadline"
    assert not transfer.quiescent
    two.settle(transfer)
    assert two.ours.any()
    assert transfer.poll() is Status.FAILED


def test_what_was_cancelled_before_it_was_posted_never_is(pair: MakePair) -> None:
    two = pair("delay:seconds=0.1", qp_per_transfer="1", max_send_wr="8")
    peer = two.meet()
    first = two.read(peer, scattered(8))
    second = two.read(peer, [(0, 1)])
    second.cancel()
    assert (second.poll(), second.reason, second.quiescent) == (Status.FAILED, "cancelled", True)
    assert two.finish(first) is Status.DONE
    expect(two, scattered(8))


def test_no_more_is_posted_than_one_send_queue_holds(pair: MakePair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Posting to a full queue blocks for up to 5 s in the library, and the thread with it."""
    two = pair("delay:seconds=0.002", qp_per_transfer="2", max_send_wr="16")

    def full(queue_pair: Any, count: int) -> bool:
        assert queue_pair.outstanding + count <= queue_pair.depth, "posting would block"
        return True

    monkeypatch.setattr("mori.io.rdma._has_room", full)
    peer = two.meet()
    blocks = scattered(120)
    transfers = [two.read(peer, blocks[:100]), two.read(peer, blocks[100:])]
    assert {two.finish(each) for each in transfers} == {Status.DONE}
    assert [each.descriptors for each in transfers] == [100, 20]
    expect(two, blocks)


def test_spans_across_regions_arrive_whole(pair: MakePair) -> None:
    """Pools over 2 GiB are registered in pieces; a merged span knows nothing of them."""
    two = pair(region_bytes=str(24 * BLOCK + 100))
    assert two.owned.map.piece_bytes == 24 * BLOCK, "a block is never cut"
    assert len(two.owned.memory) == -(-BLOCKS // 24)
    spans = np.array([[3 * BLOCK, 20 * BLOCK, 200 * BLOCK]], dtype=np.int64)
    transfer = two.reader.read(two.meet(), spans, 5.0)
    assert two.finish(transfer) is Status.DONE
    assert transfer.nbytes == 200 * BLOCK
    expect(two, [(3 + block, 20 + block) for block in range(200)])


def test_a_span_outside_either_pool_is_refused_at_once(pair: MakePair) -> None:
    two = pair()
    peer = two.meet()
    for blocks in ([(0, BLOCKS)], [(BLOCKS, 0)]):
        with pytest.raises(ValueError, match="outside"):
            two.read(peer, blocks)


def test_a_read_of_nothing_is_done(pair: MakePair) -> None:
    two = pair()
    transfer = two.read(two.meet(), [])
    assert (transfer.poll(), transfer.quiescent) == (Status.DONE, True)


def test_a_peer_whose_queue_pairs_broke_is_not_met_again(pair: MakePair) -> None:
    """MORI never makes them anew, so every later read would fail; refused, the link takes another backend."""
    two = pair(f"fail:after={2 * FIRST}", qp_per_transfer="2")
    peer = two.meet()
    other = two.meet()
    transfer = two.read(peer, scattered(4))
    assert two.finish(transfer) is Status.FAILED
    two.settle(transfer)
    with pytest.raises(PeerUnreachable, match=r"in error|PEER_UNREACHABLE"):
        two.wait(peer.poll)
    with pytest.raises(PeerUnreachable, match="in error"):
        two.meet()
    assert two.finish(two.read(other, [(0, 0)])) is Status.FAILED
    late = two.read(peer, [(0, 0)])
    assert (late.poll(), late.reason, late.quiescent) == (Status.FAILED, "peer_lost", True)


def test_a_peer_that_the_library_finds_dead_ends_its_reads_at_once(pair: MakePair) -> None:
    """One read breaks a queue pair; another, of which the other one has not begun, is told of it."""
    spec = f"fail:after={FIRST + 1},lane=0;stall:seconds=6,after={FIRST},lane=1"
    two = pair(spec, qp_per_transfer="2")
    peer = two.meet()
    begun = time.monotonic()
    transfers = [two.read(peer, scattered(64)[first : first + 16]) for first in range(0, 64, 16)]
    assert {two.finish(each) for each in transfers} == {Status.FAILED}
    assert {each.reason for each in transfers} == {"peer_lost"}
    assert time.monotonic() - begun < 5.5, "nobody waited for the stalled queue pair"
    assert not all(each.quiescent for each in transfers)
    with pytest.raises(PeerBroken):
        two.meet()
    for each in transfers:
        two.settle(each)


def test_a_device_that_failed_ends_every_peer(pair: MakePair) -> None:
    two = pair(f"stall:seconds=0.5,after={FIRST}")
    peer = two.meet()
    transfer = two.read(peer, scattered(8))
    from mori.cpp import PeerFailureEvent, PeerFailureReason

    failure = PeerFailureEvent("", PeerFailureReason.LOCAL_PORT_DOWN, detail="a cable")
    two.reader._library.engine._rdma.failures.append(failure)
    assert two.finish(transfer) is Status.FAILED
    with pytest.raises(PeerUnreachable, match="LOCAL_PORT_DOWN: a cable"):
        two.wait(peer.poll)
    two.settle(transfer)
    assert two.finish(two.read(two.meet(), scattered(8))) is Status.DONE, "a port may come back"


def test_a_peer_that_takes_long_to_connect_delays_nobody(pair: MakePair) -> None:
    """I5: the library's own way to make a session keeps the interpreter meanwhile."""
    two = pair()
    two.meet()
    slow = pair("connect:seconds=4")
    fast = two.read(two.meet(), [])
    assert fast.poll() is Status.DONE
    peer = slow.reader.connect(slow.owner.describe(), slow.described, mint(slow.secret), 5.0)
    longest = 0.0
    while not peer.poll():
        begun = time.monotonic()
        slow.owner.progress()
        slow.reader.progress()
        transfer = two.read(two.meet(), [(0, 0)])
        assert two.finish(transfer) is Status.DONE
        longest = max(longest, time.monotonic() - begun)
    assert longest < 3.0
    assert slow.finish(slow.read(peer, scattered(8))) is Status.DONE


def test_a_peer_whose_queue_pairs_take_too_long_is_unreachable(pair: MakePair) -> None:
    slow = pair("connect:seconds=4")
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable, match="no queue pairs within the deadline"):
        slow.meet(timeout_s=0.2)
    assert time.monotonic() - begun < 3.0
    assert slow.finish(slow.read(slow.meet(), scattered(8))) is Status.DONE, "they were made meanwhile"


def test_a_peer_whose_memory_cannot_be_read_is_not_connected(pair: MakePair) -> None:
    """The first reads show what no handshake can, and go to memory beside the pool."""
    two = pair("unheard;fail:after=0,lane=0")
    with pytest.raises(PeerUnreachable, match="a first read failed"):
        two.meet()
    with pytest.raises(PeerBroken):
        two.meet()
    other = pair()
    other.meet()
    assert not other.ours.any()


def test_a_reader_that_was_not_admitted_does_not_even_connect(pair: MakePair) -> None:
    """X22: MORI itself checks no token."""
    two = pair()
    with pytest.raises(PeerUnreachable, match="refused"):
        two.meet(token=mint(new_secret()))


def test_an_owner_that_closed_is_noticed_without_a_read(pair: MakePair) -> None:
    two = pair()
    peer = two.meet()
    two.close(two.owner)
    with pytest.raises(PeerUnreachable):
        two.wait(lambda: not peer.poll())


def test_closing_the_engine_ends_every_write_and_every_thread(pair: MakePair) -> None:
    """R7, I3: with reads in flight, and while a caller still holds them and their peer."""
    threads = set(threading.enumerate())
    two = pair(f"stall:seconds=30,after={FIRST}")
    peer: Any = two.meet()
    transfers = [two.read(peer, scattered(64)) for _ in range(2)]
    two.reader.progress()
    sessions = [weakref.ref(session) for session in peer._sessions.values()]
    begun = time.monotonic()
    two.close(two.reader, two.owner)
    assert time.monotonic() - begun < 20.0
    assert {each.poll() for each in transfers} == {Status.FAILED}
    assert all(each.quiescent for each in transfers)
    assert set(threading.enumerate()) <= threads
    assert [session() for session in sessions] == [None], "a session must not outlive its engine"
    assert not two.ours.any()


def test_it_asks_to_be_polled_only_while_something_is_under_way(pair: MakePair) -> None:
    """R24."""
    two = pair(f"stall:seconds=0.2,after={FIRST}")
    peer = two.meet()
    assert two.reader.next_deadline() is None
    assert two.reader.fileno() is not None
    transfer = two.read(peer, scattered(4), timeout_s=0.05)
    soon = two.reader.next_deadline()
    assert soon is not None
    assert soon - time.monotonic() < 0.01
    two.settle(transfer)
    two.reader.progress()
    assert two.reader.next_deadline() is None


def test_a_producer_is_not_notified_of_a_read_unless_configured(pair: MakePair) -> None:
    """MORI never erases a notification: a notified producer grows without end."""
    for option, notified in (("false", False), ("true", True)):
        two = pair(notification=option)
        assert two.finish(two.read(two.meet(), scattered(4))) is Status.DONE
        inbound = two.owner._library.engine._rdma.registry.inbound
        if notified:
            two.wait(lambda inbound=inbound: set(inbound.values()) == {0})
        else:
            assert not inbound

# SPDX-License-Identifier: Apache-2.0
"""The nccl backend over gloo: two engines in this process, and what must hold when a pair breaks."""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import kvferry.transfer.backends.nccl.peer as peer_module
import kvferry.transfer.backends.nccl.session as session
from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.backends.common.wakeups import Waker
from kvferry.transfer.backends.nccl.communicator import NcclPair, PairBroken
from kvferry.transfer.backends.nccl.engine import NcclEngine, open_backend
from kvferry.transfer.backends.nccl.pair import PairThread, Rendezvous, reader_end, server_end
from kvferry.transfer.backends.nccl.staging import staging
from kvferry.transfer.backends.nccl.wire import HEAD_BYTES, PART_BYTES, NcclAddress, pack_head
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Status
from tests.helpers.waiting import wait_until

POOL_BYTES = 1 << 20
OPTIONS = EngineOptions(name="test", bind_host="127.0.0.1", advertise_host="127.0.0.1")
PAIR = b"\7" * 16


class Side:
    """An engine with a pool of its own."""

    def __init__(self, fill: int) -> None:
        self.pool = torch.full((POOL_BYTES,), fill, dtype=torch.uint8)
        self.engine: NcclEngine = open_backend(OPTIONS)
        [self.region] = self.engine.register([self.pool])


class Rig:
    """A reader, a server, and what makes both go on."""

    def __init__(self) -> None:
        self.reader, self.server = Side(0), Side(9)
        self.secret = new_secret()
        self.server.engine.admit(self.secret)

    def connect(self) -> Peer:
        served = self.server
        peer = self.reader.engine.connect(
            served.engine.describe(), [served.region.describe()], mint(self.secret), 10.0
        )
        self.until(peer.poll)
        return peer

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, step=self._progress)

    def _progress(self) -> None:
        self.reader.engine.progress()
        self.server.engine.progress()

    def close(self) -> None:
        self.reader.engine.close()
        self.server.engine.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()
    assert not pair_threads()


def pair_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("nccl-pair")]


def spans(*rows: tuple[int, int, int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64).reshape(-1, 3)


def test_the_death_of_either_end_of_a_pair_ends_the_other(rig: Rig) -> None:
    """L11: no communicator outlives its other half."""
    peer = rig.connect()
    assert len(pair_threads()) == 2
    rig.server.engine._server.sessions[0].close()
    with pytest.raises(PeerUnreachable):
        rig.until(lambda: peer.poll() and False)
    rig.until(lambda: not pair_threads())
    rig.connect().close()
    rig.until(lambda: not pair_threads())


def test_a_pair_whose_communicator_fails_is_closed_at_both_ends(rig: Rig) -> None:
    """L11: also when it is the library that fails, and not the peer."""
    peer = rig.connect()

    def fail(pair: PairThread) -> None:
        raise PairBroken("planted")

    pair: Any = getattr(rig.server.engine._server.sessions[0], "_pair")  # noqa: B009
    assert pair is not None
    pair.submit(fail)
    with pytest.raises(PeerUnreachable):
        rig.until(lambda: peer.poll() and False)
    transfer = rig.reader.engine.read(peer, spans((0, 0, 64)), 5.0)
    assert (transfer.poll(), transfer.reason, transfer.quiescent) == (Status.FAILED, "peer_lost", True)
    rig.until(lambda: not pair_threads())


def test_a_read_that_passes_its_deadline_takes_its_pair_with_it(rig: Rig) -> None:
    """L10, L11: a receive without an answer must not be there when the next message comes."""
    peer = rig.connect()
    held = threading.Event()
    pair: Any = getattr(rig.server.engine._server.sessions[0], "_pair")  # noqa: B009
    assert pair is not None
    pair.submit(lambda thread: held.wait(20) and None)
    transfer = rig.reader.engine.read(peer, spans((0, 0, 64)), 0.2)
    rig.until(lambda: transfer.poll() is Status.FAILED)
    assert (transfer.reason, transfer.quiescent) == ("deadline", True)
    with pytest.raises(PeerUnreachable):
        peer.poll()
    held.set()
    rig.until(lambda: not pair_threads())
    assert not rig.reader.pool.any()
    again = rig.connect()
    transfer = rig.reader.engine.read(again, spans((0, 0, 64)), 5.0)
    rig.until(lambda: transfer.poll() is Status.DONE)


def test_a_cancelled_read_is_received_and_thrown_away(rig: Rig) -> None:
    """L15: it is quiescent at once, because only the transfer thread copies into the pool."""
    peer = rig.connect()
    transfer = rig.reader.engine.read(peer, spans((0, 0, POOL_BYTES)), 5.0)
    transfer.cancel()
    assert (transfer.poll(), transfer.reason, transfer.quiescent) == (Status.FAILED, "cancelled", True)
    after = rig.reader.engine.read(peer, spans((64, 64, 64)), 5.0)
    rig.until(lambda: after.poll() is Status.DONE)
    assert rig.reader.pool.nonzero().flatten().tolist() == list(range(64, 128))


def test_reads_longer_than_a_message_arrive_whole() -> None:
    """Parts are gathered, sent, received and copied out at the same time, in two messages at either end."""
    size = 3 * PART_BYTES + 1000
    rig = Rig()
    source = torch.from_numpy(np.random.default_rng(5).integers(0, 256, size, dtype=np.uint8))
    [rig.server.region] = rig.server.engine.register([source])
    target = torch.zeros(size, dtype=torch.uint8)
    rig.reader.engine.register([target])
    half = size // 2
    transfer = rig.reader.engine.read(
        rig.connect(), spans((half, 0, size - half), (0, size - half, half)), 20.0
    )
    rig.until(lambda: transfer.poll() is not Status.PENDING)
    assert transfer.poll() is Status.DONE
    assert torch.equal(target, torch.cat([source[size - half :], source[: size - half]]))
    rig.close()


class SilentEnd:
    """A server's communicator that says nothing."""

    def send(self, message: torch.Tensor, tag: int) -> None:
        """Discard it."""

    def wait(self, work: Any, deadline: float, closing: threading.Event) -> None:
        """It is over."""

    def close(self) -> None:
        """Nothing to tear down."""


class UnfinishedReceive:
    """A reader's communicator whose messages come only when the test lets them."""

    def __init__(self) -> None:
        self.may_come = threading.Event()
        self.heads: list[bytes] = []

    def receive(self, message: torch.Tensor, tag: int) -> torch.Tensor:
        return message

    def wait(self, work: torch.Tensor, deadline: float, closing: threading.Event) -> None:
        if len(self.heads) < 2:
            assert self.may_come.wait(20)
        head = self.heads.pop(0)
        work[:HEAD_BYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        work[HEAD_BYTES:] = 5

    def close(self) -> None:
        self.may_come.set()


def test_nothing_is_copied_out_before_the_receive_has_been_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L1: a message may be looked at only when the library says that it is there."""
    fabric = UnfinishedReceive()
    monkeypatch.setattr(session, "server_end", lambda *args: SilentEnd())
    monkeypatch.setattr(peer_module, "reader_end", lambda *args: fabric)
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"\3" * count)
    head = b"\3" * 16
    fabric.heads = [pack_head(head, 0, 0), pack_head(head, 0, 64)]
    peer = rig.connect()
    transfer = rig.reader.engine.read(peer, spans((0, 0, 64)), 10.0)
    for _ in range(50):
        rig.reader.engine.progress()
    assert transfer.poll() is Status.PENDING
    assert not rig.reader.pool.any()
    fabric.may_come.set()
    rig.until(lambda: transfer.poll() is Status.DONE)
    assert rig.reader.pool[:64].eq(5).all()


class UnfinishedWork:
    """A receive whose stream waits."""

    def wait(self) -> None:
        """The host does not."""


class UnfinishedKernel:
    """A CUDA event after a kernel that waits for a dead peer."""

    def record(self) -> None:
        """It is in the stream."""

    def query(self) -> bool:
        return False


def test_a_pair_that_is_closed_does_not_wait_for_the_deadline_of_a_dead_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What NCCL waits for then holds up the whole GPU, and with it the next backend to be opened."""
    monkeypatch.setattr(torch.cuda, "Event", UnfinishedKernel)
    pair, closing = object.__new__(NcclPair), threading.Event()

    def wait() -> None:
        with pytest.raises(PairBroken, match="closed"):
            pair.wait(UnfinishedWork(), time.monotonic() + 3600, closing)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    closing.set()
    waiting.join(10.0)
    assert not waiting.is_alive()


def test_pairs_that_are_made_at_the_same_time_all_have_the_watchdog_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would end the process when a peer dies, and is set for the whole process while a group is made."""
    variable = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(variable, raising=False)
    seen: list[str | None] = []

    class Group:
        def __init__(self, *arguments: object) -> None:
            first = not seen
            seen.append(os.environ.get(variable))
            time.sleep(0.1 if first else 0.3)  # the first is done while the others are under way
            seen.append(os.environ.get(variable))

        class Options:
            """Nothing that this test is about."""

    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Group, raising=False)
    threads = [threading.Thread(target=NcclPair, args=(None, 0)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    assert seen == ["0"] * 6
    assert variable not in os.environ


class PairThreads:
    """Both threads of one pair, without engines."""

    def __init__(self) -> None:
        self.waker = Waker()
        self._under_way: list[Any] = []
        deadline = time.monotonic() + 10.0
        rendezvous = Rendezvous("127.0.0.1")
        self.pools = [torch.zeros(1024, dtype=torch.uint8) for _ in range(2)]
        self.server = PairThread(
            PAIR,
            staging(self.pools[0]),
            lambda: server_end(rendezvous, "gloo", "127.0.0.1", deadline),
            lambda pair: None,
            self.waker,
        )
        self.reader = PairThread(
            PAIR,
            staging(self.pools[1]),
            lambda: reader_end("127.0.0.1", rendezvous.port, "gloo", "127.0.0.1", deadline),
            lambda pair: None,
            self.waker,
        )

    def send(self, *labels: tuple[bytes, bytes]) -> None:
        """Send one message per (id of the read that gloo matches, id in the head)."""

        def job(pair: PairThread) -> None:
            for matched, in_head in labels:
                message = pair.staging.fill(pair.staging.new_message(), pack_head(in_head, 0, 0), [])
                self._under_way.append((message, pair.send(message, matched, 0)))

        self.server.submit(job)

    def receive(self, read_id: bytes) -> threading.Event:
        """Receive the message of one read; the event is set when it came."""
        came = threading.Event()

        def job(pair: PairThread) -> None:
            pair.receive(pair.staging.new_message(), read_id, 0, 0, time.monotonic() + 5.0)
            came.set()

        self.reader.submit(job)
        return came

    def close(self) -> None:
        for pair in (self.reader, self.server):
            pair.close()
            pair.join(5.0)
        self.waker.close()
        assert not pair_threads()


@pytest.fixture
def ends() -> Iterator[PairThreads]:
    made = PairThreads()
    yield made
    made.close()


def test_a_message_left_over_from_a_dead_read_is_not_taken_for_the_next_one(ends: PairThreads) -> None:
    """L10: by order alone the first message would be taken, and every later one shifted."""
    ends.send((b"a" * 16, b"a" * 16), (b"b" * 16, b"b" * 16))
    assert ends.receive(b"b" * 16).wait(10)


def test_a_message_of_another_read_breaks_the_pair(ends: PairThreads) -> None:
    """L10: NCCL knows no tags; there the head alone decides."""
    ends.send((b"b" * 16, b"a" * 16))
    came = ends.receive(b"b" * 16)
    ends.reader.join(10.0)
    assert not came.is_set()
    assert "not part 0" in ends.reader.error


def test_pairs_that_come_and_go_leave_no_descriptor(rig: Rig) -> None:
    """R7"""

    def once() -> int:
        rig.connect().close()
        rig.until(lambda: not pair_threads() and not rig.server.engine._server.sessions)
        return len(os.listdir("/proc/self/fd"))

    once()  # libraries keep what they open on first use
    before = once()
    for _ in range(4):
        assert once() <= before


def test_a_request_beyond_the_pool_ends_the_pair(rig: Rig) -> None:
    """X22: a reader is admitted, not trusted."""
    peer = rig.connect()
    peer._sizes = [2 * POOL_BYTES]  # type: ignore[attr-defined]
    transfer = rig.reader.engine.read(peer, spans((0, POOL_BYTES, 64)), 5.0)
    rig.until(lambda: transfer.poll() is Status.FAILED)
    assert transfer.reason == "peer_lost"
    rig.until(lambda: not rig.server.engine._server.sessions and not pair_threads())
    assert not rig.reader.pool.any()


def test_auto_does_not_choose_gloo() -> None:
    options = EngineOptions(name="test", bind_host="127.0.0.1", advertise_host="127.0.0.1", explicit=False)
    engine = open_backend(options)
    with pytest.raises(BackendUnavailable, match="gloo"):
        engine.register([torch.zeros(16, dtype=torch.uint8)])
    engine.close()


def test_a_pool_of_another_kind_of_memory_is_unreachable(rig: Rig) -> None:
    address = msgspec.msgpack.decode(rig.server.engine.describe(), type=NcclAddress)
    on_gpu = msgspec.msgpack.encode(msgspec.structs.replace(address, fabric="nccl"))
    with pytest.raises(PeerUnreachable, match="gloo"):
        rig.reader.engine.connect(on_gpu, [rig.server.region.describe()], mint(rig.secret), 1.0)


def test_spans_outside_either_pool_are_refused(rig: Rig) -> None:
    peer = rig.connect()
    for span in ((POOL_BYTES, 0, 1), (0, POOL_BYTES, 1)):
        with pytest.raises(ValueError, match="outside"):
            rig.reader.engine.read(peer, spans(span), 1.0)

# SPDX-License-Identifier: Apache-2.0
"""How the mooncake backend treats Mooncake, with a library that does what each test needs in its place."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import pytest
import torch

import kvferry.transfer.backends.mooncake.engine as backend
from kvferry.transfer.backends.mooncake.engine import open_backend
from kvferry.transfer.backends.mooncake.library import (
    CANARY_BYTES,
    MooncakeAddress,
    MooncakeRegionAddress,
    Piece,
)
from kvferry.transfer.backends.mooncake.peer import PIECE_BYTES, WINDOW, cut
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Status
from tests.helpers.waiting import wait_until

OPTIONS = EngineOptions(name="test", bind_host="127.0.0.1", advertise_host="127.0.0.1")
PROOF = bytes(range(CANARY_BYTES))


class ScriptedLibrary:
    """Takes every read and ends none until the test says how."""

    moves_cuda = False

    def __init__(self, host: str) -> None:
        self.known_peers: dict[str, bytes] = {}
        self.bounce_buffer = np.zeros(CANARY_BYTES, dtype=np.uint8)
        self.pinned: list[int] = []
        self.posted: dict[int, Piece] = {}
        self.ended: dict[int, Status] = {}
        self.may_open = threading.Event()
        self.may_open.set()
        self.closed = False

    def segment(self) -> str:
        return "127.0.0.1:1"

    def pin(self, address: int, nbytes: int) -> None:
        self.pinned.append(address)

    def pin_pool(self, pool: Sequence[MooncakeRegionAddress]) -> None:
        for region in pool:
            self.pin(region.address, region.nbytes)

    def unpin_pool(self) -> None:
        self.pinned.clear()

    def start_read(self, segment: str, piece: Piece) -> int:
        assert self.may_open.wait(20)
        batch = len(self.posted) + 1
        self.posted[batch] = piece
        return batch

    def check(self, batch: int) -> Status:
        assert not self.closed
        return self.ended.get(batch, Status.PENDING)

    def close(self) -> None:
        self.closed = True

    def prove(self, canary: bytes = PROOF) -> None:
        """The first read brings this."""
        self.bounce_buffer[:] = np.frombuffer(canary, dtype=np.uint8)
        self.ended[max(self.posted)] = Status.DONE

    def in_flight(self) -> list[int]:
        return [batch for batch in self.posted if batch not in self.ended]


class Rig:
    """An engine over scripted libraries; the first of them serves, the others read."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.libraries: list[ScriptedLibrary] = []
        self.hang = False
        monkeypatch.setattr(backend, "MooncakeLibrary", self._make)
        self.engine = open_backend(OPTIONS)
        self.pool = torch.zeros(1 << 20, dtype=torch.uint8)
        self.engine.register([self.pool])

    def _make(self, host: str) -> ScriptedLibrary:
        library = ScriptedLibrary(host)
        if self.hang:
            library.may_open.clear()
        self.libraries.append(library)
        return library

    def connect(self, segment: str = "127.0.0.1:2", canary: bytes = PROOF, timeout_s: float = 10.0) -> Peer:
        address = MooncakeAddress(segment=segment, canary=canary, canary_address=64)
        pool = MooncakeRegionAddress(address=1 << 30, nbytes=1 << 20)
        encode = msgspec.msgpack.encode
        return self.engine.connect(encode(address), [encode(pool)], b"", timeout_s)

    def connected(self, **where: str) -> tuple[Peer, ScriptedLibrary]:
        """A peer that has proven itself."""
        peer = self.connect(**where)
        library = self.libraries[-1]
        self.until(lambda: bool(library.in_flight()))
        library.prove()
        self.until(peer.poll)
        return peer, library

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, step=self.engine.progress)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def spans(count: int, length: int = 64) -> np.ndarray:
    starts = np.arange(count, dtype=np.int64) * length
    return np.column_stack([starts, starts, np.full(count, length, dtype=np.int64)])


def test_a_long_span_is_cut_and_every_byte_of_it_is_read_once() -> None:
    length = 2 * PIECE_BYTES + 5
    ours, theirs = ([MooncakeRegionAddress(address=base, nbytes=1 << 40)] for base in (100, 200))
    pieces = cut(np.array([[3, 7, length]], dtype=np.int64), ours, theirs)
    assert [piece.length for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, 5]
    assert [piece.local for piece in pieces] == [103, 103 + PIECE_BYTES, 103 + 2 * PIECE_BYTES]
    assert [piece.remote for piece in pieces] == [207, 207 + PIECE_BYTES, 207 + 2 * PIECE_BYTES]


def test_no_more_reads_fly_than_mooncake_queues(rig: Rig) -> None:
    """Mooncake fails what waits in its own queue for over a second."""
    peer, library = rig.connected()
    transfer = rig.engine.read(peer, spans(3 * WINDOW), 10.0)
    most = 0
    while transfer.poll() is Status.PENDING:
        most = max(most, len(library.in_flight()))
        library.ended[library.in_flight()[0]] = Status.DONE
        rig.engine.progress()
    assert most == WINDOW
    assert len(library.posted) == 3 * WINDOW + 1


def test_a_failed_piece_fails_the_transfer_which_is_quiescent_when_the_others_have_ended(rig: Rig) -> None:
    """X11: one status is not the status of all."""
    peer, library = rig.connected()
    transfer = rig.engine.read(peer, spans(4), 10.0)
    first, second, third, last = library.in_flight()
    library.ended.update({last: Status.DONE, second: Status.FAILED})
    rig.engine.progress()
    assert (transfer.poll(), transfer.reason, transfer.quiescent) == (Status.FAILED, "peer_lost", False)
    library.ended.update({first: Status.DONE, third: Status.DONE})
    rig.engine.progress()
    assert transfer.poll() is Status.FAILED
    assert transfer.quiescent


def test_what_passes_its_deadline_stays_unquiescent_for_as_long_as_mooncake_reads(rig: Rig) -> None:
    """L15: the destination of a read that timed out is not released while it may be written to."""
    peer, library = rig.connected()
    transfer = rig.engine.read(peer, spans(2 * WINDOW), 0.0)
    rig.until(lambda: transfer.poll() is Status.FAILED)
    assert (transfer.reason, transfer.quiescent) == ("deadline", False)
    assert len(library.in_flight()) == WINDOW  # and nothing more is posted for it
    library.ended.update(dict.fromkeys(library.in_flight(), Status.DONE))
    rig.engine.progress()
    assert transfer.quiescent
    assert transfer.poll() is Status.FAILED


def test_closing_the_engine_destroys_what_could_write(rig: Rig) -> None:
    peer, library = rig.connected()
    transfer = rig.engine.read(peer, spans(2), 10.0)
    rig.engine.close()
    assert library.closed
    assert rig.libraries[0].closed
    assert (transfer.poll(), transfer.quiescent) == (Status.FAILED, True)


def test_a_producer_that_hangs_while_it_is_opened_holds_nobody_up(rig: Rig) -> None:
    """X13: opening a segment blocks for up to a minute, so it must never be done on the transfer thread."""
    rig.hang = True
    stuck = rig.connect(timeout_s=0.05)
    hanging = rig.libraries[-1]
    rig.hang = False
    peer, library = rig.connected(segment="127.0.0.1:3")
    transfer = rig.engine.read(peer, spans(1), 10.0)
    library.ended.update(dict.fromkeys(library.in_flight(), Status.DONE))
    rig.until(lambda: transfer.poll() is Status.DONE)
    with pytest.raises(PeerUnreachable, match="deadline"):
        rig.until(stuck.poll)
    with pytest.raises(PeerUnreachable, match="earlier attempt"):
        rig.connect()  # one thread per producer that hangs, not one per attempt
    hanging.may_open.set()
    rig.until(lambda: bool(hanging.posted))
    hanging.prove()
    rig.until(lambda: not stuck.opening and stuck.finished)  # type: ignore[attr-defined]
    again = rig.connect()
    rig.until(lambda: len(hanging.posted) == 2)  # its engine is used again
    hanging.prove()
    rig.until(again.poll)


def test_an_engine_closed_while_a_producer_hangs_gives_the_pool_back(rig: Rig) -> None:
    rig.hang = True
    rig.connect()
    hanging = rig.libraries[-1]
    rig.engine.close()
    assert not hanging.pinned
    hanging.may_open.set()


def test_a_peer_that_is_not_the_one_described_is_refused(rig: Rig) -> None:
    peer = rig.connect()
    library = rig.libraries[-1]
    rig.until(lambda: bool(library.in_flight()))
    library.prove(b"\1" * CANARY_BYTES)
    with pytest.raises(PeerUnreachable, match="not the one"):
        rig.until(peer.poll)


def test_an_engine_that_knows_an_earlier_life_of_an_address_is_not_used_for_the_next(rig: Rig) -> None:
    """Mooncake keeps what it learned about a segment, so it would go on reading from the old one."""
    old, library = rig.connected()
    old.close()
    rig.engine.progress()
    rig.connect(canary=b"\2" * CANARY_BYTES)
    assert rig.libraries[-1] is not library
    rig.connect(segment="127.0.0.1:4")
    rig.until(lambda: len(library.posted) == 2)


def test_a_closed_peer_is_kept_until_its_reads_have_ended(rig: Rig) -> None:
    peer, library = rig.connected()
    transfer = rig.engine.read(peer, spans(1), 10.0)
    peer.close()
    rig.engine.progress()
    assert (transfer.poll(), transfer.quiescent) == (Status.FAILED, False)
    rig.connect(segment="127.0.0.1:5")
    assert rig.libraries[-1] is not library
    library.ended.update(dict.fromkeys(library.in_flight(), Status.DONE))
    rig.engine.progress()
    assert transfer.quiescent


def test_spans_outside_either_pool_are_refused(rig: Rig) -> None:
    """Mooncake checks no local address."""
    peer, _ = rig.connected()
    for span in ([1 << 20, 0, 1], [0, 1 << 20, 1]):
        with pytest.raises(ValueError, match="outside"):
            rig.engine.read(peer, np.array([span], dtype=np.int64), 1.0)


def test_auto_leaves_out_what_lets_anybody_write_the_pool(rig: Rig) -> None:
    """X22."""
    with pytest.raises(BackendUnavailable, match="by name"):
        open_backend(dataclasses.replace(OPTIONS, explicit=False))


def test_a_transfer_of_nothing_is_done(rig: Rig) -> None:
    peer, _ = rig.connected()
    transfer = rig.engine.read(peer, spans(0), 1.0)
    assert (transfer.poll(), transfer.quiescent) == (Status.DONE, True)

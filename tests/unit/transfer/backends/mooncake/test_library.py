# SPDX-License-Identifier: Apache-2.0
"""What the mooncake backend relies on, asked of the installed Mooncake itself."""

from __future__ import annotations

import time
from collections.abc import Iterator
from statistics import median

import msgspec
import numpy as np
import pytest

from kvferry.transfer.backends.mooncake.library import (
    MooncakeAddress,
    MooncakeLibrary,
    MooncakeRegionAddress,
    Piece,
    probe,
)
from kvferry.transfer.engine import Status
from tests.contract.conftest import POOL_BYTES, ServingPeer

PIECE = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def installed() -> None:
    reason = probe({})
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture
def peer() -> Iterator[ServingPeer]:
    started = ServingPeer("mooncake")
    yield started
    started.close()


class Reading:
    """One of Mooncake's engines that reads all of the peer's pool, piece by piece."""

    def __init__(self, peer: ServingPeer) -> None:
        self.segment = msgspec.msgpack.decode(peer.engine, type=MooncakeAddress).segment
        self.remote = msgspec.msgpack.decode(peer.regions[0], type=MooncakeRegionAddress).address
        self.pool = np.zeros(POOL_BYTES, dtype=np.uint8)
        self.library = MooncakeLibrary("127.0.0.1")
        self.library.pin_pool([MooncakeRegionAddress(address=self.pool.ctypes.data, nbytes=POOL_BYTES)])

    def post(self, at: int) -> int:
        """Begin to read one piece."""
        return self.library.start_read(
            self.segment, Piece(self.pool.ctypes.data + at, self.remote + at, PIECE)
        )

    def finish(self, batch: int) -> Status:
        deadline = time.monotonic() + 20.0
        while (status := self.library.check(batch)) is Status.PENDING:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        return status


def test_posting_to_a_stopped_peer_and_asking_for_the_status_do_not_wait(peer: ServingPeer) -> None:
    """The transfer thread does both; Mooncake's own status call for batches would wait, and spin."""
    reading = Reading(peer)
    assert reading.finish(reading.post(0)) is Status.DONE
    peer.stop()
    took, batches = [], []
    for at in range(0, POOL_BYTES, PIECE):
        begun = time.monotonic()
        batches.append(reading.post(at))
        assert reading.library.check(batches[-1]) is Status.PENDING
        took.append(time.monotonic() - begun)
    # A busy machine may hold up some, but neither most nor any for as long as the peer stands still.
    assert median(took) < 1.0 and sum(took) < 10.0
    peer.resume()
    assert {reading.finish(batch) for batch in batches} == {Status.DONE}
    reading.library.close()


def test_a_destroyed_engine_writes_nothing_more(peer: ServingPeer) -> None:
    """I3 rests on it: closing the backend makes its reads quiescent."""
    reading = Reading(peer)
    assert reading.finish(reading.post(0)) is Status.DONE
    peer.stop()
    for at in range(0, POOL_BYTES, PIECE):
        assert reading.post(at)
    reading.library.close()
    reading.pool[:] = 0
    peer.resume()
    witness = Reading(peer)  # the peer has been at work again once this is answered
    assert witness.finish(witness.post(0)) is Status.DONE
    witness.library.close()
    assert witness.pool.any()
    assert not reading.pool.any()


def test_an_engine_that_has_gone_is_not_found(peer: ServingPeer) -> None:
    peer.kill_now()
    reading = Reading(peer)
    assert reading.post(0) == 0
    reading.library.close()

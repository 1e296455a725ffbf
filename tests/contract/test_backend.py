# SPDX-License-Identifier: Apache-2.0
"""What every transfer backend promises, with the peer in another process."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.engine import PeerUnreachable, Status, open_engine
from kvferry.transfer.layout import REGION_SHIFT
from tests.contract.conftest import ON_GPUS, POOL_BYTES, READER_GPU, Reader, ServingPeer, engine_options
from tests.contract.pools import virtual
from tests.helpers.waiting import patient

StartPeer = Callable[..., ServingPeer]


def scattered(block_bytes: int, count: int, seed: int = 7) -> list[tuple[int, int, int]]:
    """Random distinct blocks on both sides."""
    random = np.random.default_rng(seed)
    places = POOL_BYTES // block_bytes
    local = random.permutation(places)[:count] * block_bytes
    remote = random.permutation(places)[:count] * block_bytes
    return [(int(a), int(b), block_bytes) for a, b in zip(local, remote, strict=True)]


def open_descriptors() -> Counter[str]:
    """What this process has open, each with how often: a file's path, or a kind such as `socket`."""
    found: Counter[str] = Counter()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found[re.sub(r":\[\d+\]$", "", os.readlink(f"/proc/self/fd/{descriptor}"))] += 1
    return found


def expected(spans: list[tuple[int, int, int]], served: np.ndarray) -> np.ndarray:
    pool = np.zeros(POOL_BYTES, dtype=np.uint8)
    for local, remote, nbytes in spans:
        pool[local : local + nbytes] = served[remote : remote + nbytes]
    return pool


@pytest.mark.parametrize(("block_bytes", "count"), [(64, 1), (4096, 700), (65536, 100), (1 << 20, 9)])
def test_scattered_spans_arrive_byte_for_byte_and_nothing_else_is_touched(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray, block_bytes: int, count: int
) -> None:
    """R12: every public method of a backend is exercised, single and batch."""
    peer = reader.connect(start_peer())
    spans = scattered(block_bytes, count)
    transfer = reader.read(peer, spans)
    assert reader.finish(transfer) is Status.DONE
    assert transfer.quiescent
    assert (transfer.nbytes, transfer.descriptors) == (block_bytes * count, count)
    assert np.array_equal(reader.pool, expected(spans, served_bytes))


@pytest.mark.parametrize(("num_local", "num_remote"), [(4, 1), (1, 4), (4, 8)])
def test_pools_may_lie_in_several_allocations(
    backend: str,
    cell: tuple[str, str],
    start_peer: StartPeer,
    served_bytes: np.ndarray,
    num_local: int,
    num_remote: int,
) -> None:
    """As vLLM's do before 0.29: one for each layer. A span outside of its own is refused."""
    reader = Reader(backend, "cpu" if cell[1] == "cpu" else READER_GPU, num_regions=num_local)
    with contextlib.closing(reader.engine):
        peer = reader.connect(start_peer(num_regions=num_remote))
        spans = np.array(scattered(4096, 700), dtype=np.int64)
        rows = spans.copy()
        rows[:, 0] = virtual(spans[:, 0], POOL_BYTES // num_local)
        rows[:, 1] = virtual(spans[:, 1], POOL_BYTES // num_remote)
        transfer = reader.read(peer, [tuple(row) for row in rows.tolist()])
        assert reader.finish(transfer) is Status.DONE
        assert np.array_equal(reader.pool, expected([tuple(row) for row in spans.tolist()], served_bytes))
        for column, count in ((0, num_local), (1, num_remote)):
            for place in (POOL_BYTES // count - 100, count << REGION_SHIFT):
                wrong = [0, 0, 4096]
                wrong[column] = place
                with pytest.raises(ValueError, match="outside"):
                    reader.read(peer, [(wrong[0], wrong[1], wrong[2])])


def test_an_engine_reads_its_own_pool(backend: str, reader: Reader, served_bytes: np.ndarray) -> None:
    """As a server does that lends a prompt's KV and is then asked for the rest of the answer itself."""
    if backend in ("cuda_ipc", "nccl"):
        pytest.skip("neither CUDA nor NCCL connects a process to itself: such a prompt is computed")
    for _ in range(2):  # the second time after it has been disconnected
        reader.restore(served_bytes)
        peer = reader.connect_to_itself()
        half = POOL_BYTES // 2
        spans = [(block * 4096, half + block * 8192, 4096) for block in range(512)]
        assert reader.finish(reader.read(peer, spans)) is Status.DONE
        wanted = served_bytes.copy()
        for local, remote, nbytes in spans:
            wanted[local : local + nbytes] = served_bytes[remote : remote + nbytes]
        assert np.array_equal(reader.pool, wanted)
        peer.close()
        reader.engine.progress()


def test_many_reads_over_one_connection_do_not_mix(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """L10: answers belong to requests by number, not by the order of waiting."""
    peer = reader.connect(start_peer())
    spans = scattered(4096, 1024)
    transfers = [reader.read(peer, spans[first : first + 16]) for first in range(0, 1024, 16)]
    assert {reader.finish(transfer) for transfer in transfers} == {Status.DONE}
    assert np.array_equal(reader.pool, expected(spans, served_bytes))


def test_a_peer_killed_before_the_read_fails_it_and_leaves_it_quiescent(
    reader: Reader, start_peer: StartPeer
) -> None:
    """X12: a failed transfer is reported, never parked."""
    other = start_peer()
    peer = reader.connect(other)
    other.kill_now()
    transfer = reader.read(peer, scattered(1 << 20, 16), timeout_s=patient(5.0))
    assert reader.finish(transfer) is Status.FAILED
    assert transfer.reason == "peer_lost"
    reader.wait(lambda: transfer.quiescent)


def test_a_peer_killed_during_reads_ends_every_one_of_them(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """X11: a read counts as done only when all of it arrived, so those that say so are whole."""
    other = start_peer()
    peer = reader.connect(other)
    killer = threading.Timer(0.02, other.kill_now)
    spans = scattered(65536, 256)
    batches = [reader.read(peer, spans, timeout_s=patient(5.0))]  # on a slow machine it may stay the only one
    killer.start()
    reader.finish(batches[0])
    while killer.is_alive():
        transfer = reader.read(peer, spans, timeout_s=patient(5.0))
        batches.append(transfer)
        reader.finish(transfer)
    killer.join()
    last = reader.read(peer, spans, timeout_s=patient(5.0))
    assert reader.finish(last) is Status.FAILED
    for transfer in batches:
        reader.wait(functools.partial(getattr, transfer, "quiescent"))
        assert transfer.poll() in (Status.DONE, Status.FAILED)
    if batches[0].poll() is Status.DONE:
        assert np.array_equal(reader.pool, expected(spans, served_bytes))


def test_a_stopped_peer_runs_into_the_deadline_or_is_not_needed(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """The deadline is ours: NIXL has none. Shared-memory reads (cma) do not need the owner to run at all."""
    other = start_peer()
    peer = reader.connect(other)
    other.stop()
    spans = scattered(1 << 20, 15)
    begun = time.monotonic()
    transfer = reader.read(peer, spans, timeout_s=patient(0.5))
    status = reader.finish(transfer)
    assert time.monotonic() - begun < patient(10.0)
    if status is Status.DONE:
        assert np.array_equal(reader.pool, expected(spans, served_bytes))
    else:
        assert transfer.reason == "deadline"
    other.resume()
    reader.wait(lambda: transfer.quiescent)


def test_a_cancelled_read_writes_nothing_after_it_is_quiescent(reader: Reader, start_peer: StartPeer) -> None:
    """L15: the destination is quiescent only when nothing can be written to it any more (I3)."""
    other = start_peer()
    peer = reader.connect(other)
    other.stop()
    transfer = reader.read(peer, scattered(1 << 20, 15), timeout_s=patient(5.0))
    transfer.cancel()
    assert transfer.poll() in (Status.FAILED, Status.DONE)
    other.resume()
    reader.wait(lambda: transfer.quiescent)
    reader.clear()
    follow_up = reader.read(peer, [(0, 0, 64)])
    assert reader.finish(follow_up) is Status.DONE
    assert not reader.pool[64:].any()


def test_a_peer_that_died_before_we_connect_is_unreachable(reader: Reader, start_peer: StartPeer) -> None:
    other = start_peer()
    other.kill_now()
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable):
        reader.connect(other, timeout_s=patient(2.0))
    assert time.monotonic() - begun < patient(12.0)


def test_a_stopped_peer_is_unreachable_within_the_deadline(reader: Reader, start_peer: StartPeer) -> None:
    """X13: connecting has a deadline and delays no other peer."""
    other = start_peer()
    other.stop()
    begun = time.monotonic()
    with pytest.raises(PeerUnreachable):
        reader.connect(other, timeout_s=patient(1.0))
    assert time.monotonic() - begun < patient(12.0)


def test_a_stopped_peer_does_not_delay_reads_from_another(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """X13, L11: one dead peer does not block the others."""
    stopped, healthy = start_peer(), start_peer()
    stopped.stop()
    pending = reader.engine.connect(stopped.engine, stopped.regions, mint(stopped.secret), patient(40.0))
    peer = reader.connect(healthy)
    spans = scattered(65536, 64)
    begun = time.monotonic()
    transfer = reader.read(peer, spans)
    assert reader.finish(transfer) is Status.DONE
    assert time.monotonic() - begun < patient(20.0)
    assert not pending.poll()
    pending.close()


def test_a_description_that_makes_no_sense_is_unreachable(reader: Reader) -> None:
    with pytest.raises(PeerUnreachable):
        reader.engine.connect(b"nonsense", [b"nonsense"], b"", 1.0)


def test_a_closed_peer_can_be_met_again(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    other = start_peer()
    for _ in range(3):
        peer = reader.connect(other)
        spans = scattered(4096, 8)
        assert reader.finish(reader.read(peer, spans)) is Status.DONE
        peer.close()
        reader.engine.progress()
    assert np.array_equal(reader.pool, expected(spans, served_bytes))


def test_closing_an_engine_leaves_no_thread_and_no_descriptor_behind(backend: str) -> None:
    """R7: opening and closing again and again leaks nothing."""
    options = engine_options("leak", backend)
    open_engine(backend, options).close()  # libraries keep what they open on first use
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    for _ in range(5):
        open_engine(backend, options).close()
    assert set(threading.enumerate()) <= threads
    assert not open_descriptors() - descriptors


@pytest.mark.parametrize("cell", ["nccl", "tcp", ON_GPUS[0]], indirect=True)
def test_a_reader_without_a_token_of_this_agent_is_refused(reader: Reader, start_peer: StartPeer) -> None:
    """X22: only readers admitted on the control channel are served."""
    other = start_peer()
    with pytest.raises(PeerUnreachable):
        reader.connect(other, token=mint(new_secret()))


@pytest.mark.parametrize("cell", ["tcp"], indirect=True)
def test_an_answer_to_another_read_is_nobodys(reader: Reader, start_peer: StartPeer) -> None:
    """L10: answers are matched by number. Two that changed places fail, and not a byte of them lands."""
    peer = reader.connect(start_peer("reorder:seconds=10,count=1"))
    first = reader.read(peer, [(0, 4096, 64)])
    second = reader.read(peer, [(128, 8192, 64)])
    assert reader.finish(first) is Status.FAILED
    assert reader.finish(second) is Status.FAILED
    assert (first.reason, second.reason) == ("peer_lost", "peer_lost")
    assert first.quiescent and second.quiescent
    assert not reader.pool.any()


@pytest.mark.parametrize("cell", ["tcp"], indirect=True)
def test_a_read_that_nobody_overtakes_is_only_late(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """The fault itself: with one read in flight there is nothing to reorder."""
    peer = reader.connect(start_peer("reorder:seconds=0.05,count=1"))
    assert reader.finish(reader.read(peer, [(0, 4096, 64)])) is Status.DONE
    assert np.array_equal(reader.pool[:64], served_bytes[4096:4160])


@pytest.mark.parametrize("cell", ["nixl"], indirect=True)
def test_reads_over_one_connection_may_be_of_any_size(
    reader: Reader, start_peer: StartPeer, served_bytes: np.ndarray
) -> None:
    """The first is a lucky run of blocks; later ones do not start at multiples of it."""
    peer = reader.connect(start_peer())
    sizes = [(0, 131072, 65536), (65536, 4096, 4096), (69632, 8192, 8192), (81920, 64, 192)]
    for span in sizes:
        assert reader.finish(reader.read(peer, [span])) is Status.DONE
    assert np.array_equal(reader.pool, expected(sizes, served_bytes))

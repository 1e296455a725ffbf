# SPDX-License-Identifier: Apache-2.0
"""The cuda_ipc backend but for CUDA itself: two engines in this process, on a stand-in for the GPU."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
import torch

from kvferry.transfer.access_tokens import mint, new_secret
from kvferry.transfer.backends.common.settings import parse_settings
from kvferry.transfer.backends.cuda_ipc.engine import CudaIpcEngine, open_backend, probe
from kvferry.transfer.backends.cuda_ipc.launches import LAUNCH_BYTES
from kvferry.transfer.backends.cuda_ipc.peer import CudaIpcAddress
from kvferry.transfer.backends.cuda_ipc.settings import CudaIpcSettings
from kvferry.transfer.engine import BackendUnavailable, EngineOptions, Peer, PeerUnreachable, Status, Transfer
from tests.helpers.waiting import wait_until
from tests.standins.cuda_device import HostDevice

POOL_BYTES = 1 << 20
OPTIONS = EngineOptions(name="test", bind_host="127.0.0.1", advertise_host="127.0.0.1")


class Side:
    """An engine with a pool of its own."""

    def __init__(self, fill: int) -> None:
        self.engine = CudaIpcEngine(OPTIONS, lambda pool, settings, computing: HostDevice())
        self.pool = torch.full((POOL_BYTES,), fill, dtype=torch.uint8)
        [self.region] = self.engine.register([self.pool])

    @property
    def device(self) -> HostDevice:
        device = self.engine._device
        assert isinstance(device, HostDevice)
        return device


class Rig:
    """A reader, a producer, and what makes both go on."""

    def __init__(self) -> None:
        self.reader, self.producer = Side(0), Side(9)
        self.secret = new_secret()
        self.producer.engine.admit(self.secret)
        self.running = [self.reader.engine, self.producer.engine]

    def connect(self, token: bytes | None = None, description: bytes | None = None) -> Peer:
        peer = self.reader.engine.connect(
            description or self.producer.engine.describe(),
            [self.producer.region.describe()],
            token or mint(self.secret),
            5.0,
        )
        self.until(peer.poll)
        return peer

    def read(self, peer: Peer, *places: int, timeout_s: float = 5.0, nbytes: int = 64) -> Transfer:
        spans = np.array([(place, place, nbytes) for place in places], dtype=np.int64).reshape(-1, 3)
        return self.reader.engine.read(peer, spans, timeout_s)

    def progress(self) -> None:
        for engine in self.running:
            engine.progress()

    def until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, step=self.progress)

    def kill_producer(self) -> None:
        """What a reader sees of it: the connection ends. The memory stays as long as it is mapped."""
        self.running.remove(self.producer.engine)
        self.producer.engine._server.close()

    def close(self) -> None:
        for side in (self.reader, self.producer):
            if side.engine in self.running:
                side.engine.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def test_reads_that_wait_are_launched_together_and_land_apart(rig: Rig) -> None:
    one, other = rig.connect(), rig.connect()
    reads = [rig.read(one, 0, 4096), rig.read(other, 8192), rig.read(one, 100_000)]
    rig.until(lambda: all(read.poll() is Status.DONE for read in reads))
    assert len(rig.reader.device.launched) == 1
    assert [(read.nbytes, read.descriptors) for read in reads] == [(128, 2), (64, 1), (64, 1)]
    assert rig.reader.pool.count_nonzero() == 4 * 64


def test_no_more_is_in_flight_than_keeps_the_link_busy(rig: Rig) -> None:
    peer = rig.connect()
    device = rig.reader.device
    device.hold = True
    reads = []
    for place in range(4):
        reads.append(rig.read(peer, place * 64))
        rig.reader.engine.progress()
    assert [launch.work.num_spans for launch in device.launched] == [1, 1]
    device.in_flight[0].end()
    rig.until(lambda: len(device.launched) == 3)
    assert device.launched[2].work.num_spans == 2
    assert [read.poll() for read in reads] == [Status.DONE] + [Status.PENDING] * 3
    for launch in list(device.in_flight):
        launch.end()
    rig.until(lambda: all(read.poll() is Status.DONE for read in reads))


def test_a_launch_takes_no_more_reads_once_it_is_long_enough(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert LAUNCH_BYTES < 2 << 30
    monkeypatch.setattr("kvferry.transfer.backends.cuda_ipc.launches.LAUNCH_BYTES", 100)
    peer = rig.connect()
    reads = [rig.read(peer, place * 64) for place in range(5)]
    rig.until(lambda: all(read.poll() is Status.DONE for read in reads))
    assert [launch.work.num_spans for launch in rig.reader.device.launched] == [2, 2, 1]


@pytest.mark.parametrize("how", ["cancelled", "deadline", "peer_lost"])
def test_what_fails_in_flight_is_quiescent_only_when_it_has_landed(rig: Rig, how: str) -> None:
    """I3, L15: a kernel cannot be called back."""
    peer = rig.connect()
    rig.reader.device.hold = True
    read = rig.read(peer, 0, timeout_s=0.05 if how == "deadline" else 5.0)
    rig.reader.engine.progress()
    if how == "cancelled":
        read.cancel()
    elif how == "peer_lost":
        peer.close()
    rig.until(lambda: read.poll() is Status.FAILED)
    assert read.reason == how
    assert not read.quiescent
    rig.reader.device.in_flight[0].end()
    rig.until(lambda: read.quiescent)
    assert read.poll() is Status.FAILED


def test_what_fails_before_its_launch_is_quiescent_at_once_and_never_launched(rig: Rig) -> None:
    peer = rig.connect()
    read = rig.read(peer, 0)
    read.cancel()
    assert read.quiescent
    rig.reader.engine.progress()
    assert not rig.reader.device.launched


def test_a_dead_producers_memory_is_given_back_once_no_kernel_reads_it(rig: Rig) -> None:
    """As long as it is mapped, a killed owner's GPU memory stays taken, and it cannot start again."""
    peer = rig.connect()
    device = rig.reader.device
    device.hold = True
    read = rig.read(peer, 0)
    rig.reader.engine.progress()
    rig.kill_producer()
    rig.until(lambda: read.poll() is Status.FAILED)
    assert read.reason == "peer_lost"
    assert len(device.mapped) == 1
    device.in_flight[0].end()
    rig.until(lambda: not device.mapped)
    assert read.quiescent
    with pytest.raises(PeerUnreachable):
        peer.poll()


def test_an_idle_peer_that_dies_is_unmapped_too(rig: Rig) -> None:
    rig.connect()
    rig.kill_producer()
    rig.until(lambda: not rig.reader.device.mapped)


def test_a_read_from_a_peer_that_is_gone_fails_before_anything_is_launched(rig: Rig) -> None:
    peer = rig.connect()
    rig.kill_producer()
    read = rig.read(peer, 0)
    rig.until(lambda: read.poll() is not Status.PENDING)
    assert (read.poll(), read.reason, read.quiescent) == (Status.FAILED, "peer_lost", True)
    assert not rig.reader.device.launched


def test_closing_waits_for_what_is_in_flight(rig: Rig) -> None:
    peer = rig.connect()
    rig.reader.device.hold = True
    reads = [rig.read(peer, 0)]
    rig.reader.engine.progress()
    reads.append(rig.read(peer, 64))
    rig.running.remove(rig.reader.engine)
    rig.reader.engine.close()
    assert rig.reader.device.closed
    assert all(read.poll() is Status.FAILED and read.quiescent for read in reads)


def test_whoever_sleeps_on_the_descriptor_is_woken_until_it_has_seen_the_landing(rig: Rig) -> None:
    """R24: no thread has to poll for the end of a kernel; `PollPacer` sets when it is polled."""
    peer = rig.connect()
    engine = rig.reader.engine
    rig.reader.device.hold = True
    transfer = rig.read(peer, 0)
    engine.progress()
    descriptor = engine.fileno()
    assert descriptor is not None
    assert select.select([descriptor], [], [], 5.0)[0]
    engine.progress()
    assert transfer.poll() is Status.PENDING
    rig.reader.device.in_flight[0].end()
    assert select.select([descriptor], [], [], 5.0)[0]
    engine.progress()
    assert transfer.poll() is Status.DONE
    assert not select.select([descriptor], [], [], 0.1)[0]


def test_a_device_that_cannot_reach_the_other_makes_the_peer_unreachable_and_says_why(rig: Rig) -> None:
    """The open is tried; equal host ids would have promised it."""
    rig.reader.device.unreachable = True
    with pytest.raises(PeerUnreachable, match="CUDA_ERROR_INVALID_VALUE"):
        rig.connect()


def test_a_handle_that_leads_to_other_memory_is_not_trusted(rig: Rig) -> None:
    """What another host's handle might do here."""
    address = msgspec.msgpack.decode(rig.producer.engine.describe(), type=CudaIpcAddress)
    wrong = msgspec.structs.replace(address, canary=b"x" * 32)
    with pytest.raises(PeerUnreachable, match="other memory"):
        rig.connect(description=msgspec.msgpack.encode(wrong))
    assert not rig.reader.device.mapped


def test_a_reader_without_a_token_of_this_agent_is_refused(rig: Rig) -> None:
    """X22."""
    with pytest.raises(PeerUnreachable, match=r"closed by the peer|refused"):
        rig.connect(token=mint(new_secret()))


@pytest.mark.parametrize(
    "span", [(0, POOL_BYTES - 32, 64), (POOL_BYTES - 32, 0, 64), (-64, 0, 64), (0, -64, 64)]
)
def test_a_span_outside_a_pool_never_reaches_a_kernel(rig: Rig, span: tuple[int, int, int]) -> None:
    peer = rig.connect()
    with pytest.raises(ValueError, match="outside"):
        rig.reader.engine.read(peer, np.array([span], dtype=np.int64), 5.0)


def test_an_empty_read_is_done(rig: Rig) -> None:
    assert rig.read(rig.connect()).poll() is Status.DONE


def test_settings_bound_the_share_of_the_gpu() -> None:
    settings = parse_settings("cuda_ipc", CudaIpcSettings, {"sm_share": "0.125", "busy_sm_share": "0.0625"})
    assert (settings.num_programs(132, computing=False), settings.num_programs(132, computing=True)) == (
        16,
        8,
    )
    assert CudaIpcSettings(sm_share=0.001).num_programs(132, computing=False) == 1
    with pytest.raises(ValueError, match="sm_share"):
        parse_settings("cuda_ipc", CudaIpcSettings, {"sm_share": "1.5"})
    with pytest.raises(ValueError, match="num_warps"):
        parse_settings("cuda_ipc", CudaIpcSettings, {"num_warps": "24"})
    with pytest.raises(ValueError, match="unknown option"):
        parse_settings("cuda_ipc", CudaIpcSettings, {"share": "1"})


def test_settings_say_what_is_the_kernels() -> None:
    """Long spans go by the copy engines: all of them while the model computes, else all but an eighth."""
    settings = CudaIpcSettings(copy_engine_bytes=1000, mixed_bytes=4000)
    assert settings.num_gathered(100, 100 * 4000, computing=False) == 13
    assert settings.num_gathered(1, 4000, computing=False) == 1
    assert settings.num_gathered(100, 100 * 3999, computing=False) == 100
    assert settings.num_gathered(100, 100 * 1000, computing=True) == 0
    assert settings.num_gathered(100, 100 * 999, computing=True) == 100
    never = CudaIpcSettings(copy_engine_bytes=0, mixed_bytes=0)
    assert {never.num_gathered(3, 1 << 30, computing) for computing in (False, True)} == {3}
    with pytest.raises(ValueError, match="mixed_bytes"):
        parse_settings("cuda_ipc", CudaIpcSettings, {"mixed_bytes": "-1"})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_reason_is_told() -> None:
    reason = probe({})
    assert reason is not None
    assert reason.startswith("cuda_ipc: ")
    with pytest.raises(BackendUnavailable, match="cuda_ipc"):
        open_backend(OPTIONS)

# SPDX-License-Identifier: Apache-2.0
"""The stand-in behaves as the real library does (docs/sources.md#mori-io).

`make test-rdma` runs these tests with the real library too, but for those that need a fault.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.waiting import patient
from tests.standins import mori_io
from tests.unit.transfer.backends.mori.rig import fault

NBYTES = 1 << 16
WAIT_MS = int(patient(5.0) * 1000)


def libraries() -> list[str]:
    """The stand-in, and the real library where it is: `make test-rdma` brings it."""
    return ["standin", "library"] if importlib.util.find_spec("mori") is not None else ["standin"]


@pytest.fixture(params=libraries())
def io(request: pytest.FixtureRequest) -> Iterator[ModuleType]:
    with mori_io.on_path() if request.param == "standin" else contextlib.nullcontext():
        import mori.io

        yield mori.io


@pytest.fixture
def standin() -> Iterator[ModuleType]:
    """For what only faults can show."""
    with mori_io.on_path():
        import mori.io

        yield mori.io


class Engines:
    """A reader and an owner that know each other, and one registered buffer of each."""

    def __init__(self, io: ModuleType, **config: Any) -> None:
        settings = io.RdmaBackendConfig(**{"qp_per_transfer": 2, **config})
        self.reader = io.IOEngine("reader", io.IOEngineConfig(host="127.0.0.1", port=0))
        with fault(""):
            self.owner = io.IOEngine("owner", io.IOEngineConfig("127.0.0.1", 0))
        for engine in (self.reader, self.owner):
            engine.create_backend(io.BackendType.RDMA, settings)
        self.reader.register_remote_engine(self.owner.get_engine_desc())
        self.owner.register_remote_engine(self.reader.get_engine_desc())
        self.ours = torch.zeros(NBYTES, dtype=torch.uint8)
        self.theirs = torch.randint(1, 256, (NBYTES,), dtype=torch.uint8)
        self.local = self.reader.register_torch_tensor(self.ours)
        self.remote = self.owner.register_torch_tensor(self.theirs)


def test_descriptions_pack_into_arrays_in_the_librarys_order(io: ModuleType) -> None:
    import msgpack

    two = Engines(io)
    desc = two.owner.get_engine_desc()
    assert msgpack.unpackb(desc.pack()) == [
        "owner",
        desc.node_id,
        desc.hostname,
        "127.0.0.1",
        desc.port,
        os.getpid(),
    ]
    assert desc.port > 0
    assert io.EngineDesc.unpack(desc.pack()) == desc
    packed = msgpack.unpackb(two.remote.pack())
    assert packed[:7] == ["owner", two.remote.id, -1, "", two.theirs.data_ptr(), NBYTES, 1]
    assert (len(packed), packed[7], packed[8]) == (15, bytes(64), two.remote.numa_node)
    assert io.MemoryDesc.unpack(two.remote.pack()) == two.remote
    for kind in (io.EngineDesc, io.MemoryDesc):
        for nonsense in (b"", b"nonsense", msgpack.packb([1]), msgpack.packb(1)):
            with pytest.raises(RuntimeError, match=r"std::bad_cast|insufficient bytes"):
                kind.unpack(nonsense)


def test_descriptions_of_other_versions_are_taken(io: ModuleType) -> None:
    """They are shorter or longer arrays; so engines of a fleet may be of several versions."""
    import msgpack

    two = Engines(io)
    engine = msgpack.unpackb(two.owner.get_engine_desc().pack())
    memory = msgpack.unpackb(two.remote.pack())
    assert io.EngineDesc.unpack(msgpack.packb(engine[:3])).hostname == engine[2]
    assert io.EngineDesc.unpack(msgpack.packb([*engine, "more"])).pid == os.getpid()
    assert io.MemoryDesc.unpack(msgpack.packb(memory[:9])).size == NBYTES
    assert io.MemoryDesc.unpack(msgpack.packb([*memory, 1, 2])) == two.remote


def test_descriptions_can_be_read_and_neither_made_nor_changed_nor_hashed(io: ModuleType) -> None:
    two = Engines(io)
    for description in (two.owner.get_engine_desc(), two.remote):
        with pytest.raises(TypeError, match="unhashable"):
            hash(description)
        with pytest.raises(AttributeError):
            description.key = "another"
    shown = [
        "engine_key",
        "id",
        "device_id",
        "device_bus_id",
        "numa_node",
        "data",
        "size",
        "loc",
        "ipc_handle",
    ]
    assert all(hasattr(two.remote, name) for name in shown)
    assert not hasattr(two.remote, "ipc_offset")
    with pytest.raises(TypeError, match="onstructor"):
        io.EngineDesc()
    with pytest.raises(TypeError):
        io.MemoryDesc("owner")


def test_enums_are_equal_to_their_like_alone_and_have_no_order(io: ModuleType) -> None:
    codes = io.StatusCode
    assert codes.SUCCESS != 0
    assert int(codes.SUCCESS) == 0
    assert codes.INIT != io.BackendType.XGMI
    assert codes.ERR_RDMA_OP.name == "ERR_RDMA_OP"
    assert bool(codes.SUCCESS)
    with pytest.raises(TypeError):
        assert codes.SUCCESS < codes.INIT
    from mori.cpp import TransferStatus

    assert TransferStatus().Code() == codes.INIT
    assert TransferStatus().Code() is not codes.INIT


def test_a_log_level_may_be_any_word(io: ModuleType) -> None:
    io.set_log_level("loud")
    io.set_log_level("error")


@pytest.mark.parametrize(
    ("session", "batch", "write"), list(itertools.product((True, False), (True, False), (True, False)))
)
def test_bytes_move_either_way_and_the_owner_hears_of_it_for_ever(
    io: ModuleType, session: bool, batch: bool, write: bool
) -> None:
    """Argument orders, and one status for a batch of a session, a list of them for a batch of an engine."""
    two = Engines(io)
    uid = two.reader.allocate_transfer_uid()
    offsets, sizes = list(range(0, NBYTES, 2048)), [1024] * (NBYTES // 2048)
    verb = ("batch_" if batch else "") + ("write" if write else "read")
    if session:
        call = getattr(two.reader.create_session(two.local, two.remote), verb)
        answer = call(offsets, offsets, sizes, uid) if batch else call(0, 0, NBYTES, uid)
        statuses = [answer]
    else:
        call = getattr(two.reader, verb)
        if batch:
            statuses = call([two.local], [offsets], [two.remote], [offsets], [sizes], [uid])
        else:
            statuses = [call(two.local, 0, two.remote, 0, NBYTES, uid)]
    assert len(statuses) == 1
    assert two.reader.wait_all(statuses, timeout_ms=WAIT_MS) == io.StatusCode.SUCCESS
    moved = torch.zeros(NBYTES, dtype=torch.bool)
    for offset, size in zip(offsets, sizes, strict=True) if batch else [(0, NBYTES)]:
        moved[offset : offset + size] = True
    assert torch.equal(two.ours == two.theirs, moved)
    deadline = time.monotonic() + patient(5.0)
    while two.owner.pop_inbound_transfer_status("reader", uid) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    again = two.owner.pop_inbound_transfer_status("reader", uid)
    assert again is not None and again.Succeeded()
    assert two.owner.pop_inbound_transfer_status("reader", uid + 1) is None


def test_nobody_hears_of_it_when_notifications_are_off(io: ModuleType) -> None:
    two = Engines(io, enable_notification=False)
    status = two.reader.create_session(two.local, two.remote).read(0, 0, 8, 0)
    status.Wait()
    assert status.Succeeded()
    time.sleep(0.02)
    assert two.owner.pop_inbound_transfer_status("reader", 0) is None


def test_an_error_stays_and_a_status_that_has_not_begun_waits_for_nothing(io: ModuleType) -> None:
    from mori.cpp import TransferStatus

    status = TransferStatus()
    assert status.Init()
    begun = time.monotonic()
    status.Wait()
    assert status.WaitFor(30_000) == io.StatusCode.INIT
    assert time.monotonic() - begun < 20.0
    status.Update(io.StatusCode.ERR_RDMA_OP, "first")
    status.Update(io.StatusCode.SUCCESS, "second")
    assert (status.Code(), status.Message(), status.Failed()) == (io.StatusCode.ERR_RDMA_OP, "first", True)
    status.SetCode(io.StatusCode.SUCCESS)
    assert status.Succeeded()


def test_waiting_lets_others_run_and_keeps_to_its_time(io: ModuleType) -> None:
    from mori.cpp import TransferStatus

    status = TransferStatus()
    status.SetCode(io.StatusCode.IN_PROGRESS)
    assert status.WaitFor(0) == io.StatusCode.IN_PROGRESS
    assert status.WaitFor(10) == io.StatusCode.IN_PROGRESS
    threading.Timer(0.05, status.Update, (io.StatusCode.SUCCESS, "")).start()
    assert status.WaitFor(WAIT_MS) == io.StatusCode.SUCCESS


def test_waiting_for_many_tells_the_first_error_and_polling_any(io: ModuleType) -> None:
    from mori.cpp import TransferStatus

    engine = io.IOEngine("waiting", io.IOEngineConfig("127.0.0.1", 0))
    codes = io.StatusCode
    done, pending, failed, worse = (TransferStatus() for _ in range(4))
    for status, code in (
        (done, codes.SUCCESS),
        (pending, codes.IN_PROGRESS),
        (failed, codes.ERR_RDMA_OP),
        (worse, codes.ERR_BAD_STATE),
    ):
        status.SetCode(code)
    assert engine.wait_all([]) == codes.SUCCESS
    assert engine.wait_all([done, pending], timeout_ms=0) == codes.IN_PROGRESS
    assert engine.wait_all([done, pending, failed], timeout_ms=0) == codes.ERR_RDMA_OP
    assert engine.wait_all([failed, worse, done], timeout_ms=-1) == codes.ERR_RDMA_OP
    assert engine.wait_all([done, pending], timeout_ms=20) == codes.IN_PROGRESS


def test_without_a_backend_or_an_introduction_there_is_no_way(io: ModuleType) -> None:
    two = Engines(io)
    stranger = io.IOEngine("stranger", io.IOEngineConfig("127.0.0.1", 0))
    region = stranger.register_torch_tensor(torch.zeros(8))
    assert stranger.create_session(region, two.remote) is None
    stranger.create_backend(io.BackendType.RDMA)
    region = stranger.register_torch_tensor(torch.zeros(8))
    assert stranger.create_session(region, two.remote) is None
    status = stranger.read(region, 0, two.remote, 0, 8, 0)
    assert status.Code() == io.StatusCode.ERR_BAD_STATE
    assert status.Message() == "No available backend found, create backend first"
    with pytest.raises(NotImplementedError):
        stranger.create_backend(io.BackendType.TCP)


def test_what_lies_outside_a_region_is_refused_and_breaks_nothing(io: ModuleType) -> None:
    two = Engines(io)
    session = two.reader.create_session(two.local, two.remote)
    for local, remote, size in ((NBYTES, 0, 1), (0, NBYTES - 4, 8), (0, 0, 1 << 32)):
        status = session.read(local, remote, size, 0)
        assert status.Code() == io.StatusCode.ERR_INVALID_ARGS
    for columns in (([0], [0, 1], [1]), ([0, 1], [0, 1], [1])):
        assert session.batch_read(*columns, 0).Code() == io.StatusCode.ERR_INVALID_ARGS
    status = session.read(0, 0, 8, 0)
    assert status.WaitFor(WAIT_MS) == io.StatusCode.SUCCESS


def test_a_region_that_its_owner_does_not_know_is_a_runtime_error(io: ModuleType) -> None:
    two = Engines(io)
    two.owner.deregister_memory(two.remote)
    with pytest.raises(RuntimeError, match="remote MR size mismatch"):
        two.reader.create_session(two.local, two.remote)


def test_an_engines_batch_of_unequal_lists_ends_the_process(io: ModuleType) -> None:
    """A session refuses it; the library is built with its assertions."""
    code = """
import mori.io as io, torch
engine = io.IOEngine("e", io.IOEngineConfig("127.0.0.1", 0))
engine.create_backend(io.BackendType.RDMA)
engine.register_remote_engine(engine.get_engine_desc())
region = engine.register_torch_tensor(torch.zeros(16))
print("registered", flush=True)
engine.batch_read([region], [[0]], [region], [[0, 1]], [[1]], [0])
print("unreachable", flush=True)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, timeout=patient(30)
    )
    assert ended.returncode == -6
    assert "registered" in ended.stdout and "unreachable" not in ended.stdout


def test_a_broken_queue_pair_stays_broken_and_the_other_does_not(standin: ModuleType) -> None:
    """A uid names the queue pair that a single read takes."""
    io = standin
    with fault("fail:after=1,lane=0"):
        two = Engines(io)
    session = two.reader.create_session(two.local, two.remote)
    codes = [session.read(0, 0, 8, uid).WaitFor(WAIT_MS) for uid in (0, 2, 4, 1, 3, 0)]
    good, bad = io.StatusCode.SUCCESS, io.StatusCode.ERR_RDMA_OP
    assert codes == [good, bad, bad, good, good, bad]
    again = two.reader.create_session(two.local, two.remote)
    assert again.read(0, 0, 8, 0).WaitFor(WAIT_MS) == bad
    assert again.alive()


def test_registration_happens_at_first_use_and_ends_the_process_when_it_fails() -> None:
    code = """
import os, sys, mori.io as io
engine = io.IOEngine("e", io.IOEngineConfig("127.0.0.1", 0))
engine.create_backend(io.BackendType.RDMA)
engine.register_remote_engine(engine.get_engine_desc())
region = engine.register_memory(id(engine), 16, -1, io.MemoryLocationType.CPU)
print("registered", flush=True)
engine.create_session(region, region)
print("unreachable", flush=True)
"""
    ended = _run(code, "registration:above=8")
    assert (ended.returncode, ended.stdout) == (-6, "registered\n")


def test_a_missing_topology_ends_the_process() -> None:
    code = (
        "import mori.io as io; e = io.IOEngine('e', io.IOEngineConfig('127.0.0.1', 0));"
        "e.create_backend(io.BackendType.RDMA); print('unreachable')"
    )
    ended = _run(code, "topology")
    assert (ended.returncode, ended.stdout) == (255, "")


def test_another_process_is_read_while_it_is_stopped_and_not_once_it_is_dead(io: ModuleType) -> None:
    code = """
import ctypes, json, sys, mori.io as io
engine = io.IOEngine("owner", io.IOEngineConfig("127.0.0.1", 0))
engine.create_backend(io.BackendType.RDMA)
memory = ctypes.create_string_buffer(b"remote bytes", 16)
region = engine.register_memory(ctypes.addressof(memory), 16, -1, io.MemoryLocationType.CPU)
print(json.dumps([engine.get_engine_desc().pack().hex(), region.pack().hex()]), flush=True)
sys.stdin.read()
"""
    owner = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ
    )
    try:
        assert owner.stdout is not None and owner.stdin is not None
        engine, region = (bytes.fromhex(each) for each in json.loads(owner.stdout.readline()))
        reader = io.IOEngine("reader", io.IOEngineConfig("127.0.0.1", 0))
        reader.create_backend(io.BackendType.RDMA, io.RdmaBackendConfig(enable_notification=False))
        reader.register_remote_engine(io.EngineDesc.unpack(engine))
        ours = np.zeros(16, dtype=np.uint8)
        local = reader.register_memory(ours.ctypes.data, 16, -1, io.MemoryLocationType.CPU)
        session = reader.create_session(local, io.MemoryDesc.unpack(region))
        owner.send_signal(19)
        assert session.read(0, 0, 16, 0).WaitFor(WAIT_MS) == io.StatusCode.SUCCESS
        assert ours.tobytes().rstrip(b"\0") == b"remote bytes"
        owner.kill()
        owner.wait()
        assert session.read(0, 0, 16, 0).WaitFor(WAIT_MS) == io.StatusCode.ERR_RDMA_OP
    finally:
        owner.kill()
        owner.wait()
        owner.stdin.close()
        owner.stdout.close()


def test_a_fault_that_makes_no_sense_is_refused(standin: ModuleType) -> None:
    for text in ("melt", "fail:when=2", "topology:after=1"):
        with fault(text), pytest.raises(ValueError, match=text):
            standin.IOEngine("e", standin.IOEngineConfig())


def _run(code: str, spec: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(mori_io.FOLDER), mori_io.FAULT: spec}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=30
    )

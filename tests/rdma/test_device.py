# SPDX-License-Identifier: Apache-2.0
"""The emulated machine has an RDMA device, real verbs and the real libraries: the log says which."""

from __future__ import annotations

import importlib.metadata
import os

import pytest

from kvferry.deploy.doctor import command as doctor
from kvferry.transfer.rdma_devices import list_rdma_devices
from tests.helpers.waiting import patient


def test_the_machine_and_its_libraries() -> None:
    import mori
    import mori.io

    [device] = list_rdma_devices()
    print(f"\nkernel {os.uname().release}")
    print(f"device {device}")
    print(f"amd-mori {mori.__version__} from {mori.io.__file__}")
    print(f"nixl {importlib.metadata.version('nixl')}, UCX_TLS={os.environ['UCX_TLS']}")
    assert [port.state for port in device.ports] == ["ACTIVE"]
    assert device.usable_by_us


def test_the_doctor_names_the_device_its_state_and_who_can_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    status = doctor.main(["--transfer-options", f"mori.probe_s={patient(30):.0f}"])
    said = capsys.readouterr().out
    print(said)
    assert status == 0
    [line] = [line for line in said.splitlines() if line.startswith("RDMA: rxe0")]
    assert "port 1 ACTIVE, Ethernet" in line
    assert line.endswith(("open to this user; usable by mori, nixl", "usable by mori, nixl, mooncake"))

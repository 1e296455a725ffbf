# SPDX-License-Identifier: Apache-2.0
"""What the kernel says of RDMA devices."""

from __future__ import annotations

import os
from pathlib import Path

from kvferry.transfer.rdma_devices import RdmaPort, list_rdma_devices


def make(tmp_path: Path, name: str, bus: str, number: int) -> None:
    """A device as sysfs shows it: a link into the folder of its bus."""
    device = tmp_path / "devices" / bus / name
    port = device / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "rate").write_text("2.5 Gb/sec (1X SDR)\n")
    for folder in ("class", "verbs", "nodes"):
        (tmp_path / folder).mkdir(exist_ok=True)
    (tmp_path / "class" / name).symlink_to(device)
    verbs = tmp_path / "verbs" / f"uverbs{number}"
    verbs.mkdir()
    (verbs / "ibdev").write_text(f"{name}\n")


def test_a_device_is_known_by_its_bus_its_ports_and_its_file(tmp_path: Path) -> None:
    make(tmp_path, "mlx5_0", "pci0000:00/0000:8c:00.0/infiniband", 0)
    make(tmp_path, "rxe0", "virtual/infiniband", 1)
    node = tmp_path / "nodes" / "uverbs1"
    node.touch(mode=0o600)
    nic, soft = list_rdma_devices(tmp_path / "class", tmp_path / "verbs", tmp_path / "nodes")
    assert (nic.name, nic.pci_address, nic.usable_by_us, nic.permissions) == (
        "mlx5_0",
        "0000:8c:00.0",
        False,
        "",
    )
    assert (soft.name, soft.pci_address, soft.node) == ("rxe0", None, node)
    assert soft.ports == (RdmaPort(1, "ACTIVE", "Ethernet", "2.5 Gb/sec (1X SDR)"),)
    assert soft.usable_by_us
    assert soft.permissions.startswith("-rw------- ")
    if os.geteuid() != 0:
        node.chmod(0)
        assert not soft.usable_by_us


def test_a_kernel_without_rdma_has_none(tmp_path: Path) -> None:
    assert list_rdma_devices(tmp_path / "class", tmp_path / "verbs", tmp_path / "nodes") == []
    (tmp_path / "class").mkdir()
    assert list_rdma_devices(tmp_path / "class", tmp_path / "verbs", tmp_path / "nodes") == []

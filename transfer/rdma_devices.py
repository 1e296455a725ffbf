# SPDX-License-Identifier: Apache-2.0
"""The RDMA devices of this machine, as the kernel describes them under /sys/class/infiniband."""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from dataclasses import dataclass
from pathlib import Path

_DEVICES = Path("/sys/class/infiniband")
_VERBS = Path("/sys/class/infiniband_verbs")
_NODES = Path("/dev/infiniband")
_PCI_ADDRESS = re.compile(r"[0-9a-fA-F]{4}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-7]")


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """One port: `state` as the kernel writes it (ACTIVE, DOWN, …), `link` is Ethernet or InfiniBand."""

    number: int
    state: str
    link: str
    rate: str


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """`pci_address` is None for a device without hardware of its own, such as soft RoCE.

    `node` is the file through which programs use it; None where the kernel module for that is not loaded.
    """

    name: str
    pci_address: str | None
    node: Path | None
    ports: tuple[RdmaPort, ...]

    @property
    def usable_by_us(self) -> bool:
        """Whether this user may open it."""
        return self.node is not None and os.access(self.node, os.R_OK | os.W_OK)

    @property
    def permissions(self) -> str:
        """Who may open it, for example `crw-rw---- root:rdma`; empty without a node."""
        if self.node is None or not self.node.exists():
            return ""
        status = self.node.stat()
        return f"{stat.filemode(status.st_mode)} {_user(status.st_uid)}:{_group(status.st_gid)}"


def list_rdma_devices(
    devices: Path = _DEVICES, verbs: Path = _VERBS, nodes: Path = _NODES
) -> list[RdmaDevice]:
    """Every device, by name. Empty where the kernel knows of none."""
    if not devices.is_dir():
        return []
    by_device = {_text(each / "ibdev"): nodes / each.name for each in verbs.glob("uverbs*")}
    return [_device(path, by_device.get(path.name)) for path in sorted(devices.iterdir())]


def _device(path: Path, node: Path | None) -> RdmaDevice:
    parts = reversed(path.resolve().parts)
    address = next((part for part in parts if _PCI_ADDRESS.fullmatch(part)), None)
    ports = sorted((path / "ports").glob("[0-9]*"), key=lambda port: int(port.name))
    return RdmaDevice(path.name, address, node, tuple(_port(each) for each in ports))


def _port(path: Path) -> RdmaPort:
    return RdmaPort(
        number=int(path.name),
        state=_text(path / "state").partition(": ")[2],
        link=_text(path / "link_layer"),
        rate=_text(path / "rate"),
    )


def _text(path: Path) -> str:
    """A line of a file; empty if it cannot be read: drivers leave some out."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)

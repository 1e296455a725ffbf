# SPDX-License-Identifier: Apache-2.0
"""Soft RoCE as it is, without the PCI address that `guest/prepare` gives it elsewhere."""

from __future__ import annotations

import time

from kvferry.transfer.engine import usable
from kvferry.transfer.rdma_devices import list_rdma_devices


def test_mori_says_what_is_missing_instead_of_hanging() -> None:
    [device] = list_rdma_devices()
    assert device.pci_address is None
    begun = time.monotonic()
    reason = usable("mori").reason
    print(reason)
    assert "PCI address of rxe0 without end" in reason
    assert time.monotonic() - begun < 20


def test_without_the_device_there_is_another_reason() -> None:
    reason = usable("mori", {"devices": "^rxe0", "probe_s": "180"}).reason
    print(reason)
    assert "no active RDMA device" in reason or "no usable GPU" in reason

# SPDX-License-Identifier: Apache-2.0
"""The only list of transfer backends, and the options of the plane. It imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

from kvferry.common.shared_options import check_at_least_1, check_ports, check_positive

Backend = Literal["mori", "cuda_ipc", "nixl", "mooncake", "nccl", "tcp"]
"""Best first."""
TransferChoice = Literal["auto", Backend]
"""What `--transfer` takes."""
BACKENDS: Mapping[str, str] = MappingProxyType(
    {name: f"kvferry.transfer.backends.{name}.engine" for name in get_args(Backend)}
)
"""Backend name to module, best first."""
SETTINGS: Mapping[str, str] = MappingProxyType(
    {name: f"kvferry.transfer.backends.{name}.settings" for name in ("mori", "cuda_ipc")}
)
"""Backends that take options, and the module that reads them."""


@dataclass(frozen=True, kw_only=True)
class PlaneOptions:
    """How KV is transferred.

    Engine:
        tp: Tensor-parallel ranks, one process each.

    Network:
        control_port: Port of the KV control channel; 0 lets the OS choose.

    KV transfer:
        transfer_options: Options of transfer backends, BACKEND.NAME=VALUE separated by commas.
        lease_s: Seconds without a renewal after which a lease expires and its blocks are freed.
        pull_timeout_s: Deadline for pulling one prompt's KV, in seconds.
        on_pull_failure: What a decode server does when the KV cannot be proven right.
    """

    tp: int = 1
    control_port: int = 6301
    transfer_options: str = ""
    lease_s: float = 10.0
    pull_timeout_s: float = 30.0
    on_pull_failure: Literal["recompute", "fail"] = "recompute"

    def check_plane(self) -> None:
        """Raise ValueError that names the wrong option."""
        check_at_least_1(tp=self.tp)
        check_ports(control_port=self.control_port)
        check_positive(lease_s=self.lease_s, pull_timeout_s=self.pull_timeout_s)
